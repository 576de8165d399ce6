"""Fits the six efficiencies to measured steps, and only those.

The logarithm of predicted over measured time is made small over all rows at once: damped Gauss-Newton on the
logarithms of the efficiencies, with large errors weighted down (Huber), so that a few odd rows do not bend the rest. A
prior pulls each efficiency towards a given value, as strongly as if `PRIOR_ROWS` rows had asked for it: what the rows
say nothing about stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from moe_engine.planner.hardware import Efficiency
from moe_engine.planner.many import Steps
from moe_engine.planner.timing import StepWork, quick_seconds, steadiness

NAMES = tuple(field.name for field in fields(Efficiency))
HUBER = 0.05  # errors above 5% count linearly
PRIOR_ROWS = 3.0
PRIOR_WIDTH = 0.5  # of the logarithm of an efficiency
LAUNCH_WIDTH = 1.5  # … and of the time that launches take, which software decides alone
FELT = 10.0
ROUNDS = 24
# Nothing is faster than its peak; nothing useful is slower than these.
LIMITS = {
    "matmul": (0.2, 0.95),
    "grouped": (0.1, 0.95),
    "attention": (0.08, 0.9),
    "memory": (0.1, 0.95),
    "links": (0.02, 0.95),
    "block_us": (1.0, 3000.0),
}
STRENGTH = (
    PRIOR_ROWS * HUBER**2 / np.array([LAUNCH_WIDTH if name == "block_us" else PRIOR_WIDTH for name in NAMES]) ** 2
)
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One measured step. steadiness: length of the schedule over the busy time of its busiest rank, which hardly
    depends on the efficiencies."""

    work: StepWork
    seconds: float
    steadiness: float
    weight: float = 1.0

    @classmethod
    def of(cls, work: StepWork, seconds: float, weight: float = 1.0) -> Sample:
        return cls(work, seconds, steadiness(work, Efficiency()), weight)

    def error(self, efficiency: Efficiency) -> float:
        """Logarithm of predicted over measured."""
        return math.log(quick_seconds(self.work, efficiency, self.steadiness) / self.seconds)


def fit(samples: Sequence[Sample], prior: Efficiency) -> Efficiency:
    """The efficiencies that explain the samples best. Without samples, the prior."""
    if not samples:
        return prior
    rows = _Rows(samples)
    ends = [_descend(rows, start, prior) for start in _starts(prior)]
    return min(ends, key=lambda end: end[0])[1]


def _starts(prior: Efficiency) -> list[Efficiency]:
    """Where to begin: launches that hide have no slope, so once with launches that are felt."""
    return [prior, replace(prior, block_us=FELT * prior.block_us)]


class _Rows:
    """Samples as arrays."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.steps = Steps([sample.work for sample in samples], [sample.steadiness for sample in samples])
        self.logarithms = np.log([sample.seconds for sample in samples])
        self.weights = np.array([sample.weight for sample in samples])

    def errors(self, point: Array) -> Array:
        """Logarithms of predicted over measured."""
        return np.asarray(np.log(self.steps.seconds(_efficiency(point))) - self.logarithms)


def _descend(rows: _Rows, start: Efficiency, prior: Efficiency) -> tuple[float, Efficiency]:
    """(what is left, efficiencies) from one start."""
    point, centre = _logarithms(start), _logarithms(prior)
    low, high = np.log(np.array([LIMITS[name] for name in NAMES])).T
    damping = 1e-3
    cost = _cost(rows, point, centre)
    matrix, right = _normal_equations(rows, point, centre)
    for _ in range(ROUNDS):
        step = np.linalg.solve(matrix + damping * np.diag(1.0 + np.diag(matrix)), right)
        candidate = np.clip(point + step, low, high)
        new = _cost(rows, candidate, centre)
        if new < cost:
            converged = cost - new < 1e-6 * cost
            point, cost, damping = candidate, new, damping / 4
            if converged:
                break
            matrix, right = _normal_equations(rows, point, centre)
        else:
            damping *= 8
    return cost, _efficiency(point)


def _logarithms(efficiency: Efficiency) -> Array:
    return np.log([getattr(efficiency, name) for name in NAMES])


def _efficiency(point: Array) -> Efficiency:
    return Efficiency(**{name: math.exp(value) for name, value in zip(NAMES, point, strict=True)})


def _cost(rows: _Rows, point: Array, centre: Array) -> float:
    errors = np.abs(rows.errors(point))
    huber = np.where(errors < HUBER, errors**2, 2 * HUBER * errors - HUBER**2)
    return float(rows.weights @ huber + STRENGTH @ (point - centre) ** 2)


def _normal_equations(rows: _Rows, point: Array, centre: Array) -> tuple[Array, Array]:
    """J'WJ and -J'We of the weighted errors and the prior, derivatives by differences."""
    step = 1e-3
    errors = rows.errors(point)
    weights = rows.weights * np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-12))
    slopes = np.stack([(rows.errors(point + step * unit) - errors) / step for unit in np.eye(len(point))])
    matrix = (slopes * weights) @ slopes.T + np.diag(STRENGTH)
    return matrix, -(slopes @ (weights * errors)) - STRENGTH * (point - centre)
