"""The trace file has the structure that Perfetto reads: complete events that nest, rows with names."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from moe_engine.schedule.chrome_trace import event, name_events, timetable_events, to_json
from moe_engine.schedule.schedules import names, num_stages, schedule
from moe_engine.schedule.simulate import Cost, simulate


def read(text: str) -> list[dict[str, Any]]:
    """The events of a trace file, each checked against the format."""
    content = json.loads(text)
    assert content.keys() == {"traceEvents", "displayTimeUnit"} and content["displayTimeUnit"] in ("ms", "ns")
    for found in content["traceEvents"]:
        assert isinstance(found["pid"], int) and isinstance(found["tid"], int) and isinstance(found["name"], str)
        if found["ph"] == "X":
            assert found.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
            assert found["ts"] >= 0 and found["dur"] >= 0
        else:
            assert found["ph"] == "M" and found["name"] in (
                *("process_name", "process_sort_index", "thread_name", "thread_sort_index"),
            )
    return list(content["traceEvents"])


@pytest.mark.parametrize("name", names())
def test_one_event_per_action_at_its_time(name: str) -> None:
    pp, micro_batches = 4, 8
    lists = schedule(name, pp, micro_batches)
    simulation = simulate(lists, num_stages(name, pp), Cost(1, 2, 1, 3, 0.25))
    events = read(to_json(timetable_events(name, simulation.timeline, process=1)))
    named = {(found["tid"], found["name"]): found["args"] for found in events if found["ph"] == "M"}
    assert named[0, "process_name"] == {"name": name}
    assert [named[rank, "thread_name"]["name"] for rank in range(pp)] == [f"rank {rank}" for rank in range(pp)]
    for rank, actions in enumerate(simulation.timeline):
        own = [found for found in events if found["ph"] == "X" and found["tid"] == rank]
        assert [found["name"] for found in own] == [timed.action.text(with_stage=True) for timed in actions]
        for found, timed in zip(own, actions, strict=True):
            assert (found["ts"], found["dur"]) == (1e6 * timed.start, 1e6 * (timed.end - timed.start))
            assert (found["pid"], found["cat"]) == (1, timed.action.kind.value)
        assert all(first["ts"] + first["dur"] <= second["ts"] + 1e-6 for first, second in pairwise(own))


def test_names_and_details_are_kept() -> None:
    one = event("attn", "phase", 0.5, 0.75, 0, 2, {"layer": 3})
    assert read(to_json([*name_events("measured", ["a", "b", "c"]), one]))[-1] == {
        "name": "attn", "cat": "phase", "ph": "X", "ts": 5e5, "dur": 2.5e5, "pid": 0, "tid": 2, "args": {"layer": 3},
    }  # fmt: skip
