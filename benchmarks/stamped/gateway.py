"""The gateway, stamped; see the package."""

from stamped import run

if __name__ == "__main__":
    run("gateway", "gateway")
