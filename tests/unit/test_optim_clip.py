"""The gradient norm is exact where it can be, accurate everywhere, and independent of how elements are cut up."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from moe_engine.distributed.collectives import Communicator
from moe_engine.optim.clip import BLOCK, CHUNK, GradientNorm, _sum_of_squares, clip_scale


def norm(**gradients: Tensor) -> float:
    owned = [(name, gradient.numel(), gradient.numel()) for name, gradient in gradients.items()]
    return GradientNorm(owned, Communicator.alone(), torch.device("cpu"))(list(gradients.values()))


def exact(*gradients: Tensor) -> float:
    """The norm by rational arithmetic, rounded to 60 digits before the last rounding."""
    total = sum((Fraction(x) ** 2 for gradient in gradients for x in gradient.double().tolist()), Fraction(0))
    return math.sqrt(total) if total else 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 2, 3, 64, 1003, BLOCK + 1])
def test_ones_give_the_root_of_their_number(numel: int, dtype: torch.dtype) -> None:
    assert norm(a=torch.ones(numel, dtype=dtype), b=torch.ones(5, dtype=dtype)) == math.sqrt(numel + 5)


def test_zeros_give_zero() -> None:
    assert norm(a=torch.zeros(10), b=torch.zeros(3)) == 0.0


def test_negative_and_zero_gradients_count_as_their_squares() -> None:
    assert norm(a=torch.tensor([-3.0, 0.0]), b=torch.tensor([4.0]), c=torch.zeros(7)) == 5.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_gives_infinity(bad: float) -> None:
    gradient = torch.ones(1000)
    gradient[777] = bad
    assert norm(a=torch.ones(3), b=gradient) == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_gradients_are_accurate_to_1e_14(dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(1)
    a = torch.randn(5000, generator=chance, dtype=dtype) ** 5
    b = torch.randn(700, generator=chance, dtype=dtype) * 1e-9
    assert norm(a=a, b=b) == pytest.approx(exact(a, b), rel=1e-14)


@pytest.mark.parametrize("tiny_exponent", [-10, -20, -24, -30])
def test_many_tiny_elements_beside_a_large_one_are_not_lost(tiny_exponent: int) -> None:
    gradient = torch.full((1 << 16,), 2.0**tiny_exponent, dtype=torch.float64)
    gradient[123] = 1.0
    expected = 1.0 + (gradient.numel() - 1) * 4.0**tiny_exponent
    assert norm(a=gradient) ** 2 == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("magnitude", [1e-300, 1e-200, 1e-30, 1e30, 1e200, 1e300])
def test_extreme_magnitudes_neither_overflow_nor_vanish(magnitude: float) -> None:
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64) * magnitude
    assert norm(a=gradient) == pytest.approx(5.0 * magnitude, rel=1e-12)
    if magnitude > 1:
        assert norm(a=gradient, b=torch.ones(4, dtype=torch.float64)) == pytest.approx(5.0 * magnitude, rel=1e-12)


def test_scaling_by_a_power_of_two_scales_the_norm_exactly() -> None:
    gradient = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    assert norm(a=gradient * 2.0**-40) == norm(a=gradient) * 2.0**-40


def test_order_of_elements_and_of_names_changes_no_bit() -> None:
    chance = torch.Generator().manual_seed(3)
    a = torch.randn(BLOCK + 1000, generator=chance) ** 3
    b = torch.randn(1000, generator=chance) * 1e-4
    assert norm(a=a, b=b) == norm(b=b, a=a[torch.randperm(a.numel(), generator=chance)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_a_parameter_is_cut_changes_no_bit(dtype: torch.dtype) -> None:
    """Cut at multiples of CHUNK, as shards are: the sums of its parts add up to the sum of the whole."""
    gradient = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(4), dtype=dtype) ** 3
    whole = _sum_of_squares(gradient, 5, 20, CHUNK)
    for cuts in ([1], [2, 3, 17], [BLOCK // CHUNK + 1], [7, 2 * BLOCK // CHUNK - 1]):
        parts = gradient.tensor_split([cut * CHUNK for cut in cuts])
        assert torch.equal(sum(_sum_of_squares(part, 5, 20, CHUNK) for part in parts), whole)


def test_gradients_stay_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64):
        gradient = torch.randn(100, dtype=dtype)
        before = gradient.clone()
        norm(a=gradient)
        assert torch.equal(gradient, before)


def test_parts_that_do_not_make_up_a_parameter_are_refused() -> None:
    world, device = Communicator.alone(), torch.device("cpu")
    with pytest.raises(ValueError, match="b: 3 of 4 elements"):
        GradientNorm([("a", 2, 2), ("b", 3, 4)], world, device)
    with pytest.raises(ValueError, match="a: ranks disagree"):
        GradientNorm([("a", 2, 4), ("a", 3, 5)], world, device)


def test_clip_scale_brings_the_norm_to_the_largest_allowed() -> None:
    assert clip_scale(4.0, 1.0) == 0.25
    assert clip_scale(1.0, 1.0) == 1.0
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(0.0, 1.0) == 1.0
    assert clip_scale(100.0, 0.0) == 1.0  # off
