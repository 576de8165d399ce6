"""How ranks start, and the frozen `Groups` object that holds every communicator of a run.

`Groups` is built once from the layout and passed down explicitly; nothing reads a global. One communicator per
purpose, because operations of different purposes may become ready in different orders on different ranks:
dispatch/combine (`ep`), its two hops between and within nodes (`ep_nodes`), what attention exchanges (`cp`), exchanges
of counts (`ep_counts`, `cp_counts`: on the data communicators they would wait behind bulk data), each directed
pipeline edge and kind of message, and each reduction group (dense and expert parameters of each holder set).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_engine.config.errors import ConfigError
from moe_engine.distributed.collectives import CollectiveLog, Communicator
from moe_engine.distributed.lost import TIME_LIMIT_S
from moe_engine.layout import Layout, Placement

if TYPE_CHECKING:
    from moe_engine.moe.dispatch import Windows

Edge = tuple[int, int, str]  # pipeline rank from, pipeline rank to, "activation" | "gradient"


@dataclass(frozen=True)
class Groups:
    """All communicators of one rank."""

    layout: Layout
    placement: Placement
    rank: int
    world: Communicator
    data: Communicator  # dp * cp ranks of this stage
    cp: Communicator  # ranks that share sequences, in the order of their shards
    cp_counts: Communicator
    ep: Communicator
    ep_counts: Communicator
    ep_nodes: tuple[Communicator, Communicator] | None  # the ranks of `ep` between nodes and within this one
    dense: dict[tuple[int, ...], Communicator]  # by holder set, those that this rank's pipeline rank is in
    expert: dict[tuple[int, ...], Communicator]
    edges: dict[Edge, Communicator]
    log: CollectiveLog | None
    ep_windows: Windows | None = None  # symmetric memory of the ranks of `ep`, for moe.dispatch=nvshmem


def start(device: torch.device, init_method: str | None = None, timeout_s: float = TIME_LIMIT_S) -> int:
    """Join the ranks that the environment (RANK, WORLD_SIZE, MASTER_ADDR …) names; returns this rank.

    A world of one starts nothing. `timeout_s` bounds every collective, so that a lost rank ends the others.
    Raises ConfigError where the ranks cannot meet.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend, init_method=init_method, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise ConfigError(_cannot_meet(error)) from error
    return rank


def _cannot_meet(error: Exception) -> str:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    reason, other = str(error).partition("\n")[0], int(port) % 60000 + 1 if port.isdecimal() else 29500
    return (
        f"MASTER_ADDR={address} MASTER_PORT={port}: the ranks cannot meet there ({reason}); use the address of rank "
        f"0's host, which all ranks reach, and a free port there, for example MASTER_PORT={other}"
    )


def stop() -> None:
    """Leave the world; harmless when it never started."""
    if dist.is_initialized():
        dist.destroy_process_group()


def build_groups(
    layout: Layout,
    placement: Placement,
    rank: int,
    log: CollectiveLog | None = None,
    limit_s: float = TIME_LIMIT_S,
) -> Groups:
    """Make every communicator of `rank`, at the same point on all ranks; an exchange may take `limit_s`."""
    if layout.world > 1 and dist.get_world_size() != layout.world:
        raise ValueError(f"world={dist.get_world_size()}: the layout {layout} needs {layout.world} ranks")
    return arrange(layout, placement, world_communicator(rank, layout.world, log), Maker(rank, log, limit_s))


def arrange(layout: Layout, placement: Placement, world: Communicator, make: Maker) -> Groups:
    """The communicators of the rank of `make`, made by it in one order for all ranks."""
    rank, log = make.rank, make.log
    dense, expert = {}, {}
    for holders in placement.holder_sets:
        first = layout.stage_ranks(holders[0])
        dense[holders] = make(f"dense{list(holders)}", [layout.dense_ranks(r, holders) for r in first])
        expert[holders] = make(f"expert{list(holders)}", [layout.expert_ranks(r, holders) for r in first])
    everybody = range(layout.world)
    ep = [layout.ep_ranks(r) for r in everybody]
    cp = [layout.cp_ranks(r) for r in everybody]
    data = [layout.dense_ranks(r, (layout.coordinate(r).pp,)) for r in everybody]
    return Groups(
        layout=layout,
        placement=placement,
        rank=rank,
        world=world,
        data=make.one("data", data),
        cp=make.one("cp", cp),
        cp_counts=make.one("cp_counts", cp),
        ep=make.one("ep", ep),
        ep_counts=make.one("ep_counts", ep),
        ep_nodes=ep_nodes(layout, make),
        dense={h: found for h, found in dense.items() if found},
        expert={h: found for h, found in expert.items() if found},
        edges=_edges(layout, placement, make),
        log=log,
    )


def ep_nodes(layout: Layout, make: Maker) -> tuple[Communicator, Communicator] | None:
    """See `Groups.ep_nodes`."""
    groups = [ranks for r in range(layout.world) if (ranks := layout.ep_node_ranks(r)) is not None]
    if not groups:
        return None
    between, within = zip(*groups, strict=True)
    return make.one("ep_between", between), make.one("ep_within", within)


def world_communicator(rank: int, size: int, log: CollectiveLog | None = None) -> Communicator:
    """All ranks of a world that `start` has joined."""
    return Communicator("world", range(size), rank, dist.group.WORLD if size > 1 else None, log)


class Maker:
    """Makes communicators; every rank makes every one of them, in the same order.

    Torch can also make a group among its members only, but it names such a group by how many groups the caller
    has made before, so ranks with different histories (an end and a middle of the pipeline) wait for each other
    for ever.
    """

    communicator: type[Communicator] = Communicator

    def __init__(self, rank: int, log: CollectiveLog | None, limit_s: float = TIME_LIMIT_S) -> None:
        self.rank, self.log, self.limit = rank, log, timedelta(seconds=limit_s)

    def __call__(self, name: str, groups: Iterable[tuple[int, ...]]) -> Communicator | None:
        """Make all `groups` (equal ones once); the communicator of the one that this rank is in, if any."""
        mine = None
        for ranks in sorted(set(groups)):
            group: Any = self.connect(ranks) if len(ranks) > 1 else None
            if self.rank in ranks:
                mine = self.communicator(f"{name}{list(ranks)}", ranks, self.rank, group, self.log)
        return mine

    def connect(self, ranks: tuple[int, ...]) -> Any:
        """What torch knows these ranks by."""
        return dist.new_group(list(ranks), timeout=self.limit)  # torch's own is half an hour on Gloo

    def one(self, name: str, groups: Iterable[tuple[int, ...]]) -> Communicator:
        mine = self(name, groups)
        if mine is None:
            raise ValueError(f"{name}: rank {self.rank} is in none of its groups")
        return mine


def _edges(layout: Layout, placement: Placement, make: Maker) -> dict[Edge, Communicator]:
    """Two-rank communicators for every pair of neighbouring stages on different pipeline ranks."""
    pairs = set()
    for stage in placement.stages[:-1]:
        for a in placement.rank_of_stage[stage.index]:
            for b in placement.rank_of_stage[stage.index + 1]:
                if a != b:
                    pairs |= {(a, b, "activation"), (b, a, "gradient")}
    edges = {}
    for source, target, kind in sorted(pairs):
        pairs_of_ranks = [sorted((r, layout.neighbour(r, target))) for r in layout.stage_ranks(source)]
        mine = make(f"{kind}{source}->{target}", [tuple(pair) for pair in pairs_of_ranks])
        if mine:
            edges[source, target, kind] = mine
    return edges
