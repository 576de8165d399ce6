"""Fits the efficiencies of a software to measured steps: six of each group, all groups at once.

A group is a card in one format. What the software does alike everywhere is learned from all of its rows, and a group
differs from that as far as its own rows ask for: the logarithm of each efficiency is a sum of levels (`LEVELS`: the
software, a card, a group), and each level is pulled towards nothing by a normal prior of its width. So two rows say
little and fifty say much, without a rule for either. Products' rates belong to a format; attention, memory and links
hardly know one; launches belong to the host.

What a model needs more or less than the arithmetic says, on all cards alike, is an unknown of its own (as is what a
release does to models with experts): twenty layouts of one model are not twenty witnesses. Predictions leave it out.

The errors are logarithms of predicted over measured time; large ones, and large unknowns of models, count linearly
(Huber), so that a few odd rows or one odd model bend nothing. Damped Gauss-Newton with derivatives by differences.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_engine.planner.hardware import Efficiency
from moe_engine.planner.many import NAMES, Steps
from moe_engine.planner.timing import StepWork, quick_seconds, steadiness

Key = tuple[str, str, str]  # card, format, software
ROW = 0.06  # errors of rows within this count as squares, beyond it linearly
MODEL = 0.05  # the same of what a model needs more or less
RELEASE = 0.03
ROUNDS = 40
# Of each efficiency's logarithm: what a level of it belongs to, and how far it usually goes.
LEVELS: dict[str, tuple[tuple[str, float], ...]] = {
    "matmul": (("format", 0.25), ("group", 0.1)),
    "grouped": (("format", 0.18), ("group", 0.07)),
    "attention": (("software", 0.3), ("card", 0.15), ("group", 0.05)),
    "memory": (("software", 0.3), ("card", 0.15), ("group", 0.1)),
    "links": (("software", 0.6), ("card", 0.3), ("group", 0.1)),
    "block_us": (("host", 0.15), ("card", 0.05), ("group", 0.05)),
}
# Nothing is faster than its peak; nothing useful is slower than these.
LIMITS = {
    "matmul": (0.2, 0.95),
    "grouped": (0.1, 0.95),
    "attention": (0.08, 0.9),
    "memory": (0.1, 0.95),
    "links": (0.02, 0.95),
    "block_us": (1.0, 3000.0),
}
LOW, HIGH = np.log(np.array([LIMITS[name] for name in NAMES])).T
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One measured step. steadiness: length of the schedule over the busy time of its busiest rank, which hardly
    depends on the efficiencies."""

    work: StepWork
    seconds: float
    steadiness: float

    @classmethod
    def of(cls, work: StepWork, seconds: float) -> Sample:
        return cls(work, seconds, steadiness(work, Efficiency()))

    def error(self, efficiency: Efficiency) -> float:
        """Logarithm of predicted over measured."""
        return math.log(quick_seconds(self.work, efficiency, self.steadiness) / self.seconds)


@dataclass(frozen=True)
class Observation:
    """A measured step with what its time is owed to: its group; the model; the release, if it is felt, else ``""``."""

    sample: Sample
    group: Key
    model: str
    release: str = ""


@dataclass(frozen=True)
class Start:
    """What is assumed of a group before any row: its efficiencies, and the kind of host that launches."""

    efficiency: Efficiency
    host: str = ""


@dataclass(frozen=True)
class Fitted:
    """Efficiencies by group, and by release the factor on time."""

    efficiencies: dict[Key, Efficiency]
    releases: dict[str, float]


def fit(observed: Sequence[Observation], starts: Mapping[Key, Start]) -> Fitted:
    """Efficiencies of all groups in `starts`, those without rows included, from rows of one software."""
    unknowns = _Unknowns(observed, starts)
    point = _descend(unknowns) if observed else np.zeros(unknowns.number)
    found = np.exp(np.clip(unknowns.logarithms(point), LOW, HIGH))
    efficiencies = {
        group: Efficiency(**dict(zip(NAMES, map(float, row), strict=True)))
        for group, row in zip(starts, found, strict=True)
    }
    releases = {release: math.exp(point[index]) for release, index in unknowns.releases.items()}
    return Fitted(efficiencies, releases)


class _Unknowns:
    """All unknowns as one vector, and what each row and group takes from it."""

    def __init__(self, observed: Sequence[Observation], starts: Mapping[Key, Start]) -> None:
        numbers: dict[Hashable, int] = {}
        widths: list[float] = []

        def number(key: Hashable, width: float) -> int:
            if key not in numbers:
                numbers[key] = len(widths)
                widths.append(width)
            return numbers[key]

        self.base = np.log([[getattr(start.efficiency, name) for name in NAMES] for start in starts.values()])
        taken = []  # (group, efficiency, unknown)
        for row, (group, start) in enumerate(starts.items()):
            owners = {"software": "", "format": group[1], "card": group[0], "group": group, "host": start.host}
            for column, name in enumerate(NAMES):
                for level, width in LEVELS[name]:
                    taken.append((row, column, number((name, level, owners[level]), width)))
        self.taken = np.array(taken)
        releases = sorted({row.release for row in observed if row.release})
        self.releases = {release: number(("release", release), RELEASE) for release in releases}
        first_model = len(widths)
        models = {model: number(("model", model), MODEL) for model in sorted({row.model for row in observed})}
        self.number, self.widths = len(widths), np.array(widths)
        self.of_model = np.arange(self.number) >= first_model
        places = {group: row for row, group in enumerate(starts)}
        self.group_of_row = np.array([places[row.group] for row in observed], dtype=int)
        self.offsets = np.zeros((len(observed), self.number))
        for index, each in enumerate(observed):
            self.offsets[index, models[each.model]] = 1.0
            if each.release:
                self.offsets[index, self.releases[each.release]] = 1.0
        self.measured = np.log([row.sample.seconds for row in observed])
        if observed:
            self.steps = Steps([r.sample.work for r in observed], [r.sample.steadiness for r in observed])

    def logarithms(self, point: Array) -> Array:
        """Logarithms of the efficiencies of all groups [G, 6]."""
        found = self.base.copy()
        np.add.at(found, (self.taken[:, 0], self.taken[:, 1]), point[self.taken[:, 2]])
        return found

    def errors(self, point: Array, nudge: Array) -> Array:
        """Logarithms of predicted over measured, with `nudge` [6] on top of all efficiencies' logarithms."""
        logarithms = np.clip(self.logarithms(point), LOW, HIGH) + nudge
        seconds = self.steps.seconds(np.exp(logarithms)[self.group_of_row])
        return np.asarray(np.log(seconds) + self.offsets @ point - self.measured)

    def slopes(self, point: Array, errors: Array) -> Array:
        """Derivatives of the errors by the unknowns [rows, unknowns]."""
        step = 1e-3
        by_efficiency = [(self.errors(point, step * unit) - errors) / step for unit in np.eye(len(NAMES))]
        of_group = np.zeros((len(self.base), len(NAMES), self.number))
        np.add.at(of_group, tuple(self.taken.T), 1.0)
        found = self.offsets.copy()
        for column, slope in enumerate(by_efficiency):
            found += slope[:, None] * of_group[self.group_of_row, column]
        return found

    def weights(self, point: Array, errors: Array) -> tuple[Array, Array]:
        """Of the squares of errors and of unknowns, such that large ones count linearly."""
        rows = np.minimum(1.0, ROW / np.maximum(np.abs(errors), 1e-12)) / ROW**2
        scaled = np.abs(point) / self.widths
        odd = np.where(self.of_model, np.minimum(1.0, 1.0 / np.maximum(scaled, 1e-12)), 1.0)
        return rows, odd / self.widths**2

    def cost(self, point: Array, errors: Array) -> float:
        """What is left of the errors, and how far the unknowns are from where they usually are."""
        scaled = point / self.widths
        return float(_huber(errors / ROW).sum() + np.where(self.of_model, _huber(scaled), scaled**2).sum())


def _huber(values: Array) -> Array:
    size = np.abs(values)
    return np.asarray(np.where(size < 1.0, size**2, 2 * size - 1))


def _descend(unknowns: _Unknowns) -> Array:
    """The unknowns that explain the rows best."""
    point, nothing = np.zeros(unknowns.number), np.zeros(len(NAMES))
    errors = unknowns.errors(point, nothing)
    cost, damping = unknowns.cost(point, errors), 1e-3
    slopes = unknowns.slopes(point, errors)
    for _ in range(ROUNDS):
        rows, prior = unknowns.weights(point, errors)
        matrix = (slopes.T * rows) @ slopes + np.diag(prior)
        right = -(slopes.T @ (rows * errors)) - prior * point
        step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), right)
        candidate = point + step
        new_errors = unknowns.errors(candidate, nothing)
        new = unknowns.cost(candidate, new_errors)
        if new < cost:
            converged = cost - new < 1e-5 * cost
            point, errors, cost, damping = candidate, new_errors, new, damping / 4
            if converged:
                break
            slopes = unknowns.slopes(point, errors)
        else:
            damping *= 8
    return point
