"""Norms are swapped where they are RMS norms, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from target_service.fast_norm import FastRMSNorm, swap_norms


class Centred(LlamaRMSNorm):
    """Looks like an RMS norm and takes off the mean."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


def model_of(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in norm.parameters():
            weight.normal_(1.0, 0.3)
    return nn.Sequential(norm).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_rms_norm_is_swapped_and_computes_the_same(dtype: torch.dtype) -> None:
    model, x = model_of(LlamaRMSNorm(64), dtype), torch.randn(1, 5, 64, dtype=dtype)
    expected = model(x)
    assert swap_norms(model) == 1
    assert isinstance(model[0], FastRMSNorm)
    tolerance = 1e-6 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(model(x), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(64), nn.LayerNorm(64, bias=False), Centred(64), Gemma2RMSNorm(64)]
)
def test_other_norms_are_left_alone(norm: nn.Module) -> None:
    model = model_of(norm, torch.float32)
    assert swap_norms(model) == 0
    assert model[0] is norm


def test_a_wrong_epsilon_is_noticed() -> None:
    norm = LlamaRMSNorm(64, eps=1e-2)
    model = model_of(norm, torch.float32)
    forward = LlamaRMSNorm(64, eps=1e-6)
    forward.weight = norm.weight
    norm.forward = forward.forward  # type: ignore[method-assign]
    assert swap_norms(model) == 0
