"""`moe-engine train`: check the configuration, find or start the ranks, train."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from moe_engine.cli import launch
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import choices, groups, load, to_yaml
from moe_engine.config.schema import Config
from moe_engine.config.validate import resolve, validate
from moe_engine.layout import Layout, Placement, StageSpec, split_stages
from moe_engine.schedule import schedules

SUMMARY = "train a model: on this machine, or as one of the ranks of torchrun or Slurm"


def help_text() -> str:
    available = "\n".join(f"  {group + '=':<13} {' | '.join(choices(group))}" for group in groups("train"))
    return f"""usage: moe-engine train [group=choice …] [section.option=value …] [values.yaml …]

Train a Mixture-of-Experts language model. Starts the ranks that the layout needs on this machine; under torchrun
or Slurm's srun it is one of the ranks already started. Results go to runs/<run.name>/.

groups of ready choices:
{available}

usual options:
  run.name=first            the run's folder in run.dir (runs)
  run.resume=true           go on from the run's newest checkpoint
  run.check=true            print the resolved configuration and layout, and stop
  train.steps=100           also train.global_batch, train.micro_batch (sequences), train.seq_len, train.seed
  parallel.pp=2             also parallel.dp, parallel.ep: ranks = pp * dp, experts spread over ep of the dp ranks
  data.text_paths=[a,b]     files or folders of text; left out: the sources of Python's standard library
  optim.lr=3e-3             peak learning rate

run.check=true lists all options with their values; a run's config.yaml can be given in their place.

examples:
  moe-engine train experiment=quickstart
  moe-engine train experiment=quickstart train.steps=20 run.name=short
  moe-engine train model=tiny data.text_paths=[docs] run.check=true
  torchrun --nproc-per-node 4 -m moe_engine train experiment=quickstart"""


def run(words: list[str]) -> int:
    """Raises ConfigError for every mistake that can be found before the ranks start, all at once."""
    given = launch.given_ranks(os.environ)
    os.environ.update(given or {})
    world = int(given["WORLD_SIZE"]) if given else None
    try:
        config = checked(load("train", words), world)
    except ConfigError:
        if given is None or given["RANK"] == "0":
            raise
        time.sleep(2)  # rank 0 has the same to say; launchers end all ranks as soon as one fails
        return 2
    if config.run.check:
        if given is None or given["RANK"] == "0":
            print(describe(config))
        return 0
    layout = Layout.of(config.parallel)
    if given is None and layout.world > 1:
        command = [sys.executable, "-m", "moe_engine", "train", *words]
        return launch.start_local_ranks(command, layout.world, config.train.threads)
    if given is None:
        os.environ.update(launch.lone_rank(), OMP_NUM_THREADS=str(config.train.threads))

    with launch.interrupt_ends_at_once():
        from moe_engine.job import train  # loads torch, after OMP_NUM_THREADS is set

    train(config)
    return 0


def checked(config: Config, world: int | None) -> Config:
    """The configuration resolved, if all its rules hold: its own, the schedule's, and that its files are there."""
    problems: list[str] = []
    resolved = config
    try:
        validate(config, world)
        resolved = resolve(config, world)
    except ConfigError as error:
        problems += str(error).splitlines()
    try:
        _check_schedule(resolved, sizes_are_valid=not problems)
    except ConfigError as error:
        problems += str(error).splitlines()
    problems += [
        f"data.text_paths=[{path}]: no such file or folder; leave it out to train on Python's standard library"
        for path in config.data.text_paths
        if not Path(path).exists()
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return resolved


def _check_schedule(config: Config, sizes_are_valid: bool) -> None:
    """Raises ConfigError if the schedule does not exist, cannot run at these sizes, or has stages without a block."""
    name = config.pipeline.schedule
    if not sizes_are_valid:
        schedules.stage_of_rank(name, 1)
        return
    pp, model, virtual_stages = config.parallel.pp, config.model, config.pipeline.virtual_stages
    schedules.schedule(name, pp, config.pipeline.micro_batches or 1, virtual_stages)
    stages, blocks = schedules.num_stages(name, pp, virtual_stages), model.num_layers + (model.mtp_depth > 0)
    if stages > blocks:
        raise ConfigError(
            f"parallel.pp={pp}: with pipeline.schedule={name} the model is cut into {stages} stages, and it has blocks "
            f"for {blocks}; use model.num_layers={stages} or more, or a smaller parallel.pp"
        )


def describe(config: Config) -> str:
    """A resolved configuration as YAML, with the layout as comments."""
    layout, pipeline, train = Layout.of(config.parallel), config.pipeline, config.train
    stages_of_rank = schedules.stage_of_rank(pipeline.schedule, layout.pp, pipeline.virtual_stages)
    specs = split_stages(config.model, 1 + max(map(max, stages_of_rank)))
    placement = Placement(tuple(specs), tuple(map(tuple, stages_of_rank)))
    lines = [
        f"layout: {layout.world} ranks = pp {layout.pp} x dp {layout.dp} x cp {layout.cp} x tp {layout.tp}; "
        f"experts over ep {layout.ep}, {config.model.num_experts // layout.ep} on each rank, {layout.edp} replicas",
        f"batch: {train.global_batch} sequences a step = dp {layout.dp} x {pipeline.micro_batches} micro-batches "
        f"x {train.micro_batch} sequences",
    ]
    for spec in specs:
        ranks = [rank for pp in placement.rank_of_stage[spec.index] for rank in layout.stage_ranks(pp)]
        lines.append(f"stage {spec.index} on ranks {_ranges(ranks)}: {_parts(spec)}")
    return to_yaml(config) + "\n".join(f"# {line}" for line in lines)


def _parts(spec: StageSpec) -> str:
    parts = ["embedding"] if spec.embedding else []
    parts += [f"layers {_ranges(spec.layers)}"] if spec.layers else []
    parts += ["head"] if spec.head else []
    parts += [f"MTP {_ranges(spec.mtp)}"] if spec.mtp else []
    return ", ".join(parts)


def _ranges(numbers: list[int] | tuple[int, ...]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
