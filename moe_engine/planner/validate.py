"""Predictions against published measurements: every usable row, by efficiencies that never saw its model.

A row is predicted three times: with efficiencies fitted on the other models of its card, precision and software
(leave one model out); with the defaults; and, as the floor that a planner must beat, with the median throughput per
FLOP of its group's other models. Only the best row of each configuration counts: the same layout on an older version
of the software is not something that a planner can know; how far apart such rows are is the noise floor.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from moe_engine.config.errors import ConfigError
from moe_engine.planner.answer import room
from moe_engine.planner.efficiencies import Group, Known
from moe_engine.planner.fit import Sample, fit
from moe_engine.planner.hardware import Efficiency
from moe_engine.planner.measured import Dropped, Feasibility, Measurement
from moe_engine.planner.memory import rank_memory
from moe_engine.planner.stages import cut
from moe_engine.planner.timing import step_work

# Before anything is fitted: shares that careful programs reach on every card.
DEFAULTS = {
    "bf16": Efficiency(),
    "fp8": Efficiency(matmul=0.6, grouped=0.45),
    "fp4": Efficiency(matmul=0.45, grouped=0.3),
}
FEW = 3  # the naive floor of models with fewer rows of others than this in their group is over all cards

Samples = dict[Group, list[tuple[Measurement, Sample]]]


@dataclass(frozen=True)
class Prediction:
    """One row: signed relative errors of the three predictions, predicted over measured less one."""

    row: Measurement
    fitted: float
    default: float
    naive: float


@dataclass(frozen=True)
class Validation:
    """All predictions of the best rows, what was left out, and the spread of equal configurations."""

    predictions: list[Prediction]
    rows: int
    used: int
    dropped: list[Dropped]
    noise: list[float]


def validate(rows: int, measurements: Sequence[Measurement], dropped: Sequence[Dropped]) -> Validation:
    """Predict every configuration."""
    best, noise = _best(measurements)
    samples, failed = _samples(best)
    predictions = [p for group, found in sorted(samples.items()) for p in _predict(group, found, samples)]
    used = len(measurements) - len(failed)
    return Validation(predictions, rows, used, [*dropped, *failed], noise)


def fitted(measurements: Sequence[Measurement]) -> dict[Group, Known]:
    """Efficiencies of every group on all its rows: for planning, not for judging the planner."""
    samples, _ = _samples(_best(measurements)[0])
    return {
        group: Known(fit([sample for _, sample in found], DEFAULTS[group[1]]), len(found))
        for group, found in samples.items()
    }


def family(name: str) -> str:
    """A model's name without what a benchmark adds: brackets, spaces, dashes."""
    return re.sub(r"[^a-z0-9.]", "", name.lower().split("(")[0])


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values lies below; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else math.nan


def rank_agreement(predictions: Sequence[Prediction]) -> tuple[int, int]:
    """Pairs of rows that differ in layout alone and by more than 3% in time, and how many are predicted in order."""
    alike: dict[tuple[object, ...], list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        row, strategy = prediction.row, prediction.row.strategy
        key = (row.group, family(row.name), row.model.num_layers, row.cluster.gpus, strategy.seq_len)
        alike[(*key, strategy.global_batch)].append(prediction)
    pairs = right = 0
    for found in alike.values():
        for one, other in combinations(found, 2):
            if one.row.strategy.layout == other.row.strategy.layout and one.row.strategy == other.row.strategy:
                continue
            measured = one.row.seconds / other.row.seconds
            if abs(math.log(measured)) < math.log(1.03):
                continue
            predicted = measured * (1 + one.fitted) / (1 + other.fitted)
            pairs, right = pairs + 1, right + ((predicted > 1) == (measured > 1))
    return pairs, right


def _best(measurements: Sequence[Measurement]) -> tuple[list[Measurement], list[float]]:
    """The fastest row of each configuration, and how much slower the others of it are."""
    groups: dict[tuple[str, ...], list[Measurement]] = defaultdict(list)
    for row in measurements:
        groups[(*row.configuration, *row.group)].append(row)
    best = [min(found, key=lambda row: row.seconds) for found in groups.values()]
    noise = [
        row.seconds / fastest.seconds - 1
        for found, fastest in zip(groups.values(), best, strict=True)
        for row in found
        if row is not fastest
    ]
    return best, noise


def _samples(best: Sequence[Measurement]) -> tuple[Samples, list[Dropped]]:
    """The rows by group, ready for fitting. The rows of one model count for no more than the root of their number:
    twenty layouts of one model say less than twenty models."""
    counts = Counter((row.group, family(row.name)) for row in best)
    samples: Samples = defaultdict(list)
    failed = []
    for row in best:
        try:
            work = step_work(cut(row.model, row.strategy), row.cluster)
            weight = counts[row.group, family(row.name)] ** -0.5
            samples[row.group].append((row, Sample.of(work, row.seconds, weight)))
        except ConfigError as error:
            failed.append(Dropped(row.id, str(error).splitlines()[0]))
    return samples, failed


def _predict(group: Group, found: list[tuple[Measurement, Sample]], samples: Samples) -> list[Prediction]:
    """The rows of one group, each model by the others; what these leave open stays at the defaults."""
    predictions = []
    rates = [(family(row.name), _flops(row) / row.seconds) for row, _ in found]
    every = [
        (family(row.name), _flops(row) / row.seconds / row.cluster.peak(group[1]))
        for other, rows in samples.items()
        if other[1] == group[1]
        for row, _ in rows
    ]
    for name in sorted({family(row.name) for row, _ in found}):
        efficiency = fit([sample for row, sample in found if family(row.name) != name], DEFAULTS[group[1]])
        others = [rate for other, rate in rates if other != name]
        share = quantile([share for other, share in every if other != name], 0.5)
        for row, sample in found:
            if family(row.name) != name:
                continue
            rate = quantile(others, 0.5) if len(others) >= FEW else share * row.cluster.peak(group[1])
            predictions.append(
                Prediction(
                    row,
                    fitted=math.exp(sample.error(efficiency)) - 1,
                    default=math.exp(sample.error(DEFAULTS[group[1]])) - 1,
                    naive=_flops(row) / rate / row.seconds - 1,
                )
            )
    return predictions


def _flops(row: Measurement) -> float:
    """Model FLOPs of a step on one card."""
    strategy = row.strategy
    return 3 * row.model.forward_flops(strategy.seq_len) * strategy.global_batch / row.cluster.gpus


@dataclass(frozen=True)
class MemoryCheck:
    """Predicted over measured bytes of the fullest rank, less one."""

    row: Measurement
    error: float


def check_memory(measurements: Sequence[Measurement]) -> list[MemoryCheck]:
    """Rows with a published peak, each configuration once, against the planned one: kept tensors as Megatron keeps
    them, nothing for the runtime."""
    found: dict[tuple[str, ...], MemoryCheck] = {}
    for row in measurements:
        if row.memory and row.configuration not in found:
            held = cut(row.model, row.strategy)
            planned = max(rank.total for rank in rank_memory(held, "megatron"))
            found[row.configuration] = MemoryCheck(row, planned / row.memory - 1)
    return list(found.values())


def check_feasibility(rows: Sequence[Feasibility]) -> tuple[int, int, int, int]:
    """(fitted and said so, fitted, did not fit and said so, did not fit)."""
    counts = [0, 0, 0, 0]
    for row in rows:
        planned = max(rank.total for rank in rank_memory(cut(row.model, row.strategy), "megatron"))
        says = planned <= room(row.cluster)
        first = 0 if row.fits else 2
        counts[first] += says == row.fits
        counts[first + 1] += 1
    return counts[0], counts[1], counts[2], counts[3]
