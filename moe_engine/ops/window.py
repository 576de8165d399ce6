"""Exchanges of rows that kernels do by themselves, by numbers that the device alone knows (`moe_kernels.nvshmem`).

A `Window` is what a communicator is elsewhere: a group of ranks, and an order of exchanges that is the same on all of
them. Its kernels run on a stream of its own, beside computation; `Pending.wait` lets the current stream wait for them,
and the host waits for nothing. The kernels are imported where they are used: they need Triton, and others do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.distributed.collectives import Communicator, Pending
from moe_engine.distributed.lost import wait_until
from moe_engine.planner.symmetric import ALIGNMENT


class Runtime(Protocol):
    """Who moves the bytes: `moe_kernels.nvshmem.runtime.Nvshmem`, or what stands for it in a test."""

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros in symmetric memory; all ranks of the job ask for the same, in the same order."""

    def launch(self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Start `programs` programs of a kernel on the current stream."""


@dataclass(frozen=True)
class Way:
    """Rows between this rank and each other one, in one direction and back, on the device.

    sent, arrived [3, ranks] int32: of the rows that leave this rank: how many, the first here, the first there; of
    those that arrive: how many, the first here, the first there. fits [1] int32: 0 where some rank has no room: then
    no rows are named.
    """

    sent: Tensor
    arrived: Tensor
    fits: Tensor

    @property
    def back(self) -> Way:
        """The same rows in the other direction."""
        return Way(self.arrived, self.sent, self.fits)


class Window:
    """Symmetric memory of the ranks of `group` for rows of `num_bytes` in all, and the exchanges through it.

    num_sms: multiprocessors that an exchange uses. All ranks of the job make all windows, in the same order.
    """

    def __init__(
        self, name: str, group: Communicator, runtime: Runtime, num_bytes: int, num_sms: int, device: torch.device
    ) -> None:
        from moe_kernels.nvshmem.exchange import Memory

        self._of_group(name, group, num_sms, device)
        half = (2, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        self.memory = Memory(
            staging=runtime.tensor(*half, dtype=torch.uint8),
            buffer=runtime.tensor(*half, dtype=torch.uint8),
            notes=runtime.tensor(2, 2, group.size, 2, dtype=torch.int64),
            signals=runtime.tensor(2, group.size, dtype=torch.int64),
            pes=torch.tensor(group.ranks, dtype=torch.int32, device=device),
            rank=group.rank,
        )
        self._runtime, self._number = runtime, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _of_group(self, name: str, group: Communicator, num_sms: int, device: torch.device) -> None:
        """All but the memory and the kernels."""
        self.name, self.group, self.num_sms = name, group, num_sms
        self._strange = torch.zeros(1, dtype=torch.int64, device=device)  # see `status` of `exchange`
        self._needed = torch.zeros(1, dtype=torch.int64, device=device)
        one, place = torch.ones(group.size, dtype=torch.int32), torch.arange(group.size, dtype=torch.int32)
        mine = torch.full_like(place, group.rank)
        # A row to each rank and one from each.
        way = torch.stack((one, place, mine)).to(device)
        self.one_each = Way(way, way, torch.ones(1, dtype=torch.int32, device=device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Window:
        return self  # a copied layer talks through the same one

    @torch.no_grad()
    def exchange(self, x: Tensor, way: Way, out_rows: int, label: str, id_words: int = 0) -> Pending:
        """Start sending rows x [N, …] by `way`; the result is [out_rows, …], what arrived and after it filling.

        Filling is 0, and -1 in the first id_words words of 4 bytes of a row. x must stay unchanged until the wait.
        """
        from moe_kernels.nvshmem.exchange import exchange

        self._log(x, label)
        self._number += 1
        x = _aligned(x.detach())
        out = x.new_empty(out_rows, *x.shape[1:])
        with self._beside(x, out, way.sent, way.arrived, way.fits) as event:
            exchange(
                x, out, way.sent, way.arrived, way.fits, self._strange, self.memory, self._number,
                self._runtime.launch, self.num_sms, id_words,
            )  # fmt: skip
        return Pending(out, event, x)

    def _log(self, x: Tensor, label: str) -> None:
        if self.group.log is not None:
            self.group.log.add("put", self.name, label, x)

    @contextmanager
    def _beside(self, *tensors: Tensor) -> Iterator[_Event | None]:
        """On the window's stream, after what the current one has been given."""
        if self._stream is None:
            yield None
            return
        event = _Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield event
            event.event.record()
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def wait(self) -> None:
        """Wait until all exchanges that were started are done."""
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
            wait_until(event.query, f"{self.name} put", self.group.ranks)

    @torch.no_grad()
    def note_need(self, needed: Tensor) -> None:
        """Somebody needed room for so many [1]."""
        torch.maximum(self._needed, needed, out=self._needed)

    def most_needed(self) -> int:
        """The most of what was noted so far. Waits for the device."""
        return int(self._needed.item())

    def check(self) -> None:
        """Wait for the device; raise RuntimeError if ranks did not do the same exchanges in the same order.

        A kernel waits for ever for a rank that is lost. Here the host does not: it raises RankLostError.
        """
        self.wait()
        other = int(self._strange.item())
        if other:
            raise RuntimeError(f"{self.name}: a rank was at exchange {other} where this one was at another")


class _Event:
    """The end of an exchange, as `Pending` waits for it."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def is_completed(self) -> bool:
        return self.event.query()


def _aligned(x: Tensor) -> Tensor:
    """x, contiguous and starting at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def start_nvshmem(world: Communicator, device: torch.device) -> Runtime:
    """NVSHMEM on all ranks of the job, whose numbers are their PEs."""
    from moe_kernels.nvshmem.runtime import Nvshmem

    return Nvshmem(device, world.ranks[world.rank], world.size, lambda own: world.gather_objects(own)[0])
