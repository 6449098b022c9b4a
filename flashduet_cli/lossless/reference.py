"""Transformers itself, in this process: greedy answers, and logits to judge differences by."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

Logits = npt.NDArray[np.float64]


class Reference:
    """One checkpoint, loaded with Transformers in the data type of the check, on the CPU.

    Nothing of Flashduet is in it: `generate` is Transformers' own. The float64 copy is loaded when
    it is first asked for.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        disable_progress_bar()  # the command draws its own
        self._folder = folder
        self._model = load_model(folder, getattr(torch, dtype))
        self._double: Any = None

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Transformers' own greedy answer, its end-of-sequence token included."""
        ids = torch.tensor([list(prompt_ids)])
        end_ids = self._model.generation_config.eos_token_id
        first_end = end_ids[0] if isinstance(end_ids, list) else end_ids
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=end_ids,
            pad_token_id=first_end if first_end is not None else 0,
        )
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config
            )
        return output[0, len(prompt_ids) :].tolist()

    def logits(self, token_ids: Sequence[int], block_length: int) -> Logits:
        """Logits [V] after `token_ids`, as the last row of a pass over the last `block_length`.

        The rows before it are in the cache, as in a round: 1 is the shape of a plain step.
        """
        before, block = list(token_ids[:-block_length]), list(token_ids[-block_length:])
        with torch.inference_mode(), warnings.catch_warnings():
            # Newer releases call the argument `cache`, those that we still take do not know it.
            warnings.simplefilter("ignore", FutureWarning)
            cache = None
            if before:
                cache = self._model(torch.tensor([before]), use_cache=True).past_key_values
            output = self._model(torch.tensor([block]), past_key_values=cache, use_cache=True)
        return output.logits[0, -1].double().numpy()

    def exact_logits(self, token_ids: Sequence[int]) -> Logits:
        """Logits [V] after `token_ids`, computed in float64 from the same weights."""
        if self._double is None:
            self._double = load_model(self._folder, torch.float64)
            for module in self._double.modules():
                if type(module).__name__.endswith("RotaryEmbedding"):
                    # Angles are float32 in every pass, so their rounding is the model's own.
                    module.register_forward_pre_hook(_pause)
                    module.register_forward_hook(_resume)
        with torch.inference_mode(), _InDouble():
            output = self._double(torch.tensor([list(token_ids)]), use_cache=False)
        return output.logits[0, -1].numpy()


class _InDouble(TorchFunctionMode):
    """Keeps a float64 model in float64 where its code asks for float32 (norms, softmax)."""

    paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _InDouble.paused:
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            args = tuple(_widened(value) for value in args)
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _pause(module: Any, arguments: Any) -> None:
    _InDouble.paused = True


def _resume(module: Any, arguments: Any, output: Any) -> None:
    _InDouble.paused = False


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The checkpoint as Transformers loads it, for inference on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()
