"""A dry run against real ranks: what each holds, keeps and sends, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import Case, config_of
from live_bytes import LiveBytes
from ranks import run_ranks

from moe_engine.config.schema import Config
from moe_engine.config.validate import resolve
from moe_engine.distributed.collectives import CollectiveLog
from moe_engine.dryrun.run import Moments, dry_run, set_routing, whole_rows
from moe_engine.schedule import pair
from moe_engine.trainer import Trainer

FAST = [
    Case(pp=2, dp=2, ep=2, schedule="dualpipe", precision="bf16"),
    Case(dp=2, ep=2, precision="bf16", recompute="selective"),
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
CASES = [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]


def _measured(rank: int, case: Case) -> dict[str, Any]:
    """One step on a real rank with the routing and the rows of a dry run."""
    config, log = resolve(config_of(case)), CollectiveLog()
    with LiveBytes() as live:
        trainer = Trainer(config, rank, torch.device("cpu"), log)
        set_routing(trainer, 1.0)
        if trainer.executor.order is not None:  # that of a device; the CPU's has a second thread
            trainer.executor.order = pair.LAUNCHING
        batches = [whole_rows(config, trainer.groups) for _ in range(trainer.micro_batches)]
        log.records.clear()
        trainer.executor.recorder = recorder = Moments(live.bytes)
        trainer.step(batches)
    return {"log": log.records, "states": trainer.optimizer.state_bytes(), "kept": [moment.kept for moment in recorder.moments]}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_dry_run_holds_keeps_and_sends_what_a_rank_does(case: Case) -> None:
    config, measured = resolve(config_of(case)), run_ranks(case.world, _measured, case)
    for rank in sorted({0, case.world - 1}):
        real, found = measured[rank], dry_run(config, rank)
        assert found.states == real["states"]
        assert found.collectives == real["log"]
        most = max(real["kept"])
        assert -_in_flight(config) - 0.005 * most <= found.kept - most <= 0.005 * most


def _in_flight(config: Config) -> int:
    """Bytes of messages to other stages that a real rank may still hold: a dry run takes them for sent."""
    tokens = config.train.micro_batch * config.train.seq_len
    message = tokens * config.model.dim * getattr(torch, config.precision.compute).itemsize
    return 4 * message if config.parallel.pp > 1 else 0
