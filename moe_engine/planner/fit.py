"""Fits the six efficiencies to measured steps, and only those.

The logarithm of predicted over measured time is made small over all rows at once: damped Gauss-Newton on the
logarithms of the efficiencies, with large errors weighted down (Huber), so that a few odd rows do not bend the rest. A
prior pulls each efficiency towards a given value, as strongly as if `PRIOR_ROWS` rows had asked for it: what the rows
say nothing about stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from moe_engine.planner.hardware import Efficiency
from moe_engine.planner.timing import StepWork, quick_seconds, steadiness

NAMES = tuple(field.name for field in fields(Efficiency))
HUBER = 0.05  # errors above 5% count linearly
PRIOR_ROWS = 3.0
PRIOR_WIDTH = 0.5  # of the logarithm of an efficiency
ROUNDS = 12
# Nothing is faster than its peak; nothing useful is slower than these.
LIMITS = {
    "matmul": (0.2, 0.95),
    "grouped": (0.1, 0.95),
    "attention": (0.08, 0.9),
    "memory": (0.1, 0.95),
    "links": (0.02, 0.95),
    "block_us": (1.0, 3000.0),
}


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
    point = _logarithms(prior)
    centre = list(point)
    damping = 1e-3
    cost = _cost(samples, point, centre)
    for _ in range(ROUNDS):
        step = _solve(*_normal_equations(samples, point, centre), damping)
        candidate = [
            min(max(x + d, math.log(LIMITS[name][0])), math.log(LIMITS[name][1]))
            for name, x, d in zip(NAMES, point, step, strict=True)
        ]
        new = _cost(samples, candidate, centre)
        if new < cost:
            converged = cost - new < 1e-6 * cost
            point, cost, damping = candidate, new, damping / 4
            if converged:
                break
        else:
            damping *= 8
    return _efficiency(point)


def _logarithms(efficiency: Efficiency) -> list[float]:
    return [math.log(getattr(efficiency, name)) for name in NAMES]


def _efficiency(point: Sequence[float]) -> Efficiency:
    return Efficiency(**{name: math.exp(value) for name, value in zip(NAMES, point, strict=True)})


def _cost(samples: Sequence[Sample], point: Sequence[float], centre: Sequence[float]) -> float:
    efficiency = _efficiency(point)
    total = sum(PRIOR_ROWS * HUBER**2 * ((p - c) / PRIOR_WIDTH) ** 2 for p, c in zip(point, centre, strict=True))
    for sample in samples:
        error = abs(sample.error(efficiency))
        total += sample.weight * (error**2 if error < HUBER else 2 * HUBER * error - HUBER**2)
    return total


def _normal_equations(
    samples: Sequence[Sample], point: Sequence[float], centre: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    """J'WJ and -J'We of the weighted errors and the prior, derivatives by differences."""
    size = len(point)
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    step = 1e-3
    base = _efficiency(point)
    moved = [_efficiency([x + step * (i == j) for j, x in enumerate(point)]) for i in range(size)]
    for sample in samples:
        error = sample.error(base)
        weight = sample.weight * min(1.0, HUBER / max(abs(error), 1e-12))
        slopes = [(sample.error(efficiency) - error) / step for efficiency in moved]
        for i in range(size):
            right[i] -= weight * slopes[i] * error
            for j in range(size):
                matrix[i][j] += weight * slopes[i] * slopes[j]
    strength = PRIOR_ROWS * HUBER**2 / PRIOR_WIDTH**2
    for i in range(size):
        matrix[i][i] += strength
        right[i] -= strength * (point[i] - centre[i])
    return matrix, right


def _solve(matrix: list[list[float]], right: list[float], damping: float) -> list[float]:
    """Gaussian elimination with the diagonal raised by `damping`."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        rows[i][i] += damping * (1.0 + rows[i][i])
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        solution[i] = (rows[i][size] - sum(rows[i][j] * solution[j] for j in range(i + 1, size))) / rows[i][i]
    return solution
