"""A bench's JSON as the table of docs/performance.md: python benchmarks/markdown_table.py FILE"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_UNITS = {"%": (100.0, " %"), "s": (1.0, " s"), "x": (1.0, ""), "": (1.0, "")}


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    factor, suffix = _UNITS[unit]
    return f"{value * factor:.3g}{suffix}"


def bound(value: float | None, row: dict[str, Any]) -> str:
    sign = "≤" if row["better"] == "lower" else "≥"
    return f"{sign} {shown(value, row['unit'])}" if value is not None else "reported"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    machine = report["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers"))
    print(
        f"{machine['processor']}, {machine['cores']} cores, {versions}, {report['started'][:10]};"
    )
    print(report["settings"])
    print(
        "\n| row | figure | value | 95% interval | floor | goal | |\n|---|---|---|---|---|---|---|"
    )
    for row in report["rows"]:
        unit = row["unit"]
        interval = ""
        if row["low"] is not None:
            interval = f"{shown(row['low'], unit)} … {shown(row['high'], unit)}"
        value = shown(row["value"], unit) or row.get("error", "")
        cells = [row["row"], row["title"], value, interval]
        cells += [bound(row["floor"], row), bound(row["goal"], row), row["verdict"]]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
