"""The draft, stamped; see the package."""

from stamped import run

if __name__ == "__main__":
    run("draft", "draft_service")
