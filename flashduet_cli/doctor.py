"""`flashduet doctor`: what this machine can do, and the fix for what it can't."""

from __future__ import annotations

import typer
from rich.table import Table
from rich.text import Text

from flashduet_cli import options
from flashduet_cli.console import err, out, print_json
from flashduet_cli.doctor_checks import Check
from flashduet_cli.doctor_machine import machine_checks
from flashduet_cli.doctor_setup import setup_checks

STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def doctor(as_json: options.AsJson = False) -> None:
    """Check devices, dtypes, transports, kernels, versions, models and ports.

    WARN is something that works less well or is missing without need; FAIL keeps the default pair
    from running, and makes the exit status 1.
    """
    with err.status("looking around"):
        checks = [*machine_checks(), *setup_checks()]
    if as_json:
        print_json({"checks": [_as_dict(check) for check in checks]})
    else:
        out.print(_table(checks))
    if any(check.status == "FAIL" for check in checks):
        raise typer.Exit(1)


def _as_dict(check: Check) -> dict[str, str]:
    return {
        "area": check.area,
        "name": check.name,
        "status": check.status,
        "detail": check.detail,
        "fix": check.fix,
    }


def _table(checks: list[Check]) -> Table:
    table = Table("", "what", "found")
    area = ""
    for check in checks:
        if check.area != area:
            area = check.area
            table.add_section()
            table.add_row("", Text(area, style="bold"), "")
        found = Text(check.detail)
        if check.fix:
            found.append(f"\n→ {check.fix}", style="italic")
        table.add_row(Text(check.status, style=STYLES[check.status]), check.name, found)
    return table
