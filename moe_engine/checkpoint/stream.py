"""Safetensors files written one tensor at a time, so that a conversion never holds more than a few.

`safetensors.torch.save_file` wants all tensors of a file at once. The format does not: its header says where each
tensor lies, and types and shapes are known before any value is. A file is 8 bytes with the header's length
(little-endian), the header (JSON), and the tensors' bytes back to back.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_engine.config.errors import ConfigError

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
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


def write_file(path: Path, tensors: Sequence[Announced], values: Callable[[str], Tensor]) -> int:
    """Write `values(key)` for each announced tensor, one after the other; returns the file's size in bytes.

    Raises ValueError when a value is not as announced, ConfigError when the disk is full or cannot be written.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    described: dict[str, object] = dict(header)
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
                value = values(tensor.key)
                if (value.dtype, tuple(value.shape)) != (tensor.dtype, tensor.shape):
                    raise ValueError(f"{tensor.key}: {value.dtype}{list(value.shape)} is not what was announced: {tensor}")
                file.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}); free some space or choose another folder") from error
