"""The states of experts that move to other ranks, exchanged between the shards that hold them.

A bucket of experts is, for each place in the expert-parallel group, a flat space of its own: the stacked experts of
every layer, cut in equal shards over the ranks that hold the same experts (replicas, and a stage's second holder). An
expert that moves leaves a range of one space for a range of another, and both are cut at other points, so a piece is
a stretch with one owner before and one after. All ranks work out the same pieces from the two placements; one exchange
between all ranks of the stage's holders carries them, one stacked parameter and one kind of state at a time, which
bounds the memory it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.distributed.collectives import Communicator
from moe_engine.moe.placement import ExpertPlacement


@dataclass(frozen=True)
class Move:
    """The experts of one layer get other places."""

    old: ExpertPlacement
    new: ExpertPlacement

    @property
    def num_moved(self) -> int:
        """Experts that change their rank."""
        return sum(a != b for a, b in zip(self.old.rank_list(), self.new.rank_list(), strict=True))


@dataclass(frozen=True)
class Piece:
    """`numel` elements of a shard: from rank `source`, there from element `start`, to `target`, there at `place`."""

    source: int
    start: int
    target: int
    place: int
    numel: int


@dataclass(frozen=True)
class Stacked:
    """Where a stacked parameter lies in the flat space of each expert-parallel place.

    offset: of its first expert; numel: elements of one expert; shard_size: of the space;
    owners[r][s]: the rank that owns shard s of place r.
    """

    offset: int
    numel: int
    shard_size: int
    owners: Sequence[Sequence[int]]

    def pieces(self, move: Move) -> Iterator[Piece]:
        """What travels, in one order for all ranks. An expert that keeps its place is left out."""
        places = [self._place_of_expert(placement) for placement in (move.old, move.new)]
        for expert in range(move.old.num_experts):
            (old_rank, old), (new_rank, new) = (of_expert[expert] for of_expert in places)
            if (old_rank, old) != (new_rank, new):
                for start, end in self._cuts(old, new):
                    source, first = divmod(old + start, self.shard_size)
                    target, place = divmod(new + start, self.shard_size)
                    yield Piece(self.owners[old_rank][source], first, self.owners[new_rank][target], place, end - start)

    def _place_of_expert(self, placement: ExpertPlacement) -> dict[int, tuple[int, int]]:
        """By expert: its rank in the group, and where it begins in that rank's flat space."""
        return {
            expert: (rank, self.offset + i * self.numel)
            for rank in range(placement.ep_size)
            for i, expert in enumerate(placement.experts_of(rank))
        }

    def _cuts(self, old: int, new: int) -> Iterator[tuple[int, int]]:
        """Stretches of an expert that lie in one shard at both places."""
        start = 0
        while start < self.numel:
            left = (self.shard_size - (begin + start) % self.shard_size for begin in (old, new))
            end = min(self.numel, start + min(left))
            yield start, end
            start = end


@torch.no_grad()
def exchange(states: Mapping[str, Tensor], pieces: Sequence[Piece], everyone: Communicator) -> None:
    """Send and receive this rank's pieces of each state's shard, in place. All ranks of `everyone` call this."""
    me = everyone.ranks[everyone.rank]
    out = [[p for p in pieces if p.source == me and p.target == rank] for rank in everyone.ranks]
    into = [[p for p in pieces if p.target == me and p.source == rank] for rank in everyone.ranks]
    send_splits, recv_splits = ([sum(p.numel for p in each) for each in parts] for parts in (out, into))
    for kind, shard in states.items():
        sent = torch.cat([shard[:0], *(shard[p.start : p.start + p.numel] for each in out for p in each)])
        arrived = everyone.all_to_all(sent, send_splits, recv_splits, f"experts {kind}").wait()
        begin = 0
        for piece in (p for each in into for p in each):
            shard[piece.place : piece.place + piece.numel] = arrived[begin : begin + piece.numel]
            begin += piece.numel
