"""`moe-engine schedule`: prove, time and draw a pipeline schedule before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moe_engine.config.errors import ConfigError
from moe_engine.config.load import choices, groups, load
from moe_engine.config.schema import ParallelConfig, PipelineConfig
from moe_engine.schedule import draw, schedules
from moe_engine.schedule.check import Report, check
from moe_engine.schedule.simulate import Cost, Simulation, formula_bubble, simulate

SUMMARY = "time and draw a pipeline schedule under a cost model"


@dataclass
class ScheduleConfig:
    """The options of this command; those it shares with `train` have their names there."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cost: Cost = field(default_factory=lambda: Cost(f=1.0, b=2.0, w=1.0, fb=3.0))
    out: str = ""  # an .svg file for the picture; empty: none


def help_text() -> str:
    available = "\n".join(f"  {group + '=':<13} {' | '.join(choices(group))}" for group in groups("schedule"))
    return f"""usage: moe-engine schedule [group=choice …] [section.option=value …]

Print the timetable of a pipeline schedule under a cost model, with its length, idle time, bubble and the most
activations that each rank holds. The schedule is proven legal first. Nothing is trained, no torch is loaded.

groups of ready choices:
{available}

options:
  pipeline.schedule=NAME    {", ".join(schedules.names())}
  parallel.pp=4             pipeline ranks
  pipeline.micro_batches=8  micro-batches of a step (all forwards and backwards between two updates)
  cost.f=1 cost.b=2         time of a forward, and of a full backward (weight gradient included)
  cost.w=1                  the part of the backward that makes weight gradients
  cost.fb=3                 time of an overlapped forward and backward
  cost.communication=0      delay of a message between two ranks
  out=FILE.svg              also draw the timetable into this file

examples:
  moe-engine schedule pipeline=1f1b parallel.pp=4 pipeline.micro_batches=8
  moe-engine schedule pipeline=gpipe cost.f=1 cost.b=2 out=gpipe.svg"""


def run(words: list[str]) -> int:
    config = load("schedule", words, ScheduleConfig)
    _check_options(config)
    name, pp, micro_batches = config.pipeline.schedule, config.parallel.pp, _micro_batches(config)
    lists = schedules.schedule(name, pp, micro_batches)
    num_stages = schedules.num_stages(name, pp)
    report = check(lists, num_stages, micro_batches)
    simulation = simulate(lists, num_stages, config.cost)
    title = f"{name}: {pp} ranks, {num_stages} stages, {micro_batches} micro-batches"
    print(title)
    print(draw.timetable(simulation))
    print(_numbers(simulation, report, formula_bubble(name, pp, config.cost)))
    if config.out:
        Path(config.out).write_text(draw.svg(simulation, title))
        print(f"drawn into {config.out}")
    return 0


def _micro_batches(config: ScheduleConfig) -> int:
    given = config.pipeline.micro_batches
    return 2 * config.parallel.pp if given is None else given


def _check_options(config: ScheduleConfig) -> None:
    """Raises ConfigError, with a line for each option that cannot be as it is."""
    problems = []
    try:
        schedules.schedule(config.pipeline.schedule, config.parallel.pp, _micro_batches(config))
    except ConfigError as error:
        problems += str(error).splitlines()
    if config.cost.f + config.cost.b == 0:
        problems.append("cost.f=0 cost.b=0: something must take time; use cost.f=1 cost.b=2")
    out = Path(config.out)
    if config.out and out.suffix != ".svg":
        problems.append(f"out={config.out}: the picture is an SVG file; use out={out.with_suffix('.svg')}")
    if config.out and not out.absolute().parent.is_dir():
        problems.append(f"out={config.out}: there is no folder {out.parent}; make it, or use out={out.name}")
    if problems:
        raise ConfigError("\n".join(problems))


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
