"""Fuzz a tiny stack from outside: `make fuzz`, or `python -m tests.fuzz --requests 100000`.

Sends good, bad and broken HTTP, what schemathesis draws from our OpenAPI document, and good, bad
and broken gRPC, several at a time. Passes if no answer blames us (no 5xx, no INTERNAL), every error
is a proper error object, no process ended, nothing is left in any service's GetLoad, and the stack
still answers as before.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.fuzz.campaign import noise, run_campaign
from tests.fuzz.report import table
from tests.support.pair import PATIENCE, Pair
from tests.support.tiny import tiny_drafter, tiny_target

# Of the services' logs, shown after a failure.
LOG_LINES = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="in all; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="other requests; default %(default)s")
    parser.add_argument("--at-once", type=int, default=16, help="connections; default %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        target = tiny_target(root / "target")
        drafter = tiny_drafter(root / "drafter", target)
        # A request that sets no limit shows nothing by being long.
        settings = {"FLASHDUET_GATEWAY_DEFAULT_MAX_TOKENS": "4", "FLASHDUET_TRACE_DIR": ""}
        pair = Pair(target, drafter, root / "traces", **PATIENCE, **settings)
        failed = True
        try:
            start = time.monotonic()
            parts = run_campaign(
                pair,
                options.requests,
                options.seed,
                options.at_once,
                progress=partial(print, flush=True),
            )
            failed = any(part.failed for part in parts)
            print(table(parts))
            sent = sum(part.requests for part in parts)
            print(f"{sent} requests in {time.monotonic() - start:.0f} s, seed {options.seed}")
        finally:
            if failed:
                lines = [line for line in pair.logs if not noise(line)]
                print(*lines[-LOG_LINES:], sep="\n", file=sys.stderr)
            pair.stop()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
