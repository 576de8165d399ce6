"""A traced step of real ranks: every action and phase in time, the measured figures, the same bits."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from layout_cases import Case, config_of
from layouts import rank_batches
from ranks import run_ranks

from moe_engine.distributed.collectives import CollectiveLog
from moe_engine.pipeline.trace import makespan_and_bubbles
from moe_engine.trainer import Trainer


def _traced(rank: int, case: Case, traced: bool) -> dict[str, Any]:
    log = CollectiveLog(waits=[] if traced else None)
    trainer = Trainer(config_of(case), rank, torch.device("cpu"), log)
    losses = [trainer.step(rank_batches(trainer, case, step)).loss for step in (0, 1)]
    if not traced:
        assert trainer.tracer is None and log.waits is None
        return {"losses": losses}
    figures, trace = trainer.trace_figures(), trainer.trace()
    assert trainer.tracer is not None
    return {
        "losses": losses,
        "figures": figures,
        "spans": trainer.tracer.spans,
        "waits": trainer.tracer.waits(),
        "measured": trace.measured(),
        "simulated": trace.simulated(),
        "costs": trace.costs(),
        "picture": trace.picture("a step"),
        "perfetto": trace.perfetto("a step"),
        "lists": trainer.lists,
        "pp": trainer.executor.here,
    }


@pytest.fixture(scope="module", params=["zb_h1", "dualpipe"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    case = Case(pp=2, dp=2, ep=2, schedule=request.param, precision="fp32")
    found = run_ranks(case.world, _traced, case, True)
    plain = run_ranks(case.world, _traced, case, False)
    assert [each["losses"] for each in found] == [each["losses"] for each in plain]
    return found


def test_every_action_is_there_in_order_and_phases_lie_inside(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        spans = {span.label: span for span in each["spans"]}
        names = [action.text(with_stage=True) for action in each["lists"][each["pp"]]]
        assert set(names) <= spans.keys() and len(spans) == len(each["spans"])
        own = [spans[name] for name in names]
        assert all(first.end <= second.start for first, second in zip(own, own[1:], strict=False))
        pairs = [span for span in own if "&" in span.label]
        for span in each["spans"]:
            if span.label not in names and pairs and " attn " in span.label:
                assert any(action.start <= span.start and span.end <= action.end for action in own)
        assert not pairs or any(" attn " in span.label for span in each["spans"])


def test_figures_add_up(ranks: list[dict[str, Any]]) -> None:
    figures = ranks[0]["figures"]
    assert all(each["figures"] == figures for each in ranks) and len(figures) == 4
    makespan, bubbles = makespan_and_bubbles(figures)
    for each, figure, bubble in zip(ranks, figures, bubbles, strict=True):
        assert 0 < figure.busy_s < figure.end - figure.start <= makespan
        assert bubble == 1 - figure.busy_s / makespan and 0 < bubble < 1
        waits = each["waits"]
        assert {kind for kind, _ in waits} == {"message", "exchange", "reduction"}
        exposed = sum(span.end - span.start for kind, span in waits if kind != "message")
        assert figure.exposed_s == pytest.approx(exposed)
        assert all(span.end >= span.start for _, span in waits)


def test_measured_beside_simulated(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]
    measured, simulation = first["measured"], first["simulated"]
    assert [[timed.action for timed in actions] for actions in measured] == first["lists"]
    assert [[timed.action for timed in actions] for actions in simulation.timeline] == first["lists"]
    for actions in measured:
        assert all(a.start < a.end <= b.start for a, b in zip(actions, actions[1:], strict=False))
    assert all(cost.f > 0 and cost.b >= cost.w >= 0 for cost in first["costs"])
    end = max(timed.end for actions in measured for timed in actions)
    texts = [
        text.text or "" for text in ElementTree.fromstring(first["picture"]).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"a step: measured", "simulated", f"whole step {end:.6g}", f"whole step {simulation.makespan:.6g}"} <= set(
        texts
    )


def test_the_trace_file_nests(ranks: list[dict[str, Any]]) -> None:
    """On each row events lie within one another or apart; exchanges, which may do neither, come as pairs by id."""
    events = json.loads(ranks[0]["perfetto"])["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "a step: measured", 1: "a step: simulated"}
    for row in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}:
        stack: list[float] = []
        own = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == row]
        for e in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1] <= e["ts"] + 1e-3:
                stack.pop()
            assert not stack or e["ts"] + e["dur"] <= stack[-1] + 1e-3, e
            stack.append(e["ts"] + e["dur"])
    begun = sorted(e["id"] for e in events if e["ph"] == "b")
    assert begun == sorted(e["id"] for e in events if e["ph"] == "e") and len(set(begun)) == len(begun)
    woven = any("&" in action.kind.value for actions in ranks[0]["lists"] for action in actions)
    assert bool(begun) == woven
