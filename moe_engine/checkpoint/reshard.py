"""From one layout to another: a checkpoint is a set of stored ranges, a rank wants other ranges.

A tensor goes by its key, `<kind>/<global name>` (`master/norm.weight`), and is seen flat. Each rank stores the
range that it owns; the index lists all ranges of a key. Loading intersects what a rank wants with what is stored,
so neither side knows anything of the other's pipeline, expert or data parallel degree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from moe_engine.optim.zero import Shard

EXTRA = "buffer"  # the kind of tensors beside the optimizer's states
MOMENTS = ("exp_avg", "exp_avg_sq")  # kinds that are converted where a run keeps them in another format


@dataclass(frozen=True)
class Part:
    """A flat range of one tensor in this rank's memory, to be written or to be filled."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    end: int
    values: Tensor  # [end - start], a view

    @property
    def dtype(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Range:
    """A flat range of one tensor in a file, there under the tensor's key."""

    file: str
    start: int
    end: int
    crc32: int  # of the range's bytes


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    ranges: tuple[Range, ...]  # ascending, without gaps or overlaps

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        return cls(tuple(data["shape"]), data["dtype"], tuple(Range(**each) for each in data["ranges"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Copy:
    """Elements [skip, skip + len(target)) of a stored range belong in `target`."""

    key: str
    dtype: str
    stored: Range
    skip: int
    target: Tensor


def parts_of(shards: Iterable[Shard], extras: Mapping[str, Tensor]) -> list[Part]:
    """The parts of this rank: a part for each state of each shard, and each extra tensor whole."""
    parts = []
    for name, start, end, shape, states in shards:
        parts += [Part(f"{kind}/{name}", tuple(shape), start, end, values) for kind, values in states.items()]
    for name, tensor in extras.items():
        parts.append(Part(f"{EXTRA}/{name}", tuple(tensor.shape), 0, tensor.numel(), tensor.detach().view(-1)))
    return parts


def merge(stored: Iterable[tuple[str, Entry]]) -> dict[str, Entry]:
    """Join the entries (key, entry) of all ranks to one for each key, sorted by key.

    Raises ValueError when a tensor is not stored exactly once from its first to its last element, or when ranks
    disagree on its shape or dtype.
    """
    merged: dict[str, Entry] = {}
    for key, entry in stored:
        before = merged.get(key, Entry(entry.shape, entry.dtype, ()))
        if (before.shape, before.dtype) != (entry.shape, entry.dtype):
            raise ValueError(f"{key}: ranks disagree, {before.dtype}{before.shape} and {entry.dtype}{entry.shape}")
        ranges = sorted(before.ranges + entry.ranges, key=lambda each: each.start)
        merged[key] = Entry(entry.shape, entry.dtype, tuple(ranges))
    for key, entry in merged.items():
        borders = [0, *(each.end for each in entry.ranges)]
        if [each.start for each in entry.ranges] != borders[:-1] or borders[-1] != entry.numel:
            raise ValueError(f"{key}: the ranks' parts do not make up the whole: {entry.ranges}")
    return dict(sorted(merged.items()))


def mismatches(entries: Mapping[str, Entry], parts: Iterable[Part]) -> list[str]:
    """What keeps `parts` from being filled, a line each: missing keys, other shapes, other dtypes but of moments."""
    found = []
    for part in parts:
        entry = entries.get(part.key)
        if entry is None:
            found.append(f"{part.key} is missing")
        elif entry.shape != part.shape:
            found.append(f"{part.key} has shape {list(entry.shape)} where the model has {list(part.shape)}")
        elif entry.dtype != part.dtype and part.key.partition("/")[0] not in MOMENTS:
            found.append(f"{part.key} is {entry.dtype} where this run has {part.dtype}")
    return found


def plan(entries: Mapping[str, Entry], parts: Iterable[Part]) -> dict[str, list[Copy]]:
    """The copies that fill `parts`, by file. Every part must have an entry (`mismatches`)."""
    copies: dict[str, list[Copy]] = {}
    for part in parts:
        entry = entries[part.key]
        for stored in entry.ranges:
            start, end = max(part.start, stored.start), min(part.end, stored.end)
            if start < end:
                target = part.values[start - part.start : end - part.start]
                copies.setdefault(stored.file, []).append(
                    Copy(part.key, entry.dtype, stored, start - stored.start, target)
                )
    return copies
