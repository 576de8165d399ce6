"""One rank of `moe-engine bench overlap`: runs every order of phases in turns and tells how long what stood still.

Runs at an end of a wire (`bench.wire`); the job says what to compute.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from moe_engine.bench.record import turns
from moe_engine.bench.timed_blocks import PhaseTimes, TimedBlocks
from moe_engine.bench.wire import on_rank
from moe_engine.config.schema import Config, ModelConfig, ParallelConfig, PipelineConfig, PrecisionConfig, TrainConfig
from moe_engine.distributed.groups import build_groups
from moe_engine.layout import Layout, Placement, split_stages
from moe_engine.model.batch import Batch, ItemCounts
from moe_engine.model.transformer import LossRule
from moe_engine.pipeline.executor import Executor
from moe_engine.schedule import pair, schedules
from moe_engine.trainer import Trainer

SCHEDULE = "overlapped_1f1b"
ORDERS = {
    "plain": None,  # pipeline.overlap=false
    "one_after_the_other": pair.ONE_AFTER_THE_OTHER,  # the same, cut in phases: what each exchange takes by itself
    "overlapped": pair.BLOCKING,
    "without_courier": pair.WITHOUT_COURIER,
}


@dataclass
class Job:
    """What a rank measures. `times`: sleeping phases (`PhaseTimes`), None: a real model; tokens x dim: a message."""

    micro_batches: int
    blocks: int
    tokens: int
    dim: int
    expert_hidden: int
    precision: str
    rounds: int
    times: dict[str, float] | None = None


class Clock:
    """A recorder of (label, start, end)."""

    def __init__(self) -> None:
        self.open: dict[str, float] = {}
        self.events: list[tuple[str, float, float]] = []

    def start(self, label: str) -> None:
        self.open[label] = time.perf_counter()

    def end(self, label: str) -> None:
        self.events.append((label, self.open.pop(label), time.perf_counter()))


def config_of(job: Job) -> Config:
    """A small decoder with experts on both ranks; every token goes to most of them."""
    compute = {"fp32": "float32", "bf16": "bfloat16"}[job.precision]
    model = ModelConfig(
        vocab_size=1024, dim=job.dim, num_layers=job.blocks, num_dense_layers=0, num_heads=8, kv_lora_rank=128,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_experts=8, top_k=4,
        expert_hidden=job.expert_hidden, num_shared_experts=1,
    )  # fmt: skip
    return Config(
        model=model,
        parallel=ParallelConfig(pp=1, dp=2, ep=2),
        pipeline=PipelineConfig(SCHEDULE, micro_batches=job.micro_batches),
        precision=PrecisionConfig(job.precision, compute),
        train=TrainConfig(global_batch=2 * job.micro_batches * 4, micro_batch=4, seq_len=job.tokens // 4),
    )


def executors_of(job: Job, rank: int) -> tuple[dict[str, Executor], Any, list[Batch], Any]:
    """An executor for each order over one stage, the lists, this rank's micro-batches, and what clears gradients."""
    rows = (1, 4, job.tokens // 4) if job.times is None else (1, 1, job.tokens)
    chance = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 1024, rows, generator=chance)
    place = torch.arange(rows[2]).expand(rows[1], -1)
    batches = [
        Batch(tokens, tokens.roll(m), place, torch.zeros_like(place, dtype=torch.int32))
        for m in range(job.micro_batches)
    ]
    if job.times is None:
        trainer = Trainer(config_of(job), rank, torch.device("cpu"))
        stages: Any = trainer.stages
        found, lists = trainer.groups, trainer.lists
        clear = trainer.optimizer.zero_grad
    else:
        spec = split_stages(ModelConfig(num_layers=job.blocks), 1)[0]
        found = build_groups(Layout(dp=2, ep=2), Placement((spec,), ((0,),)), rank)
        stage = TimedBlocks(spec, job.blocks, job.tokens, job.dim, PhaseTimes(**job.times), found)
        stages = {0: stage}
        lists = schedules.schedule(SCHEDULE, 1, job.micro_batches)
        clear = stage.zero_grad
    return {name: Executor(stages, found, order) for name, order in ORDERS.items()}, lists, batches, clear


def run(job: Job, rank: int) -> dict[str, Any]:
    """By order its steps, taken in turns: seconds and events. The bits of their losses must agree."""
    executors, lists, batches, clear = executors_of(job, rank)
    world = next(iter(executors.values())).groups.world
    everything = 2 * job.micro_batches * job.tokens
    rule = LossRule(ItemCounts(everything, (), job.micro_batches * 8, everything), 0.0)
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    sums: dict[str, list[Any]] = {}
    for number, name in enumerate(["plain", *turns(list(ORDERS), job.rounds)]):  # the first step warms up
        clear()
        clock = executors[name].recorder = Clock()
        world.barrier()
        start = time.perf_counter()
        found = executors[name].run(lists, batches, rule)
        seconds = time.perf_counter() - start
        if number:
            steps[name].append({"seconds": seconds, "events": clock.events})
        sums[name] = [found.loss_sums.tolist(), found.aux.tolist()]
    if any(each != sums["plain"] for each in sums.values()):
        raise ValueError(f"the orders give different losses: {sums}")
    return steps


if __name__ == "__main__":
    on_rank(sys.argv[1], lambda rank, job: run(Job(**job), rank))
