"""Efficiencies of cards from measured steps: which rows count, and what follows from which.

Six efficiencies are fitted for each group, a card in one format with one software; `fit.py` says what groups of one
software learn from each other. A release of a software runs models with experts slower or faster than its others by a
factor that all cards and formats share.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moe_engine.config.errors import ConfigError
from moe_engine.planner.efficiencies import Group, Known, Table
from moe_engine.planner.fit import Fitted, Observation, Sample, Start, fit
from moe_engine.planner.hardware import Efficiency
from moe_engine.planner.measured import Dropped, Measurement
from moe_engine.planner.stages import cut
from moe_engine.planner.timing import step_work

# Before anything is fitted: shares that careful programs reach on every card.
DEFAULTS = {
    "bf16": Efficiency(),
    "fp8": Efficiency(matmul=0.6, grouped=0.45),
    "fp4": Efficiency(matmul=0.45, grouped=0.3),
}
# Time in which a host launches one pass through a dense block, kernel by kernel.
EAGER_US = 500.0

Samples = dict[Group, list[tuple[Measurement, Sample]]]


def best_rows(measurements: Sequence[Measurement]) -> tuple[list[Measurement], list[tuple[Measurement, float]]]:
    """The fastest row of each configuration, and the others of it with how much slower they are."""
    groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for row in measurements:
        groups[row.configuration].append(row)
    best = [min(found, key=lambda row: row.seconds) for found in groups.values()]
    noise = [
        (row, row.seconds / fastest.seconds - 1)
        for found, fastest in zip(groups.values(), best, strict=True)
        for row in found
        if row is not fastest
    ]
    return best, noise


def family(name: str) -> str:
    """A model's name without what a benchmark adds: brackets, spaces, dashes."""
    return re.sub(r"[^a-z0-9.]", "", name.lower().split("(")[0])


def families(rows: Sequence[Measurement]) -> dict[str, str]:
    """For every name of a model the first name of the same one: equal but for what a benchmark adds, or equal sizes."""
    same: dict[str, str] = {}
    of_sizes: dict[tuple[int, ...], str] = {}
    for row in rows:
        model, name = row.model, family(row.name)
        sizes = (model.dim, model.num_layers, model.num_heads, model.dense_hidden, model.num_experts)
        first = same.get(name) or of_sizes.get(sizes) or name
        other = of_sizes.setdefault(sizes, first)
        same = {each: first if root == other else root for each, root in same.items()} | {name: first}
        of_sizes = {each: first if root == other else root for each, root in of_sizes.items()}
    return {row.name: same[family(row.name)] for row in rows}


def samples_of(best: Sequence[Measurement]) -> tuple[Samples, list[Dropped]]:
    """The rows by group, ready for fitting. The rows of one model count for no more than the root of their number:
    twenty layouts of one model say less than twenty models."""
    samples: Samples = defaultdict(list)
    failed = []
    for row in best:
        try:
            work = step_work(cut(row.model, row.strategy), row.cluster)
            samples[row.group].append((row, Sample.of(work, row.seconds)))
        except ConfigError as error:
            failed.append(Dropped(row.id, str(error).splitlines()[0]))
    return samples, failed


def starts_of(rows: Sequence[Measurement]) -> dict[Group, Start]:
    """What is assumed of each group before any row of it is seen."""
    starts = {}
    for row in rows:
        rack = row.cluster.gpus_per_node > 8
        default = replace(DEFAULTS[row.group[1]], block_us=EAGER_US)
        starts[row.group] = Start(default, "rack" if rack else "box")
    return starts


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values lies below; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else math.nan


def fitted(measurements: Sequence[Measurement]) -> Table:
    """The efficiencies of every group and the factor of every release from all rows: for planning, not for judging
    the planner."""
    best, _ = best_rows(measurements)
    samples, _ = samples_of(best)
    fits = Fits(samples, families(best), starts_of(best))
    groups = {}
    for group, found in samples.items():
        experts = sum(row.model.num_experts > 0 for row, _ in found)
        year = max(row.year for row, _ in found)
        groups[group] = Known(fits.of(group), len(found) - experts, experts, year)
    softwares = {group[2] for group in samples}
    return Table(
        groups,
        {f"{each} {name}": factor for each in softwares for name, factor in fits.software(each).releases.items()},
    )


class Fits:
    """Efficiencies of groups and factors of releases from given rows; each software when it is asked for. names: of
    the models, as `families` finds them; starts: what is assumed of every group."""

    def __init__(self, samples: Samples, names: Mapping[str, str], starts: Mapping[Group, Start]) -> None:
        self.samples, self.names, self.starts = samples, names, starts
        self._known: dict[str, Fitted] = {}

    def of(self, group: Group) -> Efficiency:
        """The efficiencies of a group."""
        return self.software(group[2]).efficiencies[group]

    def factor(self, row: Measurement) -> float:
        """How much longer steps take in a row's release."""
        return self.software(row.stack).releases.get(row.release, 1.0) if row.model.num_experts else 1.0

    def software(self, software: str) -> Fitted:
        """All that is known of a software."""
        if software not in self._known:
            groups = [group for group in self.samples if group[2] == software]
            observed = [
                Observation(sample, group, self.names[row.name], row.release if row.model.num_experts else "")
                for group in groups
                for row, sample in self.samples[group]
            ]
            self._known[software] = fit(observed, {group: self.starts[group] for group in groups})
        return self._known[software]
