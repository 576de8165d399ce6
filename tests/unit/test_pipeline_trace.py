"""A trace from made-up spans: figures, costs and places in time come out as put in."""

from __future__ import annotations

from typing import Any

import pytest

from moe_engine.distributed.collectives import CollectiveLog, Communicator
from moe_engine.layout import Layout, Placement
from moe_engine.pipeline.trace import Span, StepFigures, Trace, Tracer, makespan_and_bubbles
from moe_engine.schedule.schedules import num_stages, schedule
from moe_engine.schedule.simulate import Cost, simulate

COST = Cost(f=1, b=2, w=1, fb=3)


def ranks_of(name: str, pp: int, micro_batches: int, late: float) -> tuple[list[dict[str, Any]], Any, int]:
    """Spans as an executor would record them that runs exactly as simulated, `late` seconds on the clock.

    Each rank goes to its next action at once and waits inside it for its inputs.
    """
    lists, stages = schedule(name, pp, micro_batches), num_stages(name, pp)
    simulation = simulate(lists, stages, COST)
    ranks = []
    for rank, actions in enumerate(simulation.timeline):
        spans, waits, now = [], [], 0.0
        for timed in actions:
            label = timed.action.text(with_stage=True)
            if timed.start > now:
                waits.append(("message", Span("edge", now + late, timed.start + late)))
            spans.append(Span(label, now + late, timed.end + late))
            now = timed.end
        ranks.append({"pp": rank, "spans": spans, "waits": waits, "pass": (late, now + late)})
    return ranks, lists, stages


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zbv", "dualpipe", "dualpipev"])
def test_a_perfect_run_is_its_simulation(name: str) -> None:
    ranks, lists, stages = ranks_of(name, 4, 8, late=1000.0)
    trace, expected = Trace(ranks, lists, stages), simulate(lists, stages, COST)
    assert [[timed.action for timed in actions] for actions in trace.measured()] == lists
    for measured, simulated in zip(trace.measured(), expected.timeline, strict=True):
        for one, other in zip(measured, simulated, strict=True):
            assert (one.start, one.end) == (pytest.approx(other.start), pytest.approx(other.end))
    assert trace.simulated().makespan == pytest.approx(expected.makespan)
    for cost in trace.costs():
        assert cost.f == pytest.approx(1) and (cost.b == pytest.approx(2) or "&" in str(lists))


def test_figures_tell_bubble_from_exposed_communication() -> None:
    alone = Communicator.alone()
    placement = Placement((), ())
    groups: Any = type("Groups", (), {
        "layout": Layout(), "placement": placement, "rank": 0, "world": alone, "ep": Communicator("ep", (0,), 0),
        "ep_counts": Communicator("counts", (0,), 0), "ep_nodes": None,
        "edges": {(0, 1, "activation"): Communicator("edge", (0,), 0)},
    })  # fmt: skip
    log = CollectiveLog(waits=[])
    tracer = Tracer(groups, log)
    assert tracer.clock_offset == 0.0
    actions = schedule("1f1b", 1, 1)[0]
    import torch

    x = torch.zeros(4)
    records = {name: log.add("op", name, "label", x) for name in ("edge", "ep", "dense")}
    tracer._pass = (10.0, 20.0)
    tracer.spans = [Span("F0@0", 10.0, 14.0), Span("B0@0", 15.0, 20.0), Span("F0@0 attn 0", 12.0, 13.0)]
    assert log.waits is not None
    log.waits += [
        (records["edge"], 10.0, 11.5), (records["ep"], 12.0, 12.5), (records["edge"], 19.5, 20.5),
        (records["dense"], 21.0, 24.0),
    ]  # type: ignore[list-item]  # fmt: skip
    figures = tracer.figures(actions)
    assert figures == StepFigures(10.0, 20.0, busy_s=4.0 + 5.0 - 1.5 - 0.5, exposed_s=0.5 + 3.0)
    makespan, bubbles = makespan_and_bubbles([figures, StepFigures(12.0, 30.0, 20.0, 0.0)])
    assert makespan == 20.0 and bubbles == pytest.approx([0.65, 0.0])
    tracer.begin()
    assert tracer.spans == [] and log.records == [] and log.waits == []
