"""One rank of `moe-engine bench comm`: exchanges of rows, checked and timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_engine.bench import record
from moe_engine.config.routing import NATURAL, routing_mode
from moe_engine.config.schema import MoEConfig
from moe_engine.distributed.collectives import CollectiveLog, Communicator
from moe_engine.distributed.device import synchronizer
from moe_engine.distributed.groups import Maker, ep_nodes
from moe_engine.layout import Layout
from moe_engine.moe import dispatch as wire
from moe_engine.moe.choices import SkewedLoads
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.ops.permute import permute, unpermute
from moe_engine.ops.window import start_nvshmem

T = TypeVar("T")

P2P_BYTES = 16 << 20
BY_KERNELS = "nvshmem"
PLAIN = "undeduplicated"  # a row in bf16 for each (token, expert), by one all_to_all_single: what other engines send


@dataclass(frozen=True)
class Job:
    """What the ranks do; see `comm.CommSection`. candidates: `undeduplicated`, or way_payload. Payloads: bf16; fp8,
    rows that are codes for products that take them; fp8-decoded, rows that travel as codes and are numbers at the end.
    """

    candidates: list[str]
    routings: list[str]
    tokens: list[int]
    ranks: int
    ranks_per_node: int
    dim: int
    num_experts: int
    top_k: int
    rounds: int


def on_rank(rank: int, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """By case, direction and candidate: seconds, bytes that left this rank, and what is wrong; the limit beside it."""
    job, log = Job(**options), CollectiveLog()
    layout, make = Layout(dp=job.ranks, ep=job.ranks, ranks_per_node=job.ranks_per_node), Maker(rank, log)
    ep, finish = make.one("ep", [layout.ep_ranks(rank)]), synchronizer(device)
    ways = wire.Links(ep, ep, nodes=ep_nodes(layout, make), windows=_windows(job, ep, device))
    found: dict[str, Any] = {"limit": _point_to_point(ways.rows, device), "device": device.type}
    candidates = runnable(job.candidates, device.type)
    for routing in job.routings:
        for tokens in job.tokens:
            ids = choices(job, routing, tokens, rank).to(device)
            exchanges = {name: _Exchange(job, name, ids, ways, log) for name in candidates}
            for exchange in exchanges.values():
                exchange.dispatch()
                exchange.combine()
            for direction in ("dispatch", "combine"):
                for name in record.turns(timed(candidates, direction), job.rounds):
                    exchange = exchanges[name]
                    finish()
                    ways.rows.barrier()
                    start = time.perf_counter()
                    getattr(exchange, direction)()
                    finish()
                    exchange.seconds[direction].append(time.perf_counter() - start)
            for name, exchange in exchanges.items():
                for direction, seconds in exchange.seconds.items():
                    found[f"{direction} {routing} {tokens} {name}"] = {
                        "seconds": seconds,
                        "bytes": exchange.bytes[direction],
                        "wrong": exchange.wrong(),
                    }
    return found


def timed(candidates: list[str], direction: str) -> list[str]:
    """All of them; what comes back is never in fp8."""
    return [name for name in candidates if direction == "dispatch" or "fp8" not in name]


def runnable(candidates: list[str], device: str) -> list[str]:
    """Those that this kind of device can run: only GPUs put rows by kernels."""
    return [name for name in candidates if device == "cuda" or not name.startswith(BY_KERNELS)]


def _windows(job: Job, ep: Communicator, device: torch.device) -> wire.Windows | None:
    """Symmetric memory for every case of the job, where kernels put rows."""
    if not any(name.startswith(BY_KERNELS) for name in runnable(job.candidates, device.type)):
        return None
    config = MoEConfig(job.dim, 1, job.num_experts, job.top_k)
    return wire.open_windows(config, max(job.tokens), ep, start_nvshmem(ep, device), device)


def choices(job: Job, routing: str, tokens: int, rank: int) -> Tensor:
    """Expert ids [T, K]; natural: those of random scores, as of a router that has learnt nothing."""
    mode = routing_mode(routing)
    if mode.kind == NATURAL:
        scores = torch.rand(tokens, job.num_experts, generator=torch.Generator().manual_seed(rank))
        return scores.topk(job.top_k, dim=1).indices.sort(dim=1).values
    return SkewedLoads(MoEConfig(1, 1, job.num_experts, job.top_k), mode.skew).draw(tokens, rank)


class _Exchange:
    """A candidate on one micro-batch. The layout is made before, for all candidates; packing and decoding are timed."""

    def __init__(self, job: Job, name: str, ids: Tensor, ways: wire.Links, log: CollectiveLog) -> None:
        self.plain = name == PLAIN
        way, _, payload = name.partition("_")
        self.decoded = payload == "fp8-decoded"
        links = wire.Links(
            ways.rows,
            ways.counts,
            exact=self.plain,
            fp8=payload.startswith("fp8"),
            nodes=ways.nodes if way == "hierarchical" else None,
            windows=ways.windows if way == BY_KERNELS else None,
        )
        chance = torch.Generator().manual_seed(7)
        # Whole numbers that fp8 holds: sums of copies are exact.
        self.x = torch.randint(-8, 9, (len(ids), job.dim), generator=chance).bfloat16().to(ids.device)
        self.weights = torch.ones(ids.shape, device=ids.device)
        placement = ExpertPlacement(job.num_experts, links.size)
        self.ranks = placement.rank_of(ids)
        handle = wire.plan(ids, placement, links)
        assert handle is not None
        self.handle, self.log = handle, log
        self.seconds: dict[str, list[float]] = {"dispatch": [], "combine": []}
        self.bytes: dict[str, int] = {}
        self.arrived, self.back = wire.Rows(self.x, ids, self.weights), self.x

    def dispatch(self) -> None:
        def send() -> wire.Rows:
            if self.plain:
                x = self.handle.send(permute(self.x, self.handle.tokens), "rows").wait()
                return replace(self.arrived, x=x)
            rows = wire.pack_for(self.handle, self.x, self.weights)
            arrived = wire.dispatch_wait(wire.dispatch_start(rows, self.handle))
            return replace(arrived, x=arrived.numbers(), codes=None) if self.decoded else arrived

        self.arrived = self._counted("dispatch", send)

    def combine(self) -> None:
        rows = self.arrived.numbers()

        def send() -> Tensor:
            if self.plain:
                return unpermute(self.handle.send_back(rows, "rows").wait(), self.handle.tokens)
            return wire.combine_wait(wire.combine_start(rows, self.handle))

        self.back = self._counted("combine", send)

    @torch.no_grad()
    def _counted(self, direction: str, send: Callable[[], T]) -> T:
        before = len(self.log.records)
        result = send()
        self.bytes[direction] = sum(entry.bytes for entry in self.log.records[before:])
        return result

    def wrong(self) -> str:
        """There and back, untouched, a token comes as often as ranks want it (choices, where each has its row)."""
        wanted = self.ranks.new_zeros(len(self.ranks), self.handle.links.size).scatter_(1, self.ranks, 1)
        rows = torch.full_like(wanted[:, 0], self.ranks.shape[1]) if self.plain else wanted.sum(dim=1)
        return "" if torch.equal(self.back, self.x * rows[:, None]) else "identity there and back is not rows x token"


def _point_to_point(ep: Communicator, device: torch.device) -> float:
    """Bytes a second that a rank sends to its neighbour while that one sends as much to it, all pairs at once."""
    other = ep.rank ^ 1
    if other >= ep.size:
        other = ep.rank
    payload, best, finish = torch.zeros(P2P_BYTES, dtype=torch.uint8, device=device), 0.0, synchronizer(device)
    for _ in range(5):
        finish()
        ep.barrier()
        if other == ep.rank:
            continue
        start = time.perf_counter()
        sent, received = ep.send(payload, other, 0), ep.receive(torch.empty_like(payload), other, 0)
        received.wait()
        sent.wait()
        finish()
        best = max(best, P2P_BYTES / (time.perf_counter() - start))
    return best
