"""Every way to the experts gives what its definition says, bit by bit, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatch_reference import Blocks, expected, experts
from ranks import run_ranks
from torch import Tensor

from moe_engine.distributed.collectives import CollectiveLog, Communicator
from moe_engine.moe import dispatch as wire

TOKENS = (5, 0, 7, 1, 3, 0, 2, 9)  # of each rank
K, D = 3, 136  # a whole scale of fp8 and a part


@dataclass(frozen=True)
class Setting:
    """One exchange there and back. routing: random | masked (some choices are none) | one (all want one expert)."""

    num_experts: int
    routing: str
    dtype: torch.dtype
    fp8: bool
    exact: bool
    on_node: int | None  # with it, two hops


def settings(world: int) -> Iterator[Setting]:
    nodes = [None, *(n for n in (1, 2, 4, 8) if n <= world and (n > 1 or world == 2))]
    sizes = {
        (12 * world // 4 or 3, "random"),
        (8 * world, "masked"),
        (8 * world, "one"),
        (257, "random"),
        (512, "masked"),
    }
    for (num_experts, routing), on_node, exact in product(sorted(sizes), nodes, (False, True)):
        for dtype, fp8 in (
            (torch.float32, False),
            (torch.bfloat16, False),
            (torch.bfloat16, True),
            (torch.float32, True),
        ):
            if routing != "random" or num_experts == 257 or not fp8:
                yield Setting(num_experts, routing, dtype, fp8, exact, on_node)


def choices(rank: int, setting: Setting) -> Tensor:
    chance = torch.Generator().manual_seed(rank)
    scores = torch.rand(TOKENS[rank], setting.num_experts, generator=chance)
    if setting.routing == "one":
        scores[:, -1] = 2.0
    ids = scores.topk(min(K, setting.num_experts), dim=1).indices.sort(dim=1).values
    if setting.routing == "masked":
        ids[torch.rand(ids.shape, generator=chance) < 0.4] = -1
    if setting.routing == "one":
        ids[:, :-1] = -1
    return ids


def communicators(rank: int, world: int, log: CollectiveLog) -> dict[int | None, Any]:
    """For each size of a node its two communicators; all ranks make all groups."""
    found: dict[int | None, Any] = {None: None}
    for on_node in (n for n in (1, 2, 4, 8) if n <= world):
        pair = []
        for name, groups in (
            ("between", [list(range(place, world, on_node)) for place in range(on_node)]),
            ("within", [list(range(first, first + on_node)) for first in range(0, world, on_node)]),
        ):
            for ranks in groups:
                group = dist.new_group(ranks) if len(ranks) > 1 else None
                if rank in ranks:
                    pair.append(Communicator(name, ranks, rank, group, log))
        found[on_node] = tuple(pair)
    return found


def _compare(rank: int, world: int) -> list[str]:
    log = CollectiveLog()
    nodes = communicators(rank, world, log)
    ep = Communicator("ep", range(world), rank, dist.group.WORLD if world > 1 else None, log)
    counts = Communicator("counts", range(world), rank, dist.new_group(list(range(world))) if world > 1 else None, log)
    return [
        f"{setting}: {wrong}"
        for setting in settings(world)
        for wrong in _wrong(rank, setting, wire.Links(ep, counts, setting.exact, setting.fp8, nodes[setting.on_node]))
    ]


def _wrong(rank: int, setting: Setting, links: wire.Links) -> list[str]:
    """What differs from the definition."""
    placement: Any = Blocks(setting.num_experts, links.size)
    chance = torch.Generator().manual_seed(50 + rank)
    x = torch.randn(TOKENS[rank], D, generator=chance).to(setting.dtype).requires_grad_()
    ids = choices(rank, setting)
    weights = torch.rand(ids.shape, generator=chance).masked_fill_(ids < 0, 0).requires_grad_()
    d_out = torch.randn(x.shape, generator=chance).to(setting.dtype)

    def there_and_back() -> tuple[wire.Rows, Tensor, tuple[Tensor, Tensor]]:
        handle = wire.plan(ids, placement, links, "layer 0")
        arrived = wire.dispatch_wait(wire.dispatch_start(wire.pack_rows(x, ids, weights, placement, handle), handle))
        rows = experts(arrived.numbers(), placement.global_ids(arrived.local_ids, rank), arrived.weights)
        return arrived, wire.combine_wait(wire.combine_start(rows, handle)), _identity(links, placement, ids, weights)

    arrived, out, (ones, home) = there_and_back()
    out.backward(d_out)
    on_node = setting.on_node or 1
    want = expected(x.detach(), ids, weights.detach(), d_out, placement, on_node, setting.exact, setting.fp8)
    alone = links.size == 1 and not setting.fp8
    if alone:  # the tokens are the rows, whatever their experts
        want.arrived = [(0, t, [e for e in row if e >= 0]) for t, row in enumerate(ids.tolist())]
    got = placement.global_ids(arrived.local_ids, rank).tolist()
    wrong = []
    if [[e for e in row if e >= 0] for row in got] != [row for _, _, row in want.arrived]:
        wrong.append("rows, or their order")
    for name, a, b in (("output", out, want.out), ("d_x", x.grad, want.d_x)):
        if not (alone and setting.exact) and not torch.equal(a, b):  # real experts round each of their rows
            wrong.append(f"{name} by {(a.double() - b.double()).abs().max():.2g}")
    if not torch.allclose(weights.grad, want.d_weights, rtol=1e-5, atol=1e-5):
        wrong.append(f"d_weights by {(weights.grad - want.d_weights).abs().max():.2g}")
    again, out_again, _ = there_and_back()
    if not (torch.equal(out, out_again) and torch.equal(arrived.weights, again.weights)):
        wrong.append("other bits the second time")
    units = ids if setting.exact else placement.rank_of(ids)
    chosen = zip(units.tolist(), (ids >= 0).tolist(), strict=True)
    distinct = torch.tensor([len({unit for unit, real in zip(*row, strict=True) if real}) for row in chosen])
    if not alone and not torch.equal(ones[:, 0], distinct.float()):
        wrong.append("identity")
    if not torch.equal(home, weights):
        wrong.append("weights there and back")
    return wrong


def _identity(links: wire.Links, placement: Any, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Ones there and back, not touched by any expert: the number of rows of each token. And the weights [T, K]."""
    x, weights = torch.ones(len(ids), 1), weights.detach()
    handle = wire.plan(ids, placement, links, "identity")
    arrived = wire.dispatch_wait(wire.dispatch_start(wire.pack_rows(x, ids, weights, placement, handle), handle))
    home = weights
    if handle is not None:
        home = handle.sent.unpack_weights(handle.send_slots_back(arrived.weights).wait())
    return wire.combine_wait(wire.combine_start(arrived.numbers(), handle)), home


@pytest.mark.parametrize("world", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_way_gives_what_its_definition_says(world: int) -> None:
    wrong = [line for lines in run_ranks(world, _compare, world, time_limit=240.0) for line in lines]
    assert not wrong, "\n".join(wrong[:20])


def _bytes(rank: int, world: int, on_node: int | None, fp8: bool) -> dict[str, int]:
    log = CollectiveLog()
    ep = Communicator("ep", range(world), rank, dist.group.WORLD, log)
    links = wire.Links(ep, ep, fp8=fp8, nodes=communicators(rank, world, log)[on_node])
    placement: Any = Blocks(256, world)
    ids = top_8_of_256(rank)
    x, weights = torch.randn(len(ids), 256).bfloat16(), torch.ones(ids.shape)
    handle = wire.plan(ids, placement, links)
    arrived = wire.dispatch_wait(wire.dispatch_start(wire.pack_rows(x, ids, weights, placement, handle), handle))
    wire.combine_wait(wire.combine_start(arrived.numbers(), handle))
    return {f"{record.communicator}{record.label}": record.bytes for record in log.records}


def top_8_of_256(rank: int) -> Tensor:
    scores = torch.rand(200 + rank, 256, generator=torch.Generator().manual_seed(rank))
    return scores.topk(8, dim=1).indices.sort(dim=1).values


@pytest.mark.parametrize("fp8", [False, True])
def test_bytes_of_each_hop_are_those_of_its_rows(fp8: bool) -> None:
    """Row: 256 numbers (fp8: and 2 scales); 8 slots of an id and a weight. Between nodes one for each (token, node)."""
    world, on_node = 4, 2
    row, slots = (256 + 2 * 4 if fp8 else 2 * 256), 8 * (4 + 4)
    ranks = [top_8_of_256(rank) // (256 // world) for rank in range(world)]
    pairs = [[(t, r) for t, row in enumerate(ranks[rank].tolist()) for r in sorted(set(row))] for rank in range(world)]
    one_hop = run_ranks(world, _bytes, world, None, fp8)
    two_hops = run_ranks(world, _bytes, world, on_node, fp8)
    for rank in range(world):
        assert one_hop[rank]["ep dispatch x"] == len(pairs[rank]) * row
        assert one_hop[rank]["ep dispatch slots"] == len(pairs[rank]) * slots
        assert two_hops[rank]["between dispatch x"] == len({(t, r // on_node) for t, r in pairs[rank]}) * row
        assert two_hops[rank]["between dispatch slots"] == len({(t, r // on_node) for t, r in pairs[rank]}) * slots
        here, place = divmod(rank, on_node)
        passed = [s for s in range(world) if s % on_node == place for _, r in pairs[s] if r // on_node == here]
        assert two_hops[rank]["within dispatch x"] == len(passed) * row
        assert two_hops[rank]["within dispatch slots"] == len(passed) * slots
        to_pass = {(s, t) for s in range(place, world, on_node) for t, r in pairs[s] if r // on_node == here}
        assert two_hops[rank]["between combine"] == len(to_pass) * 2 * 256  # back: summed on the node, in bf16
