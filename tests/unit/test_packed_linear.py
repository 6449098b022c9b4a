"""Packed layers give what the plain ones give, alone and side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flashduet.packed_linear import PackedLinear, SharedLinear, can_pack, pack_linears

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
TYPES = [kind for kind in TOLERANCE if can_pack(kind, CPU)]


class Gated(nn.Module):
    """Two layers on one input, a third on their product, and one that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(24, 40), nn.Linear(24, 40, bias=False)
        self.down = nn.Linear(40, 24)
        self.twice = nn.Linear(24, 24)
        self.mixed = Conv1D(12, 24)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return self.mixed(self.twice(self.twice(hidden)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (1, 7, 24), (2, 3, 24)])
@torch.inference_mode()
def test_a_packed_layer_gives_what_the_plain_one_gives(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    first, second = nn.Linear(24, 40).to(dtype), nn.Linear(24, 8, bias=False).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    both = PackedLinear.of(first, second)
    expected = torch.cat([first(x), second(x)], dim=-1)
    torch.testing.assert_close(both(x), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert both.nbytes == (48 * 24 + 48) * dtype.itemsize


@torch.inference_mode()
def test_a_model_is_packed_in_place_and_lets_its_weights_go() -> None:
    model, x = Gated().eval(), torch.randn(1, 5, 24)
    expected = model(x)
    report = pack_linears(model, lambda: model(x))
    assert (report.layers, report.products) == (5, 4)
    assert isinstance(model.gate, SharedLinear)
    assert isinstance(model.up, SharedLinear)
    assert isinstance(model.down, PackedLinear)
    assert isinstance(model.twice, PackedLinear)
    assert list(model.parameters()) == []
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_siblings_given_different_inputs_are_right_too() -> None:
    model, x, y = Gated().eval(), torch.randn(1, 5, 24), torch.randn(1, 5, 24)
    gate, up = model.gate, model.up
    pack_linears(model, lambda: model(x))
    for first, second in ((x, y), (y, x), (x, x), (y, y)):
        torch.testing.assert_close(model.gate(first), gate(first), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model.up(second), up(second), atol=1e-5, rtol=1e-5)
    # A pass that broke off between the two leaves nothing behind that a later one would take.
    model.gate(x)
    torch.testing.assert_close(model.gate(x), gate(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.up(y), up(y), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_tied_embedding_keeps_its_weight() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 24), nn.Linear(24, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))  # type: ignore[no-any-return]

    model, ids = Tied().eval(), torch.tensor([[3, 7, 3]])
    expected = model(ids)
    pack_linears(model, lambda: model(ids))
    torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]


def test_other_devices_and_types_are_not_packed() -> None:
    assert not can_pack(torch.float64, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))
