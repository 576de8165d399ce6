"""Communicators: every collective and message of the engine goes through one of these objects.

A `Communicator` is a fixed tuple of ranks with a name. With one rank it has no process group and every call is
a local no-op, so code above never asks whether an axis is used. It fixes what torch leaves open:

* sums of floating-point numbers over ranks are taken in rank order (all-to-all or all-gather, then an ordered
  sum): an all-reduce adds in an order that depends on the backend and on a value's offset in the buffer, and
  bits would change with the layout;
* no call changes its argument, and none records into autograd (an all-to-all on a tensor that requires a
  gradient would silently cut the graph: the autograd functions of `moe.dispatch` and `model.context_parallel` are
  the only doors);
* started operations return a `Pending`, which keeps the buffers alive until it is waited for;
* every call can be recorded in a `CollectiveLog`, since two ranks that enqueue in different orders swap data
  silently on Gloo and deadlock on NCCL: tests compare the logs of all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_engine.config.errors import ConfigError
from moe_engine.distributed.lost import explain


@dataclass(frozen=True)
class CollectiveRecord:
    """One enqueued operation; `bytes` is what this rank put in."""

    op: str
    communicator: str
    label: str
    bytes: int


class Wait(NamedTuple):
    """A time in which this rank stood still until an operation was finished; `time.perf_counter` seconds."""

    record: CollectiveRecord
    start: float
    end: float


@dataclass
class CollectiveLog:
    """The order in which one rank enqueued its operations, and how long it waited for them.

    waits: None where they are not wanted, and then nothing is timed. Only the thread that made the log stands still
    in a wait that counts: a second one that waits beside it holds nothing up.
    """

    records: list[CollectiveRecord] = field(default_factory=list)
    waits: list[Wait] | None = None
    thread: int = field(default_factory=threading.get_ident)

    @contextmanager
    def waiting(self, record: CollectiveRecord) -> Iterator[None]:
        """Around a wait for the operation `record`."""
        if self.waits is None or threading.get_ident() != self.thread:
            yield
            return
        start = time.perf_counter()
        yield
        self.waits.append(Wait(record, start, time.perf_counter()))

    def add(self, op: str, communicator: str, label: str, tensor: Tensor) -> CollectiveRecord:
        record = CollectiveRecord(op, communicator, label, tensor.numel() * tensor.element_size())
        self.records.append(record)
        return record


class Pending:
    """A started operation: `wait()` gives its result, and may be called again."""

    def __init__(
        self,
        result: Tensor,
        work: Any = None,
        keep: Tensor | None = None,
        waiting: AbstractContextManager[None] | None = None,
    ) -> None:
        self._result, self._work, self._keep = result, work, keep
        self._waiting = waiting or nullcontext()  # entered around the wait

    def done(self) -> bool:
        """Whether the operation has finished, without waiting."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> Tensor:
        if self._work is not None:
            with self._waiting:
                self._work.wait()
            self._work = self._keep = None
        return self._result


class Communicator:
    """Global ranks, ascending, that exchange tensors; `rank` is this one's place among them.

    Ascending because torch sorts the ranks of a group: in another order, places here would not be places there.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], my_rank: int, group: Any = None, log: CollectiveLog | None = None
    ) -> None:
        if list(ranks) != sorted(set(ranks)):
            raise ValueError(f"{name}: ranks={list(ranks)} must be ascending; use {sorted(set(ranks))}")
        self.name, self.ranks, self.group, self.log = name, tuple(ranks), group, log
        self.rank, self.size = self.ranks.index(my_rank), len(self.ranks)

    @classmethod
    def alone(cls) -> Communicator:
        """One rank by itself: no process group, no communication."""
        return cls("alone", (0,), 0)

    @classmethod
    def of_group(cls, group: Any) -> Communicator:
        """Wrap what somebody else made (an imported layer's `ep_group`): a process group or a DeviceMesh axis."""
        if isinstance(group, DeviceMesh) and group.ndim == 1:
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"group={group!r}: a process group of this rank or a one-dimensional DeviceMesh is expected, for "
                "example torch.distributed.group.WORLD after init_process_group"
            )
        ranks = dist.get_process_group_ranks(group)
        return cls("given", ranks, dist.get_rank(), group if len(ranks) > 1 else None)

    @classmethod
    def of_name(cls, name: str) -> Communicator:
        """The communicator of a torch process group by the name that torch gave it, "" for one rank alone."""
        resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009 - torch types it as its own
        return cls.of_group(resolve(name)) if name else cls.alone()

    @property
    def group_name(self) -> str:
        """What `of_name` finds it by."""
        return "" if self.group is None else str(self.group.group_name)

    @classmethod
    def of_world(cls) -> Communicator:
        """All ranks of a world that somebody else started, or this one alone."""
        return cls.of_group(dist.group.WORLD) if dist.is_initialized() else cls.alone()

    def __repr__(self) -> str:
        return f"Communicator({self.name}, ranks={self.ranks})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self  # a process group cannot be copied: a copied layer talks over the same one

    def _record(self, op: str, label: str, tensor: Tensor) -> AbstractContextManager[None]:
        """Log the operation; what is returned is to be entered around the wait for it.

        There a failure becomes a RankLostError, which names the operation and the ranks that no longer answer.
        """
        waiting = nullcontext() if self.log is None else self.log.waiting(self.log.add(op, self.name, label, tensor))
        return self._answered(f"{self.name} {op} {label}".rstrip(), waiting)

    @contextmanager
    def _answered(self, what: str, waiting: AbstractContextManager[None]) -> Iterator[None]:
        try:
            with waiting:
                yield
        except torch.OutOfMemoryError:  # a RuntimeError as well, of this rank alone
            raise
        except RuntimeError as error:
            raise explain(what, self.ranks, error) from error

    @torch.no_grad()
    def all_reduce_sum(self, x: Tensor, label: str = "") -> Tensor:
        """Sum over ranks, as a new tensor (of bools: their "or"); floating point in rank order, for small tensors."""
        if self.size == 1:
            return x.clone()
        waiting = self._record("all_reduce_sum", label, x)
        # Gloo adds bools as bytes, and a True of value 2 is not equal to True.
        if x.is_floating_point() or x.dtype == torch.bool:
            return ordered_sum(self._gather(x.reshape(-1), waiting).wait().view(self.size, *x.shape))
        total = x.clone()
        return Pending(total, self._all_reduce(total, dist.ReduceOp.SUM), waiting=waiting).wait()

    @torch.no_grad()
    def all_reduce_max(self, x: Tensor, label: str = "") -> Tensor:
        """Maximum over ranks, as a new tensor."""
        largest = x.clone()
        if self.size == 1:
            return largest
        waiting = self._record("all_reduce_max", label, x)
        return Pending(largest, self._all_reduce(largest, dist.ReduceOp.MAX), waiting=waiting).wait()

    @torch.no_grad()
    def reduce_scatter_sum(self, x: Tensor, label: str = "") -> Tensor:
        """Sum `x` [size * n] over ranks in rank order and keep this rank's part [n]."""
        if self.size == 1:
            return x.clone()
        if x.numel() % self.size:
            raise ValueError(f"{self.name} {label}: {x.numel()} elements are no equal parts for {self.size} ranks")
        waiting = self._record("reduce_scatter_sum", label, x)
        x = x.detach().contiguous()
        parts = torch.empty_like(x)
        return ordered_sum(Pending(parts, self._all_to_all(parts, x), x, waiting).wait().view(self.size, -1))

    @torch.no_grad()
    def all_gather(self, x: Tensor, label: str = "") -> Tensor:
        """Concatenate `x` [n, …] of all ranks in rank order: [size * n, …]."""
        return x.clone() if self.size == 1 else self.all_gather_start(x, label).wait()

    @torch.no_grad()
    def all_gather_start(self, x: Tensor, label: str = "") -> Pending:
        """Start an `all_gather`; `x` must stay unchanged until `wait()`."""
        if self.size == 1:
            return Pending(x)
        return self._gather(x, self._record("all_gather", label, x))

    def _gather(self, x: Tensor, waiting: AbstractContextManager[None]) -> Pending:
        x = x.detach().contiguous()
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return Pending(out, self._all_gather(out, x), x, waiting)

    @torch.no_grad()
    def shift(self, x: Tensor, label: str = "") -> Pending:
        """Start sending `x` to the next member, the last one's to the first; the result is the previous member's.

        An all-to-all in which each has one receiver: a send and a receive that are one operation cannot deadlock. `x`
        must stay unchanged until `wait()`.
        """
        if self.size == 1:
            return Pending(x)
        waiting = self._record("shift", label, x)
        x = x.detach().contiguous()
        out = torch.empty_like(x)
        send, receive = [0] * self.size, [0] * self.size
        send[(self.rank + 1) % self.size] = receive[(self.rank - 1) % self.size] = x.numel()
        return Pending(out, self._all_to_all(out.view(-1), x.view(-1), receive, send), x, waiting)

    @torch.no_grad()
    def all_to_all(self, x: Tensor, send_splits: list[int], recv_splits: list[int], label: str = "") -> Pending:
        """Start sending rows `x` [sum(send_splits), …]; the result is [sum(recv_splits), …] in rank order.

        A rank with nothing to send or receive still takes part. `x` must stay unchanged until `wait()`. Raises
        ValueError for splits that are not one for each rank, or not of `x`.
        """
        if self.size == 1:
            return Pending(x)
        if (len(send_splits), len(recv_splits), sum(send_splits)) != (self.size, self.size, x.shape[0]):
            raise ValueError(
                f"{self.name} {label}: {self.size} ranks exchange {x.shape[0]} rows, and the splits are {send_splits} "
                f"to send and {recv_splits} to receive"
            )
        waiting = self._record("all_to_all", label, x)
        x = x.detach().contiguous()
        out = x.new_empty((sum(recv_splits), *x.shape[1:]))
        return Pending(out, self._all_to_all(out, x, recv_splits, send_splits), x, waiting)

    @torch.no_grad()
    def send(self, x: Tensor, to: int, tag: int, label: str = "") -> Pending:
        """Start sending `x` to the member with place `to`; `x` must stay unchanged until `wait()`."""
        waiting = self._record("send", label, x)
        x = x.detach().contiguous()
        return Pending(x, self._send(x, to, tag), x, waiting)

    @torch.no_grad()
    def receive(self, buffer: Tensor, source: int, tag: int, label: str = "") -> Pending:
        """Start receiving into `buffer` (its shape and dtype must be the sender's) from the member `source`."""
        waiting = self._record("receive", label, buffer)
        return Pending(buffer, self._receive(buffer, source, tag), waiting=waiting)

    # What follows is all that talks to torch; a dry run (`distributed.silent`) has others talk to nobody. Each starts
    # its operation and returns what can be waited for. What fails before that is this rank's own mistake, and raised as
    # it is; what fails in the wait may be another rank's (see `_record`).

    def _all_reduce(self, x: Tensor, op: Any) -> Any:
        return dist.all_reduce(x, op=op, group=self.group, async_op=True)

    def _all_gather(self, out: Tensor, x: Tensor) -> Any:
        return _gather_into(out, x, group=self.group, async_op=True)

    def _all_to_all(
        self, out: Tensor, x: Tensor, recv_splits: list[int] | None = None, send_splits: list[int] | None = None
    ) -> Any:
        """Equal parts without splits."""
        return dist.all_to_all_single(out, x, recv_splits, send_splits, group=self.group, async_op=True)

    def _send(self, x: Tensor, to: int, tag: int) -> Any:
        return dist.isend(x, self.ranks[to], group=self.group, tag=tag)

    def _receive(self, buffer: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(buffer, self.ranks[source], group=self.group, tag=tag)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every member's (picklable) value in rank order, on all members. For start-up only."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)


def _gather_into(out: Tensor, x: Tensor, **options: Any) -> Any:
    """All ranks' `x` into `out`, concatenated."""
    # torch 2.13 renamed this collective and deprecates the old name; the floor, 2.11, has the old one only.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, x, **options)


def ordered_sum(parts: Tensor) -> Tensor:
    """Sum over the first dimension strictly in order: [n, …] -> […]."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
