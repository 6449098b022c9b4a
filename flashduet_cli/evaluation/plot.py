"""A picture of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from flashduet.errors import ConfigurationError


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw τ by category, acceptance by slot, and the histogram of accepted tokens.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        import_module("matplotlib").use("Agg")
    except ImportError as error:
        raise ConfigurationError("--plot needs matplotlib: pip install matplotlib") from error
    plt = import_module("matplotlib.pyplot")
    runs = {name: part for name, part in report.items() if isinstance(part, dict)}
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    width = 0.8 / max(len(runs), 1)
    for index, (name, part) in enumerate(runs.items()):
        taus = {category: tau["tau"] for category, tau in part["by_category"].items()}
        taus["overall"] = part["overall"]["tau"]
        places = [place + index * width for place in range(len(taus))]
        axes[0].bar(places, list(taus.values()), width, label=name)
        axes[0].set_xticks(range(len(taus)), list(taus), rotation=45, ha="right")
        slots = part["by_slot"]
        axes[1].plot(range(1, len(slots) + 1), slots, marker="o", label=name)
        counts = part["accepted_histogram"]
        total = sum(counts.values()) or 1
        axes[2].bar(
            [int(accepted) + index * width for accepted in counts],
            [count / total for count in counts.values()],
            width,
            label=name,
        )
    axes[0].set(title="acceptance length", ylabel="tokens a round")
    axes[1].set(title="rounds that accept a slot", xlabel="slot", ylim=(0, 1))
    axes[2].set(title="accepted draft tokens", xlabel="a round", ylabel="share of rounds")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
