"""SwiGLU, permutation and their fp8 forms: Triton kernels against the reference, the reference against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from interpreter import interpreted
from measures import assert_same_bits, calc_diff, poisoned_memory, randn
from torch import Tensor

import moe_kernels
from moe_kernels.fp8_format import GRADIENT_AMAX

swiglu, permute = interpreted("swiglu"), interpreted("permute")
SHAPES = [(1, 128), (7, 24), (45, 256)]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def operands(shape: tuple[int, int], weighted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, hidden = shape
    weight = randn(rows, dtype=torch.float32, seed=2) if weighted else None
    return randn(rows, hidden, seed=1), randn(rows, 2 * hidden) * 3, weight


def close(results: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(results, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.shape == b.shape and a.dtype == b.dtype and calc_diff(a, b) < 1e-6


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_in_bf16(shape: tuple[int, int], weighted: bool) -> None:
    d_out, gate_up, weight = operands(shape, weighted)
    close((swiglu.swiglu(gate_up, weight),), (moe_kernels.swiglu(gate_up, weight),))
    expected = moe_kernels.swiglu_backward_recompute(d_out, gate_up, weight)
    close(swiglu.swiglu_backward_recompute(d_out, gate_up, weight), expected)
    close(swiglu.swiglu_backward(d_out, gate_up, weight), expected[:2])


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_with_the_cast_fused(shape: tuple[int, int], weighted: bool, power_of_two: bool) -> None:
    d_out, gate_up, weight = operands(shape, weighted)
    d_out = (d_out.float() * 2.0**-45).bfloat16()

    def values(d_codes: Tensor, d_scale: Tensor, d_weight: Tensor | None, act: Tensor, act_scale: Tensor) -> tuple:
        return moe_kernels.dequantize_rows(d_codes, d_scale), d_weight, moe_kernels.dequantize_rows(act, act_scale)

    forward = swiglu.swiglu_fp8(gate_up, weight, power_of_two=power_of_two)
    expected = moe_kernels.swiglu_fp8(gate_up, weight, power_of_two=power_of_two)
    # The device's exponential may differ in its last bit, and a code with it: equal codes but for one in a thousand.
    assert (forward[0].float() != expected[0].float()).float().mean() < 1e-3
    assert torch.allclose(forward[1], expected[1], rtol=1e-6)
    exact = moe_kernels.swiglu(gate_up.double(), weight)
    assert calc_diff(moe_kernels.dequantize_rows(*forward), exact) < 1e-3
    backward = values(*swiglu.swiglu_backward_fp8(d_out, gate_up, weight, power_of_two=power_of_two))
    exact = moe_kernels.swiglu_backward_recompute(d_out.double(), gate_up.double(), weight)
    for result, wide in zip(backward, exact, strict=True):
        assert result is None or wide is None or calc_diff(result, wide) < 1e-3
    if shape[1] % 128 == 0:
        codes, scale = moe_kernels.quantize_rows(gate_up)
        from_codes = values(*swiglu.swiglu_backward_fp8(d_out, codes, weight, scale, power_of_two))
        expected = values(*moe_kernels.swiglu_backward_fp8(d_out, codes, weight, scale, power_of_two))
        for result, wide in zip(from_codes, expected, strict=True):
            assert result is None or wide is None or calc_diff(result, wide) < 1e-5


def test_codes_of_gate_and_up_that_share_a_tile_are_refused() -> None:
    d_out, gate_up, _ = operands((3, 24), False)
    codes, scale = moe_kernels.quantize_rows(gate_up)
    with pytest.raises(ValueError, match="hidden=24"):
        swiglu.swiglu_backward_fp8(d_out, codes, None, scale)


@pytest.mark.parametrize("dim", [40, 128, 1100])
def test_permute(dim: int) -> None:
    x, source = randn(9, dim), torch.tensor([8, 0, 0, 3, 5, 1, 8])
    assert_same_bits([permute.permute(x, source)], [x[source]])
    codes, scale = moe_kernels.quantize_rows(x)
    expected = moe_kernels.quantize_rows(x[source])
    assert_same_bits(moe_kernels.permute_fp8(codes, scale, source), expected)
    assert_same_bits(permute.permute_fp8(codes, scale, source), expected)


@pytest.mark.parametrize("dim", [40, 128, 1100])
def test_unpermute(dim: int) -> None:
    x = randn(9, dim)
    places = torch.tensor([[3, 1, -1], [-1, -1, -1], [8, -1, 0], [2, 4, 5], [6, -1, -1]])
    assert_same_bits([permute.unpermute(x, places)], [moe_kernels.unpermute(x, places)])
    codes, scale = moe_kernels.quantize_rows(x, GRADIENT_AMAX)
    for dtype in (torch.bfloat16, torch.float32):
        expected = moe_kernels.unpermute(moe_kernels.dequantize_rows(codes, scale), places).to(dtype)
        assert_same_bits([permute.unpermute_fp8(codes, scale, places, dtype)], [expected])
        assert_same_bits([moe_kernels.unpermute_fp8(codes, scale, places, dtype)], [expected])


def test_no_rows() -> None:
    nothing, places = torch.zeros(0, 128, dtype=torch.bfloat16), torch.zeros(0, 2, dtype=torch.int64)
    assert permute.permute(nothing, places[:, 0]).shape == permute.unpermute(nothing, places).shape == (0, 128)
    assert swiglu.swiglu(nothing).shape == (0, 64)
    codes, scale = permute.permute_fp8(*moe_kernels.quantize_rows(randn(3, 128)), places[:, 0])
    assert codes.shape == (0, 128) and scale.shape == (1, 0)
    weight = torch.zeros(0)
    shapes = [x.shape for x in swiglu.swiglu_backward_fp8(nothing, nothing.repeat(1, 2), weight)]
    assert shapes == [(0, 256), (2, 0), (0,), (0, 128), (1, 0)]
