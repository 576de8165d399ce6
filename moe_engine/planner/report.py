"""An answer as tables, markdown, JSON and a picture. Bytes in decimal GB, times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from moe_engine.planner.answer import Answer, room

GB = 1e9
_COLOURS = (
    "#4c78a8",
    "#9ecae9",
    "#f58518",
    "#ffbf79",
    "#54a24b",
    "#88d27a",
    "#b79a20",
    "#e45756",
    "#72b7b2",
    "#b279a2",
)


@dataclass(frozen=True)
class Table:
    """A titled table of texts."""

    title: str
    header: list[str]
    rows: list[list[str]]


def tables(answer: Answer, name: str, tokens: float) -> list[Table]:
    """Everything that the command prints in tables. name: of the model."""
    return [_memory_table(answer), _activation_table(answer), _time_table(answer), _summary_table(answer, name, tokens)]


def markdown(found: list[Table], warnings: list[str], notes: Sequence[str] = ()) -> str:
    """The tables as markdown; notes and warnings at the end."""
    lines = []
    for table in found:
        lines += [f"## {table.title}", "", "| " + " | ".join(table.header) + " |"]
        lines.append("|" + "---|" * len(table.header))
        lines += ["| " + " | ".join(row) + " |" for row in table.rows] + [""]
    for heading, texts in (("Notes", notes), ("Warnings", warnings)):
        if texts:
            lines += [f"## {heading}", "", *(f"* {text}" for text in texts), ""]
    return "\n".join(lines)


def as_data(answer: Answer, name: str, tokens: float, source: str) -> dict[str, Any]:
    """The answer for machines: plain numbers, bytes and seconds. source: of the efficiencies."""
    strategy, cluster, time = answer.request.strategy, answer.request.cluster, answer.time
    layout = strategy.layout
    return {
        "model": name,
        "layout": {**vars(layout), "etp": strategy.etp, "zero": strategy.zero, "world": layout.world},
        "schedule": {
            "name": strategy.schedule,
            "virtual_stages": strategy.virtual_stages,
            "stage_layers": [len(stage.layers) for stage in answer.cut.stages],
            "micro_batches": strategy.micro_batches,
            "bubble": time.bubble,
        },
        "batch": {
            "global_batch": strategy.global_batch,
            "micro_batch": strategy.micro_batch,
            "seq_len": strategy.seq_len,
        },
        "precision": dict(vars(strategy.precision)),
        "recompute": sorted(strategy.recompute),
        "assumed": {
            "load": answer.request.load,
            "keeping": answer.request.keeping,
            "dispatch": strategy.dispatch,
            "sequence_parallel": strategy.sequence_parallel,
            "shard": strategy.shard,
            "hidden": dict(vars(strategy.overlap)),
        },
        "cluster": dict(vars(cluster)),
        "efficiency": dict(vars(answer.efficiency)),
        "efficiency_source": source,
        "parameters": answer.request.model.parameters(),
        "memory": [
            {
                "pp": rank.pp,
                "stages": list(rank.stages),
                "dense_parameters": rank.dense,
                "expert_parameters": rank.experts,
                "bytes": rank.parts(),
                "activations": rank.activations,
                "buffers": rank.buffers,
                "in_flight": list(rank.in_flight),
                "total": rank.total,
                "margin": room(cluster) - rank.total,
            }
            for rank in answer.memory
        ],
        "time": {
            "step_s": time.seconds,
            "parts_s": time.parts,
            "hidden_s": time.hidden,
            "communication_s": time.communication,
        },
        "tokens_per_s_per_gpu": answer.tokens_per_s_per_gpu,
        "mfu": answer.mfu,
        "tokens": tokens,
        "days": answer.days(tokens),
        "gpu_hours": answer.gpu_hours(tokens),
        "warnings": answer.warnings,
    }


def picture(answer: Answer, title: str) -> str:
    """Memory by part of every pipeline rank, and the parts of the step's time, as an SVG."""
    memory = [(f"rank {rank.pp}", {k: v / GB for k, v in rank.parts().items()}) for rank in answer.memory]
    time = [("step", {part: seconds for part, seconds in answer.time.parts.items() if seconds > 0})]
    height = 40 + 24 * (len(memory) + len(time)) + 150
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="1000" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    limit = room(answer.request.cluster) / GB
    parts += _bars(memory, 40, max(limit, max(sum(row.values()) for _, row in memory)), "GB", limit)
    parts += _bars(time, 40 + 24 * len(memory) + 70, sum(time[0][1].values()), "s", None)
    return "\n".join([*parts, "</svg>", ""])


def _bars(
    rows: list[tuple[str, dict[str, float]]], top: float, most: float, unit: str, limit: float | None
) -> list[str]:
    """Stacked bars to scale with a legend below; a line where the card ends."""
    scale, names = 880 / most, list(dict.fromkeys(name for _, row in rows for name in row))
    parts = []
    for position, (label, row) in enumerate(rows):
        left, y = 90.0, top + 24 * position
        parts.append(f'<text x="84" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        for name, value in row.items():
            colour = _COLOURS[names.index(name) % len(_COLOURS)]
            parts.append(
                f'<rect x="{left:.1f}" y="{y}" width="{value * scale:.1f}" height="20" fill="{colour}">'
                f"<title>{escape(name)}: {value:.3g} {unit}</title></rect>"
            )
            left += value * scale
    bottom = top + 24 * len(rows)
    if limit is not None:
        x = 90 + limit * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{bottom}" stroke="red" stroke-dasharray="4"/>'
        )
    for position, name in enumerate(names):
        x, y = 90 + 145 * (position % 6), bottom + 8 + 18 * (position // 6)
        colour = _COLOURS[position % len(_COLOURS)]
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{escape(name)}</text>')
    return parts


def _decimals(largest: float, usual: int) -> int:
    """Decimals of a table's column: more than usual where all that stands in it is small."""
    return usual if largest >= 1 else usual + 3


def _memory_table(answer: Answer) -> Table:
    rows = []
    digits = _decimals(answer.peak_bytes / GB, 2)
    for rank in answer.memory:
        parts = [f"{value / GB:.{digits}f}" for value in rank.parts().values()]
        in_flight = "+".join(map(str, rank.in_flight))
        margin = room(answer.request.cluster) - rank.total
        held = ",".join(map(str, rank.stages))
        rows.append([str(rank.pp), held, in_flight, *parts, f"{rank.total / GB:.{digits}f}", f"{margin / GB:+.2f}"])
    cluster = answer.request.cluster
    title = (
        f"Memory, GB on one rank of each pipeline rank ({cluster.card}: {cluster.memory_gb:g} GB, "
        f"of which {cluster.runtime_gb:g} for the runtime)"
    )
    return Table(title, ["rank", "stages", "in flight", *answer.memory[0].parts(), "peak", "margin"], rows)


def _activation_table(answer: Answer) -> Table:
    fullest = max(answer.memory, key=lambda rank: rank.total)
    ordered = sorted(fullest.activations.items(), key=lambda item: -item[1])
    whole = fullest.activation_bytes
    digits = _decimals(whole / GB, 3)
    rows = [[name, f"{size / GB:.{digits}f}", f"{size / max(1.0, whole):.1%}"] for name, size in ordered]
    rows += [[f"buffer: {name}", f"{size / GB:.{digits}f}", ""] for name, size in fullest.buffers.items()]
    return Table(f"Kept for backward on pipeline rank {fullest.pp}, the fullest", ["tensor", "GB", "share"], rows)


def _time_table(answer: Answer) -> Table:
    time = answer.time
    digits = _decimals(time.seconds, 3)
    rows = [[part, f"{seconds:.{digits}f}", f"{seconds / time.seconds:.1%}"] for part, seconds in time.parts.items()]
    rows.append(["step", f"{time.seconds:.{digits}f}", "100.0%"])
    rows += [[f"communication: {kind}", f"{seconds:.{digits}f}", ""] for kind, seconds in time.communication.items()]
    rows.append(["of it hidden", f"{time.hidden:.{digits}f}", ""])
    return Table("Time of a step, seconds on the busiest rank", ["part", "seconds", "share"], rows)


def _summary_table(answer: Answer, name: str, tokens: float) -> Table:
    strategy = answer.request.strategy
    layout, precision = strategy.layout, strategy.precision
    recompute = " ".join(sorted(strategy.recompute)) or "none"
    rows = [
        ["model", f"{name}, {answer.request.model.parameters():,} parameters"],
        [
            "layout",
            f"pp {layout.pp} x dp {layout.dp} x cp {layout.cp} x tp {layout.tp}, ep {layout.ep}, etp {strategy.etp}, "
            f"ZeRO-{strategy.zero}",
        ],
        ["products, recompute", f"{precision.compute}, {recompute}"],
        ["schedule", f"{strategy.schedule}, {strategy.micro_batches} micro-batches of {strategy.micro_batch}"],
        ["batch", f"{strategy.global_batch} x {strategy.seq_len} tokens"],
        ["tokens/s/GPU", f"{answer.tokens_per_s_per_gpu:.0f}"],
        *[[f"MFU, {words}", f"{share:.2%} of the bf16 peak"] for words, share in answer.mfu.items()],
        [f"{tokens:.4g} tokens", f"{answer.days(tokens):.2f} days, {answer.gpu_hours(tokens):,.0f} GPU-hours"],
    ]
    return Table("In short", ["", ""], rows)
