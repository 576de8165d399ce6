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
  pipeline.micro_batches=8  micro-batches of a step
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
    _check(config)
    name, pp, micro_batches = config.pipeline.schedule, config.parallel.pp, config.pipeline.micro_batches or 1
    lists = schedules.schedule(name, pp, micro_batches)
    num_stages = schedules.num_stages(name, pp)
    report = check(lists, num_stages, micro_batches)
    simulation = simulate(lists, num_stages, config.cost)
    print(_numbers(name, config, report, simulation))
    return 0


def _check(config: ScheduleConfig) -> None:
    problems = []
    if config.parallel.pp < 1:
        problems.append(f"parallel.pp={config.parallel.pp}: must be 1 or more, for example parallel.pp=4")
    if (config.pipeline.micro_batches or 1) < 1:
        problems.append(
            f"pipeline.micro_batches={config.pipeline.micro_batches}: must be 1 or more, "
            "for example pipeline.micro_batches=8"
        )
    if config.out and not config.out.endswith(".svg"):
        problems.append(f"out={config.out}: the picture is SVG; use out={Path(config.out).with_suffix('.svg')}")
    if config.out and not Path(config.out).absolute().parent.is_dir():
        problems.append(f"out={config.out}: no such folder; make {Path(config.out).parent}, or use out=schedule.svg")
    if problems:
        raise ConfigError("\n".join(problems))
