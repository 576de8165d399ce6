"""What is alive in memory: bytes of every storage that some operation made and something still holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from moe_engine.dryrun import tensors


class LiveBytes(TorchDispatchMode):
    """Inside the `with`, remembers the storage of every result; `bytes()` are those of the storages still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._live = tensors.LiveBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                self._live.hold(x)
        return result

    def bytes(self) -> int:
        return self._live.now

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return self._live.peak
