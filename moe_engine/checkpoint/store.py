"""Save and load: all ranks together, in any layout, complete or not at all.

Only safetensors and JSON are written and read, nothing pickled. The folder must be one that all ranks see: each
rank writes what it owns, rank 0 writes the index when all are done and commits by a rename. A kill before that
leaves earlier checkpoints as they were, and a partial folder that nobody reads and the next save removes. What is
on disk is described in `files`, the way from one layout to another in `reshard`.

When one rank fails, all ranks raise the same error: none is left waiting for the others.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from moe_engine.checkpoint import files
from moe_engine.checkpoint.files import Index, Written
from moe_engine.checkpoint.reshard import merge, mismatches, parts_of, plan
from moe_engine.checkpoint.weights import MASTER, model_of, open_weights, require_model
from moe_engine.config.errors import ConfigError, in_one_line
from moe_engine.config.schema import ModelConfig
from moe_engine.distributed.collectives import Communicator
from moe_engine.optim.zero import Shard

T = TypeVar("T")


def save(
    folder: Path,
    step: int,
    shards: Iterable[Shard],
    extras: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    world: Communicator,
) -> Path:
    """Write `folder/step_<step>`, complete or not at all, and return its path. All ranks call this together.

    `shards` are this rank's own ranges of optimizer states; `extras` are whole tensors by global name (contiguous,
    equal on all ranks that give them), stored once, by the first such rank. `meta` is any JSON object; rank 0's is
    kept. All values are on disk when this returns. A checkpoint of the same step is replaced.
    Raises ConfigError on all ranks when any of them cannot write, or the disk has too little room.
    """
    final, partial = files.folder_of(folder, step), files.partial_of(folder, step)
    own = parts_of(shards, {})

    def prepare() -> tuple[set[str], int]:
        json.dumps(dict(meta))  # a value that JSON does not know fails here, before anything is written
        if world.rank == 0:
            files.clean(folder)
            partial.mkdir(parents=True)
        return set(extras), sum(part.values.nbytes for part in [*own, *parts_of([], extras)])

    def write() -> Written | None:
        files.require_room(partial, sum(size for _, size in prepared))
        given_before = set[str]().union(*(names for names, _ in prepared[: world.rank]))
        first_here = {name: tensor for name, tensor in extras.items() if name not in given_before}
        parts = [*own, *parts_of([], first_here)]
        return files.write_tensors(partial, f"rank_{world.rank}.safetensors", parts) if parts else None

    def commit() -> None:
        if world.rank == 0:
            found = [each for each in written if each is not None]
            entries = merge(entry for each in found for entry in each.entries)
            sizes = {each.file: each.size for each in found}
            files.write_index(partial, Index(step, dict(meta), sizes, entries))
            files.commit(partial, final)

    try:
        prepared = _together(world, final, prepare)
        written = _together(world, final, write)
        _together(world, final, commit)
    except ConfigError:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load(
    path: Path, shards: Iterable[Shard], extras: Mapping[str, Tensor], world: Communicator | None = None
) -> dict[str, Any]:
    """Fill `shards` and `extras` in place from the checkpoint `path`, saved in any layout; returns its meta and `step`.

    With `world`, all ranks call this together, a failure of one is raised on all, and tensors that no rank wants
    are refused. Without, the caller reads its part for itself.
    Moments of another dtype are converted. Raises ConfigError naming damaged or missing files, missing or unexpected
    names, and other tensors of another shape or dtype; a file that is damaged where this rank needs no part of it goes
    unseen. After an error some tensors may already be filled.
    """
    parts = parts_of(shards, extras)
    found: list[Index] = []  # too large to be sent around

    def fit() -> set[str]:
        index = files.read_index(path)
        found.append(index)
        wrong = mismatches(index.tensors, parts)
        if wrong:
            raise ConfigError(f"checkpoint={path}: does not fit this model: {in_one_line(wrong)}")
        return {part.key for part in parts}

    def read() -> None:
        for file, copies in plan(index.tensors, parts).items():
            files.read_tensors(path / file, copies)

    wanted = set[str]().union(*_together(world, path, fit))
    index = found[0]
    unexpected = sorted(index.tensors.keys() - wanted)
    if world is not None and unexpected:
        raise ConfigError(f"checkpoint={path}: holds what this model lacks: {in_one_line(unexpected)}")
    _together(world, path, read)
    return {**index.meta, "step": index.step}


def load_weights(
    path: Path, model: ModelConfig, shards: Iterable[Shard], extras: Mapping[str, Tensor], world: Communicator
) -> list[str]:
    """Fill the masters of `shards`, and `extras`, with the weights at `path` (see `weights.open_weights`).

    All ranks call this together and each reads what its own shards need; moments stay as they are. Returns what a
    person should know, a line each. Raises ConfigError on all ranks when one finds weights of another model or a
    damaged file; some tensors may already be filled then.
    """

    def read() -> list[str]:
        weights = open_weights(path)
        require_model(weights.model, model, path)
        if world.rank == 0:
            weights.check_copies()
        for shard in shards:
            shard.states[MASTER].copy_(weights.read(shard.name, shard.start, shard.end))
        for name, tensor in extras.items():
            tensor.copy_(weights.read(name).view(tensor.shape))
        return weights.notes

    return _together(world, path, read)[0]


def check_resume(folder: Path, model: ModelConfig, master: str, steps: int) -> None:
    """Whether a run of `model` with master weights of type `master` can go on from the newest checkpoint in `folder`.

    To `steps` in all; a run that has come to its end may be started again, and does nothing more.

    Raises ConfigError with a line for each option that cannot change. Values are not read.
    """
    with warnings.catch_warnings(record=True) as passed_by:  # where one is found, who loads it will say this again
        warnings.simplefilter("always")
        path = newest(folder)
    if path is None:
        why = "".join(f" ({warning.message})" for warning in passed_by)
        anew = "start with run.resume=false" + (" run.overwrite=true" if passed_by else "")
        raise ConfigError(f"run.resume=true: no complete checkpoint in {folder}{why}; {anew}")
    index = files.read_index(path)
    problems = []
    if index.step > steps:
        problems.append(
            f"train.steps={steps}: counts all steps of the run, and {path} is after {index.step}; "
            f"use train.steps={index.step + 1} or more"
        )
    stored = next((entry.dtype for key, entry in index.tensors.items() if key.startswith(f"{MASTER}/")), master)
    if stored != master:
        problems.append(
            f"precision.master={master}: {path} has {stored}; use precision.master={stored}, "
            f"or a new run with init_from={path}"
        )
    try:
        require_model(model_of(index.meta, path), model, path)
    except ConfigError as error:
        problems += error.lines
    if problems:
        raise ConfigError("\n".join(problems))


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None. Warns of each incomplete one that it passes by.

    Complete: the index is whole and every file has the size it should. Contents are checked by `load`.
    """
    for path in files.committed(folder):
        try:
            files.check_complete(path)
        except ConfigError as error:
            warnings.warn(f"passed by an incomplete checkpoint: {error}", stacklevel=2)
        else:
            return path
    return None


def _together(world: Communicator | None, path: Path, action: Callable[[], T]) -> list[T]:
    """Do `action` on every rank; all results in rank order. If it fails on any rank, ConfigError on every rank."""
    result: Any = None
    failure, message = None, None
    try:
        result = action()
    except Exception as raised:  # whatever it is: the other ranks wait for a word from this one
        failure, message = raised, _explain(raised, path)
    outcomes = (world or Communicator.alone()).gather_objects((result, message))
    messages = dict.fromkeys(message for _, message in outcomes if message is not None)
    if messages:
        raise ConfigError("\n".join(messages)) from failure
    return [result for result, _ in outcomes]


def _explain(error: Exception, path: Path) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OSError):
        return f"checkpoint={path}: {error}; set run.dir to a folder that all ranks can read and write"
    return f"checkpoint={path}: {error!r}"
