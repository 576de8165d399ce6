"""The learning rate: warm-up, cosine, and its ends."""

from __future__ import annotations

import pytest

from moe_engine.config.schema import OptimConfig
from moe_engine.optim.lr import learning_rate

OPTIM = OptimConfig(lr=2.0, min_lr_ratio=0.1, warmup_steps=10)


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rates = [learning_rate(OPTIM, step, 110) for step in range(10)]
    assert rates == pytest.approx([0.2 * n for n in range(1, 11)])


def test_cosine_is_halfway_in_the_middle_and_ends_at_the_floor() -> None:
    assert learning_rate(OPTIM, 59, 110) == pytest.approx(2.0 * 0.55)  # update 60 of 10 … 110
    assert learning_rate(OPTIM, 109, 110) == pytest.approx(0.2)
    assert learning_rate(OPTIM, 500, 110) == pytest.approx(0.2)


def test_rate_falls_after_warm_up() -> None:
    rates = [learning_rate(OPTIM, step, 110) for step in range(9, 110)]
    assert all(a > b for a, b in zip(rates, rates[1:], strict=False))


def test_no_warm_up_starts_close_to_the_peak() -> None:
    optim = OptimConfig(lr=2.0, min_lr_ratio=0.0, warmup_steps=0)
    assert 1.99 < learning_rate(optim, 0, 100) < 2.0
    assert learning_rate(optim, 99, 100) == pytest.approx(0.0, abs=1e-15)


def test_run_shorter_than_its_warm_up_only_warms_up() -> None:
    assert [learning_rate(OPTIM, step, 5) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert learning_rate(OPTIM, 10, 10) == pytest.approx(0.2)
