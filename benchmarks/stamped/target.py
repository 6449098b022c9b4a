"""The target, stamped; see the package."""

from stamped import run

if __name__ == "__main__":
    run("target", "target_service")
