"""Make the Python stubs of proto/ (run as `make proto`).

With --check nothing is written: the exit status is 1 if the stubs in the tree are stale.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
OUT = ROOT / "flashduet" / "v1"


def generate(destination: Path) -> None:
    """Write all stubs below `destination`, as flashduet/v1/*_pb2*.py[i]."""
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    well_known = files("grpc_tools") / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTO}",
            f"-I{well_known}",
            f"--python_out={destination}",
            f"--pyi_out={destination}",
            f"--grpc_python_out={destination}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")


def stale() -> list[str]:
    """Names of stubs that differ from what proto/ would give."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_bytes() for path in Path(folder).rglob("*_pb2*")}
    present = {path.name: path.read_bytes() for path in OUT.glob("*_pb2*") if path.is_file()}
    return sorted(
        name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    if parser.parse_args().check:
        names = stale()
        for name in names:
            print(f"stale: flashduet/v1/{name} (run `make proto`)")
        return 1 if names else 0
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
