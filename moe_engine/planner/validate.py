"""Predictions against published measurements: every usable row, by efficiencies that never saw its model.

A row is predicted three times: with efficiencies fitted on the other models of its card, precision and software
(leave one model out); with the defaults; and, as the floor that a planner must beat, with the median throughput per
FLOP of its group's other models. Only the best row of each configuration counts: the same layout on an older version
of the software is not something that a planner can know; how far apart such rows are is the noise floor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from moe_engine.planner.answer import room
from moe_engine.planner.calibrate import Fits, Samples, best_rows, families, family, quantile, samples_of, starts_of
from moe_engine.planner.efficiencies import Group
from moe_engine.planner.measured import Dropped, Feasibility, Measurement
from moe_engine.planner.memory import rank_memory
from moe_engine.planner.stages import cut

FEW = 3  # the naive floor of models with fewer rows of others than this in their group is over all cards


@dataclass(frozen=True)
class Prediction:
    """One row: signed relative errors of the three predictions, predicted over measured less one."""

    row: Measurement
    fitted: float
    default: float
    naive: float


@dataclass(frozen=True)
class Validation:
    """All predictions of the best rows, what was left out, the spread of equal configurations, and all rows used."""

    predictions: list[Prediction]
    rows: int
    used: int
    dropped: list[Dropped]
    noise: list[tuple[Measurement, float]]
    measurements: Sequence[Measurement] = ()


def validate(rows: int, measurements: Sequence[Measurement], dropped: Sequence[Dropped]) -> Validation:
    """Predict every configuration."""
    best, noise = best_rows(measurements)
    samples, failed = samples_of(best)
    names, starts = families(best), starts_of(best)
    fits = {model: Fits(_without(samples, names, model), names, starts) for model in set(names.values())}
    predictions = [p for group in sorted(samples) for p in _predict(group, samples, names, fits)]
    used = len(measurements) - len(failed)
    return Validation(predictions, rows, used, [*dropped, *failed], noise, measurements)


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


def _without(samples: Samples, names: dict[str, str], model: str) -> Samples:
    """The rows of all other models."""
    return {group: [each for each in found if names[each[0].name] != model] for group, found in samples.items()}


def _predict(group: Group, samples: Samples, names: dict[str, str], fits: dict[str, Fits]) -> list[Prediction]:
    """The rows of one group, each model by the others."""
    predictions = []
    found = samples[group]
    rates = [(names[row.name], _flops(row) / row.seconds) for row, _ in found]
    every = [
        (names[row.name], _flops(row) / row.seconds / row.cluster.peak(group[1]))
        for other, rows in samples.items()
        if other[1] == group[1]
        for row, _ in rows
    ]
    for row, sample in found:
        name = names[row.name]
        others = [rate for other, rate in rates if other != name]
        share = quantile([share for other, share in every if other != name], 0.5)
        rate = quantile(others, 0.5) if len(others) >= FEW else share * row.cluster.peak(group[1])
        efficiency, default = fits[name].of(group), fits[name].starts[group].efficiency
        predictions.append(
            Prediction(
                row,
                fitted=math.exp(sample.error(efficiency)) * fits[name].factor(row) - 1,
                default=math.exp(sample.error(default)) - 1,
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
    found: dict[tuple[object, ...], MemoryCheck] = {}
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
