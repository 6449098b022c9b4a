"""Make the Python stubs and the descriptor set of proto/ (run as `make proto`).

The descriptor set, flashduet/v1/flashduet.v1.binpb, is all of the contracts in one file, comments
included: gRPC libraries of other languages call the services with it, or generate stubs from it,
without our .proto files. See examples/node.

With --check nothing is written: the exit status is 1 if a file in the tree is stale.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("flashduet") / "v1"
DESCRIPTOR_SET = PACKAGE / "flashduet.v1.binpb"
_BUF_TIMEOUT_S = 120


def generate_stubs(destination: Path) -> None:
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


def build_descriptor_set(destination: Path) -> None:
    """Write the descriptor set below `destination`."""
    beside_python = Path(sys.executable).with_name("buf")
    buf = str(beside_python) if beside_python.exists() else shutil.which("buf")
    if buf is None:
        raise SystemExit("buf is missing; `pip install buf-bin` brings it")
    out = destination / DESCRIPTOR_SET
    out.parent.mkdir(parents=True, exist_ok=True)
    build = subprocess.run(
        [buf, "build", "--as-file-descriptor-set", "--output", str(out)],
        cwd=PROTO,
        timeout=_BUF_TIMEOUT_S,
        check=False,
    )
    if build.returncode != 0:
        raise SystemExit(f"buf build failed with status {build.returncode}")


def stale() -> list[str]:
    """Names of files that differ from what proto/ would give."""
    with tempfile.TemporaryDirectory() as folder:
        generate_stubs(Path(folder))
        build_descriptor_set(Path(folder))
        fresh = _read(Path(folder) / PACKAGE)
    present = _read(ROOT / PACKAGE)
    return sorted(
        name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name)
    )


def _read(folder: Path) -> dict[str, object]:
    """The generated files of a folder by name; the descriptor set parsed, since two releases of
    buf may write the same one in different bytes."""
    found: dict[str, object] = {
        path.name: path.read_bytes() for path in folder.glob("*_pb2*") if path.is_file()
    }
    described = folder / DESCRIPTOR_SET.name
    if described.is_file():
        found[described.name] = FileDescriptorSet.FromString(described.read_bytes())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    if parser.parse_args().check:
        names = stale()
        for name in names:
            print(f"stale: {PACKAGE}/{name} (run `make proto`)")
        return 1 if names else 0
    generate_stubs(ROOT)
    build_descriptor_set(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
