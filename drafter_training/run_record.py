"""What a run leaves behind besides weights: run.json, history.json, training.png."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flashduet.models_cache import put_in_place

RUN_FILE = "run.json"
HISTORY_FILE = "history.json"
PLOT_FILE = "training.png"


@dataclass(frozen=True)
class Measured:
    """State of a run at one checkpoint.

    seconds: of training so far. loss: of the steps since the last one. held_out_loss, block_tau: on
    held-out sequences at random anchors. tau: of decoding held-out greedy answers, teacher forced.
    """

    step: int
    seconds: float
    loss: float
    held_out_loss: float
    block_tau: float
    tau: float


def write_json(path: Path, value: object) -> None:
    """By rename, so that a reader never sees half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    put_in_place(temporary, path)


def machine() -> dict[str, Any]:
    """What a figure of this run depends on besides its settings."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "processor": platform.processor() or platform.machine(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def write_history(folder: Path, history: list[Measured]) -> None:
    write_json(folder / HISTORY_FILE, [asdict(measured) for measured in history])


def plot_history(folder: Path, history: list[Measured]) -> bool:
    """Draws loss and τ by step; False without matplotlib or with nothing to draw."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        return False
    if not history:
        return False
    matplotlib.use("Agg")
    plt = import_module("matplotlib.pyplot")
    steps = [measured.step for measured in history]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(steps, [m.loss for m in history], label="training")
    left.plot(steps, [m.held_out_loss for m in history], label="held out")
    left.set(xlabel="step", ylabel="loss", title="loss")
    left.legend()
    right.plot(steps, [m.tau for m in history], label="greedy decoding, teacher forced")
    right.plot(steps, [m.block_tau for m in history], label="random anchors")
    right.set(xlabel="step", ylabel="tokens a round", title="acceptance length, held out")
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(folder / PLOT_FILE, dpi=120)
    plt.close(figure)
    return True
