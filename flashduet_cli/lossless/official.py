"""The official `dflash` package, in this process: the same drafter, used in its way."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flashduet.errors import ConfigurationError
from flashduet_cli.lossless.reference import load_model
from flashduet_cli.lossless.report import Answer


def check_installed() -> None:
    """Raise ConfigurationError where the package is missing."""
    if find_spec("dflash") is None:
        raise ConfigurationError("--official: needs the package dflash (pip install dflash==0.1.0)")


def drafter_class(drafter: Path) -> Any:
    """The package's class for a drafter's folder.

    Raises:
        ConfigurationError: the package is missing, or cannot read the drafter.
    """
    check_installed()
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    named = json.loads((drafter / "config.json").read_text()).get("architectures") or []
    kind = DFlash2DraftModel if "DFlash2DraftModel" in named else DFlashDraftModel
    if kind.__name__ not in named:
        raise ConfigurationError(
            f"{drafter}: the official package reads DFlashDraftModel and DFlash2DraftModel, "
            f"this is {', '.join(named) or 'neither'}"
        )
    return kind


class OfficialDFlash:
    """A target and a z-lab drafter, loaded by Transformers and by the package."""

    def __init__(self, target: Path, drafter: Path, dtype: str) -> None:
        """drafter: folder in the z-lab format.

        Raises:
            ConfigurationError: the package is missing, or cannot read the drafter.
        """
        kind = drafter_class(drafter)
        self._target = load_model(target, getattr(torch, dtype))
        self._drafter = kind.from_pretrained(drafter, dtype=getattr(torch, dtype)).eval()
        self._drafter.register_forward_hook(self._count)
        self._rounds = self._drafted_tokens = 0

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int) -> Answer:
        """Its greedy answer, the end-of-sequence token included, and the rounds it drafted in."""
        ends = self._target.generation_config.eos_token_id
        self._rounds = self._drafted_tokens = 0
        with warnings.catch_warnings():
            # It calls the cache as Transformers did before; nobody here can change that.
            warnings.simplefilter("ignore", FutureWarning)
            output = self._drafter.spec_generate(
                target=self._target,
                input_ids=torch.tensor([list(prompt_ids)]),
                max_new_tokens=max_tokens,
                stop_token_ids=ends if isinstance(ends, list) or ends is None else [ends],
            )
        token_ids = tuple(output[0, len(prompt_ids) :].tolist())
        return Answer(
            token_ids,
            rounds=self._rounds,
            drafted_tokens=self._drafted_tokens,
            acceptance_length=(len(token_ids) - 1) / self._rounds if self._rounds else 0.0,
        )

    def _count(self, module: Any, arguments: Any, output: Any) -> None:
        self._rounds += 1
        # A row for each slot, the anchor's too; the last round may have fewer.
        self._drafted_tokens += output.shape[1] - 1
