"""Comparisons on synthetic samples: a true difference is found, no difference is not, noise and drift or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_engine.bench.compare import MIN_SAMPLES, compare, ratio_of, table
from moe_engine.bench.record import Result, Verdict, turns, write
from moe_engine.config.errors import ConfigError

SEEDS = 60


def timings(seed: int, slower: float, rounds: int = 20, drift: float = 0.1) -> tuple[list[float], list[float]]:
    """Two candidates in turns on a machine with 1% noise, an even drift, and an interruption in one step of twenty."""
    rng = np.random.default_rng(seed)
    times: dict[str, list[float]] = {"a": [], "b": []}
    for turn, name in enumerate(turns(["a", "b"], rounds)):
        time = (1 + drift * turn / (2 * rounds)) * np.exp(0.01 * rng.standard_normal())
        if rng.random() < 0.05:
            time *= 1 + rng.exponential(0.5)
        times[name].append(float(time * (slower if name == "b" else 1)))
    return times["a"], times["b"]


@pytest.mark.parametrize("paired", [True, False])
def test_three_percent_are_found(paired: bool) -> None:
    found = [ratio_of(*timings(seed, 1.03, drift=0.1 * paired), paired) for seed in range(SEEDS)]
    assert sum(each.is_regression(1.01) for each in found) >= 0.97 * SEEDS
    assert not any(each.is_regression(1.05) for each in found)
    assert np.median([each.ratio for each in found]) == pytest.approx(1.03, abs=0.002)


@pytest.mark.parametrize("rounds", [MIN_SAMPLES, 12, 20])
@pytest.mark.parametrize("paired", [True, False])
def test_no_difference_is_not_found(paired: bool, rounds: int) -> None:
    found = [ratio_of(*timings(seed, 1.0, rounds, drift=0.1 * paired), paired) for seed in range(SEEDS)]
    assert sum(each.low > 1 for each in found) <= 0.05 * SEEDS  # one side of a 95% interval: 2.5% expected
    assert sum(each.high < 1 for each in found) <= 0.05 * SEEDS
    assert not any(each.is_regression(1.05) for each in found)


def test_the_interval_holds_the_true_ratio() -> None:
    found = [ratio_of(*timings(seed, 1.1), paired=True) for seed in range(SEEDS)]
    assert sum(each.low <= 1.1 <= each.high for each in found) >= 0.9 * SEEDS


def test_turns_protect_against_drift_that_would_fool_two_runs_one_after_the_other() -> None:
    a, b = timings(0, 1.0, drift=1.0)
    assert not ratio_of(a, b, paired=True).is_regression(1.05)
    slow_machine = [time * 1.2 for time in b]  # the same code, run an hour later
    assert ratio_of(a, slow_machine, paired=False).ratio > 1.1


def test_the_same_samples_give_the_same_answer() -> None:
    a, b = timings(3, 1.02)
    assert ratio_of(a, b, paired=True) == ratio_of(a, b, paired=True)
    swapped = ratio_of(b, a, paired=True)
    assert ratio_of(a, b, paired=True).ratio == pytest.approx(1 / swapped.ratio)


def folder(path: Path, slower: float = 1.0, **changes: object) -> str:
    a, b = timings(1, slower)
    base = Result("step", "threads1", "ours", str(path), a, Verdict(True, "right"))
    other = replace(base, **{"candidate": "peer", "samples": b, **changes})  # type: ignore[arg-type]
    write(path, [base, other], {}, "", "")
    return str(path)


def test_candidates_of_one_session_are_compared_in_pairs(tmp_path: Path) -> None:
    (found,) = compare(f"{folder(tmp_path, 1.2)}@ours", f"{tmp_path}@peer")
    assert found.paired and found.is_regression(1.05) and found.case == "step threads1"
    (back,) = compare(f"{tmp_path}@peer", f"{tmp_path}@ours")
    assert back.high < 1 and not back.is_regression(1.0)
    text = table([found, back], 1.05)
    assert "REGRESSION: slower by more than 1.05x" in text and "faster" in text


def test_two_folders_are_compared_by_name_and_share_the_confidence(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b", 1.2)
    ours, peer = compare(first, second)
    assert not ours.paired and not ours.is_regression(1.05) and peer.is_regression(1.05)
    assert "no difference shown (not interleaved)" in table([ours, peer], 1.05)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    first = folder(tmp_path / "a")
    with pytest.raises(ConfigError, match="no results there"):
        compare(first, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no candidate them in .*; there are ours, peer"):
        compare(f"{first}@them", f"{first}@ours")
    with pytest.raises(ConfigError, match="the same results twice"):
        compare(first, first)
    other_case = folder(tmp_path / "b", case="threads2")
    with pytest.raises(ConfigError, match="no case in common; the first has step threads1"):
        compare(f"{first}@peer", f"{other_case}@peer")
    few = folder(tmp_path / "few", samples=[1.0] * (MIN_SAMPLES - 1))
    wrong = folder(tmp_path / "wrong", samples=[], verdict=Verdict(False, "loss off by 0.3"))
    with pytest.raises(ConfigError, match=f"samples are too few to judge; use bench.rounds={MIN_SAMPLES}"):
        compare(f"{few}@ours", f"{few}@peer")
    with pytest.raises(ConfigError, match="its correctness check failed .loss off by 0.3."):
        compare(f"{wrong}@ours", f"{wrong}@peer")
