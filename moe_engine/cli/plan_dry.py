"""`moe-engine plan dry_run=true rank=…`: one rank of the job by the engine's own code, beside the arithmetic."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import Config
from moe_engine.config.strict import shown
from moe_engine.config.validate import resolve, validate
from moe_engine.planner.collectives import step_bytes
from moe_engine.planner.hardware import ClusterConfig, Efficiency
from moe_engine.planner.memory import rank_memory
from moe_engine.planner.report import Table
from moe_engine.planner.request import PlanSection
from moe_engine.planner.stages import Cut
from moe_engine.planner.strategy import recompute_section
from moe_engine.planner.timing import stage_cost, step_work
from moe_engine.schedule import schedules
from moe_engine.schedule.simulate import Timed, simulate

if TYPE_CHECKING:
    from moe_engine.cli.plan import PlanConfig


# Of section `plan`, what a dry run reads: the routing, what is recomputed, and where planned times come from.
_READ = (
    "load", "recompute", "compute", "efficiencies", "software", "matmul", "grouped", "attention", "memory", "links",
    "block_us",
)  # fmt: skip


def job(config: PlanConfig) -> Config:
    """The planned job as the engine would be asked for it. Raises ConfigError with a line for each broken rule."""
    asked = Config(
        model=config.model,
        parallel=config.parallel,
        pipeline=config.pipeline,
        precision=config.precision,
        moe=config.moe,
        cp=config.cp,
        recompute=recompute_section(frozenset(config.plan.recompute)),
        train=config.train,
    )
    asked.run.ranks, asked.train.eval_sequences, asked.train.sample_tokens = config.cluster.gpus, 0, 0
    problems = []
    if config.moe.routing != "natural":
        problems.append(
            f"moe.routing={config.moe.routing}: a dry run chooses experts by plan.load; use moe.routing=natural"
        )
    if config.plan.load < 1:
        problems.append(f"plan.load={config.plan.load}: must be 1 or more; use plan.load=1")
    problems += _wrong_size(config)
    if problems:
        raise ConfigError("\n".join(problems))
    validate(asked)
    asked = resolve(asked)
    parallel, train = asked.parallel, asked.train
    schedules.check_batch(asked.pipeline, parallel.pp, parallel.dp or 1, train.global_batch, train.micro_batch)
    world = parallel.pp * (parallel.dp or 1) * parallel.cp * parallel.tp
    if not 0 <= config.rank < world:
        raise ConfigError(f"rank={config.rank}: ranks are 0 to {world - 1}; use rank=0")
    return asked


def _wrong_size(config: PlanConfig) -> list[str]:
    """The refusal, a line, of a layout that is given whole and has not as many ranks as the cluster has cards."""
    grid = {axis: getattr(config.parallel, axis) or 0 for axis in ("pp", "dp", "cp", "tp")}  # dp may be left out
    ranks, gpus = math.prod(grid.values()), config.cluster.gpus
    if min(grid.values()) < 1 or ranks == gpus:
        return []
    shown = " x ".join(f"{axis} {size}" for axis, size in grid.items())
    return [f"cluster.gpus={gpus}: {shown} are {ranks} ranks; use cluster.gpus={ranks}, or leave parallel.dp out"]


def _unread(plan: PlanSection) -> list[str]:
    """Notes on what only arithmetic can take for granted: the engine does what it does."""
    usual = PlanSection()
    given = [name for name, value in vars(plan).items() if name not in _READ and value != getattr(usual, name)]
    return [
        f"{shown(f'plan.{name}', getattr(plan, name))} is for the planner; a dry run has no use for it"
        for name in given
    ]


def run_dry(
    config: PlanConfig, asked: Config, cut: Cut, efficiency: Efficiency
) -> tuple[list[Table], dict[str, Any], list[str]]:
    """The tables, the same as data, and notes. asked, cut: the planned job (see `job`), and over its ranks."""
    import torch

    from moe_engine.dryrun import report
    from moe_engine.dryrun.run import dry_run

    torch.set_num_threads(1)  # nothing here is long enough for two
    start = time.perf_counter()
    found = dry_run(asked, config.rank, config.plan.load)
    seconds = time.perf_counter() - start
    pp = cut.strategy.layout.coordinate(config.rank).pp
    memory = rank_memory(cut, "engine", config.plan.load)[pp]
    planned: dict[str, dict[str, float]] = {
        "memory": {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "master": memory.master,
            "moments": memory.moments,
            "kept for backward": memory.activation_bytes,
            **{name: size for name, size in memory.buffers.items() if name == "symmetric memory"},
        },
        "collectives": dict(step_bytes(cut, pp, config.plan.load)),
    }
    times = _timetable(cut, config.cluster, efficiency, pp)
    place = ", ".join(f"{axis} {value}" for axis, value in vars(cut.strategy.layout.coordinate(config.rank)).items())
    load = config.plan.load
    notes = [
        f"rank {config.rank}: {place}; {found.parameters:,} parameters",
        "routing: " + ("balanced" if load == 1 else f"max_load={load:g}, this rank's experts are the busiest"),
        f"ran in {seconds:.1f} s",
        *_unread(config.plan),
    ]
    if config.plan.compute not in ("", "bf16"):
        notes.append(
            f"plan.compute={config.plan.compute} is for the planner's times; what is kept is that of precision="
            f"{config.precision.name}"
        )
    return report.tables(found, planned, times), report.as_data(found, planned, times), notes


def _timetable(cut: Cut, cluster: ClusterConfig, efficiency: Efficiency, pp: int) -> list[Timed]:
    """The rank's actions in planned time."""
    strategy = cut.strategy
    work = step_work(cut, cluster)
    costs = [stage_cost(work, stage, efficiency) for stage in range(len(work.stages))]
    lists = schedules.schedule(strategy.schedule, strategy.layout.pp, strategy.micro_batches, strategy.virtual_stages)
    return simulate(lists, len(work.stages), costs).timeline[pp]
