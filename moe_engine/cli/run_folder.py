"""Before ranks start: can the run's folder take what it will hold, and does it hold another run?

Checked once, by the process that starts the ranks (or by rank 0, where they were started elsewhere), with nothing
written; only where everything is in order is an earlier run removed, and only if `run.overwrite` says so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from moe_engine import one_writer
from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import FORMAT_BYTES, Config, moments_format
from moe_engine.planner.flops import parameter_count

_RESULTS = ("metrics.jsonl", "summary.json", "loss.png", "config.yaml", "environment.json", "tb", "checkpoints")


def prepare(config: Config) -> None:
    """Make way for the run. Raises ConfigError as `check` does."""
    check(config)
    folder = Path(config.run.dir) / config.run.name
    if not config.run.resume and _checkpoints(folder):
        for name in _RESULTS:  # what else lies there is not ours
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def check(config: Config) -> None:
    """Raises ConfigError with a line for each folder that cannot be used. Nothing is written."""
    problems = [*_folder_problem("run.dir", config.run.dir), *_folder_problem("data.cache_dir", config.data.cache_dir)]
    folder = Path(config.run.dir) / config.run.name
    if not problems:
        problems = [*_name_problem(config, folder), *_room_problem(config, folder)]
    if problems:
        raise ConfigError("\n".join(problems))


def _folder_problem(option: str, value: str) -> Iterator[str]:
    """Whether a folder is there, or can be made, and written."""
    path = Path(value).expanduser()
    try:
        there = _nearest(path)
    except OSError as error:  # a name too long
        yield f"{option}={value}: {error.strerror}; use a shorter one, for example {option}=/tmp/{option}"
        return
    if not there.is_dir():
        yield f"{option}={value}: {there} is not a folder; use another, for example {option}=/tmp/{path.name}"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{option}={value}: {there} cannot be written; use another folder, for example {option}=/tmp/{path.name}"


def _name_problem(config: Config, folder: Path) -> Iterator[str]:
    name = config.run.name
    if folder.exists() and not folder.is_dir():
        yield f"run.name={name}: {folder} is not a folder; use another name, for example run.name={_free_name(folder)}"
        return
    if one_writer.is_held(folder):
        yield (
            f"run.name={name}: another run is writing {folder}; wait for its end, or use another name, for example "
            f"run.name={_free_name(folder)}"
        )
        return
    held = _checkpoints(folder)
    if held and not (config.run.resume or config.run.overwrite):
        yield (
            f"run.name={name}: {folder} holds a run, with {held[-1].name}; use run.resume=true to go on with it, "
            f"run.name={_free_name(folder)} to keep it, or run.overwrite=true to remove it"
        )
    source = config.train.init_from
    if held and source and not config.run.resume and Path(source).resolve().is_relative_to(folder.resolve()):
        yield (
            f"train.init_from={source}: lies in {folder}, which run.overwrite=true would remove; "
            f"use run.name={_free_name(folder)}"
        )


def _room_problem(config: Config, folder: Path) -> Iterator[str]:
    master, moments = (FORMAT_BYTES[name] for name in (config.precision.master, moments_format(config.precision)))
    needed = parameter_count(config.model).total * (master + 2 * moments)  # what a checkpoint has of each parameter
    free = shutil.disk_usage(_nearest(folder)).free
    if free < needed:
        yield (
            f"run.dir={config.run.dir}: a checkpoint takes {needed:,} bytes, and {free:,} are free there; "
            "free some space, or use run.dir on another disk"
        )


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step_*"))


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _free_name(folder: Path) -> str:
    number = 2
    while folder.with_name(f"{folder.name}_{number}").exists():
        number += 1
    return f"{folder.name}_{number}"
