"""A timetable as a trace file for Perfetto (ui.perfetto.dev) or chrome://tracing: one row per rank.

The format is Chrome's trace events: a JSON object whose `traceEvents` are complete events (`ph` = "X") with a start and
a duration in microseconds, on a thread (`tid`, here a rank) of a process (`pid`, here one timetable); events of kind
"M" name the rows. Events of one row nest: whatever lies within another is drawn below it. What may overlap without
nesting (exchanges under way) is a pair of asynchronous events, "b" and "e" with one id, drawn on rows of its own.

Source: "Trace Event Format" (Google, the Chromium project), which Perfetto reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from moe_engine.schedule.simulate import Timed

MICROSECONDS = 1e6  # in one second, or in one unit of a cost model without a unit


def to_json(events: Iterable[dict[str, Any]]) -> str:
    """The whole file."""
    return json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}, indent=None) + "\n"


def timetable_events(title: str, timeline: Sequence[Sequence[Timed]], process: int = 0) -> list[dict[str, Any]]:
    """The events of a timetable (a list of timed actions per rank), titled `title`, as process number `process`."""
    events = name_events(title, [f"rank {rank}" for rank in range(len(timeline))], process)
    for rank, actions in enumerate(timeline):
        for timed in actions:
            halves = timed.action.halves()
            details = {
                "stage": ", ".join(str(half.stage) for half in halves),
                "micro_batch": ", ".join(str(half.micro_batch) for half in halves),
            }
            name, kind = timed.action.text(with_stage=True), timed.action.kind.value
            events.append(event(name, kind, timed.start, timed.end, process, rank, details))
    return events


def event(
    name: str, category: str, start: float, end: float, process: int, thread: int, details: dict[str, Any]
) -> dict[str, Any]:
    """One complete event; `start` and `end` in seconds."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start * MICROSECONDS,
        "dur": (end - start) * MICROSECONDS,
        "pid": process,
        "tid": thread,
        "args": details,
    }


def asynchronous_events(
    name: str, category: str, start: float, end: float, process: int, thread: int, identity: str
) -> list[dict[str, Any]]:
    """Begin and end of something that overlaps others; `identity` must not be another's in this file."""
    shared = {"name": name, "cat": category, "pid": process, "tid": thread, "id": identity}
    return [shared | {"ph": "b", "ts": start * MICROSECONDS}, shared | {"ph": "e", "ts": end * MICROSECONDS}]


def name_events(title: str, threads: Sequence[str], process: int = 0) -> list[dict[str, Any]]:
    """What gives a process and its threads their names, and keeps them in this order."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": title}},
        {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}},
    ]
    for number, name in enumerate(threads):
        row = {"ph": "M", "pid": process, "tid": number}
        events.append(row | {"name": "thread_name", "args": {"name": name}})
        events.append(row | {"name": "thread_sort_index", "args": {"sort_index": number}})
    return events
