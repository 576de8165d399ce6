"""Rows put by kernels: the kernels in Triton's interpreter on several ranks, against plain collectives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import interpreter  # noqa: F401 - before anything imports Triton
import pytest
import torch
import torch.distributed as dist
from dispatch_reference import Blocks, expected, experts
from layouts import Case, config_of, rank_batches
from ranks import run_ranks
from symmetric import Emulated
from torch import Tensor

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import Config, MoEConfig, moe_layer_config
from moe_engine.distributed.collectives import CollectiveLog, Communicator
from moe_engine.distributed.groups import Groups, build_groups
from moe_engine.moe import dispatch as wire
from moe_engine.moe.layer import MoELayer
from moe_engine.trainer import Trainer

TOKENS = (5, 0, 7, 1, 3, 0, 2, 9)
K, D, EXPERTS = 3, 136, 8


def windows_of(
    config: MoEConfig, ep: Communicator, runtime: Emulated, capacity: int = 0, dtype: torch.dtype = torch.float32
) -> wire.Windows:
    """Symmetric memory that starts with rubbish."""
    windows = wire.open_windows(
        config, max(TOKENS), ep, runtime, torch.device("cpu"), capacity=capacity, num_sms=2, dtype=dtype
    )
    for part in (windows.rows.memory.buffer, windows.rows.memory.staging):
        part.fill_(0xCD)
    ep.barrier()
    return windows


def choices(rank: int, routing: str, num_experts: int) -> Tensor:
    chance = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS[rank], num_experts, generator=chance).topk(K, dim=1).indices.sort(dim=1).values
    if routing == "masked":
        ids[torch.rand(ids.shape, generator=chance) < 0.4] = -1
    if routing == "one":
        ids[:, :-1] = -1
        ids[:, -1] = num_experts - 1
    return ids


SETTINGS = (
    ("random", 8, torch.bfloat16, False, False),
    ("one", 8, torch.bfloat16, True, False),
    ("masked", 512, torch.float32, False, False),
    ("random", 257, torch.bfloat16, True, True),
    ("masked", 257, torch.bfloat16, True, False),
)


def _compare(rank: int, world: int, folder: str, order: str, settings: int) -> list[str]:
    ep = Communicator("ep", range(world), rank, dist.group.WORLD)
    wrong = []
    with Emulated(Path(folder), rank, world, order, seed=1) as runtime:
        config = MoEConfig(D, 8, 512, K, combine="exact")
        windows = windows_of(config, ep, runtime)
        for routing, num_experts, dtype, fp8, exact in SETTINGS[:settings]:
            links = wire.Links(ep, ep, exact, fp8, windows=windows)
            found = _wrong(rank, routing, num_experts, dtype, links)
            wrong += [f"{routing} {num_experts} {dtype} fp8={fp8} {exact}: {w}" for w in found]
        windows.check()
        ep.barrier()
    return wrong


def _wrong(rank: int, routing: str, num_experts: int, dtype: torch.dtype, links: wire.Links) -> list[str]:
    """What differs from the definition."""
    placement: Any = Blocks(num_experts, links.size)
    chance = torch.Generator().manual_seed(50 + rank)
    x = torch.randn(TOKENS[rank], D, generator=chance).to(dtype).requires_grad_()
    ids = choices(rank, routing, num_experts)
    weights = torch.rand(ids.shape, generator=chance).masked_fill_(ids < 0, 0).requires_grad_()
    d_out = torch.randn(x.shape, generator=chance).to(dtype)
    handle = wire.plan(ids, placement, links, "layer 0")
    arrived = wire.dispatch_wait(wire.dispatch_start(wire.pack_rows(x, ids, weights, placement, handle), handle))
    rows = experts(arrived.numbers(), placement.global_ids(arrived.local_ids, rank), arrived.weights)
    out = wire.combine_wait(wire.combine_start(rows, handle))
    out.backward(d_out)
    want = expected(x.detach(), ids, weights.detach(), d_out, placement, 1, links.exact, links.fp8)
    got = [[e for e in row if e >= 0] for row in placement.global_ids(arrived.local_ids, rank).tolist()]
    wrong = []
    if got[: len(want.arrived)] != [row for _, _, row in want.arrived] or any(got[len(want.arrived) :]):
        wrong.append("rows, or their order")
    for name, a, b in (("output", out, want.out), ("d_x", x.grad, want.d_x)):
        if not torch.equal(a, b):
            wrong.append(f"{name} by {(a.double() - b.double()).abs().max():.2g}")
    if not torch.allclose(weights.grad, want.d_weights, rtol=1e-5, atol=1e-5):
        wrong.append("d_weights")
    return wrong


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(world, function, world, folder, *args, time_limit=200.0)


@pytest.mark.parametrize(
    ("world", "order", "settings"),
    [(2, "random", 2)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (2, "newest", len(SETTINGS)),
            (2, "signals", len(SETTINGS)),
            (4, "random", len(SETTINGS)),
            (8, "random", 3),
        )
    ],
)
def test_rows_put_by_kernels_are_those_of_the_definition(world: int, order: str, settings: int) -> None:
    wrong = [line for lines in run(world, _compare, order, settings) for line in lines]
    assert not wrong, "\n".join(wrong[:20])


def _layers(rank: int, world: int, folder: str) -> list[str]:
    """A whole layer by kernels and by all-to-all, and one whose ranks have too little room."""
    ep = Communicator("ep", range(world), rank, dist.group.WORLD)
    config = MoEConfig(64, 32, EXPERTS, K)
    x = torch.randn(1, 5 + rank, 64, generator=torch.Generator().manual_seed(rank))
    found: list[list[Tensor]] = []
    with Emulated(Path(folder), rank, world, "random", seed=2) as runtime:
        windows = windows_of(config, ep, runtime)
        for dispatch in ("all_to_all", "nvshmem"):
            layer = MoELayer(replace(config, dispatch=dispatch), ep=ep, ep_windows=windows)
            given = x.clone().requires_grad_()
            out = layer(given)
            out.square().sum().backward()
            grads = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
            found.append([out.detach(), given.grad, *grads])
        assert len(found[0]) == len(found[1]) > 4
        differing = [str(i) for i, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)]
        small = windows_of(config, ep, runtime, capacity=2)
        layer = MoELayer(replace(config, dispatch="nvshmem"), ep=ep, ep_windows=small)
        if layer(x).isfinite().any():
            differing.append("numbers from rows that were lost")
        with pytest.raises(ConfigError) as refused:
            small.check()
        ep.barrier()
    chosen = layer.router(x[0]).expert_ids // (EXPERTS // world)
    per_rank = ep.all_reduce_sum(torch.bincount(chosen.flatten(), minlength=world))
    if f"use moe.recv_capacity={int(per_rank.max())} or more" not in str(refused.value):
        differing.append(f"{refused.value}; it was {per_rank.tolist()}")
    return differing


def test_a_layer_by_kernels_has_the_bits_of_one_by_all_to_all_and_loses_nothing_silently() -> None:
    assert run(2, _layers) == [[], []]


def _steps(rank: int, world: int, folder: str) -> list[Any]:
    """Loss and gradient norm of a step by kernels and by all-to-all, and the order of what was put."""
    found: list[Any] = []
    with Emulated(Path(folder), rank, world, "random", seed=3) as runtime:
        for dispatch in ("all_to_all", "nvshmem"):
            case = Case(
                dp=2, ep=2, schedule="overlapped_1f1b", precision="fp32", steps=1, layers=3, mtp_depth=0, rows=6
            )
            config = config_of(case)
            config.moe.dispatch = dispatch
            log = CollectiveLog()

            def connect(*given: Any, config: Config = config, dispatch: str = dispatch) -> Groups:
                groups = build_groups(*given)
                if dispatch == "all_to_all":
                    return groups
                layer = moe_layer_config(config.model, config.moe)
                tokens = config.train.micro_batch * config.train.seq_len
                windows = wire.open_windows(layer, tokens, groups.ep, runtime, torch.device("cpu"), dtype=torch.float32)
                return replace(groups, ep_windows=windows)

            trainer = Trainer(config, rank, torch.device("cpu"), log, connect)
            result = trainer.step(rank_batches(trainer, case, 0))
            found.append((result.loss, result.grad_norm))
            trainer.groups.world.barrier()
    found.append([(record.communicator, record.label) for record in log.records if record.op == "put"])
    return found


@pytest.mark.slow
def test_steps_by_kernels_have_the_bits_of_steps_by_all_to_all() -> None:
    """Where forward and backward are woven: all ranks put in one order."""
    first, second = run(2, _steps)
    for by_all_to_all, by_kernels, _ in (first, second):
        assert by_all_to_all == by_kernels
    assert first[2] == second[2] and len(first[2]) > 40
