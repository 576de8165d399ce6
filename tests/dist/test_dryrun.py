"""A dry run against real ranks: what each holds, keeps and sends, to the byte."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layout_cases import Case, config_of
from live_bytes import LiveBytes
from ranks import run_ranks

from moe_engine.config.load import load
from moe_engine.config.schema import Config
from moe_engine.config.validate import resolve, validate
from moe_engine.distributed.collectives import CollectiveLog
from moe_engine.dryrun.collectives import by_purpose
from moe_engine.dryrun.run import Moments, dry_run, set_routing, whole_rows
from moe_engine.layout import Layout
from moe_engine.planner.collectives import step_bytes
from moe_engine.planner.job import cut_of
from moe_engine.planner.memory import rank_memory
from moe_engine.schedule import pair
from moe_engine.trainer import Trainer

FAST = [
    Case(pp=2, dp=2, ep=2, schedule="dualpipe", precision="bf16"),
    Case(dp=2, ep=2, precision="bf16_moments", recompute="selective"),
]
MORE = [
    Case(pp=2, dp=2, ep=2),
    Case(pp=2, dp=2, ep=2, schedule="zbv", recompute="full", layers=6, precision="bf16"),
    Case(pp=2, dp=2, schedule="interleaved_1f1b", virtual_stages=2, tied=True, layers=6, mtp_depth=0),
    Case(dp=2, ep=2, combine="exact", mtp_depth=2),
    Case(pp=4, dp=2, ep=2, schedule="zb_h1", layers=6, model="qwen3", precision="bf16"),
    Case(pp=2, dp=4, ep=2, schedule="overlapped_1f1b", overlap=False, precision="bf16"),
    Case(dp=2, cp=2, ep=4, exchange="ring"),
]
NO_LIMIT = 1 << 60
CASES = [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]


def _measured(rank: int, config: Config, limits: list[float]) -> dict[str, Any]:
    """One step on a real rank with the routing and the rows of a dry run; it should keep `limits[rank]` bytes."""
    log = CollectiveLog()
    with LiveBytes() as live, pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_engine.ops.short_attention.KEPT_KEYS", 0)  # as on a GPU: no softmax is kept
        for room in ("model.attention", "moe.mlp", "moe.experts"):  # nor anything in a wider format
            patch.setattr(f"moe_engine.{room}.widened", lambda x: x)
        trainer = Trainer(config, rank, torch.device("cpu"), log)
        set_routing(trainer, 1.0)
        if trainer.executor.order is not None:  # that of a device; the CPU's has a second thread
            trainer.executor.order = pair.LAUNCHING
        batches = [whole_rows(config, trainer.groups) for _ in range(trainer.micro_batches)]
        log.records.clear()
        gc.collect()  # what the start has left is not to be freed in the step
        time.sleep(0.2)  # and what it has sent is let go of
        most = live.bytes() + limits[rank]
        trainer.executor.recorder = recorder = Moments(lambda: _settled(live.bytes, most))
        trainer.step(batches)
    return {
        "log": log.records,
        "states": trainer.optimizer.state_bytes(),
        "kept": [moment.kept for moment in recorder.moments],
    }


def _settled(bytes_now: Callable[[], int], most: float, seconds: float = 5.0) -> int:
    """What is alive; while it is more than `most`, asked again: a thread of Gloo may hold a message's tensor for a
    moment after the wait for it is over, a long one on a busy machine. What the engine holds does not go by waiting."""
    end = time.monotonic() + seconds
    while (found := bytes_now()) > most and time.monotonic() < end:
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_dry_run_holds_keeps_and_sends_what_a_rank_does(case: Case) -> None:
    config = resolve(config_of(case))
    ranks = sorted({0, case.world - 1})
    dry = {rank: dry_run(config, rank) for rank in ranks}
    limits = [_limit(config, dry[rank].kept) if rank in dry else NO_LIMIT for rank in range(case.world)]
    measured = run_ranks(case.world, _measured, config, limits)
    for rank, found in dry.items():
        real = measured[rank]
        assert found.states == real["states"]
        assert found.collectives == real["log"]
        most = max(real["kept"])
        assert -_in_flight(config) - 0.02 * most <= found.kept - most <= 0.02 * most


MINI = "model=mini_v3 model.num_layers=4"
LAYOUTS = [
    "parallel.dp=1",
    "parallel.dp=4 parallel.ep=4",
    "parallel.pp=2 parallel.dp=2 parallel.ep=2",
    "parallel.pp=2 parallel.dp=2 parallel.ep=2 pipeline=dualpipe",
    "parallel.pp=2 parallel.dp=2 parallel.ep=2 pipeline=gpipe model.num_layers=6",
    "parallel.pp=4 parallel.ep=1",
    "parallel.pp=4 parallel.ep=1 pipeline=zb_h1",
    "parallel.pp=2 parallel.ep=1 pipeline=zbv",
    "parallel.pp=2 parallel.dp=2 parallel.ep=2 pipeline=gpipe recompute=full",
    "parallel.pp=2 parallel.dp=4 parallel.ep=4 pipeline=interleaved_1f1b pipeline.virtual_stages=2",
    "parallel.dp=8 parallel.ep=8 precision=fp32",
]


@pytest.mark.slow
@pytest.mark.parametrize("words", LAYOUTS)
def test_planned_bytes_are_those_of_real_ranks(words: str) -> None:
    """Parameters, gradients, master, moments and kept activations within 2%, bytes of collectives to the last."""
    sizes = ["precision=bf16", "train.seq_len=256", "train.micro_batch=1", "train.global_batch=16"]
    config = load("train", [*MINI.split(), *sizes, "train.eval_sequences=0", *words.split()])
    validate(config)
    config = resolve(config)
    cut, layout = cut_of(config), Layout.of(config.parallel)
    plans = rank_memory(cut)
    stages = [layout.coordinate(rank).pp for rank in range(layout.world)]
    limits = [_limit(config, plans[pp].activation_bytes) for pp in stages]
    for pp, (rank, real) in zip(stages, enumerate(run_ranks(layout.world, _measured, config, limits)), strict=True):
        for name, size in real["states"].items():
            assert getattr(plans[pp], name) == pytest.approx(size, rel=0.02)
        most, planned = max(real["kept"]), plans[pp].activation_bytes
        print(f"{words} | {rank} | {most / 1e6:.3f} | {planned / 1e6:.3f} | {planned / most - 1:+.2%}")
        assert planned == pytest.approx(most, rel=0.02, abs=_in_flight(config))
        assert step_bytes(cut, pp) == by_purpose(real["log"])


def _limit(config: Config, kept: float) -> float:
    return kept + max(0.02 * kept, _in_flight(config))


def _in_flight(config: Config) -> int:
    """Bytes of messages on their way that a real rank may hold: sent ones of which it has not heard yet that they have
    arrived. A dry run takes them for gone."""
    tokens = config.train.micro_batch * config.train.seq_len
    message = tokens * config.model.dim * getattr(torch, config.precision.compute).itemsize
    return 3 * message if config.parallel.pp > 1 else 0
