"""Two blocks of one pair in time, as recorded: one after the other above, overlapped below."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MICRO_BATCH = 5  # the pair of its forward is drawn, where the pipeline runs steadily
COLOURS = {"attn": "#4c78a8", "mlp": "#72b7b2", "tail": "#9d755d", "dispatch": "#f58518", "combine": "#eeca3b"}
ROWS = {"compute F": 3, "compute B": 2, "exchanges F": 1, "exchanges B": 0}
LABEL = re.compile(r"([FB])(\d+)@\d+ (attn|mlp|tail|dispatch|combine)(?: (\d+))?( W| start| wait)?")

Event = tuple[str, float, float]


def bars(events: Sequence[Event], micro_batch: int = MICRO_BATCH) -> list[tuple[int, str, str, float, float]]:
    """(row, phase, text, start, end) of the pair that has the forward of a micro-batch."""
    found = []
    for label, start, end in events:
        match = LABEL.fullmatch(label)
        if match is None or int(match[2]) != micro_batch - (match[1] == "B"):
            continue
        half, _, phase, block, part = match.groups()
        travels = phase in ("dispatch", "combine")
        if (part == " start") or (part == " wait" and end - start < 1e-4):
            continue
        row = ROWS[f"{'exchanges' if travels else 'compute'} {half}"]
        text = "" if part == " wait" else f"{phase} {block or ''}{part or ''}".strip()
        found.append((row, "wait" if part == " wait" else phase, text, start, end))
    return found


def draw(events_by_order: Mapping[str, Sequence[Any]], path: Path, title: str) -> None:
    """An SVG: computation and exchanges of both halves; an exchange lasts until the end of the wait for it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.4 * len(events_by_order)), layout="constrained")
    axes = figure.subplots(len(events_by_order), sharex=True, squeeze=False)[:, 0]
    for axis, (order, events) in zip(axes, events_by_order.items(), strict=True):
        drawn = bars([(label, start, end) for label, start, end in events])
        first = min((start for *_, start, _ in drawn), default=0.0)
        for row, phase, text, start, end in drawn:
            left, width = (start - first) * 1e3, (end - start) * 1e3
            if phase == "wait":
                red = {"color": "none", "edgecolor": "#b00020", "hatch": "////", "linewidth": 0, "zorder": 3}
                axis.barh(row, width, left=left, height=0.8, **red)
                continue
            axis.barh(row, width, left=left, height=0.8, color=COLOURS[phase], edgecolor="white", linewidth=0.5)
            axis.text(left + width / 2, row, text, ha="center", va="center", fontsize=7, clip_on=True)
        axis.set_yticks(list(ROWS.values()), list(ROWS))
        axis.set_title(f"{title}: {order.replace('_', ' ')} (hatched: the rank stands still)", fontsize=9, loc="left")
    axes[-1].set_xlabel("ms")
    figure.savefig(path)
