"""One checkpoint folder on disk: its files written, checked and read, and how it comes into being whole.

    step_<n>/
      index.json               format version, step, the caller's meta, file sizes; for each tensor its shape, dtype
                               and ranges (file, start, end, crc32 of the bytes)
      rank_<r>.safetensors     what rank r owned when it was saved, a flat tensor for each key

A folder is written as `.step_<n>.partial` and renamed when everything in it is on disk (fsync). Saving a step again
moves the old folder to `.step_<n>.replaced` for the moment between two renames.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_engine.checkpoint.reshard import Copy, Entry, Part, Range
from moe_engine.config.errors import ConfigError
from moe_engine.data.tokens import sync

FORMAT = "moe_engine checkpoint"
VERSION = 1
INDEX = "index.json"


@dataclass(frozen=True)
class Written:
    """A file of one rank: its name, its size in bytes, and what is in it."""

    file: str
    size: int
    entries: list[tuple[str, Entry]]


@dataclass(frozen=True)
class Index:
    """What `index.json` says."""

    step: int
    meta: dict[str, Any]
    files: dict[str, int]  # size in bytes
    tensors: dict[str, Entry]


# Writing


def folder_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step}"


def partial_of(folder: Path, step: int) -> Path:
    return folder / f".step_{step}.partial"


def clean(folder: Path) -> None:
    """Remove what saves that were killed have left in `folder`."""
    for path in folder.glob(".step_*.partial"):
        shutil.rmtree(path)
    for path in folder.glob(".step_*.replaced"):
        final = folder / path.name.removeprefix(".").removesuffix(".replaced")
        if final.exists():
            shutil.rmtree(path)
        else:
            path.rename(final)


def require_room(path: Path, needed: int, option: str = "run.dir") -> None:
    """Raise ConfigError when `path`, which `option` has chosen, has less than `needed` bytes free."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise ConfigError(
            f"checkpoint={path}: {needed:,} bytes are needed and {free:,} are free; "
            f"free some space or give another {option}"
        )


def write_tensors(path: Path, file: str, parts: Sequence[Part]) -> Written:
    """Write `parts` to `path/file` and to the disk below it. Raises ConfigError when that fails.

    Raises ValueError for two parts with one key: a file has one range of each tensor.
    """
    tensors = {part.key: part.values.cpu() for part in parts}
    if len(tensors) < len(parts):
        raise ValueError(f"{file}: a key is given twice among {[part.key for part in parts]}")
    try:
        save_file(tensors, path / file)
        sync(path / file)
        size = (path / file).stat().st_size
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(path.parent).free
        raise ConfigError(
            f"checkpoint={path / file}: cannot be written ({error}; {free:,} bytes are free there); "
            "free some space or set run.dir to a folder that all ranks can write"
        ) from error
    entries = []
    for part in parts:
        stored = Range(file, part.start, part.end, checksum(tensors[part.key]))
        entries.append((part.key, Entry(part.shape, part.dtype, (stored,))))
    return Written(file, size, entries)


def write_index(path: Path, index: Index) -> None:
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": index.step,
        "meta": index.meta,
        "files": index.files,
        "tensors": {key: entry.to_json() for key, entry in index.tensors.items()},
    }
    body["crc32"] = zlib.crc32(json.dumps(body).encode())
    (path / INDEX).write_text(json.dumps(body, indent=1))
    sync(path / INDEX)


def commit(partial: Path, final: Path) -> None:
    """Make the written folder the checkpoint, in one rename; the only step that others can see."""
    sync(partial)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def checksum(values: Tensor) -> int:
    """CRC-32 of the bytes of a flat CPU tensor."""
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().data)


# Reading


def committed(folder: Path) -> list[Path]:
    """The checkpoint folders in `folder`, the highest step first; one that was being replaced after its successor."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name = re.fullmatch(r"step_(\d+)|\.step_(\d+)\.replaced", path.name)
        if name:
            found.append((int(name[1] or name[2]), name[1] is not None, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def check_complete(path: Path) -> dict[str, Any]:
    """The content of `index.json`, if it is whole and every file has the size it should; contents stay unread.

    Raises ConfigError naming each missing, cut or damaged file.
    """
    try:
        body: dict[str, Any] = json.loads((path / INDEX).read_text())
        whole = body.pop("crc32") == zlib.crc32(json.dumps(body).encode())
    except FileNotFoundError:
        raise ConfigError(f"checkpoint={path}: not complete, {INDEX} is missing; {_advice(path)}") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # not JSON, or not an object
        whole = False
    if not whole:
        raise ConfigError(f"checkpoint={path / INDEX}: damaged; {_advice(path)}")
    outside = [file for file in body["files"] if Path(file).name != file]
    if outside:
        raise ConfigError(f"checkpoint={path / INDEX}: names {outside[0]}, which is not in its folder; {_advice(path)}")
    wrong = [problem for file, size in body["files"].items() if (problem := _size_problem(path / file, size))]
    if wrong:
        raise ConfigError("\n".join(f"checkpoint={each}; {_advice(path)}" for each in wrong))
    return body


def read_index(path: Path) -> Index:
    """What a complete checkpoint holds. Raises ConfigError as `check_complete`, and for another format version."""
    body = check_complete(path)
    if (body["format"], body["version"]) != (FORMAT, VERSION):
        found = f"{body['format']!r} version {body['version']}"
        raise ConfigError(f"checkpoint={path}: is {found}; this engine reads {FORMAT!r} version {VERSION}")
    tensors = {key: Entry.from_json(entry) for key, entry in body["tensors"].items()}
    unknown = {stored.file for entry in tensors.values() for stored in entry.ranges} - body["files"].keys()
    if unknown:
        raise ConfigError(f"checkpoint={path / INDEX}: damaged, {min(unknown)} is not among its files; {_advice(path)}")
    return Index(body["step"], body["meta"], body["files"], tensors)


def _size_problem(path: Path, size: int) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    found = path.stat().st_size
    return None if found == size else f"{path}: damaged, {found:,} bytes in place of {size:,}"


def read_tensors(path: Path, copies: Iterable[Copy]) -> None:
    """Do `copies` out of the file `path`. Raises ConfigError naming it when a stored range is not what was written."""
    try:
        with safe_open(path, framework="pt") as file:
            for copy in copies:
                values = file.get_tensor(copy.key)
                _check(values, copy)
                copy.target.copy_(values[copy.skip : copy.skip + copy.target.numel()])
    except (OSError, SafetensorError, _DamagedError) as error:
        raise ConfigError(f"checkpoint={path}: damaged ({error}); {_advice(path.parent)}") from error


class _DamagedError(Exception):
    """Bytes that are not those that were written."""


def _check(values: Tensor, copy: Copy) -> None:
    stored = copy.stored
    same_type = values.dtype == getattr(torch, copy.dtype) and tuple(values.shape) == (stored.end - stored.start,)
    if not same_type or checksum(values) != stored.crc32:
        raise _DamagedError(f"{copy.key} is not as it was written")


def _advice(path: Path) -> str:
    return f"remove {path} to go on from the checkpoint before it"
