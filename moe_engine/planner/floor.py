"""How well any plan could do on a table of measurements, where rows of one configuration differ.

A row is predicted by the median of the other rows of its own configuration: that knows all that arithmetic could know
of it, and what was measured besides. What is left is what the table does not state (software, cluster, day). Intervals
are of 1,000 draws of as many configurations, with repetition, as there are: few configurations make wide ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moe_engine.planner.measured import Measurement
from moe_engine.planner.strategy import Strategy

DRAWS = 1000
Errors = npt.NDArray[np.float64]
# What of the errors is told, and how it is read from them.
TOLD: dict[str, Callable[[Errors], float]] = {
    "median": lambda errors: float(np.median(errors)),
    "90%": lambda errors: float(np.quantile(errors, 0.9)),
    "mean": lambda errors: float(errors.mean()),
}


@dataclass(frozen=True)
class Floor:
    """Errors of rows predicted by their likes. told: of each of TOLD the value, and the ends of its 95% interval;
    worst: the largest error."""

    configurations: int
    rows: int
    told: dict[str, tuple[float, float, float]]
    worst: float


def as_tabled(row: Measurement) -> Hashable:
    """What a table of results says of a row: its configuration without what recipes add."""
    usual, strategy = Strategy(), row.strategy
    if row.release:
        unsaid = ("recompute", "graphs", "dispatch", "fused_biases", "overlap")
        strategy = replace(strategy, **{name: getattr(usual, name) for name in unsaid})
    return replace(row, strategy=strategy).configuration


def as_run(row: Measurement) -> Hashable:
    """All that is known of how a row was run."""
    return row.configuration


def floor(rows: Sequence[Measurement], alike: Callable[[Measurement], Hashable]) -> Floor | None:
    """The errors of rows that are not alone of their kind; None where there are none."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for row in rows:
        groups[alike(row)].append(row.seconds)
    errors = [_errors(np.array(seconds)) for seconds in groups.values() if len(seconds) > 1]
    if not errors:
        return None
    every, chance = np.concatenate(errors), np.random.default_rng(0)
    draws = [np.concatenate([errors[i] for i in chance.integers(len(errors), size=len(errors))]) for _ in range(DRAWS)]
    told = {}
    for name, read in TOLD.items():
        low, high = np.quantile([read(draw) for draw in draws], [0.025, 0.975])
        told[name] = (read(every), float(low), float(high))
    return Floor(len(errors), len(every), told, float(every.max()))


def _errors(seconds: Errors) -> Errors:
    """Of each row by the median of the others."""
    others = [np.median(np.delete(seconds, index)) for index in range(len(seconds))]
    return np.asarray(np.abs(np.array(others) / seconds - 1))
