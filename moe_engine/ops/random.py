"""Random numbers that depend on a name, a seed and an element's index alone.

A counter-based generator: element i of the stream (seed, name) is splitmix64 (Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014) of a key plus i times the golden-ratio increment. So a
parameter has the same values in every layout, any part of it can be made alone, and no generator state is saved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# 64-bit constants of splitmix64 as the signed integers that torch has.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
BLOCK = 1 << 20  # elements made at a time; bounds the memory of the 8-byte intermediates


def normal(
    shape: Sequence[int],
    std: float,
    name: str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    first: int = 0,
) -> Tensor:
    """Normal numbers of mean 0 and standard deviation `std`, computed in fp64 and rounded once to `dtype`.

    Element i (row-major) is element `first + i` of the stream (seed, name), so that a slice of rows can be made
    without the rest. On the meta device nothing is computed.
    """
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if out.is_meta:
        return out
    flat, key = out.view(-1), _key(name, seed)
    for start in range(0, flat.numel(), BLOCK):
        part = flat[start : start + BLOCK]
        index = torch.arange(first + start + 1, first + start + 1 + part.numel(), device=out.device)
        uniform = _uniform(_mix(index * GOLDEN + key))
        part.copy_(torch.erfinv(uniform) * (std * math.sqrt(2.0)))
    return out


def _key(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _mix(z: Tensor) -> Tensor:
    """splitmix64's output function on int64; multiplication wraps."""
    z = (z ^ _shift(z, 30)) * MIX_1
    z = (z ^ _shift(z, 27)) * MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right (torch's is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _uniform(bits: Tensor) -> Tensor:
    """The top 53 bits as an odd multiple of 2^-53 in (-1, 1): symmetric, exact in fp64, never -1, 0 or 1."""
    return ((bits >> 11) * 2 + 1).double() * 2.0**-53
