"""fp8 in the engine: rows as codes, linear layers and experts on them."""

from __future__ import annotations

import pytest
import torch

from moe_engine.ops.fp8 import dequantize, quantize


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("shape", [(0, 128), (3, 128), (5, 200), (17, 64)])
def test_numbers_that_came_from_codes_give_the_same_numbers_again(shape: tuple[int, int], gradient: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, shape[1])
    once = dequantize(quantize(x.bfloat16(), gradient))
    assert once.dtype == torch.bfloat16
    assert torch.equal(dequantize(quantize(once, gradient)), once)


def test_codes_of_small_gradients_are_those_of_large_ones() -> None:
    g = torch.randn(9, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    large, small = quantize(g, gradient=True), quantize(g * 2.0**-40, gradient=True)
    assert torch.equal(large.codes.view(torch.uint8), small.codes.view(torch.uint8))
    assert torch.equal(large.scale * 2.0**-40, small.scale)
