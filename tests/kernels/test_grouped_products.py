"""Grouped products and weight gradients: Triton kernels against the reference, the reference against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from interpreter import interpreted
from measures import calc_diff, poisoned_memory, randn, with_tail
from torch import Tensor

import moe_kernels
from moe_kernels.device.tuning import Tile
from moe_kernels.fp8_format import GRADIENT_AMAX

gemm, gemm_fp8 = interpreted("grouped_gemm"), interpreted("grouped_gemm_fp8")
wgrad, wgrad_fp8 = interpreted("grouped_wgrad"), interpreted("grouped_wgrad_fp8")

# The kernels and the reference see the same 16-bit or 8-bit operands and add them up in fp32 in another order.
FP32_SUMS = 1e-6
COUNTS = [[0, 1, 7], [44, 0, 127], [128, 129, 0]]
# Sizes for which gradients of empty groups were uninitialised memory elsewhere, and smaller ones like them.
WITH_EMPTY = [[162, 0, 257, 46, 0, 83], pytest.param([162, 0, 2577, 446, 0, 83], marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.mark.parametrize("by_column", [True, False], ids=["fprop", "dgrad"])
@pytest.mark.parametrize("tile", gemm.TILES, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_gemm(counts: list[int], tile: Tile, by_column: bool) -> None:
    a, b, sizes = with_tail(counts, 136), randn(3, 136, 72, seed=1), torch.tensor(counts)
    if by_column:
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    out = gemm.grouped_gemm(a, b, sizes, tile=tile)
    expected = moe_kernels.grouped_gemm(a, b, sizes)
    assert out.shape == expected.shape and out.dtype == expected.dtype and not out[-5:].any()
    assert calc_diff(out, expected) < FP32_SUMS
    source = torch.randint(len(a) - 5, (len(a),), generator=torch.Generator().manual_seed(2))
    gathered = gemm.grouped_gemm(a, b, sizes, source, num_sms=3, tile=tile)
    assert calc_diff(gathered, moe_kernels.grouped_gemm(a[source], b, counts)) < FP32_SUMS
    assert torch.equal(gathered, gemm.grouped_gemm(a[source], b, sizes, tile=tile))


@pytest.mark.parametrize("tile", gemm_fp8.TILES, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_gemm_fp8(counts: list[int], tile: Tile) -> None:
    sizes = torch.tensor(counts)
    a, (b, _, b_scale) = (
        moe_kernels.quantize_rows(with_tail(counts, 272)),
        moe_kernels.quantize_blocks(randn(3, 200, 272, seed=1)),
    )
    out = gemm_fp8.grouped_gemm_fp8(*a, b, b_scale, sizes, tile=tile)
    expected = moe_kernels.grouped_gemm_fp8(*a, b, b_scale, sizes)
    assert out.shape == expected.shape and out.dtype == expected.dtype == torch.bfloat16 and not out[-5:].any()
    assert calc_diff(out, expected) < FP32_SUMS
    if tile == gemm_fp8.choose(gemm_fp8.TILES, len(out), 3):  # where there is no Hopper its form is not used
        assert torch.equal(gemm_fp8.grouped_gemm_fp8(*a, b, b_scale, sizes, hopper=True), out)
    source = torch.randint(sum(counts), (len(out),), generator=torch.Generator().manual_seed(2))
    gathered = gemm_fp8.grouped_gemm_fp8(*a, b, b_scale, sizes, source, torch.float32, num_sms=3, tile=tile)
    expected = moe_kernels.grouped_gemm_fp8(*a, b, b_scale, sizes, source, torch.float32)
    assert gathered.dtype == expected.dtype == torch.float32 and calc_diff(gathered, expected) < FP32_SUMS


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("counts", [*COUNTS, *WITH_EMPTY])
def test_grouped_wgrad(counts: list[int], accumulate: bool) -> None:
    d_out, a, sizes = with_tail(counts, 136), with_tail(counts, 264, seed=1), torch.tensor(counts)
    before = randn(len(counts), 136, 264, dtype=torch.float32, seed=2) if accumulate else None
    expected = moe_kernels.grouped_wgrad(d_out.float(), a.float(), sizes, None if before is None else before.clone())
    for tile in wgrad.TILES:
        grad = wgrad.grouped_wgrad(d_out, a, sizes, None if before is None else before.clone(), tile=tile)
        assert grad.dtype == torch.float32 and calc_diff(grad, expected) < FP32_SUMS
        for group, count in enumerate(counts):
            if not count:
                assert torch.equal(grad[group], torch.zeros(136, 264) if before is None else before[group])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("counts", [*COUNTS, *WITH_EMPTY])
def test_grouped_wgrad_fp8(counts: list[int], accumulate: bool) -> None:
    sizes, wide = torch.tensor(counts), (with_tail(counts, 136) * 2.0**-30, with_tail(counts, 272, seed=1))
    d_out = moe_kernels.quantize_columns(wide[0], sizes, GRADIENT_AMAX)
    a = moe_kernels.quantize_columns(wide[1], sizes)
    before = randn(len(counts), 136, 272, dtype=torch.float32, seed=2) * 2.0**-30 if accumulate else None
    expected = moe_kernels.grouped_wgrad_fp8(*d_out, *a, sizes, None if before is None else before.clone())
    exact = moe_kernels.grouped_wgrad(
        wide[0].float(), wide[1].float(), counts, None if before is None else before.clone()
    )
    assert calc_diff(expected, exact) < 2e-3
    for tile in wgrad_fp8.TILES:
        grad = wgrad_fp8.grouped_wgrad_fp8(*d_out, *a, sizes, None if before is None else before.clone(), tile=tile)
        assert grad.dtype == torch.float32 and calc_diff(grad, expected) < FP32_SUMS
        for group, count in enumerate(counts):
            if not count:
                assert torch.equal(grad[group], torch.zeros(136, 272) if before is None else before[group])


@pytest.mark.parametrize("size", [512, 4096, 7168])
@pytest.mark.parametrize("counts", [[256], [129, 0, 127]])
def test_published_error_of_block_scaled_products(size: int, counts: list[int]) -> None:
    a, w = randn(sum(counts), size), randn(len(counts), 384, size, seed=1)
    exact = moe_kernels.grouped_gemm(a.double(), w.double().transpose(1, 2), counts)
    for power_of_two in (True, False):
        codes, _, scale = moe_kernels.quantize_blocks(w, power_of_two=power_of_two)
        rows = moe_kernels.quantize_rows(a, power_of_two=power_of_two)
        assert 6e-4 <= calc_diff(moe_kernels.grouped_gemm_fp8(*rows, codes, scale, counts), exact) <= 7.3e-4


@pytest.mark.parametrize("fp8", [True, False])
def test_a_rows_result_depends_on_that_row_alone(fp8: bool) -> None:
    a, b = randn(150, 272), randn(2, 272, 128, seed=1)
    codes, _, b_scale = moe_kernels.quantize_blocks(b.transpose(1, 2).contiguous())

    def product(rows: Tensor, counts: list[int]) -> Tensor:
        if not fp8:
            return gemm.grouped_gemm(rows, b, counts)
        return gemm_fp8.grouped_gemm_fp8(*moe_kernels.quantize_rows(rows), codes, b_scale, torch.tensor(counts))

    whole = product(a, [100, 50])
    assert torch.equal(product(a[90:110], [10, 10]), whole[90:110])
    assert torch.equal(product(a[99:101], [1, 1]), whole[99:101])


def test_nothing_to_multiply() -> None:
    nothing, sizes = torch.zeros(0, 32, dtype=torch.bfloat16), torch.tensor([0, 0])
    assert gemm.grouped_gemm(nothing, randn(2, 32, 16), sizes).shape == (0, 16)
    codes, _, scale = moe_kernels.quantize_blocks(randn(2, 16, 32))
    assert gemm_fp8.grouped_gemm_fp8(*moe_kernels.quantize_rows(nothing), codes, scale, sizes).shape == (0, 16)
    kept = randn(2, 32, 32, dtype=torch.float32)
    columns = moe_kernels.quantize_columns(nothing, sizes)
    for out in (None, kept.clone()):
        results = (
            wgrad.grouped_wgrad(nothing, nothing, sizes, out),
            wgrad_fp8.grouped_wgrad_fp8(*columns, *columns, sizes, out),
        )
        for grad in results:
            assert torch.equal(grad, torch.zeros(2, 32, 32) if out is None else kept)


def test_sizes_that_a_descriptor_cannot_take_are_refused() -> None:
    sizes = torch.tensor([3])
    with pytest.raises(ValueError, match="a: last dimension 12: must be a multiple of 8"):
        gemm.grouped_gemm(randn(3, 12), randn(1, 12, 16), sizes)
    codes, _, scale = moe_kernels.quantize_blocks(randn(1, 16, 24))
    with pytest.raises(ValueError, match="a: last dimension 24: must be a multiple of 16"):
        gemm_fp8.grouped_gemm_fp8(*moe_kernels.quantize_rows(randn(3, 24)), codes, scale, sizes)
    with pytest.raises(ValueError, match="counts: 1 sizes for 2 groups"):
        gemm.grouped_gemm(randn(3, 16), randn(2, 16, 16), sizes)
    with pytest.raises(ValueError, match="out: "):
        wgrad.grouped_wgrad(randn(3, 16), randn(3, 16), sizes, torch.zeros(1, 16, 8))
