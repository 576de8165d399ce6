"""Communicators of a dry run: those of one rank of a world of any size, with nobody at the other end.

Everything but the exchange itself is the engine's own: which communicators there are, buffers, order, the log. The
others are taken to say what this rank says: a sum of integers is its value times the number of ranks; of an
all-to-all each of them sends here what this rank sends to itself, or, where nobody does that, what it sends as far
on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_engine.distributed.collectives import CollectiveLog, Communicator
from moe_engine.distributed.groups import Groups, Maker, arrange
from moe_engine.layout import Layout, Placement


class SilentCommunicator(Communicator):
    """See the module. `others`, if given, says what the others give to `gather_objects`, from this rank's value."""

    others: Callable[[Any], list[Any]] | None = None

    def _all_reduce(self, x: Tensor, op: Any) -> None:
        if op == dist.ReduceOp.SUM and not x.is_floating_point():
            x *= self.size

    def _all_gather(self, out: Tensor, x: Tensor) -> Any:
        if not x.is_floating_point():
            out.view(self.size, *x.shape).copy_(x.expand(self.size, *x.shape))
        return None

    def _all_to_all(
        self, out: Tensor, x: Tensor, recv_splits: list[int] | None = None, send_splits: list[int] | None = None
    ) -> Any:
        if x.is_floating_point():
            return None
        equal = [x.shape[0] // self.size] * self.size
        sent = x.split(send_splits or equal)
        for source, part in enumerate(out.split(recv_splits or equal)):
            same = sent[self.rank] if len(sent[self.rank]) else sent[(2 * self.rank - source) % self.size]
            if part.shape != same.shape:
                raise ValueError(f"{self.name}: {len(part)} rows are awaited, and this rank would send {len(same)}")
            part.copy_(same)
        return None

    def _send(self, x: Tensor, to: int, tag: int) -> Any:
        return None

    def _receive(self, buffer: Tensor, source: int, tag: int) -> Any:
        return None

    def gather_objects(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        if self.others is None:
            raise ValueError(f"{self.name}: nobody answers in a dry run")
        return [value, *self.others(value)]

    def barrier(self) -> None:
        pass


class _SilentMaker(Maker):
    communicator = SilentCommunicator

    def connect(self, ranks: tuple[int, ...]) -> Any:
        return None


def silent_groups(
    layout: Layout,
    placement: Placement,
    rank: int,
    log: CollectiveLog | None,
    others: Callable[[Any], list[Any]],
) -> Groups:
    """As `build_groups`, for a dry run of `rank`. `others`: see `SilentCommunicator`, for the world."""
    world = SilentCommunicator("world", range(layout.world), rank, None, log)
    world.others = others
    return arrange(layout, placement, world, _SilentMaker(rank, log))
