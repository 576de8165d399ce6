"""Times a schedule under a cost model, before anything is trained.

Each rank runs its list in order; an action starts when the rank is free and its inputs are there; an input from another
rank arrives `communication` after the action that made it has ended. Nothing else costs time, so the result is the best
that the schedule can do, and the gap to a measured step is the executor's to explain.

Source: the bubble formulas of the DualPipe README (github.com/deepseek-ai/DualPipe) and of "Zero Bubble Pipeline
Parallelism" (arXiv 2401.10241, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_engine.config.errors import ConfigError
from moe_engine.schedule.action import Action, Kind, inputs
from moe_engine.schedule.check import Lists, Slot, count_memory, execution_order, producers


@dataclass(frozen=True)
class Cost:
    """Seconds (or any one unit) that each kind of action takes on one stage.

    b: the full backward, weight gradient included, so that an I takes b - w. fb: the overlapped pair.
    communication: the delay of one message between two ranks.
    """

    f: float
    b: float
    w: float
    fb: float
    communication: float = 0.0

    def __post_init__(self) -> None:
        for name in ("f", "b", "w", "fb", "communication"):
            if getattr(self, name) < 0:
                raise ConfigError(f"cost.{name}={getattr(self, name)}: a time is not negative; use 0 or more")
        if self.w > self.b:
            raise ConfigError(
                f"cost.w={self.w}: the weight gradient is a part of the full backward, cost.b={self.b}; "
                f"use cost.w={self.b} or less, or add it to cost.b"
            )

    def of(self, kind: Kind) -> float:
        """How long an action of this kind takes."""
        return {Kind.F: self.f, Kind.B: self.b, Kind.I: self.b - self.w, Kind.W: self.w, Kind.FB: self.fb}[kind]


class Timed(NamedTuple):
    """An action with its place in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule in time. `timeline` has one list of timed actions per rank, in the unit of the cost model."""

    timeline: list[list[Timed]]
    peak_activations: list[int]  # per rank, as `check.Report`

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(timed.end for actions in self.timeline for timed in actions)

    @property
    def idle(self) -> list[float]:
        """Time in which each rank runs nothing."""
        return [self.makespan - sum(timed.end - timed.start for timed in actions) for actions in self.timeline]

    @property
    def bubble(self) -> list[float]:
        """The idle fraction of each rank."""
        return [idle / self.makespan for idle in self.idle]


class _Step(NamedTuple):
    """One action in an order that respects what it needs: `after` are the places of its inputs in that order, with the
    stage whose message delay counts, -1 for none. The action before it on its rank is `previous`, -1 for none."""

    slot: Slot
    action: Action
    previous: int
    after: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Prepared:
    """A schedule made ready for timing under many cost models: what waits for what is found once."""

    lists: Lists
    steps: tuple[_Step, ...]

    def ends(self, costs: Sequence[Cost]) -> list[tuple[float, float]]:
        """Start and end of every step, for a cost of each stage; a pair over two stages takes the mean of theirs."""
        times: list[tuple[float, float]] = []
        seconds = [{kind: cost.of(kind) for kind in Kind} for cost in costs]
        for step in self.steps:
            start = times[step.previous][1] if step.previous >= 0 else 0.0
            for place, stage in step.after:
                start = max(start, times[place][1] + (costs[stage].communication if stage >= 0 else 0.0))
            action = step.action
            length = seconds[action.stage][action.kind]
            if action.backward_stage is not None:
                length = (length + seconds[action.backward_stage][action.kind]) / 2
            times.append((start, start + length))
        return times

    def makespan(self, costs: Sequence[Cost]) -> float:
        """From the first start to the last end."""
        return max(end for _, end in self.ends(costs))


def prepare(lists: Lists, num_stages: int) -> Prepared:
    """Find what each action waits for. Raises ScheduleError if the lists deadlock."""
    made_at = producers(lists)
    place_of: dict[Slot, int] = {}
    steps: list[_Step] = []
    for slot in execution_order(lists, num_stages):
        action = lists[slot.rank][slot.position]
        sources = [(made_at[item], item.stage) for item in inputs(action, num_stages)]
        after = tuple((place_of[s], stage if s.rank != slot.rank else -1) for s, stage in sources)
        previous = place_of[Slot(slot.rank, slot.position - 1)] if slot.position else -1
        place_of[slot] = len(steps)
        steps.append(_Step(slot, action, previous, after))
    return Prepared(lists, tuple(steps))


def simulate(lists: Lists, num_stages: int, cost: Cost | Sequence[Cost]) -> Simulation:
    """Start and end of every action. `cost` is of every stage, or one for each.

    Raises ScheduleError if the lists deadlock.
    """
    prepared = prepare(lists, num_stages)
    timeline: list[list[Timed]] = [[] for _ in lists]
    for step, times in zip(
        prepared.steps, prepared.ends([cost] * num_stages if isinstance(cost, Cost) else cost), strict=True
    ):
        timeline[step.slot.rank].append(Timed(step.action, *times))
    return Simulation(timeline, count_memory(lists).peak_activations)


def formula_bubble(name: str, pp: int, cost: Cost) -> float | None:
    """Idle time of every rank by the published formula, communication left out; None where there is none.

    Exact for equal stages with enough micro-batches; those of dualpipe and dualpipev only if also f = w = b/2 and
    fb = f + b.
    """
    if name in ("gpipe", "1f1b", "interleaved_1f1b"):
        return (pp - 1) * (cost.f + cost.b)
    if name == "zb_h1":
        return (pp - 1) * (cost.f + cost.b - 2 * cost.w)
    if name in ("dualpipe", "dualpipev"):
        half_of_stages = pp // 2 if name == "dualpipe" else pp
        return (half_of_stages - 1) * (cost.fb + cost.b - 3 * cost.w)
    return None
