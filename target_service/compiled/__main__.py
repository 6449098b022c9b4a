"""`python -m target_service.compiled`: compile the target that the settings name, and end.

With `--parent PID` it ends, its compiler with it, when it is no child of that process any more.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import flashduet.idle_threads  # noqa: F401  before torch is

# isort: split
from flashduet.errors import FlashduetError
from flashduet.process import EXIT_CONFIGURATION
from flashduet.settings import setup_logging
from target_service.compiled.build import build
from target_service.settings import TargetSettings

_LOOK_AGAIN_S = 0.5


def main() -> int:
    if sys.argv[1:2] == ["--parent"]:
        _end_with(int(sys.argv[2]))
    try:
        settings = TargetSettings.load()
        setup_logging(settings.log_level)
        print(build(settings))
    except FlashduetError as error:
        print(f"target: {error.message}", file=sys.stderr)
        return EXIT_CONFIGURATION
    return 0


def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_AGAIN_S)
        # The group holds the compiler too; it is this process's own, or it would not be ended.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
