"""The schedule benchmark on real ranks (no assertion on how long anything takes), and its options."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from ranks import run_ranks

from moe_engine.__main__ import main
from moe_engine.bench import schedule as bench
from moe_engine.bench.timed_stage import Sleep, TimedStage
from moe_engine.model.batch import Batch, ItemCounts
from moe_engine.model.transformer import LossRule
from moe_engine.ops.wgrad_queue import WgradQueue
from moe_engine.schedule.schedules import names
from moe_engine.schedule.simulate import Cost

SECONDS = [0.002, 0.004, 0.002, 0.006]


def _rank(rank: int) -> list[dict[str, object]]:
    Sleep.calibrated = lambda: Sleep(0.0)  # type: ignore[method-assign] # here alone: sleeps never are too short
    return bench.timed_rank(rank, torch.device("cpu"), [names(), 2, 4, SECONDS, 4, 2])


def test_every_schedule_runs_its_sleeping_stages() -> None:
    ranks = run_ranks(2, _rank)
    for found in ranks:
        assert len(found) == len(names())
        for each in found:
            assert each["right"] and len(each["passes"]) == 2  # type: ignore[arg-type]
    results = [bench._result("2 ranks", name, i, ranks, 2, 4, Cost(*SECONDS)) for i, name in enumerate(names())]
    for result in results:
        assert result.verdict.passed and len(result.samples) == 2
        over = statistics.median(result.samples) / result.figures["simulated_s"] - 1
        assert result.figures["over_simulated"] == pytest.approx(over)
    gpipe, message = results[0].figures["simulated_s"], results[0].figures["message_ms"] / 1e3
    assert message > 0  # gpipe: 4 micro-batches and the other stage, one message there and one back
    assert gpipe == pytest.approx(5 * 0.006 + 2 * message)
    alone = [[each | {"message": 0.0} for each in found] for found in ranks]
    for i, name in enumerate(names()):  # stages that sleep cannot take less than they are simulated to
        result = bench._result("2 ranks", name, i, alone, 2, 4, Cost(*SECONDS))
        assert min(result.samples) >= result.figures["simulated_s"] - 1e-6, name


def test_a_stage_sleeps_where_its_weight_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    sleep, queue, cost = Sleep(overshoot=0.5), WgradQueue(), Cost(f=1, b=5, w=2, fb=6)
    stage = TimedStage(0, 2, cost, sleep, dim=4)
    x = torch.zeros(3, 4, requires_grad=True)
    tokens, place = torch.zeros(1, 1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)
    batch, rule = Batch(tokens, tokens, place, place.int()), LossRule(ItemCounts(3, (), 1, 3), 0.0)
    y = stage(batch, x, rule, queue).x
    assert slept == [0.5]
    with queue.defer("first"):
        y.backward(torch.ones(3, 4))
    assert slept == [0.5, 2.5] and stage.weight.grad is None and x.grad is not None
    queue.run("first")
    assert slept == [0.5, 2.5, 1.5] and stage.weight.grad is not None and float(stage.weight.grad) == 1.0
    sleep(0.25)
    assert len(slept) == 3


def test_options_that_cannot_be_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compute=real", "unit_s=0", "rounds=0", "micro_batches=-1", "ranks=[]", "schedules=[gpip]"]
    assert main(["bench", "schedule", *words]) == 2
    lines = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["compute=real", "unit_s=0.0", "rounds=0", "micro_batches=-1", "ranks=[]", "schedules=[gpip]"]
    assert main(["bench", "schedule", "ranks=[3]", "schedules=[dualpipe]"]) == 2
    assert capsys.readouterr().err.startswith("parallel.pp=3: dualpipe needs an even number of ranks")
    assert main(["bench", "schedule", "ranks=[two]"]) == 2
    assert capsys.readouterr().err.startswith("ranks=[two]: a list of whole numbers is expected")
