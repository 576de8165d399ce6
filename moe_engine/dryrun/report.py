"""A dry run as tables and as data."""

from __future__ import annotations

from typing import Any

from moe_engine.dryrun.collectives import by_purpose, summed
from moe_engine.dryrun.run import FAKED, DryRun
from moe_engine.planner.report import Table
from moe_engine.schedule.simulate import Timed

MB = 1e6
SHOWN = 12  # actions at either end of a long timetable


def tables(found: DryRun, planned: dict[str, dict[str, float]], times: list[Timed]) -> list[Table]:
    """What a rank held and sent, beside what arithmetic says (`planned`: bytes of memory, bytes of collectives)."""
    return [
        _compared(f"Rank {found.rank} of {found.world}: memory, MB", _memory(found), planned["memory"]),
        _compared("Collectives of a step by purpose, MB", by_purpose(found.collectives), planned["collectives"]),
        _collectives(found),
        _timetable(found, times),
        Table("What is faked", [""], [[line] for line in FAKED]),
    ]


def as_data(found: DryRun, planned: dict[str, dict[str, float]], times: list[Timed]) -> dict[str, Any]:
    """The same for machines: bytes and seconds, every action and every operation."""
    return {
        "rank": found.rank,
        "world": found.world,
        "parameters": found.parameters,
        "bytes": _memory(found),
        "planned": planned,
        "collectives": [vars(row) for row in summed(found.collectives)],
        "by_purpose": by_purpose(found.collectives),
        "timetable": [
            {"action": moment.action, "kept_bytes": moment.kept, "start_s": timed.start, "end_s": timed.end}
            for moment, timed in zip(found.timetable, times, strict=True)
        ],
        "faked": list(FAKED),
    }


def _mb(size: float) -> str:
    """Megabytes; small ones as exactly as bytes."""
    return f"{size / MB:,.3f}" if size >= 1e4 else f"{size / MB:.6f}"


def _memory(found: DryRun) -> dict[str, int]:
    symmetric = {"symmetric memory": found.symmetric} if found.symmetric else {}
    return {**found.states, "kept for backward": found.kept, **symmetric, "peak of the step": found.peak}


def _compared(title: str, found: dict[str, int], planned: dict[str, float]) -> Table:
    rows = []
    for name in [*found, *(name for name in planned if name not in found)]:
        ours, theirs = found.get(name, 0), planned.get(name)
        cells = ["", ""] if theirs is None else [_mb(theirs), f"{theirs / ours - 1:+.2%}" if ours else ""]
        rows.append([name, _mb(ours), *cells])
    return Table(title, ["", "dry run", "arithmetic", "difference"], rows)


def _collectives(found: DryRun) -> Table:
    rows = [
        [row.op, row.communicator, row.what, str(found.ranks[row.communicator]), str(row.count),
         _mb(row.bytes / row.count), _mb(row.bytes)]
        for row in summed(found.collectives)
    ]  # fmt: skip
    return Table(
        "Collectives of a step", ["operation", "communicator", "what", "ranks", "times", "MB each", "MB in all"], rows
    )


def _timetable(found: DryRun, times: list[Timed]) -> Table:
    rows = [
        [moment.action, f"{timed.start * 1e3:,.1f}", f"{timed.end * 1e3:,.1f}", _mb(moment.kept)]
        for moment, timed in zip(found.timetable, times, strict=True)
    ]
    if len(rows) > 2 * SHOWN + 1:
        rows = [*rows[:SHOWN], [f"… {len(rows) - 2 * SHOWN} more, all with out=", "", "", ""], *rows[-SHOWN:]]
    return Table(
        "Actions in their order, with planned times (action F3@1: forward of micro-batch 3 on stage 1)",
        ["action", "starts, ms", "ends, ms", "kept after it, MB"],
        rows,
    )
