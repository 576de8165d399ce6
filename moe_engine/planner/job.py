"""A job of this engine as the planner sees it: from a whole configuration to a model over its ranks."""

from __future__ import annotations

from moe_engine.config.schema import FORMAT_BYTES, Config, moe_layer_config, moments_format
from moe_engine.layout import Layout, Placement, stages_of
from moe_engine.planner.architecture import architecture
from moe_engine.planner.stages import Cut
from moe_engine.planner.strategy import Precision, Strategy, recomputed_parts
from moe_engine.planner.symmetric import WindowSizes, window_sizes
from moe_engine.schedule import schedules


def placement_of(config: Config) -> Placement:
    """Which pipeline rank holds which stages, as the schedule and `pipeline.stages` say."""
    pipeline, pp = config.pipeline, config.parallel.pp
    stages_of_rank = schedules.stage_of_rank(pipeline.schedule, pp, pipeline.virtual_stages)
    specs = stages_of(config.model, pipeline, 1 + max(map(max, stages_of_rank)))
    return Placement(tuple(specs), tuple(map(tuple, stages_of_rank)))


def cut_of(config: Config) -> Cut:
    """The job's model over its ranks. `config` must be resolved."""
    pipeline, train, precision = config.pipeline, config.train, config.precision
    strategy = Strategy(
        recompute=recomputed_parts(config.recompute),
        layout=Layout.of(config.parallel),
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        micro_batch=train.micro_batch,
        micro_batches=pipeline.micro_batches or 1,
        seq_len=train.seq_len,
        zero=config.parallel.zero,
        dispatch="expert" if config.moe.combine == "exact" else "rank",
        wire_fp8=config.moe.wire == "fp8",
        windows=windows_of(config),
        on_node=_on_node(config),
        max_recv_rows=config.moe.max_recv_rows,
        capacity_factor=config.moe.capacity_factor,
        exchange=config.cp.exchange,
        payload=config.cp.payload,
        precision=Precision(
            compute="fp8" if precision.name == "fp8" else "bf16",
            codes=precision.name == "fp8",
            code_copies=1 + precision.keep_transposed_codes,
            wgrad=precision.wgrad,
            bf16_first=precision.bf16_first_layers,
            bf16_last=precision.bf16_last_layers,
            parameter=FORMAT_BYTES[precision.compute],
            gradient=FORMAT_BYTES[precision.gradient],
            master=FORMAT_BYTES[precision.master],
            moments=2 * FORMAT_BYTES[moments_format(precision)],
        ),
    )
    return Cut(architecture(config.model), strategy, placement_of(config))


def windows_of(config: Config) -> WindowSizes | None:
    """The windows of a rank of a resolved job; None where it needs none."""
    ep, train = config.parallel.ep, config.train
    if config.moe.dispatch != "nvshmem" or ep == 1:
        return None
    layer, tokens = moe_layer_config(config.model, config.moe), train.micro_batch * train.seq_len // config.parallel.cp
    return window_sizes(layer, ep, tokens, FORMAT_BYTES[config.precision.compute], config.moe.recv_capacity)


def _on_node(config: Config) -> int:
    """Ranks of an expert-parallel group on one node, where rows go in two hops."""
    if config.moe.dispatch != "hierarchical" or config.parallel.ep == 1:
        return 0
    return min(config.parallel.ranks_per_node or config.parallel.ep, config.parallel.ep)
