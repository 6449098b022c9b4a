"""`flashduet models inspect`: what a drafter's checkpoint is, and whether it fits a target."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from flashduet_cli import options
from flashduet_cli.console import fail, print_json, wide

# Reading the weights of a large drafter and its target's two matrices from a slow disk.
TIMEOUT_S = 600.0


def inspect(
    path: Annotated[
        str, typer.Argument(help="A drafter's folder, a Hub id, or default for the shipped one.")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="Say whether it fits this target: default, a folder, a .gguf file, or a Hub id.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Tell what a drafter is, what it was trained for, and whether it fits a target.

    Exit status 1 if it is no drafter that can be served, or does not fit.
    """
    # A draft service's own code looks at it: the command line imports no service.
    command = [sys.executable, "-m", "draft_service.inspection", path]
    command += ["--target", target] if target is not None else []
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        fail(f"reading {path} took longer than {TIMEOUT_S:g} s")
    except KeyboardInterrupt:
        fail("interrupted", 130)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        fail(lines[-1])
    told = json.loads(done.stdout)
    if as_json:
        print_json(told)
    else:
        wide().print(_table(told))
    if told.get("target", {}).get("fits") is False:
        if as_json:
            raise typer.Exit(1)
        fail(told["target"]["why_not"])


def _table(told: dict[str, Any]) -> Table:
    network, trained = told["network"], told["trained_for"]
    table = Table("fact", "value", title=told["name"], title_justify="left")
    table.columns[1].overflow = "fold"
    size = f"{network['parameters'] / 1e6:.1f} M parameters, {network['bytes'] / 1e6:.1f} MB"
    shape = (
        f"{network['layers']} layers, hidden {network['hidden_size']}, {network['heads']} heads, "
        f"{network['kv_heads']} key-value heads of {network['head_dim']}"
    )
    rows: dict[str, object] = {
        "format": told["format"],
        "network": shape,
        "size": f"{size}, {network['dtype']}",
        "attention": "; ".join(network["attention"]),
    }
    if network["convolution"]:
        rows["DFlash 2"] = (
            f"convolutions over {network['convolution']} positions, a selector among "
            f"{network['selector_candidates']} candidates"
        )
    depth = f"of {trained['layers']}" if trained["layers"] else "of an unknown number of"
    rows |= {
        "trained for": trained["name"] or "a target that it does not name",
        "features": f"layers {', '.join(map(str, trained['layer_ids']))} {depth} layers, "
        f"hidden {trained['hidden_size']}",
        "vocabulary": f"{trained['vocab_size']} tokens",
        "block length": told["block_length"],
        "mask token": told["mask_token_id"],
    }
    if told["own"]:
        rows["brings its own"] = ", ".join(
            f"{name} ({count} rows)" for name, count in told["own"].items()
        )
    if told["shortlist"]:
        rows["drafts from"] = f"the {told['shortlist']} tokens of its shortlist"
    if told["expected_tau"]:
        rows["acceptance length"] = f"{told['expected_tau']} on its self-test prompt"
    if "target" in told:
        verdict = "fits" if told["target"]["fits"] else "does not fit"
        rows["target"] = f"{verdict} {told['target']['name']}"
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table
