"""What `run.check=true` prints: the resolved configuration, and who would hold what, without a rank or a device."""

from __future__ import annotations

from collections.abc import Sequence

from moe_engine.config.load import to_yaml
from moe_engine.config.schema import Config
from moe_engine.layout import Layout, StageSpec
from moe_engine.planner.flops import parameter_count, sequence_flops
from moe_engine.planner.job import cut_of
from moe_engine.planner.memory import RankMemory, rank_memory


def describe(config: Config) -> str:
    """A resolved configuration as YAML, which `train` takes in place of options, with the layout as comments."""
    return to_yaml(config) + "\n".join(f"# {line}" for line in layout_lines(config))


def layout_lines(config: Config) -> list[str]:
    """Ranks, batch, stages and memory of a resolved configuration; memory by the planner's arithmetic, in GiB."""
    layout, pipeline, train = Layout.of(config.parallel), config.pipeline, config.train
    cut = cut_of(config)
    placement = cut.placement
    counts, batch = parameter_count(config.model), f"dp {layout.dp} x {pipeline.micro_batches} micro-batches"
    tokens, flops = train.global_batch * train.seq_len, train.global_batch * sequence_flops(config.model, train.seq_len)
    lines = [
        f"layout: {layout.world} ranks = pp {layout.pp} x dp {layout.dp} x cp {layout.cp} x tp {layout.tp}; "
        f"experts over ep {layout.ep}, {config.model.num_experts // layout.ep} on each rank, {layout.edp} replicas",
        f"batch: {train.global_batch} sequences a step = {batch} x {train.micro_batch} sequences; "
        f"{tokens:,} tokens, {flops:.3g} FLOPs",
        f"model: {counts.total:,} parameters, {counts.active:,} active for a token",
    ]
    for spec in placement.stages:
        held = [rank for pp in placement.rank_of_stage[spec.index] for rank in layout.stage_ranks(pp)]
        lines.append(f"stage {spec.index} on ranks {_ranges(held)}: {_parts(spec)}")
    lines.append("by planning, on each of the ranks:")
    for rank in rank_memory(cut):
        lines.append(f"  {_ranges(layout.stage_ranks(rank.pp))}: {_memory(rank)}")
    return lines


def _memory(rank: RankMemory) -> str:
    """Parameters and GiB of one rank."""
    states = rank.parameters + rank.gradients + rank.master + rank.moments
    rest = rank.total - states - rank.activation_bytes
    return (
        f"{rank.dense:,.0f} dense parameters, {rank.experts:,.0f} of experts; states {_gib(states)} GiB, "
        f"activations {_gib(rank.activation_bytes)}, buffers {_gib(rest)}"
    )


def _gib(size: float) -> str:
    gib = size / 2**30
    return f"{gib:.3g}" if gib < 1000 else f"{gib:,.0f}"


def _parts(spec: StageSpec) -> str:
    parts = ["embedding"] if spec.embedding else []
    parts += [f"layers {_ranges(spec.layers)}"] if spec.layers else []
    parts += ["head"] if spec.head else []
    parts += [f"MTP {_ranges(spec.mtp)}"] if spec.mtp else []
    return ", ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
