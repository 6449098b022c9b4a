"""Where the command `flashduet` begins; `python -m flashduet_cli` is the same."""

import io
import sys


def main() -> None:
    """Run the command; Ctrl-C is quiet from here on, also while its parts are being loaded."""
    try:
        from flashduet_cli.main import app
    except KeyboardInterrupt:
        sys.exit(130)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal whose encoding lacks a character gets a "?", not the end of the answer.
            stream.reconfigure(errors="replace")
    app(prog_name="flashduet")


if __name__ == "__main__":
    main()
