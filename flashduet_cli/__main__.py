"""`python -m flashduet_cli` is the command `flashduet`."""

from flashduet_cli.main import app

app(prog_name="flashduet")
