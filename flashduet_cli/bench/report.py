"""The table: what a run has measured so far, for terminals, files and other programs."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from rich.table import Table
from rich.text import Text

from flashduet.errors import ConfigurationError
from flashduet.hardware import usable_cores
from flashduet_cli.bench.figures import Figure, Verdict

_STYLES: Mapping[Verdict, str] = {
    "goal": "bold green",
    "floor": "green",
    "missed": "bold red",
    "reported": "cyan",
    "failed": "bold red",
}


@dataclass
class BenchReport:
    """Grows while the rows are measured; whole at every moment."""

    settings: Mapping[str, object]
    figures: list[Figure] = field(default_factory=list)
    # Of the last minute, before the first row: figures of a busy machine say little.
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    started: float = field(default_factory=time.time)

    @property
    def passed(self) -> bool:
        """Whether no row has missed its floor or failed."""
        return not any(figure.verdict in ("missed", "failed") for figure in self.figures)

    def as_dict(self) -> dict[str, object]:
        """The object that --json prints and --out writes."""
        return {
            "passed": self.passed,
            "rows": [figure.as_dict() for figure in self.figures],
            "settings": dict(self.settings),
            "machine": machine(),
            "load_before": self.load_before,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "seconds": round(time.time() - self.started, 1),
        }

    def write(self, file: Path) -> None:
        """Write the JSON object.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        try:
            file.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--out {file}: {error.strerror}") from error

    def table(self) -> Table:
        """For a terminal."""
        table = Table("figure", "value", "95% interval", "floor", "goal", "")
        for column in table.columns[1:5]:
            column.justify = "right"
        for figure in self.figures:
            bounds, measured = figure.bounds, figure.measured
            interval = ""
            if measured and measured.estimate.low is not None:
                ends = (measured.estimate.low, measured.estimate.high)
                interval = " … ".join(bounds.show(end) for end in ends)
            table.add_row(
                figure.title,
                bounds.show(measured.estimate.value) if measured else figure.error,
                interval,
                bounds.show_bound(bounds.floor) or "reported",
                bounds.show_bound(bounds.goal),
                Text(figure.verdict, style=_STYLES[figure.verdict]),
            )
        return table


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers", "grpcio")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
