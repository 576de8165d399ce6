"""From the sections of a configuration to the planner's own words: what is planned, and whether it can be at all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import (
    FORMAT_BYTES,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    TrainConfig,
    moments_format,
)
from moe_engine.layout import Layout
from moe_engine.planner.architecture import Architecture, architecture
from moe_engine.planner.hardware import ClusterConfig, Efficiency
from moe_engine.planner.memory import KEEPING
from moe_engine.planner.strategy import DISPATCH, GRAPHS, RECOMPUTE, Overlap, Precision, Strategy
from moe_engine.schedule import schedules

COMPUTE = ("", "bf16", "fp8", "fp4")


@dataclass
class PlanSection:
    """Section `plan`: what the planner needs besides the sections that `train` has too.

    compute: format of matrix products, bf16, fp8 or fp4; empty: that of section `precision`. moment_bytes: of both
    AdamW moments of a parameter; left out: those of section `precision`. load: rows of the busiest rank's experts over
    the mean. keeping: what is kept for backward, as in this engine or as in megatron. graphs: what of a block the host
    launches as one recorded graph: none, router, attention (with the router) or full (the whole step); empty: what is
    usual on the cards. The *_hidden options are shares of communication that runs beside computation; cp_hidden,
    dp_hidden left out: all of it, and nothing by records of a machine without a GPU, whose cores send too.
    efficiencies: a table that `plan fit=` wrote, or records of `moe-engine bench` (a folder of one or of several, or a
    results.jsonl); software: whose efficiencies of the table, empty for those with most rows. matmul … block_us:
    efficiencies by hand; 0: those of the table or the records.
    """

    compute: str = ""
    fp8_activations: bool = False
    moment_bytes: float | None = None
    recompute: list[str] = field(default_factory=list)
    etp: int = 1
    shard: int = 0
    sequence_parallel: bool = True
    stage_layers: list[int] = field(default_factory=list)
    dispatch: str = "node"
    graphs: str = ""
    load: float = 1.0
    keeping: str = "engine"
    tp_hidden: float = 0.0
    cp_hidden: float | None = None
    ep_hidden: float = 0.0
    dp_hidden: float | None = None
    efficiencies: str = ""
    software: str = ""
    matmul: float = 0.0
    grouped: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    block_us: float = 0.0


@dataclass(frozen=True)
class Request:
    """A question to the planner, checked."""

    model: Architecture
    strategy: Strategy
    cluster: ClusterConfig
    load: float
    keeping: str


def request(
    model: ModelConfig,
    parallel: ParallelConfig,
    pipeline: PipelineConfig,
    precision: PrecisionConfig,
    train: TrainConfig,
    cluster: ClusterConfig,
    plan: PlanSection,
    search: bool = False,
) -> Request:
    """The question that these sections ask. Raises ConfigError with a line for each rule that is broken.

    With `search` the layout, the schedule and the micro-batch are what is looked for: those given are not judged, and
    the question has those of one rank.
    """
    if search:
        parallel = ParallelConfig(zero=parallel.zero)
        pipeline, train = PipelineConfig(), replace(train, micro_batch=1)
    problems = wrong_values(parallel, pipeline, train, plan)
    if not problems and not search:
        problems = _misfits(model, parallel, train, cluster, plan)
    if problems:
        raise ConfigError("\n".join(problems))
    layout = Layout(1, 1, 1, 1, 1) if search else layout_of(parallel, cluster)
    micro_batches = train.global_batch // (layout.dp * train.micro_batch)
    if not search:
        schedules.check_batch(pipeline, layout.pp, layout.dp, train.global_batch, train.micro_batch)
    problems = _pipeline_misfits(model, layout, pipeline, micro_batches, plan)
    if problems:
        raise ConfigError("\n".join(problems))
    strategy = Strategy(
        layout=layout,
        etp=plan.etp,
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        micro_batch=train.micro_batch,
        micro_batches=micro_batches,
        seq_len=train.seq_len,
        zero=parallel.zero,
        shard=plan.shard,
        recompute=frozenset(plan.recompute),
        precision=precision_of(precision, plan),
        stage_layers=tuple(plan.stage_layers),
        sequence_parallel=plan.sequence_parallel,
        dispatch=plan.dispatch,
        graphs=plan.graphs,
        overlap=Overlap(
            plan.tp_hidden,
            1.0 if plan.cp_hidden is None else plan.cp_hidden,
            plan.ep_hidden,
            1.0 if plan.dp_hidden is None else plan.dp_hidden,
        ),
    )
    return Request(architecture(model), strategy, cluster, plan.load, plan.keeping)


def layout_of(parallel: ParallelConfig, cluster: ClusterConfig) -> Layout:
    """The rank grid over the whole cluster; dp takes what the other axes leave."""
    dp = parallel.dp or cluster.gpus // (parallel.pp * parallel.cp * parallel.tp)
    return Layout(parallel.pp, dp, parallel.cp, parallel.tp, parallel.ep)


def precision_of(precision: PrecisionConfig, plan: PlanSection) -> Precision:
    """Bytes of each kind of number."""
    return Precision(
        compute=plan.compute or ("fp8" if precision.name == "fp8" else "bf16"),
        parameter=float(FORMAT_BYTES[precision.compute]),
        gradient=float(FORMAT_BYTES[precision.gradient]),
        master=float(FORMAT_BYTES[precision.master]),
        moments=2.0 * FORMAT_BYTES[moments_format(precision)] if plan.moment_bytes is None else plan.moment_bytes,
        fp8_activations=plan.fp8_activations,
        codes=precision.name == "fp8",
        code_copies=1 + precision.keep_transposed_codes,
    )


def efficiency_of(plan: PlanSection, known: Efficiency) -> Efficiency:
    """The efficiencies of section `plan`, where it gives any, over those known for the card."""
    return Efficiency(**{name: getattr(plan, name) or value for name, value in vars(known).items()})


def wrong_values(
    parallel: ParallelConfig, pipeline: PipelineConfig, train: TrainConfig, plan: PlanSection
) -> list[str]:
    """A line for each value that cannot be, whatever the others are."""
    problems = []
    if pipeline.stages:
        problems.append(
            f"pipeline.stages=[{','.join(pipeline.stages)}]: a plan cuts by numbers of layers; "
            "use plan.stage_layers=[3,2] for five layers on two stages"
        )
    at_least_one = {f"parallel.{axis}": getattr(parallel, axis) for axis in ("pp", "cp", "ep", "tp")}
    at_least_one |= {
        f"train.{name}": getattr(train, name) for name in ("steps", "global_batch", "micro_batch", "seq_len")
    }
    at_least_one |= {"plan.etp": plan.etp, "plan.load": plan.load}
    if parallel.dp is not None:
        at_least_one["parallel.dp"] = parallel.dp
    problems += [
        f"{name}={value}: must be 1 or more; use {name}=1" for name, value in at_least_one.items() if value < 1
    ]
    if parallel.zero not in (0, 1, 2, 3):
        problems.append(f"parallel.zero={parallel.zero}: ZeRO has stages 0 to 3; use parallel.zero=1")
    for name, value, choices in (
        ("compute", plan.compute, COMPUTE),
        ("dispatch", plan.dispatch, DISPATCH),
        ("graphs", plan.graphs, GRAPHS),
        ("keeping", plan.keeping, KEEPING),
    ):
        if value not in choices:
            problems.append(f"plan.{name}={value}: no such choice; use one of {', '.join(c for c in choices if c)}")
    for part in plan.recompute:
        if part not in RECOMPUTE:
            problems.append(f"plan.recompute=[{part}]: cannot be computed again; use some of {', '.join(RECOMPUTE)}")
    for name in (
        "tp_hidden",
        "cp_hidden",
        "ep_hidden",
        "dp_hidden",
        "matmul",
        "grouped",
        "attention",
        "memory",
        "links",
    ):
        if not 0 <= (getattr(plan, name) or 0.0) <= 1:
            problems.append(f"plan.{name}={getattr(plan, name)}: a share, from 0 to 1; use plan.{name}=0.5")
    for name in ("moment_bytes", "block_us", "shard"):
        if (getattr(plan, name) or 0) < 0:
            problems.append(f"plan.{name}={getattr(plan, name)}: must be 0 or more; use plan.{name}=0")
    if any(size < 0 for size in plan.stage_layers):
        problems.append(f"plan.stage_layers={plan.stage_layers}: layers of each stage, 0 or more; use [3,2] for five")
    return problems


def _misfits(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, cluster: ClusterConfig, plan: PlanSection
) -> list[str]:
    """What does not fit together, once every value by itself is possible."""
    problems = []
    others = parallel.pp * parallel.cp * parallel.tp
    dp = parallel.dp or max(1, cluster.gpus // others)
    if others * dp != cluster.gpus:
        problems.append(
            f"cluster.gpus={cluster.gpus}: pp {parallel.pp} x dp {dp} x cp {parallel.cp} x tp {parallel.tp} are "
            f"{others * dp} ranks; use cluster.gpus={others * dp}, or leave parallel.dp out"
        )
    stage = dp * parallel.cp * parallel.tp
    if stage % plan.etp:
        problems.append(
            f"plan.etp={plan.etp}: must divide the {stage} ranks of a stage; use plan.etp={_divisor(stage, plan.etp)}"
        )
    elif stage % (parallel.ep * plan.etp):
        problems.append(
            f"parallel.ep={parallel.ep}: with plan.etp={plan.etp} must divide the {stage} ranks of a stage; "
            f"use parallel.ep={_divisor(stage // plan.etp or 1, parallel.ep)}"
        )
    if model.num_experts % parallel.ep:
        nearest = _divisor(model.num_experts, parallel.ep)
        problems.append(
            f"parallel.ep={parallel.ep}: must divide model.num_experts={model.num_experts}; use parallel.ep={nearest}"
        )
    if model.num_heads % parallel.tp:
        nearest = _divisor(model.num_heads, parallel.tp)
        problems.append(
            f"parallel.tp={parallel.tp}: must divide model.num_heads={model.num_heads}; use parallel.tp={nearest}"
        )
    unit = dp * train.micro_batch
    if train.global_batch % unit:
        above = (train.global_batch // unit + 1) * unit
        problems.append(
            f"train.global_batch={train.global_batch}: must be a multiple of dp * train.micro_batch = {unit}; "
            f"use train.global_batch={above}"
        )
    if train.seq_len % parallel.cp:
        nearest = _divisor(train.seq_len, parallel.cp)
        problems.append(
            f"parallel.cp={parallel.cp}: must divide train.seq_len={train.seq_len}; use parallel.cp={nearest}"
        )
    return problems


def _pipeline_misfits(
    model: ModelConfig, layout: Layout, pipeline: PipelineConfig, micro_batches: int, plan: PlanSection
) -> list[str]:
    """What of the pipeline does not fit the model or the batch."""
    problems = []
    if pipeline.micro_batches not in (None, micro_batches):
        problems.append(
            f"pipeline.micro_batches={pipeline.micro_batches}: train.global_batch over dp {layout.dp} and "
            f"train.micro_batch makes {micro_batches}; leave it out, or use pipeline.micro_batches={micro_batches}"
        )
    stages = schedules.num_stages(pipeline.schedule, layout.pp, pipeline.virtual_stages)
    parts = model.num_layers + model.mtp_depth + 2  # embedding and head can have stages of their own
    if stages > parts and not plan.stage_layers:
        most = max(1, parts * layout.pp // stages)
        problems.append(
            f"parallel.pp={layout.pp}: cuts the model into {stages} stages, and it has {parts} parts with the "
            f"embedding and the head; use parallel.pp={most} or less"
        )
    return problems


def _divisor(number: int, near: int) -> int:
    """The divisor of `number` nearest to `near`."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - near), d))
