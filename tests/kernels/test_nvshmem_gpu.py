"""Rows put by kernels on this machine's GPUs, one rank each, against an all-to-all (`make gpu`)."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from moe_engine.config.schema import MoEConfig
from moe_engine.distributed import groups
from moe_engine.distributed.groups import world_communicator
from moe_engine.moe import dispatch as wire
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.ops.window import start_nvshmem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="needs moe-engine[nvshmem]"),
]
TOKENS, K, D, ROUNDS = 300, 4, 1024, 5


def _rank(rank: int, world: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    device = torch.device("cuda", rank)
    groups.start(device, f"file://{folder}/rendezvous", timeout_s=120)
    torch.cuda.set_device(device)
    ep = world_communicator(rank, world)
    config = MoEConfig(D, 64, 8 * world, K)
    windows = wire.open_windows(config, TOKENS, ep, start_nvshmem(ep, device), device)
    chance = torch.Generator(device).manual_seed(rank)
    for step in range(ROUNDS):
        count = TOKENS - 37 * ((rank + step) % 3)
        x = torch.randn(count, D, device=device, generator=chance).bfloat16()
        ids = torch.rand(count, 8 * world, device=device, generator=chance).topk(K, dim=1).indices.sort(dim=1).values
        weights = torch.rand(count, K, device=device, generator=chance)
        found = []
        for way in (windows, None):
            # In fp8 also one rank alone sends its rows.
            links = wire.Links(ep, ep, fp8=world == 1 or step % 2 == 0, windows=way)
            handle = wire.plan(ids, ExpertPlacement(8 * world, world), links)
            given, scales = x.clone().requires_grad_(), weights.clone().requires_grad_()
            packed = wire.pack_rows(given, ids, scales, ExpertPlacement(8 * world, world), handle)
            rows = wire.dispatch_wait(wire.dispatch_start(packed, handle))
            worked = (rows.numbers() * rows.weights.sum(dim=1, keepdim=True)).bfloat16()
            out = wire.combine_wait(wire.combine_start(worked, handle))
            out.square().sum().backward()
            found.append((out, given.grad, scales.grad))
        for by_kernels, by_all_to_all in zip(*found, strict=True):
            assert torch.equal(by_kernels, by_all_to_all), (rank, step)
    windows.check()
    ep.barrier()
    os._exit(0)


def test_rows_put_by_gpus_are_those_of_an_all_to_all(tmp_path: Path) -> None:
    world, fresh = torch.cuda.device_count(), multiprocessing.get_context("spawn")
    ranks = [fresh.Process(target=_rank, args=(rank, world, tmp_path)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world
