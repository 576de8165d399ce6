"""The collectives of a dry run, summed: by operation and communicator, and by the planner's purposes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from moe_engine.distributed.collectives import CollectiveRecord

_PURPOSES = {
    "send": "messages sent",
    "receive": "messages received",
    "counts": "dispatch counts",
    "dispatch x": "dispatch",
    "dispatch slots": "dispatch",
    "dispatch x backward": "dispatch backward",
    "dispatch slots backward": "dispatch backward",
    "gradient magnitudes": "gradient norm",
    "gradient squares": "gradient norm",
    "aux losses": "losses",
}


@dataclass(frozen=True)
class Row:
    """Operations alike: how many, and their bytes together."""

    op: str
    communicator: str
    what: str
    count: int
    bytes: int


def purpose(record: CollectiveRecord) -> str:
    """What an operation is for, in the words of `planner.collectives`."""
    if record.op in ("send", "receive"):
        return _PURPOSES[record.op]
    what = _what(record)
    return _PURPOSES.get(what, what)


def by_purpose(records: Iterable[CollectiveRecord]) -> dict[str, int]:
    """Bytes of each purpose."""
    found: dict[str, int] = {}
    for record in records:
        found[purpose(record)] = found.get(purpose(record), 0) + record.bytes
    return found


def kind(communicator: str) -> str:
    """A communicator's name without its ranks."""
    return re.sub(r"\[[\d, ]*\]$", "", communicator)


def summed(records: Iterable[CollectiveRecord]) -> list[Row]:
    """Operations that are alike together, in the order of their first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for record in records:
        key = (record.op, kind(record.communicator), _what(record))
        found.setdefault(key, []).append(record.bytes)
    return [Row(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]


def _what(record: CollectiveRecord) -> str:
    """The label without layer and micro-batch."""
    if record.op in ("send", "receive"):
        return record.label.partition(" of ")[0]
    words = record.label.split()
    if "micro_batch" in words:
        words = words[words.index("micro_batch") + 2 :]
    if words[:1] == ["round"]:  # of bounded rows
        words = words[2:]
    return " ".join(words)
