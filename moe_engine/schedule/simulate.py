"""Times a schedule under a cost model, before anything is trained.

Each rank runs its list in order; an action starts when the rank is free and its inputs are there; an input from another
rank arrives `communication` after the action that made it has ended. Nothing else costs time, so the result is the best
that the schedule can do, and the gap to a measured step is the executor's to explain.

Source: the bubble formulas of the DualPipe README (github.com/deepseek-ai/DualPipe) and of "Zero Bubble Pipeline
Parallelism" (arXiv 2401.10241, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_engine.config.errors import ConfigError
from moe_engine.schedule.action import Action, Kind, inputs
from moe_engine.schedule.check import Lists, count_memory, execution_order, producers


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


def simulate(lists: Lists, num_stages: int, cost: Cost) -> Simulation:
    """Start and end of every action. Raises ScheduleError if the lists deadlock."""
    made_at = producers(lists)
    timeline: list[list[Timed]] = [[] for _ in lists]
    for rank, index in execution_order(lists, num_stages):
        action = lists[rank][index]
        start = timeline[rank][-1].end if timeline[rank] else 0.0
        for item in inputs(action, num_stages):
            source = made_at[item]
            delay = 0.0 if source.rank == rank else cost.communication
            start = max(start, timeline[source.rank][source.position].end + delay)
        timeline[rank].append(Timed(action, start, start + cost.of(action.kind)))
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
