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
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_BYTES = 4 << 20  # memory of smaller tensors is kept by the allocator itself
HUGE_PAGE = 2 << 20
_CAN_KEEP = hasattr(mmap, "MADV_FREE") and hasattr(mmap, "MADV_HUGEPAGE")


class _Kept:
    """Memory whose tensors have ended, by its size."""

    def __init__(self) -> None:
        self.free: dict[int, list[mmap.mmap]] = defaultdict(list)

    def take(self, size: int) -> mmap.mmap:
        try:
            return self.free[size].pop()
        except IndexError:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a system without them
                memory.madvise(mmap.MADV_HUGEPAGE)
            return memory

    def give_back(self, memory: mmap.mmap) -> None:
        with contextlib.suppress(OSError):  # an old one: it stays taken
            memory.madvise(mmap.MADV_FREE)
        self.free[len(memory)].append(memory)


@functools.cache
def _kept() -> _Kept:
    return _Kept()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`; on a CPU for a large tensor from memory that an ended one left."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LEAST_BYTES or not _CAN_KEEP:
        return torch.empty(shape, dtype=dtype, device=device)
    kept = _kept()
    memory = kept.take(-(-size // HUGE_PAGE) * HUGE_PAGE)
    view = memoryview(memory)  # lives as long as the tensor's storage does
    weakref.finalize(view, kept.give_back, memory).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)
