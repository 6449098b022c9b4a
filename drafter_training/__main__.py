"""Entry point of ``python -m drafter_training``."""

from drafter_training.cli import app

if __name__ == "__main__":
    app(prog_name="python -m drafter_training")
