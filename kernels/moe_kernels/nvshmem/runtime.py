"""NVSHMEM on the host, through nvshmem4py: start-up, symmetric memory, and kernels made known to the library."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def bitcode(folder: Path | None = None) -> Path | None:
    """NVSHMEM's device functions for linking, of the installed package `nvidia-nvshmem-cu…`; None without it.

    From 3.5 on there is one for each architecture; that of Hopper is taken.
    """
    if folder is None:
        spec = importlib.util.find_spec("nvidia")
        folders = [] if spec is None else [Path(f) / "nvshmem" / "lib" for f in spec.submodule_search_locations or []]
    else:
        folders = [folder]
    names = ("libnvshmem_device_sm_90.bc", "libnvshmem_device.bc")
    return next((path for f in folders for name in names if (path := f / name).exists()), None)


class Nvshmem:
    """The library, started on all ranks of the job: each is a PE of the same number.

    share: gives rank 0's bytes to all ranks. Raises ImportError without nvshmem4py, RuntimeError without the bitcode.
    """

    def __init__(self, device: torch.device, rank: int, size: int, share: Callable[[bytes], bytes]) -> None:
        library = bitcode()
        if library is None:
            raise RuntimeError("no libnvshmem_device.bc: install moe-engine[nvshmem]")
        warps = importlib.import_module("moe_kernels.nvshmem.exchange").WARPS  # needs Triton
        self._options = {"num_warps": warps, "extern_libs": {"libnvshmem_device": str(library)}}
        self._core = importlib.import_module("nvshmem.core")
        self._bindings = importlib.import_module("nvshmem.bindings")
        self._device = device
        self._known: dict[int, Any] = {}
        unique = self._core.get_unique_id(empty=rank != 0)
        # The id is a structure whose bytes numpy shows.
        raw = unique._data.view("uint8").reshape(-1)
        raw[:] = torch.frombuffer(bytearray(share(raw.tobytes())), dtype=torch.uint8).numpy()
        cuda = importlib.import_module("cuda.core.experimental").Device(device.index)
        cuda.set_current()
        self._core.init(device=cuda, uid=unique, rank=rank, nranks=size, initializer_method="uid")

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros in symmetric memory, kept to the job's end; all PEs ask for the same, in the same order."""
        raw: Tensor = self._core.tensor((math.prod(shape) * dtype.itemsize,), torch.uint8)
        return raw.zero_().view(dtype).view(shape)

    def launch(self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Start `programs` programs of a kernel on the current stream.

        A module has its own copy of the library's state, which is filled before its first kernel starts.
        """
        options = {**constants, **self._options}
        compiled = kernel.warmup(*arguments, grid=(programs,), **options)
        if id(compiled) not in self._known:
            compiled._init_handles()
            self._bindings.cumodule_init(int(compiled.module))
            self._known[id(compiled)] = compiled
        kernel[(programs,)](*arguments, **options)
