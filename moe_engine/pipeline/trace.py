"""What really happened in a step: every action and phase of every rank in time, beside what the simulator says.

A `Tracer` is the executor's recorder on one rank and reads the waits of the rank's collective log. From them come

* measured bubble: the share of the pass in which a rank ran no action, or stood in one waiting for another stage;
* exposed communication: seconds of the whole step in which it stood still for experts' rows, their counts, or sums
  and parameters of the optimizer, and not for the pipeline.

`Trace` is the same of all ranks on one clock, for a trace file and a picture. Times are those of the host: where
kernels run beside it (a GPU), a phase ends when it is launched, unless `synchronize` is given, which waits for the
device at every mark and so takes overlap away.

The simulated step beside the measured one has the measured median of each kind of action on each stage as its cost
model, so it shows what the schedule makes of these times; what differs is waiting and the scatter of the times.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_engine.distributed.collectives import CollectiveLog, Communicator
from moe_engine.distributed.groups import Groups
from moe_engine.schedule.action import Action, Kind
from moe_engine.schedule.check import Lists
from moe_engine.schedule.chrome_trace import asynchronous_events, event, name_events, timetable_events, to_json
from moe_engine.schedule.draw import Panel, svg
from moe_engine.schedule.simulate import Cost, Simulation, Timed, simulate

CLOCK_ROUNDS = 5
MESSAGE, EXCHANGE, REDUCTION = "message", "exchange", "reduction"  # what a rank stood still for


class Span(NamedTuple):
    """A labelled piece of time, in `time.perf_counter` seconds of the rank's host."""

    label: str
    start: float
    end: float


@dataclass(frozen=True)
class StepFigures:
    """One rank's step in numbers. start and end are those of the pass over its actions, on the common clock.

    busy_s: in actions, and in them not waiting for another stage; exposed_s: see the module's text.
    """

    start: float
    end: float
    busy_s: float
    exposed_s: float

    def bubble(self, makespan: float) -> float:
        return 1 - self.busy_s / makespan


class Tracer:
    """Records one step at a time on one rank: `begin`, the pass, `end_pass`, the optimizer, `figures`.

    It is a `pipeline.recorder.Recorder`. `log` must be that of all of the rank's communicators, with its waits wanted.
    All ranks of the world must make theirs at the same point.
    """

    def __init__(self, groups: Groups, log: CollectiveLog, synchronize: Callable[[], None] = lambda: None) -> None:
        self.groups, self.log, self.synchronize = groups, log, synchronize
        self.clock_offset = _clock_offset(groups.world)
        self.spans: list[Span] = []
        self._open: dict[str, float] = {}
        self._pass = (0.0, 0.0)
        self._kinds = {edge.name: MESSAGE for edge in groups.edges.values()}
        exchanging = (groups.ep, groups.ep_counts, *(groups.ep_nodes or ()))
        self._kinds |= {communicator.name: EXCHANGE for communicator in exchanging}

    def start(self, label: str) -> None:
        self.synchronize()
        self._open[label] = time.perf_counter()

    def end(self, label: str) -> None:
        self.synchronize()
        self.spans.append(Span(label, self._open.pop(label), time.perf_counter()))

    def begin(self) -> None:
        """Forget the step before; the pass over the actions begins."""
        self.spans.clear()
        self.log.records.clear()
        if self.log.waits is not None:
            self.log.waits.clear()
        self._pass = (time.perf_counter(), 0.0)

    def end_pass(self) -> None:
        """The pass over the actions has ended; what comes until `figures` is reduction and optimizer."""
        self._pass = (self._pass[0], time.perf_counter())

    def waits(self) -> list[tuple[str, Span]]:
        """What this rank stood still for in the step: a kind, and the operation as the log has it."""
        found = []
        for record, start, end in self.log.waits or ():
            kind = self._kinds.get(record.communicator, REDUCTION)
            found.append((kind, Span(f"{record.communicator} {record.op} {record.label}", start, end)))
        return found

    def figures(self, actions: Sequence[Action]) -> StepFigures:
        """The step in numbers; `actions` are those of this rank."""
        names = {action.text(with_stage=True) for action in actions}
        waits = self.waits()
        in_actions = [span for span in self.spans if span.label in names]
        messages = [span for kind, span in waits if kind == MESSAGE and span.start < self._pass[1]]
        busy = sum(map(_length, in_actions)) - sum(_overlap(wait, span) for wait in messages for span in in_actions)
        exposed = sum(_length(span) for kind, span in waits if kind != MESSAGE)
        begin, end = self._pass
        return StepFigures(begin + self.clock_offset, end + self.clock_offset, busy, exposed)

    def gather(self, lists: Lists, num_stages: int) -> Trace:
        """Every rank's step, on all ranks. Only where a step is drawn: it moves all spans."""
        own = {
            "pp": self.groups.layout.coordinate(self.groups.rank).pp,
            "spans": [self._common(span) for span in self.spans],
            "waits": [(kind, self._common(span)) for kind, span in self.waits()],
            "pass": self._common(Span("", *self._pass))[1:],
        }
        return Trace(self.groups.world.gather_objects(own), lists, num_stages)

    def _common(self, span: Span) -> Span:
        return Span(span.label, span.start + self.clock_offset, span.end + self.clock_offset)


class Trace:
    """One step of all ranks on one clock; time 0 is the first rank's start."""

    def __init__(self, ranks: Sequence[dict[str, Any]], lists: Lists, num_stages: int) -> None:
        self.ranks, self.lists, self.num_stages = ranks, lists, num_stages
        self.zero = min(rank["pass"][0] for rank in ranks)

    def measured(self) -> list[list[Timed]]:
        """The actions of the first rank of each pipeline position, from when their inputs were there."""
        first = {rank["pp"]: rank for rank in reversed(self.ranks)}
        return [self._timed(first[pp], actions) for pp, actions in enumerate(self.lists)]

    def simulated(self) -> Simulation:
        """The same schedule with the measured median times of each kind of action on each stage."""
        return simulate(self.lists, self.num_stages, self.costs())

    def costs(self) -> list[Cost]:
        """Measured medians by stage, message waits left out; 0 for kinds that a stage never ran."""
        found: dict[tuple[Kind, int], list[float]] = {}
        for rank in self.ranks:
            spans = {span.label: span for span in rank["spans"]}
            messages = [wait for kind, wait in rank["waits"] if kind == MESSAGE]
            for action in self.lists[rank["pp"]]:
                span = spans[action.text(with_stage=True)]
                seconds = _length(span) - sum(_overlap(wait, span) for wait in messages)
                found.setdefault((action.kind, action.stage), []).append(seconds)
        return [_cost({kind: found.get((kind, stage), []) for kind in Kind}) for stage in range(self.num_stages)]

    def picture(self, title: str) -> str:
        """Measured above simulated, on one scale of time, as SVG."""
        return svg([Panel(f"{title}: measured", self.measured()), Panel("simulated", self.simulated().timeline)])

    def perfetto(self, title: str) -> str:
        """A trace file: each rank with its phases and waits, exchanges under way on rows below, the simulated step."""
        events = name_events(f"{title}: measured", [f"rank {rank}" for rank in range(len(self.ranks))])
        for number, rank in enumerate(self.ranks):
            exchanges = {span.label.removesuffix(" wait") for span in rank["spans"] if span.label.endswith(" wait")}
            for span in rank["spans"]:
                if span.label in exchanges:
                    start, end = span.start - self.zero, span.end - self.zero
                    identity = f"rank {number} {span.label}"
                    events += asynchronous_events(span.label, "exchange", start, end, 0, number, identity)
                else:
                    events.append(self._event(span, "phase", number))
            told = [
                span for span in rank["spans"] if span.label.startswith("wait for ") or span.label.endswith(" wait")
            ]
            for kind, wait in rank["waits"]:
                if not any(_overlap(wait, span) for span in told):  # the executor has not told of it itself
                    events.append(self._event(wait, f"wait for a {kind}", number))
        return to_json(events + timetable_events(f"{title}: simulated", self.simulated().timeline, process=1))

    def _event(self, span: Span, category: str, rank: int) -> dict[str, Any]:
        return event(span.label, category, span.start - self.zero, span.end - self.zero, 0, rank, {})

    def _timed(self, rank: dict[str, Any], actions: Sequence[Action]) -> list[Timed]:
        spans = {span.label: span for span in rank["spans"]}
        messages = [wait for kind, wait in rank["waits"] if kind == MESSAGE]
        timed = []
        for action in actions:
            span = spans[action.text(with_stage=True)]
            half = (span.start + span.end) / 2
            start = max([span.start, *(w.end for w in messages if span.start <= w.start < half and w.end < span.end)])
            timed.append(Timed(action, start - self.zero, span.end - self.zero))
        return timed


def makespan_and_bubbles(figures: Sequence[StepFigures]) -> tuple[float, list[float]]:
    """Length of the pass from the first rank's start to the last one's end, and each rank's idle share of it."""
    length = max(each.end for each in figures) - min(each.start for each in figures)
    return length, [each.bubble(length) for each in figures]


def _cost(seconds: dict[Kind, list[float]]) -> Cost:
    median = {kind: statistics.median(found) if found else 0.0 for kind, found in seconds.items()}
    whole = median[Kind.B] if seconds[Kind.B] else median[Kind.I] + median[Kind.W]
    return Cost(median[Kind.F], whole, min(median[Kind.W], whole), median[Kind.FB])


def _clock_offset(world: Communicator) -> float:
    """What to add to this rank's clock to have rank 0's. Ranks of one host share a clock; others meet at a barrier."""
    readings = []
    for _ in range(CLOCK_ROUNDS if world.size > 1 else 1):
        world.barrier()
        readings.append(time.perf_counter())
    ranks = world.gather_objects((socket.gethostname(), readings))
    (host, zero), (own_host, own) = ranks[0], ranks[world.rank]
    return 0.0 if own_host == host else statistics.median(a - b for a, b in zip(zero, own, strict=True))


def _length(span: Span) -> float:
    return span.end - span.start


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))
