"""Run a module as `python -m` does, and end with the process that started us.

    python -m flashduet_cli.child MODULE [ARGUMENT ...]

Standard input is the lifeline: the parent holds its other end and writes nothing. However the
parent ends, kill -9 included, the kernel closes that end; the read here returns, and this process
is asked to stop, then made to. (PR_SET_PDEATHSIG would do on Linux only, and fires when the
*thread* that started us ends.)
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

# A service gives requests under way its shutdown_grace_s; without a parent there are none.
ORPHAN_GRACE_S = 10.0

_parent_lost = threading.Event()


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m flashduet_cli.child MODULE [ARGUMENT ...]")
    # A duplicate is not inherited, so no grandchild holds the lifeline.
    lifeline = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(target=_follow, args=(lifeline,), daemon=True, name="lifeline").start()
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        if _parent_lost.is_set():
            _kill_group()


def _follow(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    _parent_lost.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    _kill_group()


def _kill_group() -> None:
    """End this process and what it started; started alone, only this process."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
