"""Is one timing slower than another, or does it only look so?

The answer is a ratio of times (second over first) with a confidence interval from the bootstrap (Efron 1979): the
statistic is taken again for many samples drawn, with replacement, from those at hand. Candidates that took turns
(`record.turns`) are compared pair by pair, so that what slows the machine for both does not count; others by their
medians.

A regression is real when both hold:

* the ratio is above `bound`: it is large enough to care about;
* the interval lies wholly above 1: it is not chance. At 95%, shared out over the cases of one comparison
  (Bonferroni), so that a hundred cases do not raise a false alarm by their number.

Asking that the interval lie above `bound` instead would let a slowdown of just over `bound` through half of the time
however often one measures; asking for the ratio alone would raise an alarm at noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_engine.bench.record import Result, read
from moe_engine.config.errors import ConfigError

RESAMPLES = 2000
CONFIDENCE = 0.95
MIN_SAMPLES = 6
SEED = 0  # of the resampling: the same files give the same answer


@dataclass(frozen=True)
class Comparison:
    """times of b over times of a: ratio, and the interval [low, high] that holds the true one."""

    case: str
    ratio: float
    low: float
    high: float
    paired: bool

    def is_regression(self, bound: float) -> bool:
        return self.ratio > bound and self.low > 1

    def verdict(self, bound: float) -> str:
        """In words."""
        if self.is_regression(bound):
            return f"REGRESSION: slower by more than {bound:g}x"
        if self.low > 1:
            return "slower, within the bound"
        if self.high < 1:
            return "faster"
        return "above the bound, but not distinguishable from chance" if self.ratio > bound else "no difference shown"


def ratio_of(
    a: Sequence[float], b: Sequence[float], paired: bool, confidence: float = CONFIDENCE, case: str = ""
) -> Comparison:
    """The ratio of b's times to a's. Paired samples are those of `record.turns`: the n-th of a beside the n-th of b."""
    rng = np.random.default_rng(SEED)
    logs_a, logs_b = np.log(np.asarray(a, float)), np.log(np.asarray(b, float))
    if paired:
        # An even drift adds to every other difference what it takes from the rest: the median stays.
        differences = logs_b - logs_a
        center = float(np.median(differences))
        draws = np.median(rng.choice(differences, (RESAMPLES, len(a))), axis=1)
    else:
        center = float(np.median(logs_b) - np.median(logs_a))
        draws = np.median(rng.choice(logs_b, (RESAMPLES, len(b))), axis=1)
        draws = draws - np.median(rng.choice(logs_a, (RESAMPLES, len(a))), axis=1)
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Comparison(case, math.exp(center), math.exp(low), math.exp(high), paired)


def compare(first: str, second: str) -> list[Comparison]:
    """Compare two results, each `folder` or `folder@candidate`. Without a candidate, candidates of the same name.

    Raises ConfigError when a file is unreadable, nothing matches, or samples are too few or missing.
    """
    a, b = _select(first), _select(second)
    common = [key for key in a if key in b]
    if not common:
        raise ConfigError(
            f"compare=[{first},{second}]: no case in common; the first has {_names(a)}, the second {_names(b)}. "
            "Name candidates as folder@candidate to compare different ones"
        )
    if _same(first, second):
        raise ConfigError(f"compare=[{first},{second}]: the same results twice; name two, as in [a,b] or [a@x,a@y]")
    problems = [
        problem
        for key in common
        for name, found in ((first, a[key]), (second, b[key]))
        for problem in _unusable(name, found)
    ]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    confidence = 1 - (1 - CONFIDENCE) / len(common)
    return [_compare_two(a[key], b[key], " ".join(key), confidence) for key in common]


def _compare_two(a: Result, b: Result, case: str, confidence: float) -> Comparison:
    paired = a.session == b.session and len(a.samples) == len(b.samples)
    return ratio_of(a.samples, b.samples, paired, confidence, case)


def _same(first: str, second: str) -> bool:
    (a, candidate_a), (b, candidate_b) = _split(first), _split(second)
    return a.resolve() == b.resolve() and candidate_a == candidate_b


def _split(name: str) -> tuple[Path, str]:
    path, _, candidate = name.partition("@")
    return Path(path), candidate


def _select(name: str) -> dict[tuple[str, ...], Result]:
    """The results that `name` means, by what must be equal for a comparison."""
    path, candidate = _split(name)
    results = read(path)
    if not candidate:
        return {(result.benchmark, result.case, result.candidate): result for result in results}
    found: dict[tuple[str, ...], Result] = {(r.benchmark, r.case): r for r in results if r.candidate == candidate}
    if not found:
        names = ", ".join(dict.fromkeys(result.candidate for result in results))
        raise ConfigError(f"compare: {name}: no candidate {candidate} in {path}; there are {names}")
    return found


def _unusable(name: str, result: Result) -> list[str]:
    where = f"compare: {name}: {result.benchmark} {result.case} {result.candidate}"
    if not result.verdict.passed:
        return [f"{where}: its correctness check failed ({result.verdict.text}), so it has no timings to compare"]
    if len(result.samples) < MIN_SAMPLES:
        return [f"{where}: {len(result.samples)} samples are too few to judge; use bench.rounds={MIN_SAMPLES} or more"]
    return []


def _names(results: dict[tuple[str, ...], Result]) -> str:
    return ", ".join(" ".join(key) for key in results)


def table(comparisons: Sequence[Comparison], bound: float) -> str:
    """A line for each case."""
    width = max(len(comparison.case) for comparison in comparisons)
    lines = [f"{'case':<{width}}   ratio  interval"]
    for each in comparisons:
        how = "" if each.paired else " (not interleaved)"
        interval = f"{each.low:.4f} … {each.high:.4f}"
        lines.append(f"{each.case:<{width}}  {each.ratio:.4f}  {interval}  {each.verdict(bound)}{how}")
    return "\n".join(line.rstrip() for line in lines)
