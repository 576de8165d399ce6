"""Memory for large results on a CPU that is used again from call to call.

The allocator of torch gives a large tensor's memory back to the system when the tensor ends, and the next one gets
pages that the system clears at their first touch: for the gradients of experts, which nothing but their size makes
slow, about as long as their matrix products take. Here such memory is kept when its tensor has ended, for the next
one of that size, and marked as free: a system that runs short takes it without asking (Linux: MADV_FREE). It lies in
huge pages where there are any.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_BYTES = 4 << 20  # memory of smaller tensors is kept by the allocator itself
HUGE_PAGE = 2 << 20
_CAN_KEEP = hasattr(mmap, "MADV_FREE") and hasattr(mmap, "MADV_HUGEPAGE")


class _Kept:
    """Memory whose tensors have ended: with what is in use never more than was once in use at the same time.

    Tensors end at any moment, in the middle of a call here, too (a collection of garbage): their memory waits in
    `returned`, to which adding is atomic, for the next call.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.returned: deque[mmap.mmap] = deque()
        self.free: list[mmap.mmap] = []  # the one used longest ago first
        self.in_use = self.most_in_use = 0

    def take(self, size: int) -> mmap.mmap:
        with self.lock:
            while self.returned:
                memory = self.returned.popleft()
                self.in_use -= len(memory)
                self.free.append(memory)
            found = next((i for i in reversed(range(len(self.free))) if len(self.free[i]) == size), None)
            memory = _new_memory(size) if found is None else self.free.pop(found)
            self.in_use += size
            self.most_in_use = max(self.most_in_use, self.in_use)
            while self.in_use + sum(map(len, self.free)) > self.most_in_use:
                self.free.pop(0)
            return memory

    def drop(self) -> None:
        """Keep nothing of what is free."""
        with self.lock:
            self.free.clear()

    def give_back(self, memory: mmap.mmap) -> None:
        with contextlib.suppress(OSError):  # an old system: it stays taken
            memory.madvise(mmap.MADV_FREE)
        self.returned.append(memory)


def _new_memory(size: int) -> mmap.mmap:
    """size: bytes, a multiple of HUGE_PAGE."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@functools.cache
def _kept() -> _Kept:
    return _Kept()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`; on a CPU for a large tensor from memory that an ended one left."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LEAST_BYTES or not _CAN_KEEP:
        return torch.empty(shape, dtype=dtype, device=device)
    kept = _kept()
    try:
        memory = kept.take(-(-size // HUGE_PAGE) * HUGE_PAGE)
    except OSError:  # the system has no more
        kept.drop()
        return torch.empty(shape, dtype=dtype, device=device)
    view = memoryview(memory)  # lives as long as the tensor's storage does
    weakref.finalize(view, kept.give_back, memory).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)
