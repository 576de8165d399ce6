"""Rows put by kernels: the kernels in Triton's interpreter on several ranks, against plain collectives."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import interpreter  # noqa: F401 - before anything imports Triton
import pytest
import torch
import torch.distributed as dist
from dispatch_reference import Blocks, expected, experts
from ranks import run_ranks
from symmetric import Emulated
from torch import Tensor

from moe_engine.distributed.collectives import CollectiveLog, Communicator
from moe_engine.moe import dispatch as wire
from moe_engine.ops.window import Window

TOKENS = (5, 0, 7, 1)
K, D, EXPERTS = 3, 136, 8


def windows_of(ep: Communicator, runtime: Any, most_rows: int, most_choices: int) -> wire.Windows:
    device = torch.device("cpu")
    rows = Window("rows", ep, runtime, most_rows * D * 4, 3, device)
    for part in (rows.memory.buffer, rows.memory.staging):
        part.fill_(0xCD)
    return wire.Windows(rows, Window("counts", ep, runtime, ep.size**2 * 8, 2, device), most_rows, most_choices)


def choices(rank: int, routing: str) -> Tensor:
    chance = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS[rank], EXPERTS, generator=chance).topk(K, dim=1).indices.sort(dim=1).values
    if routing == "masked":
        ids[torch.rand(ids.shape, generator=chance) < 0.4] = -1
    if routing == "one":
        ids[:, :-1] = -1
        ids[:, -1] = EXPERTS - 1
    return ids


def _compare(rank: int, world: int, folder: str, order: str) -> list[str]:
    log = CollectiveLog()
    ep = Communicator("ep", range(world), rank, dist.group.WORLD, log)
    wrong = []
    with Emulated(Path(folder), rank, world, order, seed=1) as runtime:
        windows = windows_of(ep, runtime, K * sum(TOKENS), K * sum(TOKENS))
        ep.barrier()
        for routing, dtype, fp8, exact in (
            ("random", torch.bfloat16, False, False),
            ("masked", torch.float32, False, False),
            ("one", torch.bfloat16, True, False),
            ("random", torch.bfloat16, True, True),
        ):
            links = wire.Links(ep, ep, exact, fp8, windows=windows)
            wrong += [f"{routing} {dtype} fp8={fp8} {exact}: {w}" for w in _wrong(rank, routing, dtype, links)]
        windows.rows.check()
        windows.counts.check()
        ep.barrier()
    return wrong


def _wrong(rank: int, routing: str, dtype: torch.dtype, links: wire.Links) -> list[str]:
    """What differs from the definition."""
    placement: Any = Blocks(EXPERTS, links.size)
    chance = torch.Generator().manual_seed(50 + rank)
    x = torch.randn(TOKENS[rank], D, generator=chance).to(dtype).requires_grad_()
    ids = choices(rank, routing)
    weights = torch.rand(ids.shape, generator=chance).masked_fill_(ids < 0, 0).requires_grad_()
    d_out = torch.randn(x.shape, generator=chance).to(dtype)
    handle = wire.plan(ids, placement, links, "layer 0")
    arrived = wire.dispatch_wait(wire.dispatch_start(wire.pack_rows(x, ids, weights, placement, handle), handle))
    rows = experts(arrived.x, placement.global_ids(arrived.local_ids, rank), arrived.weights)
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


@pytest.mark.parametrize("order", ["random", "newest", "signals"])
def test_rows_put_by_kernels_are_those_of_the_definition(order: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wrong = [line for lines in run_ranks(2, _compare, 2, folder, order, time_limit=100.0) for line in lines]
    assert not wrong, "\n".join(wrong[:20])
