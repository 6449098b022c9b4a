"""Entry point of ``python -m drafter_training``."""

from drafter_training.cli import main

if __name__ == "__main__":
    main()
