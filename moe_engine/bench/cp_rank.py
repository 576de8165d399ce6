"""One rank of `moe-engine bench cp`: a latent attention layer over shared sequences, by every exchange and payload.

Run by the benchmark's local ranks, or at an end of a wire (`bench.wire`).
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.bench.live_memory import LivePeak
from moe_engine.bench.record import turns
from moe_engine.bench.wire import on_rank
from moe_engine.config.schema import ModelConfig
from moe_engine.distributed.collectives import CollectiveLog, Communicator, Pending
from moe_engine.distributed.groups import world_communicator
from moe_engine.model.attention import LatentAttention, sequence_context
from moe_engine.model.batch import Batch
from moe_engine.model.context_parallel import ContextParallel
from moe_engine.ops.random import normal

PRODUCTS = 9  # timed, of which the median counts
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Job:
    """What a rank measures; see the benchmark's options."""

    candidates: list[list[str]]  # exchange, payload
    seq_len: int
    dim: int
    heads: int
    kv_lora_rank: int
    nope: int
    rope: int
    value: int
    precision: str
    rounds: int

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            dim=self.dim, num_heads=self.heads, kv_lora_rank=self.kv_lora_rank, qk_nope_head_dim=self.nope,
            qk_rope_head_dim=self.rope, v_head_dim=self.value,
        )  # fmt: skip


class AtOnce(Communicator):
    """Waits for each operation where it is started: what the exchanges take with nothing beside them."""

    def shift(self, x: Tensor, label: str = "") -> Pending:
        return _finished(super().shift(x, label))

    def all_gather_start(self, x: Tensor, label: str = "") -> Pending:
        return _finished(super().all_gather_start(x, label))


def _finished(pending: Pending) -> Pending:
    pending.wait()
    return pending


class _Layer:
    """An attention layer on this rank's tokens, with what came of the last step."""

    def __init__(self, job: Job, rank: int, size: int, cp: ContextParallel | None) -> None:
        dtype = DTYPES[job.precision]
        place = torch.arange(job.seq_len)[None]
        tokens = torch.zeros(1, 1, job.seq_len, dtype=torch.int64)
        whole = Batch(tokens, tokens, place, torch.zeros_like(place, dtype=torch.int32))
        batch = whole.share(rank, size if cp else 1)
        own = slice(None) if batch.shard is None else batch.shard.places()
        self.module = LatentAttention(job.model, dtype, None, cp)
        for name, parameter in self.module.named_parameters():
            std = 1.0 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
            parameter.data.copy_(normal(parameter.shape, std, name, 0, dtype))
        self.x, self.d_y = (normal((job.seq_len, job.dim), 1.0, name, 1, dtype)[own] for name in ("x", "d_y"))
        self.context = sequence_context(batch, job.model, dtype)

    def step(self) -> tuple[Tensor, Tensor]:
        """Output and the gradient of the input."""
        x = self.x.clone().requires_grad_()
        y = self.module(x, self.context)
        y.backward(self.d_y)
        for parameter in self.module.parameters():
            parameter.grad = None
        assert x.grad is not None
        return y.detach(), x.grad


def run(rank: int, size: int, job: Job) -> dict[str, Any]:
    """By candidate: seconds of each step, in turns; what a step sent and waited for; its peak of memory; its error.

    Under `products` the rate of this rank's matrix products.
    """
    log = CollectiveLog(waits=[])
    world = world_communicator(rank, size, log)
    at_once = AtOnce("world", range(size), rank, world.group, log)
    names = [f"{exchange}_{payload}" for exchange, payload in job.candidates]
    ways = dict(zip(names, job.candidates, strict=True))
    layers = {name: _Layer(job, rank, size, ContextParallel(world, *way)) for name, way in ways.items()}
    alone = {name: _Layer(job, rank, size, ContextParallel(at_once, *way)) for name, way in ways.items()}
    found = {name: _checked(job, rank, size, layers[name], world, log) for name in names}
    for name in turns(names, job.rounds):
        for kind, layer in (("seconds", layers[name]), ("seconds_alone", alone[name])):
            world.barrier()
            assert log.waits is not None
            log.waits.clear()
            start = time.perf_counter()
            layer.step()
            found[name][kind].append(time.perf_counter() - start)
            found[name][kind.replace("seconds", "waits")].append(sum(wait.end - wait.start for wait in log.waits))
    world.barrier()
    found["products"] = _products(job, layers[names[0]].module)
    return found


@torch.no_grad()
def _products(job: Job, module: LatentAttention) -> dict[str, float]:
    """The rate of multiplying latents up, all ranks at once."""
    latent = normal((job.seq_len, job.kv_lora_rank), 1.0, "latent", 1, DTYPES[job.precision])
    seconds = []
    for _ in range(PRODUCTS):
        start = time.perf_counter()
        module.kv_up(latent)
        seconds.append(time.perf_counter() - start)
    return {"flops_per_s": 2.0 * latent.numel() * module.kv_up.weight.shape[0] / statistics.median(seconds)}


def _checked(job: Job, rank: int, size: int, layer: _Layer, world: Communicator, log: CollectiveLog) -> dict[str, Any]:
    """A first step: against the whole sequence on this rank alone; bytes sent and peak of memory."""
    whole = _Layer(job, rank, size, None)
    assert layer.context.shared is not None
    own = layer.context.shared.shard.places()
    expected = [part[own] for part in whole.step()]
    world.barrier()
    log.records.clear()
    with LivePeak() as live:
        results = layer.step()
    difference = max(float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True))
    # A gathered block goes to all others, of an all-to-all a part stays here.
    factors = {"shift": 1.0, "all_gather": size - 1.0}
    sent = sum(record.bytes * factors.get(record.op, 1 - 1 / size) for record in log.records)
    measured: dict[str, Any] = {"difference": difference, "sent": sent, "peak": live.peak}
    return measured | {name: [] for name in ("seconds", "seconds_alone", "waits", "waits_alone")}


def on_local_rank(rank: int, _device: torch.device, size: int, job: dict[str, Any]) -> dict[str, Any]:
    """`run` as `bench.ranks` calls it."""
    return run(rank, size, Job(**job))


if __name__ == "__main__":
    on_rank(sys.argv[1], lambda rank, job: run(rank, 2, Job(**job)))
