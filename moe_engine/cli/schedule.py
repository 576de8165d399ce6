"""`moe-engine schedule`: prove, time, draw and compare pipeline schedules before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moe_engine.cli import out_file
from moe_engine.cli.help import available
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import load
from moe_engine.config.model_rules import check_model
from moe_engine.config.rules import Rules
from moe_engine.config.schema import ModelConfig, ParallelConfig, PipelineConfig, RecomputeConfig
from moe_engine.config.strict import shown
from moe_engine.layout import Layout
from moe_engine.planner.architecture import architecture
from moe_engine.planner.memory import rank_memory
from moe_engine.planner.stages import cut
from moe_engine.planner.strategy import Strategy, recomputed_parts
from moe_engine.schedule import chrome_trace, draw, schedules
from moe_engine.schedule.check import Report, check
from moe_engine.schedule.compare import Comparison, Row, best, compare, even_fb
from moe_engine.schedule.simulate import Cost, Simulation, formula_bubble, simulate

SUMMARY = "time, draw and compare pipeline schedules under a cost model"
PAIRED = ("dualpipev", "dualpipe")  # the schedules with overlapped pairs, that with fewer parameter copies first
ALL = "all"  # in place of a schedule's name: the comparison


@dataclass
class BatchSection:
    """Section `train`, as far as memory depends on it."""

    micro_batch: int = 1  # sequences
    seq_len: int = 4096


@dataclass
class ScheduleConfig:
    """The options of this command; those it shares with `train` have their names there."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cost: Cost = field(default_factory=lambda: Cost(f=1.0, b=2.0, w=1.0, fb=3.0))
    model: ModelConfig = field(default_factory=ModelConfig)  # for pipeline=all, with memory
    train: BatchSection = field(default_factory=BatchSection)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    memory_gib: float = 0.0  # with a model: advise nothing that needs more on a rank; 0: no limit
    out: str = ""  # a file for the timetable: .svg a picture, .json a trace for Perfetto; empty: none


def help_text() -> str:
    return f"""usage: moe-engine schedule [group=choice …] [section.option=value …]

Print the timetable of a pipeline schedule under a cost model, with its length, idle time, bubble and the most
activations that each rank holds. The schedule is proven legal first. Nothing is trained, no torch is loaded.
With pipeline=all: one table of all schedules at this size, and which one to take.

groups of ready choices:
{available("schedule")}

options:
  pipeline.schedule=NAME    {", ".join(schedules.names())}
  parallel.pp=4             pipeline ranks
  pipeline.micro_batches=8  micro-batches of a step (all forwards and backwards between two updates)
  pipeline.virtual_stages=2 stages of a rank, for interleaved_1f1b
  cost.f=1 cost.b=2         time of a forward, and of a full backward (weight gradient included), of one stage
  cost.w=1                  the part of the backward that makes weight gradients
  cost.fb=3                 time of an overlapped forward and backward
  cost.communication=0      delay of a message between two ranks
  out=FILE.svg              also draw the timetable into this file; out=FILE.json: a trace for ui.perfetto.dev

With pipeline=all, cost.* are the times of 1/pp of the model; a schedule that cuts it finer gets its share of them.
With a model, the table also has the memory of the fullest rank, and what does not fit is not advised:
  model=deepseek_v3 parallel.dp=128 parallel.ep=64 train.seq_len=4096 recompute=selective memory_gib=80

examples:
  moe-engine schedule pipeline=1f1b parallel.pp=4 pipeline.micro_batches=8
  moe-engine schedule pipeline=dualpipe parallel.pp=8 pipeline.micro_batches=20 out=dualpipe.svg
  moe-engine schedule pipeline=all parallel.pp=8 pipeline.micro_batches=32 cost.fb=2.5"""


def run(words: list[str]) -> int:
    config = load("schedule", words, ScheduleConfig)
    _check_options(config)
    if config.pipeline.schedule == ALL:
        print(_comparison(config))
        return 0
    pipeline, pp, micro_batches = config.pipeline, config.parallel.pp, _micro_batches(config)
    lists = schedules.schedule(pipeline.schedule, pp, micro_batches, pipeline.virtual_stages)
    num_stages = schedules.num_stages(pipeline.schedule, pp, pipeline.virtual_stages)
    report = check(lists, num_stages, micro_batches)
    simulation = simulate(lists, num_stages, config.cost)
    title = f"{pipeline.schedule}: {pp} ranks, {num_stages} stages, {micro_batches} micro-batches"
    print(title)
    print(draw.timetable(simulation))
    print(_numbers(simulation, report, formula_bubble(pipeline.schedule, pp, config.cost)))
    if config.out:
        out_file.write(config.out, _WRITERS[Path(config.out).suffix](title, simulation))
        print(f"drawn into {config.out}")
    return 0


def _picture(title: str, simulation: Simulation) -> str:
    return draw.svg([draw.Panel(title, simulation.timeline)])


def _trace(title: str, simulation: Simulation) -> str:
    return chrome_trace.to_json(chrome_trace.timetable_events(title, simulation.timeline))


_WRITERS: dict[str, Callable[[str, Simulation], str]] = {".svg": _picture, ".json": _trace}


def _micro_batches(config: ScheduleConfig) -> int:
    given = config.pipeline.micro_batches
    return 2 * config.parallel.pp if given is None else given


def _check_options(config: ScheduleConfig) -> None:
    """Raises ConfigError, with a line for each option that cannot be as it is."""
    problems = []
    try:
        # For the comparison any schedule stands for the options that all share.
        name = "gpipe" if config.pipeline.schedule == ALL else config.pipeline.schedule
        stages = 1 if config.pipeline.schedule == ALL else config.pipeline.virtual_stages
        schedules.check_size(name, config.parallel.pp, _micro_batches(config), stages)
    except ConfigError as error:
        problems += error.lines
    if config.pipeline.schedule == ALL and config.pipeline.virtual_stages < 1:
        problems.append(f"pipeline.virtual_stages={config.pipeline.virtual_stages}: must be at least 1; use 2")
    if config.pipeline.stages:
        problems.append(
            f"{shown('pipeline.stages', config.pipeline.stages)}: is for train; here all stages take the times of "
            "cost.*; leave it out"
        )
    if config.cost.f + config.cost.b == 0:
        problems.append("cost.f=0 cost.b=0: something must take time; use cost.f=1 cost.b=2")
    problems += _check_out(config)
    problems += _check_model(config)
    if problems:
        raise ConfigError("\n".join(problems))


def _check_out(config: ScheduleConfig) -> list[str]:
    if not config.out:
        return []
    out, problems = Path(config.out), []
    if config.pipeline.schedule == ALL:
        problems.append(f"out={config.out}: a comparison has no timetable; name one schedule, or give no out")
    elif out.suffix not in _WRITERS:
        works = " or ".join(f"out={out.with_suffix(suffix)}" for suffix in _WRITERS)
        problems.append(f"out={config.out}: a picture is an .svg file and a trace a .json file; use {works}")
    return problems + out_file.problems(config.out)


def _check_model(config: ScheduleConfig) -> list[str]:
    sizes = {"train.micro_batch": config.train.micro_batch, "train.seq_len": config.train.seq_len}
    sizes |= {"parallel.dp": config.parallel.dp or 1, "parallel.ep": config.parallel.ep}
    problems = [f"{name}={size}: must be 1 or more, for example {name}=1" for name, size in sizes.items() if size < 1]
    if config.memory_gib < 0:
        problems.append(f"memory_gib={config.memory_gib:g}: must be 0 (no limit) or more, for example memory_gib=80")
    replicas = (config.parallel.dp or 1) * config.parallel.cp
    if not problems and replicas % config.parallel.ep:
        problems.append(
            f"parallel.ep={config.parallel.ep}: must divide parallel.dp * parallel.cp = {replicas}; "
            f"use parallel.dp={config.parallel.ep}"
        )
    rules = Rules(config)
    check_model(rules)
    try:
        rules.finish()
        recomputed_parts(config.recompute)
    except ConfigError as error:
        problems += error.lines
    return problems


def _memory_gib(config: ScheduleConfig, name: str) -> float:
    """Of the fullest rank, by the planner. Raises ConfigError where the model cannot be cut for this schedule."""
    parallel = config.parallel
    strategy = Strategy(
        layout=Layout(parallel.pp, parallel.dp or 1, parallel.cp, parallel.tp, parallel.ep),
        schedule=name,
        virtual_stages=_interleaved_stages(config) if name == "interleaved_1f1b" else 1,
        micro_batch=config.train.micro_batch,
        micro_batches=_micro_batches(config),
        seq_len=config.train.seq_len,
        recompute=recomputed_parts(config.recompute),
    )
    return max(rank.total for rank in rank_memory(cut(architecture(config.model), strategy))) / 2**30


def _numbers(simulation: Simulation, report: Report, formula_idle: float | None) -> str:
    """Length of the step and a line for each rank."""
    lines = [
        f"makespan {simulation.makespan:g}"
        + ("" if formula_idle is None else f" (idle time of a rank by the published formula: {formula_idle:g})"),
        "rank      idle    bubble  peak activations  peak weight gradients",
    ]
    rows = zip(simulation.idle, simulation.bubble, report.peak_activations, report.peak_weight_gradients, strict=True)
    for rank, (idle, bubble, activations, weight_gradients) in enumerate(rows):
        lines.append(f"{rank:>4}  {idle:>8.4g}  {bubble:>8.2%}  {activations:>16}  {weight_gradients:>21}")
    return "\n".join(lines)


def _comparison(config: ScheduleConfig) -> str:
    pp, micro_batches, cost = config.parallel.pp, _micro_batches(config), config.cost
    comparison = compare(pp, micro_batches, cost, _interleaved_stages(config))
    memory: dict[str, float] = {}
    if config.model.name != ModelConfig.name:  # a model was chosen
        memory = {row.name: _memory_gib(config, row.name) for row in comparison.rows}
    lines = [
        f"{pp} ranks, {micro_batches} micro-batches; times and activations of a stage are those of 1/{pp} of the model",
        "schedule          stages a rank  makespan    bubble  formula  parameter copies  activations  with queued W"
        + ("  memory GiB" if memory else ""),
    ]
    for row in comparison.rows:
        formula = "-" if row.formula_idle is None else f"{row.formula_idle / row.makespan:.2%}"
        lines.append(
            f"{row.name:<16}  {row.stages_per_rank:>13}  {row.makespan:>8.5g}  {row.bubble:>8.2%}  {formula:>7}  "
            f"{row.copies:>16}  {row.activations:>11.4g}  {row.held:>13.4g}"
            + (f"  {memory[row.name]:>10.1f}" if memory else "")
        )
    lines += [f"not at this size: {name}: {line}" for name, why in comparison.refused.items() for line in [_first(why)]]
    if memory:
        lines.append(
            f"memory: {config.model.name} at dp {config.parallel.dp or 1}, ep {config.parallel.ep}, micro-batches of "
            f"{config.train.micro_batch} x {config.train.seq_len} tokens, recompute={config.recompute.mode} "
            "(moe-engine plan has more)"
        )
    fitting = [row for row in comparison.rows if not 0 < config.memory_gib < memory.get(row.name, 0.0)]
    if fitting:
        return "\n".join([*lines, _advice(fitting, comparison, config)])
    least = min(memory.values())
    return "\n".join([*lines, f"take none: {config.memory_gib:g} GiB is too little, {least:.1f} the least of all"])


def _interleaved_stages(config: ScheduleConfig) -> int:
    """Those asked for; 2 where nothing is said, since 1 is 1F1B itself."""
    return max(config.pipeline.virtual_stages, 2)


def _first(text: str) -> str:
    return text.splitlines()[0]


def _advice(fitting: list[Row], comparison: Comparison, config: ScheduleConfig) -> str:
    """Which to take and why, in one line; and what would change it for the schedules with overlapped pairs."""
    row, cost = best(fitting), config.cost
    plain = comparison.named("1f1b")
    assert plain is not None
    gain = "" if row is plain else f", {1 - row.makespan / plain.makespan:.1%} shorter than 1f1b"
    copies = f"{row.copies} cop{'y' if row.copies == 1 else 'ies'} of the parameters"
    among = f" that fits in {config.memory_gib:g} GiB" if len(fitting) < len(comparison.rows) else ""
    line = f"take {row.name}: the shortest step{among}{gain}, with {copies} and {row.held:g} activations held"
    for name in PAIRED:
        if row.name not in PAIRED and any(each.name == name for each in fitting):
            even = even_fb(name, config.parallel.pp, _micro_batches(config), cost, row.makespan)
            if even is not None:
                return f"{line}; {name} is shorter from cost.fb={even:.4g} down, if overlap hides that much"
            break
    return line
