"""Safetensors files written one tensor at a time, so that a conversion never holds more than a few.

`safetensors.torch.save_file` wants all tensors of a file at once. The format does not: its header says where each
tensor lies, and types and shapes are known before any value is. A file is 8 bytes with the header's length
(little-endian), the header (JSON), and the tensors' bytes back to back.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_engine.checkpoint.files import commit, require_room
from moe_engine.config.errors import ConfigError
from moe_engine.data.tokens import sync

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
_ALIGNMENT = 8  # of the first tensor, as the format asks


@dataclass(frozen=True)
class Announced:
    """A tensor that will be written."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class Progress:
    """Counts the bytes written; `show(done, total)` hears of each change."""

    show: Callable[[int, int], None] | None = None
    total: int = 0
    done: int = 0

    def begin(self, total: int) -> None:
        self.total, self.done = total, 0

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.show is not None:
            self.show(self.done, self.total)


def cut(tensors: Iterable[Announced], most: int) -> list[list[Announced]]:
    """Tensors in order, in files of at most `most` bytes; a larger tensor has a file of its own."""
    shards: list[list[Announced]] = []
    used = 0
    for tensor in tensors:
        if not shards or used + tensor.nbytes > most:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


@contextmanager
def new_folder(out: Path, needed: int) -> Iterator[Path]:
    """A folder to write in that becomes `out` when the block ends, or vanishes when the block fails.

    Raises ConfigError when `out` exists, cannot be made, or its disk has less than `needed` bytes free.
    """
    if out.exists():
        raise ConfigError(f"to={out}: is already there; remove it or name a new folder, for example to={out}_new")
    partial = out.absolute().with_name(f".{out.name}.partial")
    try:
        if partial.exists():  # of a conversion that was killed
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"to={out}: cannot be made ({error}); name a folder that can be written") from error
    try:
        require_room(partial, needed, "to")
        yield partial
        commit(partial, out.absolute())
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after a success there is none


# A tensor, or its slices along the first dimension, one after the other, where all of it would be large.
Value = Tensor | Iterator[Tensor]


def write_file(path: Path, tensors: Sequence[Announced], values: Callable[[str], Value], progress: Progress) -> int:
    """Write `values(key)` for each announced tensor, one after the other, to the disk; the file's size in bytes.

    Raises ValueError when a value is not as announced, ConfigError when the disk is full or cannot be written.
    """
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        described[tensor.key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    if len(described) != len(tensors) + 1:
        raise ValueError(f"{path.name}: a key is announced twice")
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    try:
        with open(path, "xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors:
                for part in _parts(tensor, values(tensor.key)):
                    file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
                    progress.advance(part.nbytes)
        sync(path)
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}); free some space or choose another folder") from error


def _parts(announced: Announced, value: Value) -> Iterator[Tensor]:
    """The value in pieces. Raises ValueError unless they are together what was announced."""
    parts, rows = iter([value]) if isinstance(value, Tensor) else value, 0
    for part in parts:
        rows += part.shape[0] if part.dim() else 1
        if part.dtype != announced.dtype or part.shape[1:] != announced.shape[1:] or part.dim() != len(announced.shape):
            raise ValueError(f"{announced.key}: {part.dtype}{list(part.shape)} is not what was announced: {announced}")
        yield part
    if announced.shape and rows != announced.shape[0]:
        raise ValueError(f"{announced.key}: {rows} rows are not what was announced: {announced}")
