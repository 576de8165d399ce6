"""All schedules side by side for one model on one number of ranks, and which of them to take.

A cost model gives the times of 1/pp of the model. A schedule that cuts the model finer (interleaved, and the folded
ones with two stages a rank) has stages of a fraction of these times, so that every row of the comparison does the same
work. Activations are counted in the same unit: what 1/pp of the model saves for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_engine.config.errors import ConfigError
from moe_engine.schedule import schedules
from moe_engine.schedule.check import check
from moe_engine.schedule.simulate import Cost, formula_bubble, prepare, simulate

TEST_ONLY = ("split_1f1b",)  # wins nothing; made for testing the split of a backward


@dataclass(frozen=True)
class Row:
    """One schedule at this size; times in the unit of the cost model.

    stages_per_rank: stages a rank holds, virtual ones or both directions'; copies: how many ranks hold each parameter;
    makespan, idle (of the rank that idles most), bubble (its share of the makespan) and the published formula's idle
    time; activations, weight_gradients, held: the largest of any rank, of activations alive, of weight gradients that
    wait for their W, and of both together.
    """

    name: str
    stages_per_rank: int
    copies: int
    makespan: float
    idle: float
    bubble: float
    formula_idle: float | None
    activations: float
    weight_gradients: float
    held: float


@dataclass(frozen=True)
class Comparison:
    """`rows` in the order of `schedules.names`; `refused`: by name, why a schedule cannot run at this size."""

    rows: list[Row]
    refused: dict[str, str]

    def named(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)


def share_of_cost(cost: Cost, pp: int, num_stages: int) -> Cost:
    """The times of one of `num_stages` stages, if `cost` are those of 1/pp of the model. Messages take as long."""
    part = pp / num_stages
    return replace(cost, f=cost.f * part, b=cost.b * part, w=cost.w * part, fb=cost.fb * part)


def compare(pp: int, micro_batches: int, cost: Cost, virtual_stages: int = 2) -> Comparison:
    """Check and simulate every schedule; `virtual_stages` are those of interleaved_1f1b. `cost` is for 1/pp model."""
    rows, refused = [], {}
    for name in schedules.names():
        if name not in TEST_ONLY:
            try:
                rows.append(_row(name, pp, micro_batches, cost, virtual_stages if "interleaved" in name else 1))
            except ConfigError as error:
                refused[name] = str(error)
    return Comparison(rows, refused)


def _row(name: str, pp: int, micro_batches: int, cost: Cost, virtual_stages: int) -> Row:
    lists = schedules.schedule(name, pp, micro_batches, virtual_stages)
    held = schedules.stage_of_rank(name, pp, virtual_stages)
    num_stages = 1 + max(map(max, held))
    part, share = pp / num_stages, share_of_cost(cost, pp, num_stages)
    report, simulation = check(lists, num_stages, micro_batches), simulate(lists, num_stages, share)
    return Row(
        name=name,
        stages_per_rank=len(held[0]),
        copies=sum(0 in stages for stages in held),
        makespan=simulation.makespan,
        idle=max(simulation.idle),
        bubble=max(simulation.bubble),
        formula_idle=formula_bubble(name, pp, share),
        activations=max(report.peak_activations) * part,
        weight_gradients=max(report.peak_weight_gradients) * part,
        held=max(report.peak_held) * part,
    )


def best(rows: Sequence[Row]) -> Row:
    """The shortest step; among equals (to a thousandth) the fewest parameter copies, then the fewest activations."""
    shortest = min(row.makespan for row in rows)
    close = [row for row in rows if row.makespan <= shortest * 1.001]
    return min(close, key=lambda row: (row.copies, row.held, row.makespan))


def even_fb(name: str, pp: int, micro_batches: int, cost: Cost, makespan: float) -> float | None:
    """The `cost.fb` at which `name` (a schedule with overlapped pairs) takes as long as `makespan`.

    None where no time of a pair from 0 to f + b does.
    """

    num_stages = schedules.num_stages(name, pp)
    prepared = prepare(schedules.schedule(name, pp, micro_batches), num_stages)

    def longer(fb: float) -> bool:
        share = share_of_cost(replace(cost, fb=fb), pp, num_stages)
        return prepared.makespan([share] * num_stages) > makespan

    low, high = 0.0, cost.f + cost.b
    if longer(low) or not longer(high):
        return None
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if longer(middle) else (middle, high)
    return low
