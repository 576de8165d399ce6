"""`moe-engine train`: check the configuration, find or start the ranks, train."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moe_engine.cli import launch, run_folder, sweep
from moe_engine.cli.check import describe
from moe_engine.cli.help import available
from moe_engine.config.describe import option_lines
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import load
from moe_engine.config.routing import routing_mode
from moe_engine.config.schema import Config
from moe_engine.config.threads import thread_variables
from moe_engine.config.validate import resolve, validate
from moe_engine.layout import Layout, stages_of
from moe_engine.schedule import schedules

SUMMARY = "train a model: on this machine, or as one of the ranks of torchrun or Slurm"


def help_text() -> str:
    options = "\n".join(option_lines(Config))
    return f"""usage: moe-engine train [group=choice …] [section.option=value …] [values.yaml …]

Train a Mixture-of-Experts language model. Starts the ranks that the layout needs on this machine; under torchrun
or Slurm's srun it is one of the ranks already started. Results go to runs/<run.name>/.

groups of ready choices:
{available("train")}

usual options:
  run.name=first            the run's folder in run.dir (runs)
  run.resume=true           go on from the run's newest checkpoint
  init_from=FOLDER          start from these weights, with a fresh optimizer: a Hugging Face folder, a checkpoint or a
                            run folder of the same model (the long name is train.init_from)
  run.check=true            print the resolved configuration and layout, and stop
  train.steps=100           also train.global_batch, train.micro_batch (sequences), train.seq_len, train.seed
  parallel.pp=2             also parallel.dp, parallel.ep: ranks = pp * dp, experts spread over ep of the dp ranks
  data.text_paths=[a,b]     files or folders of text; left out: the sources of Python's standard library
  optim.lr=3e-3             peak learning rate
  --multirun                a run for each combination of options with several values (optim.lr=1e-3,3e-3), one after
                            the other, or as Slurm jobs: hydra/launcher=submitit_slurm hydra.launcher.nodes=2 …

A YAML file of values, a run's config.yaml say, can be given among the words; later words win.

examples:
  moe-engine train experiment=quickstart
  moe-engine train experiment=quickstart train.steps=20 run.name=short
  moe-engine train model=tiny data.text_paths=[docs] run.check=true
  moe-engine train --multirun experiment=quickstart optim.lr=1e-3,3e-3 train.seed=0,1 run.name=rates
  torchrun --nproc-per-node 4 -m moe_engine train experiment=quickstart
  moe-engine train experiment=quickstart parallel.dp=32 train.global_batch=64 run.ranks=64 run.check=true

all options, with the defaults of the schema (conf/train.yaml and the groups that it chooses come before them):
{options}"""


def run(words: list[str]) -> int:
    """Raises ConfigError for every mistake that can be found before the ranks start, all at once."""
    words = [f"train.{word}" if word.startswith("init_from=") else word for word in words]
    if any(flag in words for flag in sweep.FLAGS):
        return sweep.run(words, lambda config: checked(config, None))
    given = launch.given_ranks(os.environ)
    os.environ.update(given or {})
    world = int(given["WORLD_SIZE"]) if given else None
    config = checked(load("train", words), world)
    if config.run.check:
        if given is None or given["RANK"] == "0":
            print(describe(config))
        return 0
    _check_device(config)
    if given is None or (given["RANK"] == "0" and not launch.started_here(os.environ)):
        run_folder.prepare(config)
    layout = Layout.of(config.parallel)
    if given is None and layout.world > 1:
        command = [sys.executable, "-m", "moe_engine", "train", *words]
        return launch.start_local_ranks(command, layout.world, config.train.threads)
    if given is None:
        os.environ.update(launch.lone_rank(), **thread_variables(config.train.threads))

    with launch.interrupt_ends_at_once():
        from moe_engine.job import train  # loads torch, after the variables of threads are set

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
        problems += error.lines
    try:
        _check_schedule(resolved, sizes_are_valid=not problems)
    except ConfigError as error:
        problems += error.lines
    problems += [
        f"data.text_paths=[{path}]: no such file or folder; leave it out to train on Python's standard library"
        for path in config.data.text_paths
        if not Path(path).exists()
    ]
    for look in (_check_weights, _check_choices, _check_machine):
        try:
            look(resolved)
        except ConfigError as error:
            problems += error.lines
    if problems:
        raise ConfigError("\n".join(problems))
    return resolved


def _check_device(config: Config) -> None:
    """Raises ConfigError for what this machine's devices cannot do, before there is a rank or a run folder."""
    if config.moe.dispatch == "nvshmem" or config.train.kernels == "hopper":
        from moe_engine.distributed.device import check_device, device_of_rank  # loads torch

        check_device(config, device_of_rank())


def _check_weights(config: Config) -> None:
    """Raises ConfigError if the checkpoint or the weights to start from are not there, or are of another model."""
    if not (config.run.resume or config.train.init_from):
        return
    with launch.interrupt_ends_at_once():
        from moe_engine.checkpoint import store, weights
    if config.run.resume:
        checkpoints = Path(config.run.dir) / config.run.name / "checkpoints"
        store.check_resume(checkpoints, config.model, config.precision.master, config.train.steps)
        return
    source = Path(config.train.init_from)
    try:
        found = weights.open_weights(source)
    except ConfigError as error:
        raise error.about("train.init_from=") from None
    weights.require_model(found.model, config.model, source)


def _check_machine(config: Config) -> None:
    """Raises ConfigError for more threads than cores: they only hold one another up.

    A job that is checked here and runs elsewhere (run.check with run.ranks) is none of this machine's.
    """
    cores = os.cpu_count() or 1
    if config.train.threads > cores and not (config.run.check and config.run.ranks is not None):
        raise ConfigError(
            f"train.threads={config.train.threads}: of each rank, and this machine has {cores} cores; "
            f"use train.threads={cores} or less"
        )


def _check_choices(config: Config) -> None:
    """Raises ConfigError if the recorded choices to replay are not there, or of other sizes."""
    try:
        mode = routing_mode(config.moe.routing)
    except ConfigError:  # told by `validate`, with the option's name
        return
    if mode.kind == "replay":
        with launch.interrupt_ends_at_once():
            from moe_engine.checkpoint.choices import check_choices
        check_choices(Path(mode.folder), config)


def _check_schedule(config: Config, sizes_are_valid: bool) -> None:
    """Raises ConfigError if the schedule does not exist, cannot run at these sizes, or has stages without a block."""
    name = config.pipeline.schedule
    if not sizes_are_valid:
        schedules.stage_of_rank(name, 1)
        return
    pp, model, virtual_stages = config.parallel.pp, config.model, config.pipeline.virtual_stages
    train = config.train
    schedules.check_batch(config.pipeline, pp, config.parallel.dp or 1, train.global_batch, train.micro_batch)
    stages, blocks = schedules.num_stages(name, pp, virtual_stages), model.num_layers + (model.mtp_depth > 0)
    if config.pipeline.stages:
        stages_of(model, config.pipeline, stages)
    elif stages > blocks:
        raise ConfigError(
            f"parallel.pp={pp}: with pipeline.schedule={name} the model is cut into {stages} stages, and it has blocks "
            f"for {blocks}; use model.num_layers={stages} or more, or a smaller parallel.pp"
        )
