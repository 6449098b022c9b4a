"""Our own machine code for products gives what PyTorch's gives, and is missed by nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from flashduet import native
from flashduet.models_cache import CACHE_VARIABLE
from flashduet.native import NativeProduct, building, fits, load
from flashduet.packed_linear import (
    GraphLinear,
    PackedLinear,
    can_pack,
    join_linears,
    product_linears,
)

needs_library = pytest.mark.skipif(
    load() is None, reason="no compiler, or a processor without AVX512-BF16"
)


def product(outputs: int, inputs: int) -> tuple[NativeProduct, torch.Tensor]:
    weight = torch.randn(outputs, inputs).bfloat16()
    library = load()
    assert library is not None
    return NativeProduct(weight, library), weight


@needs_library
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 2), (96, 70), (576, 1536), (1024, 33 * 2)])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 21])
def test_products_are_those_of_pytorch(outputs: int, inputs: int, rows: int) -> None:
    multiply, weight = product(outputs, inputs)
    x = torch.randn(rows, inputs).bfloat16()
    expected = functional.linear(x.float(), weight.float())
    torch.testing.assert_close(
        multiply(x).float(), expected, atol=0.01 * float(expected.abs().max()), rtol=0.01
    )


@needs_library
def test_a_rows_product_does_not_depend_on_the_other_rows() -> None:
    multiply, _ = product(192, 130)
    x = torch.randn(23, 130).bfloat16()
    whole = multiply(x)
    for start, end in [(0, 1), (5, 6), (3, 11), (7, 16), (22, 23), (1, 23)]:
        assert torch.equal(multiply(x[start:end]), whole[start:end])


@needs_library
def test_any_shape_and_strides_of_the_input_will_do() -> None:
    multiply, _ = product(64, 48)
    x = torch.randn(48, 3, 5).bfloat16().permute(2, 1, 0)
    assert torch.equal(multiply(x), multiply(x.contiguous().view(15, 48)).view(5, 3, 64))
    assert multiply(x[:0]).shape == (0, 3, 64)


@needs_library
def test_an_input_that_does_not_fit_is_refused() -> None:
    multiply, _ = product(64, 48)
    for wrong in (torch.randn(3, 48), torch.randn(3, 46).bfloat16()):
        with pytest.raises(ValueError, match="bfloat16"):
            multiply(wrong)


def test_what_there_is_code_for() -> None:
    assert fits(torch.zeros(64, 8, dtype=torch.bfloat16))
    for shape, dtype in [
        ((64, 8), torch.float32),
        ((48, 8), torch.bfloat16),
        ((64, 7), torch.bfloat16),
        ((0, 8), torch.bfloat16),
    ]:
        assert not fits(torch.zeros(shape, dtype=dtype))


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    load.cache_clear()
    yield monkeypatch
    load.cache_clear()


@pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="no packed kernels here"
)
@pytest.mark.parametrize("found", [None, "/bin/false"])
@torch.inference_mode()
def test_without_a_compiler_layers_are_packed_pytorch_s_way(
    nothing_built: pytest.MonkeyPatch, found: str | None
) -> None:
    nothing_built.setattr(building.shutil, "which", lambda name: found)
    layer, x = nn.Linear(48, 64).bfloat16(), torch.randn(3, 48).bfloat16()
    packed = PackedLinear.of(layer)
    assert load() is None
    torch.testing.assert_close(packed(x), layer(x), atol=0.02, rtol=0.02)


@needs_library
@torch.inference_mode()
def test_layers_with_and_without_bias_share_a_product() -> None:
    first, second = nn.Linear(48, 64).bfloat16(), nn.Linear(48, 32, bias=False).bfloat16()
    x = torch.randn(2, 3, 48).bfloat16()
    expected = torch.cat([first(x), second(x)], dim=-1)
    torch.testing.assert_close(PackedLinear.of(first, second)(x), expected, atol=0.02, rtol=0.02)


@torch.inference_mode()
def test_the_graph_s_operator_is_the_product_with_a_library_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.Linear(48, 64).bfloat16()
    x = torch.randn(2, 3, 48).bfloat16()
    swapped = GraphLinear(layer)
    torch.testing.assert_close(swapped(x), layer(x), atol=0.02, rtol=0.02)
    monkeypatch.setattr(native, "load", lambda: None)
    torch.testing.assert_close(swapped(x), layer(x), atol=0.02, rtol=0.02)


@torch.inference_mode()
def test_layers_that_share_a_product_share_it_in_a_graph() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
            self.down, self.odd = nn.Linear(64, 32), nn.Linear(32, 33)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = functional.silu(self.gate(x)) * self.up(x)
            return self.odd(self.down(hidden))  # type: ignore[no-any-return]

    model, x = Gated().bfloat16().eval(), torch.randn(1, 5, 32).bfloat16()
    expected = model(x)
    join_linears(model, lambda: model(x))
    assert product_linears(model) == 2, "gate and up together, down; the odd one has no code"
    torch.testing.assert_close(model(x), expected, atol=0.02, rtol=0.02)
