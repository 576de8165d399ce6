"""NVSHMEM's device calls among processes of one machine: shared memory, and delivery in any order that is allowed.

A put is cut in two pieces. Each piece, and then the signal, is delivered by a second thread at a time of its choosing:
a piece is read from its source only then, pieces of all puts come in any order, and a signal only after both pieces of
its own put. That is all that NVSHMEM promises of two puts without a fence between them.
"""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

HEAP_BYTES = 1 << 23


@dataclass
class _Put:
    """What is left to deliver of a put: pieces (target, source, size), offsets in heaps; then the signal."""

    pe: int
    pieces: list[tuple[int, int, int]]
    signal: int
    value: int


class Emulated:
    """A `moe_kernels.nvshmem.runtime.Runtime` whose kernels run in Triton's interpreter.

    order: random | newest (first) | signals (of all that is whole, before other pieces). Use it as a context: at its
    end everything is delivered.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, order: str, seed: int) -> None:
        self._path, self._rank, self._ranks = folder, rank, ranks
        self._heaps: list[Tensor] = []
        self._next, self._order, self._chance = 0, order, random.Random(seed * 100 + rank)
        self._puts: list[_Put] = []
        self._lock = threading.Lock()
        self._over = False
        self._patch = pytest.MonkeyPatch()
        self.failure: BaseException | None = None

    def __enter__(self) -> Emulated:
        from moe_kernels.nvshmem import calls

        for rank in range(self._ranks):  # whoever comes first makes the file
            with open(self._path / f"heap{rank}", "ab") as file:
                file.truncate(HEAP_BYTES)
            path = str(self._path / f"heap{rank}")
            self._heaps.append(torch.from_file(path, shared=True, size=HEAP_BYTES, dtype=torch.uint8))
        self._patch.setattr(calls, "put_signal", self.put_signal)
        self._patch.setattr(calls, "wait_signal", self.wait_signal)
        self._thread = threading.Thread(target=self._deliver)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over = True
        self._thread.join()
        self._patch.undo()
        if self.failure is not None:
            raise self.failure

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        part = self._heaps[self._rank][self._next : self._next + size]
        self._next += -(-size // 128) * 128
        assert self._next <= HEAP_BYTES
        return part.view(dtype).view(shape)

    def launch(self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        kernel[(programs,)](*arguments, **constants)

    def put_signal(self, target: Any, source: Any, size: Any, signal: Any, value: Any, pe: Any) -> None:
        to, start, number, at = self._offset(target), self._offset(source), _int(size), self._offset(signal)
        assert start >= 0 and number > 0 and start + number <= HEAP_BYTES and to + number <= HEAP_BYTES
        cut = self._chance.randrange(number + 1)
        pieces = [(to, start, cut), (to + cut, start + cut, number - cut)]
        with self._lock:
            self._puts.append(_Put(_int(pe), [piece for piece in pieces if piece[2]], at, _int(value)))

    def wait_signal(self, signal: Any, value: Any) -> None:
        at, least = self._offset(signal), _int(value)
        here = self._heaps[self._rank][at : at + 8].view(torch.int64)
        end = time.monotonic() + 150
        while int(here) < least:
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self._rank}: signal at {at} is {int(here)}, awaited {least}")
            time.sleep(2e-5)

    def _offset(self, address: Any) -> int:
        return _int(address) - self._heaps[self._rank].data_ptr()

    def _deliver(self) -> None:
        try:
            while not self._over or self._puts:
                if not self._puts:
                    time.sleep(1e-5)
                    continue
                if self._chance.random() < 0.3:
                    time.sleep(self._chance.random() * 5e-4)
                self._step()
        except BaseException as error:
            self.failure = error

    def _step(self) -> None:
        with self._lock:
            put = self._choose()
            piece = put.pieces.pop(self._chance.randrange(len(put.pieces))) if put.pieces else None
            if piece is None:
                self._puts.remove(put)
        there = self._heaps[put.pe]
        if piece is None:
            there[put.signal : put.signal + 8].view(torch.int64).add_(put.value)
            return
        target, source, size = piece
        there[target : target + size] = self._heaps[self._rank][source : source + size]

    def _choose(self) -> _Put:
        if self._order == "newest":
            return self._puts[-1]
        if self._order == "signals":
            return min(self._puts, key=lambda put: len(put.pieces))
        return self._chance.choice(self._puts)


def _int(value: Any) -> int:
    """A number in a kernel that is interpreted."""
    data = getattr(getattr(value, "handle", None), "data", value)
    return int(data.item() if hasattr(data, "item") else data)
