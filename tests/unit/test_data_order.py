"""The order of rows: each once an epoch, a function of seed and place alone, and a fair shuffle."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.data.order import ordered_rows

SEEDS = st.integers(0, 2**63)


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 300), epoch=st.integers(0, 1000), seed=SEEDS)
def test_every_row_comes_once_an_epoch(num_rows: int, epoch: int, seed: int) -> None:
    rows = ordered_rows(epoch * num_rows, num_rows, num_rows=num_rows, seed=seed)
    assert sorted(rows.tolist()) == list(range(num_rows))


@settings(max_examples=15, deadline=None)
@given(num_rows=st.integers(5, 40), cuts=st.lists(st.integers(0, 60), max_size=6), seed=SEEDS)
def test_a_stretch_is_the_same_however_it_is_cut(num_rows: int, cuts: list[int], seed: int) -> None:
    whole = ordered_rows(5, sum(cuts), num_rows=num_rows, seed=seed)
    start, pieces = 5, []
    for count in cuts:
        pieces.extend(ordered_rows(start, count, num_rows=num_rows, seed=seed).tolist())
        start += count
    assert whole.tolist() == pieces


def test_the_order_is_these_rows() -> None:
    """Fixed for good: another order would break the resumption of every run there is."""
    assert ordered_rows(0, 12, num_rows=10, seed=0).tolist() == [3, 2, 8, 4, 0, 1, 7, 6, 5, 9, 7, 2]
    large = ordered_rows(10**12, 4, num_rows=3_600_000_000, seed=7)
    assert large.tolist() == [3338903388, 1589350061, 3437501791, 16681800]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(ordered_rows(epoch * 50, 50, num_rows=50, seed=seed).tolist()) for seed in range(6) for epoch in range(6)
    }
    assert len(orders) == 36
    assert tuple(range(50)) not in orders


def test_all_orders_of_four_rows_are_equally_likely() -> None:
    seen = Counter(tuple(ordered_rows(0, 4, num_rows=4, seed=seed).tolist()) for seed in range(600))
    chi_square = sum((seen[order] - 25) ** 2 / 25 for order in seen)
    assert len(seen) == 24
    assert chi_square < 49.7  # 23 degrees of freedom, p = 0.001


def test_neighbours_in_the_order_are_not_neighbours_in_the_text() -> None:
    rows = ordered_rows(0, 20_000, num_rows=20_000, seed=3)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(rows, np.arange(20_000))[0, 1]) < 0.03
    assert (np.abs(np.diff(rows)) == 1).sum() < 12  # 2 expected of a fair shuffle


@pytest.mark.parametrize(("start", "count", "num_rows"), [(-1, 1, 4), (0, -1, 4), (0, 1, 0)])
def test_refuses_places_that_do_not_exist(start: int, count: int, num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"start={start}, count={count}, num_rows={num_rows}"):
        ordered_rows(start, count, num_rows=num_rows, seed=0)
