"""Peak of the memory that tensors hold, counted exactly and without an allocator's habits: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from moe_engine.dryrun.tensors import LiveBytes

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
        self._live, self.longest_pair = LiveBytes(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(x, torch.Tensor) and x.nbytes >= SMALL:
                if x.dim() > 1:
                    self.longest_pair = max(self.longest_pair, sorted(x.shape)[-2])
                if x.untyped_storage()._cdata not in self._known:
                    self._live.hold(x)
        return result

    @property
    def peak(self) -> int:
        return self._live.peak

    def held(self) -> int:
        """Bytes that are held now."""
        return self._live.now
