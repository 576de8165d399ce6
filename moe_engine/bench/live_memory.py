"""Peak of the memory that tensors hold, counted exactly and without an allocator's habits: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

SMALL = 1 << 12  # bytes; smaller tensors are not counted


class LivePeak(TorchDispatchMode):
    """Inside the `with`: the most bytes that were held at once by storages that operations made there.

    known: tensors from before, of which operations may return views.
    peak: bytes; what existed before is not in it. longest_pair: the largest number that two dimensions of one tensor
    both reached, which shows a tensor that grows with the square of the length.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._known = {x.untyped_storage()._cdata for x in known}
        self.peak, self.longest_pair = 0, 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sum = 0  # of `_held`, in which some may be gone: an upper bound

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(x, torch.Tensor) and x.nbytes >= SMALL:
                if x.dim() > 1:
                    self.longest_pair = max(self.longest_pair, sorted(x.shape)[-2])
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        if key in self._known or (key in self._held and not self._held[key][0].expired()):
            return
        self._held[key] = StorageWeakRef(storage), size
        self._sum += size
        if self._sum > self.peak:  # perhaps a new peak: count exactly
            self.peak = max(self.peak, self.held())

    def held(self) -> int:
        """Bytes that are held now."""
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self._sum = sum(size for _, size in self._held.values())
        return self._sum
