"""Pictures of a schedule in time: text for a terminal, SVG for a page. One row per rank, time to the right.

In the text, ranks with several stages write the stage of each action, `F3@7`. In the picture the colour is the kind,
darker for every stage of a rank but its first, and the number is the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from moe_engine.schedule.action import Kind
from moe_engine.schedule.simulate import Simulation, Timed

_COLOURS = {  # (first stage of a rank, its other stages)
    Kind.F: ("#c6dbef", "#6baed6"),
    Kind.B: ("#c7e9c0", "#74c476"),
    Kind.I: ("#fee391", "#fec44f"),
    Kind.W: ("#dadaeb", "#9e9ac8"),
}
_ROW = 24  # height of a row in pixels
_LEFT = 64  # room for the names of the ranks
_WORDS = {Kind.F: "F forward", Kind.B: "B backward", Kind.I: "I input gradient", Kind.W: "W weight gradient"}


class Panel(NamedTuple):
    """A timetable, simulated or measured: a list of timed actions per rank, the first start at 0."""

    title: str
    timeline: Sequence[Sequence[Timed]]

    @property
    def length(self) -> float:
        return max((timed.end for actions in self.timeline for timed in actions), default=0.0)


def timetable(simulation: Simulation) -> str:
    """The schedule as text, one line per rank, drawn to scale; dots are idle time.

    An action of no duration has no place in it.
    """
    labels = [_labels(actions) for actions in simulation.timeline]
    scale = max(
        (
            (len(label) + 1) / (timed.end - timed.start)
            for row, actions in zip(labels, simulation.timeline, strict=True)
            for label, timed in zip(row, actions, strict=True)
            if timed.end > timed.start
        ),
        default=0.0,
    )
    width = len(str(len(labels) - 1))
    lines = []
    for rank, (row, actions) in enumerate(zip(labels, simulation.timeline, strict=True)):
        line = ""
        for label, timed in zip(row, actions, strict=True):
            if timed.end > timed.start:
                line = line.ljust(round(timed.start * scale), ".")
                line += label.ljust(round(timed.end * scale) - len(line))
        lines.append(f"rank {rank:>{width}} |{line.ljust(round(simulation.makespan * scale), '.')}|")
    return "\n".join(lines)


def svg(panels: Sequence[Panel], width: int = 1200) -> str:
    """Timetables above one another on one scale of time, as a self-contained SVG picture `width` pixels wide.

    The halves of a pair are stacked.
    """
    rows = sum(len(panel.timeline) + 2 for panel in panels)
    height = _ROW * (rows + 1)
    longest = max((panel.length for panel in panels), default=0.0)
    scale = (width - _LEFT - 8) / (longest or 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="10" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    top = 0
    for panel in panels:
        parts += _panel(panel, top, scale)
        top += _ROW * (len(panel.timeline) + 2)
    return "\n".join([*parts, *_legend(top + 8), "</svg>", ""])


def _panel(panel: Panel, top: int, scale: float) -> list[str]:
    """Title, a row per rank, and the length of the whole."""
    parts = [f'<text x="{_LEFT}" y="{top + 16}" font-size="13" text-anchor="start">{escape(panel.title)}</text>']
    length = panel.length * scale
    for rank, actions in enumerate(panel.timeline):
        top += _ROW
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{length:.2f}" height="{_ROW - 2}" fill="#eeeeee"/>')
        first_stage = min((half.stage for timed in actions for half in timed.action.halves()), default=0)
        for timed in actions:
            parts += _boxes(timed, first_stage, top, scale)
    end = f"whole step {panel.length:.6g}"
    return [*parts, f'<text x="{_LEFT + length:.2f}" y="{top + _ROW + 11}" text-anchor="end">{end}</text>']


def _labels(actions: Sequence[Timed]) -> list[str]:
    """What to write for each action of one rank."""
    stages = {half.stage for timed in actions for half in timed.action.halves()}
    return [timed.action.text(with_stage=len(stages) > 1) for timed in actions]


def _boxes(timed: Timed, first_stage: int, top: int, scale: float) -> list[str]:
    """One rectangle per half, with its micro-batch where that fits; the tooltip has everything."""
    left, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    halves = timed.action.halves()
    height = (_ROW - 2) / len(halves)
    tip = escape(f"{timed.action.text(with_stage=True)}: {timed.start:g} to {timed.end:g}")
    parts = [f"<g><title>{tip}</title>"]
    for position, half in enumerate(halves):
        box_top = top + position * height
        parts.append(
            f'<rect x="{left:.2f}" y="{box_top:.2f}" width="{width:.2f}" height="{height:.2f}" '
            f'fill="{_COLOURS[half.kind][half.stage != first_stage]}" stroke="#555555" stroke-width="0.5"/>'
        )
        if width > 6 * len(str(half.micro_batch)):
            middle, base = left + width / 2, box_top + height / 2 + 4
            parts.append(f'<text x="{middle:.2f}" y="{base:.2f}">{half.micro_batch}</text>')
    return [*parts, "</g>"]


def _legend(top: int) -> list[str]:
    parts = []
    for position, (kind, colours) in enumerate(_COLOURS.items()):
        left = _LEFT + 150 * position
        for shade, colour in enumerate(colours):
            parts.append(
                f'<rect x="{left + 14 * shade}" y="{top}" width="14" height="14" fill="{colour}" stroke="#555555"/>'
            )
        parts.append(f'<text x="{left + 34}" y="{top + 11}" text-anchor="start">{_WORDS[kind]}</text>')
    return parts
