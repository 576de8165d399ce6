"""Quantisation: the published values, float64, and the Triton kernels bit for bit against the reference."""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted
from measures import assert_same_bits, calc_diff, randn, same_bits
from torch import Tensor

import moe_kernels
from moe_kernels.fp8_format import BLOCK, CODE, FORWARD_AMAX, GRADIENT_AMAX, padded_rows, scale_of

device = interpreted("quantize")
COUNTS = [[0, 1, 7], [44, 0, 127], [128, 129, 0]]


def wide_range(*shape: int, seed: int = 0) -> Tensor:
    """Numbers over many binades, with a stretch of zeros."""
    x = randn(*shape, seed=seed).float() * (3 * randn(*shape, seed=seed + 1).float()).exp()
    x[shape[0] // 2, : shape[1] // 2] = 0
    return x.bfloat16()


def one_tile(value: float) -> Tensor:
    return torch.tensor([[value] + [0.0] * 127])


@pytest.mark.parametrize("floor", [FORWARD_AMAX, GRADIENT_AMAX])
@pytest.mark.parametrize("dim", [256, 136, 7])
def test_bf16_rows_on_a_cpu_have_the_codes_and_numbers_of_fp32_rows(dim: int, floor: float) -> None:
    """Their largest magnitudes are found in their bits, and codes are read two at once."""
    x = wide_range(70, dim)
    x[3, 0], x[5], x[6, 1] = float("inf"), -0.0, 1e-40
    for given in (x, x.index_put((torch.tensor(9), torch.tensor(2)), torch.tensor(float("nan")).bfloat16())):
        codes, scale = moe_kernels.quantize_rows(given, floor)
        assert_same_bits((codes, scale), moe_kernels.quantize_rows(given.float(), floor))
        for part in (codes, torch.nn.functional.pad(codes.view(torch.uint8), (0, 4)).view(CODE)[:, :dim]):
            numbers = moe_kernels.dequantize_rows(part, scale, torch.bfloat16)
            torch.testing.assert_close(numbers, moe_kernels.dequantize_rows(codes, scale).bfloat16(), rtol=0, atol=0,
                                       equal_nan=True)  # fmt: skip
    fine = moe_kernels.quantize_rows(x, floor, power_of_two=False)
    rounded_once = moe_kernels.dequantize_rows(*fine).bfloat16()
    torch.testing.assert_close(
        moe_kernels.dequantize_rows(*fine, torch.bfloat16), rounded_once, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(
    ("amax", "scale", "power"),
    [
        (0.0, 2.2321429e-7, 2.0**-22),
        (1e-4, 2.2321429e-7, 2.0**-22),
        (1.0, 0.0022321429, 2.0**-8),
        (448.0, 1.0, 1.0),
        (449.0, 1.0022322, 2.0),
        (1000.0, 2.2321429, 4.0),
    ],
)
def test_published_scales(amax: float, scale: float, power: float) -> None:
    assert moe_kernels.quantize_rows(one_tile(amax), 1e-4, False)[1].item() == pytest.approx(scale, rel=1e-6)
    assert moe_kernels.quantize_rows(one_tile(amax), 1e-4, True)[1].item() == power


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (17.0, 16.0), (18.0, 18.0), (19.0, 20.0), (0.3, 0.3125), (2.0**-9, 2.0**-9), (2.0**-10, 0.0),
        (1.5 * 2**-10, 2.0**-9), (448.0, 448.0),
    ],
)  # fmt: skip
def test_published_roundings(value: float, code: float) -> None:
    x = one_tile(448.0)  # scale 1
    x[0, 1] = value
    for quantize in (moe_kernels.quantize_rows, device.quantize_rows):
        assert quantize(x)[0][0, 1].float().item() == code


def test_magnitudes_above_the_format_are_clamped() -> None:
    for value in (449.0, 464.0, 1e30):  # a scale of a power of two is never too small; rounding a scale down would be
        scale = scale_of(torch.tensor([value]), FORWARD_AMAX, False)
        codes = (torch.tensor([value]) * (1 / scale)).clamp(-448, 448)
        assert codes.item() <= 448
    for power_of_two in (True, False):
        codes, _ = moe_kernels.quantize_rows(wide_range(50, 256), FORWARD_AMAX, power_of_two)
        assert codes.float().isfinite().all() and codes.float().abs().max() <= 448


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("smallest_amax", [FORWARD_AMAX, GRADIENT_AMAX])
@pytest.mark.parametrize("shape", [(1, 128), (7, 300), (129, 48), (200, 587)])
def test_kernels_give_the_bits_of_the_reference(
    shape: tuple[int, int], smallest_amax: float, power_of_two: bool
) -> None:
    x, options = wide_range(*shape), (smallest_amax, power_of_two)
    counts = torch.tensor([shape[0] // 3, 0, shape[0] - shape[0] // 3 - 1 if shape[0] > 1 else 0])
    assert_same_bits(device.quantize_rows(x, *options), moe_kernels.quantize_rows(x, *options))
    assert_same_bits(device.quantize_blocks(x, *options), moe_kernels.quantize_blocks(x, *options))
    if shape[1] % 16 == 0:
        by_row = moe_kernels.quantize_rows(x, *options)
        expected = moe_kernels.quantize_columns(x, counts, *options)
        assert_same_bits(device.quantize_columns(x, counts, *options), expected)
        both = moe_kernels.quantize_rows_and_columns(x, counts, *options)
        assert_same_bits(both[2:], expected)
        assert_same_bits(device.quantize_rows_and_columns(x, counts, *options), both)
        again = moe_kernels.quantize_columns(by_row[0], counts, *options, x_scale=by_row[1])
        assert_same_bits(device.quantize_columns(by_row[0], counts, *options, x_scale=by_row[1]), again)


@pytest.mark.parametrize("implementation", [moe_kernels, device])
@pytest.mark.parametrize("counts", COUNTS)
def test_padding_enters_no_scale_and_no_code(implementation: object, counts: list[int]) -> None:
    """Rows after the last group hold NaN or 1e30: valid results keep their bits."""
    used, sizes = sum(counts), torch.tensor(counts)
    x = wide_range(used + 5, 64, seed=3)
    results = []
    for padding in (0.0, float("nan"), 1e30):
        x[used:] = padding
        results.append(implementation.quantize_rows_and_columns(x, sizes))
    codes, scale, columns, columns_scale = results[0]
    assert not codes[used:].float().any() and (scale[:, used:] == 2.0**-22).all()
    assert columns.shape == (64, padded_rows(used + 5, 3)) and columns.float().isfinite().all()
    for other in results[1:]:
        assert_same_bits(other, results[0])
    place = 0
    for rows in x[:used].split(counts):
        piece = columns[:, place : place + len(rows)]
        assert (
            calc_diff(moe_kernels.dequantize_columns(columns, columns_scale)[:, place : place + len(rows)], rows.T)
            < 2e-3
        )
        place += -(-len(rows) // BLOCK) * BLOCK
        assert not columns[:, place - (-len(rows) % BLOCK) : place].float().any()
        assert piece.dtype == CODE


@pytest.mark.parametrize("implementation", [moe_kernels, device])
def test_dimensions_that_are_no_multiple_of_128_round_trip(implementation: object) -> None:
    for shape, scales in (((576, 716), (5, 6)), ((587, 130), (5, 2))):
        w = wide_range(*shape)
        codes, transposed, scale = implementation.quantize_blocks(w)
        assert scale.shape == scales and same_bits(transposed, codes.T)
        wide = moe_kernels.dequantize_blocks(codes, scale)
        again = implementation.quantize_blocks(wide)  # its amax may have been rounded down into a smaller scale
        assert same_bits(moe_kernels.dequantize_blocks(again[0], again[2]), wide)
        assert calc_diff(wide, w) < 2e-3
    stacked = torch.stack([w, 3 * w])
    assert_same_bits(
        implementation.quantize_blocks(stacked),
        [torch.stack(pair) for pair in zip(*(implementation.quantize_blocks(m) for m in stacked), strict=True)],
    )


@pytest.mark.parametrize("power_of_two", [True, False])
def test_codes_of_tiny_gradients(power_of_two: bool) -> None:
    g = wide_range(20, 256)
    counts = torch.tensor([20])
    for quantize in (moe_kernels.quantize_rows_and_columns, device.quantize_rows_and_columns):
        codes, scale, columns, columns_scale = quantize(g, counts, GRADIENT_AMAX, power_of_two)
        tiny = quantize((g.double() * 2.0**-40).bfloat16(), counts, GRADIENT_AMAX, power_of_two)
        assert_same_bits([tiny[0], tiny[2]], [codes, columns])
        zero = codes.float().unflatten(1, (2, -1)).abs().amax(2).T == 0
        assert zero.any() and (scale[zero] == 1).all() and (tiny[1][zero] == 1).all()
        assert torch.equal(tiny[1][~zero], scale[~zero] * 2.0**-40)


@pytest.mark.parametrize("implementation", [moe_kernels, device])
def test_nan_stays_visible_and_spares_its_neighbours(implementation: object) -> None:
    x = randn(4, 128)
    clean = implementation.quantize_rows(x)
    x[1, 5] = float("nan")
    codes, scale = implementation.quantize_rows(x)
    assert codes.float().isnan().sum() == 1 and codes[1, 5].float().isnan()
    assert_same_bits([codes[2:], scale[:, 2:]], [clean[0][2:], clean[1][:, 2:]])


def test_retiling_keeps_values_only_with_powers_of_two() -> None:
    x, counts = randn(512, 512), [512]
    changed = {}
    for power_of_two in (True, False):
        by_row = moe_kernels.quantize_rows(x, FORWARD_AMAX, power_of_two)
        columns = moe_kernels.quantize_columns(by_row[0], counts, FORWARD_AMAX, power_of_two, x_scale=by_row[1])
        again = moe_kernels.dequantize_columns(*columns)[:, :512].T
        changed[power_of_two] = (again != moe_kernels.dequantize_rows(*by_row)).float().mean().item()
    assert changed[True] < 1e-4 and changed[False] > 0.95, changed


@pytest.mark.parametrize("implementation", [moe_kernels, device])
def test_nothing(implementation: object) -> None:
    codes, scale = implementation.quantize_rows(torch.zeros(0, 256, dtype=torch.bfloat16))
    assert codes.shape == (0, 256) and scale.shape == (2, 0)
    columns, columns_scale = implementation.quantize_columns(torch.zeros(0, 256), torch.tensor([0, 0]))
    assert columns.shape == (256, 256) and columns_scale.shape == (2, 256) and not columns.float().any()
