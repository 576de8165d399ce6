"""Efficiencies of cards from measured steps: which rows count, and what follows from which.

Six efficiencies are fitted for each group, a card in one format with one software. What a group's rows leave open stays
where its relatives are: the same software and format on other cards; before that, for all but matrix products, the same
software in another format; before that, the defaults. The time of launches, which is the host's, comes from the same
card alone.

A release of a software runs models with experts slower or faster than its others by a factor that all cards and
formats share. The fewer models show it, the less it counts.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from moe_engine.config.errors import ConfigError
from moe_engine.planner.efficiencies import Group, Known, Table
from moe_engine.planner.fit import Sample, fit
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
RELEASE_ROUNDS = 2

Samples = dict[Group, list[tuple[Measurement, Sample]]]


def best_rows(measurements: Sequence[Measurement]) -> tuple[list[Measurement], list[float]]:
    """The fastest row of each configuration, and how much slower the others of it are."""
    groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for row in measurements:
        groups[row.configuration].append(row)
    best = [min(found, key=lambda row: row.seconds) for found in groups.values()]
    noise = [
        row.seconds / fastest.seconds - 1
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


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values lies below; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else math.nan


def fitted(measurements: Sequence[Measurement]) -> Table:
    """The efficiencies of every group and the factor of every release from all rows: for planning, not for judging
    the planner."""
    samples, _ = samples_of(best_rows(measurements)[0])
    fits = Fits(samples)
    groups = {}
    for group, found in samples.items():
        experts = sum(row.model.num_experts > 0 for row, _ in found)
        year = max(row.year for row, _ in found)
        groups[group] = Known(fits.of(group), len(found) - experts, experts, year)
    return Table(groups, {f"{software} {release}": factor for (software, release), factor in fits.releases.items()})


class Fits:
    """Efficiencies of groups and factors of releases from given rows."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.releases: dict[tuple[str, str], float] = {}
        self._known: dict[tuple[str, ...], Efficiency] = {}

    def of(self, group: Group) -> Efficiency:
        """The efficiencies of a group."""
        if not any(software == group[2] for software, _ in self.releases):
            self._learn_releases(group[2])
        return self._group(group)

    def factor(self, row: Measurement) -> float:
        """How much longer steps take in a row's release."""
        return self.releases.get((row.stack, row.release), 1.0) if row.model.num_experts else 1.0

    def _learn_releases(self, software: str) -> None:
        rows = [
            (group, row, sample)
            for group, found in self.samples.items()
            for row, sample in found
            if group[2] == software and row.release and row.model.num_experts
        ]
        for _ in range(RELEASE_ROUNDS if rows else 0):
            errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
            for group, row, sample in rows:
                error = sample.error(self._group(group)) + math.log(self.factor(row))
                errors[row.release][family(row.name)].append(error)
            for release, by_model in errors.items():
                middle = quantile([quantile(found, 0.5) for found in by_model.values()], 0.5)
                change = math.exp(-middle * len(by_model) / (len(by_model) + 1))
                self.releases[software, release] = self.releases.get((software, release), 1.0) * change
            self._known = {key: value for key, value in self._known.items() if key[-1] != software}

    def _group(self, group: Group) -> Efficiency:
        return self._fit(group, lambda other: other == group, lambda: self._relatives(group))

    def _relatives(self, group: Group) -> Efficiency:
        card, compute, software = group
        rates = self._fit(
            ("", compute, software),
            lambda other: other[1:] == group[1:],
            lambda: self._other_format(("", compute, software), lambda other: other[2] == software),
        )
        here = self._other_format(group, lambda other: other[0] == card and other[2] == software)
        return replace(rates, block_us=here.block_us)

    def _other_format(self, key: Group, belongs: Callable[[Group], bool]) -> Efficiency:
        """What the rows that belong say about all but matrix products, in the format, not that of `key`, with most."""
        card, compute, software = key
        counts: Counter[str] = Counter()
        for group, found in self.samples.items():
            counts[group[1]] += len(found) if belongs(group) and group[1] != compute else 0
        name, rows = max(counts.items(), key=lambda each: each[1])
        if not rows:
            return DEFAULTS[compute]
        found_there = self._fit(
            ("alone", card, name, software), lambda each: belongs(each) and each[1] == name, lambda: DEFAULTS[name]
        )
        return replace(found_there, matmul=DEFAULTS[compute].matmul, grouped=DEFAULTS[compute].grouped)

    def _fit(
        self, key: tuple[str, ...], belongs: Callable[[Group], bool], prior: Callable[[], Efficiency]
    ) -> Efficiency:
        if key not in self._known:
            rows = [each for group, found in self.samples.items() if belongs(group) for each in found]
            used = [replace(sample, seconds=sample.seconds / self.factor(row)) for row, sample in rows]
            self._known[key] = fit(used, prior())
        return self._known[key]
