"""`flashduet train`: handed on to the training package, which has the options and the help.

Training needs libraries that take seconds to import and signals of its own, so this process becomes
that one.
"""

from __future__ import annotations

import os
import sys

import typer

TRAIN_SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


def train(context: typer.Context) -> None:
    """Train a drafter for a target: data, training, ablations, studies."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "drafter_training", *context.args]
    os.execv(sys.executable, command)
