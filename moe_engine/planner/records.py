"""Records of `moe-engine bench`, as far as a plan has use for them: read by their format, without the benchmarks.

A record is a folder with results.jsonl, a result a line (`bench/record.py` has the fields), and machine.json, where the
processor's own limits were measured before. Only right results with samples become rows.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.config.errors import ConfigError

FORMAT = 1
LINES = "results.jsonl"


@dataclass(frozen=True)
class Row:
    """A timed candidate. seconds: the median of its samples; figures, config: as the benchmark wrote them."""

    benchmark: str
    case: str
    candidate: str
    seconds: float
    figures: Mapping[str, Any]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """One benchmark's folder. machine: what machine.json says, empty where there is none."""

    folder: Path
    rows: tuple[Row, ...]
    machine: Mapping[str, Any]

    @property
    def gpu(self) -> bool:
        """Whether the machine has one: what a CPU did there is not the card's."""
        return bool(self.machine.get("gpu"))


def is_records(path: Path) -> bool:
    """Whether a path names records, and not a table of efficiencies."""
    return path.is_dir() or path.suffix == ".jsonl"


def read_records(path: Path) -> list[Record]:
    """The record at `path` (its folder or its results.jsonl), or those in the folders inside it, by name.

    Raises ConfigError naming what is no record.
    """
    files = (
        [path] if not path.is_dir() else [path / LINES] if (path / LINES).is_file() else sorted(path.glob(f"*/{LINES}"))
    )
    if not files or not files[0].is_file():
        raise ConfigError(
            f"plan.efficiencies={path}: no {LINES} there nor in a folder inside; name a folder of `moe-engine bench`, "
            "for example plan.efficiencies=bench after `moe-engine bench comm out=bench/comm`"
        )
    return [_record(path, file) for file in files]


def sends_itself(records: Sequence[Record]) -> bool:
    """Whether a machine without a GPU was measured: what its ranks send, the cores that compute send."""
    machines = [record for record in records if record.machine]
    return bool(machines) and not any(record.gpu for record in machines)


def unreadable(path: Path, file: Path, why: str) -> ConfigError:
    """That a file is not what this version's benchmarks write."""
    return ConfigError(
        f"plan.efficiencies={path}: {file}: {why}; run that benchmark again with this version, or name another folder"
    )


def _record(path: Path, file: Path) -> Record:
    rows = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
        try:
            row = _row(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise unreadable(path, file, f"line {number} is no result in format {FORMAT}") from None
        rows += [row] if row else []
    return Record(file.parent, tuple(rows), _machine(path, file.parent / "machine.json"))


def _row(data: dict[str, Any]) -> Row | None:
    """None for a candidate that was wrong or not run. Raises ValueError, TypeError, KeyError, AttributeError."""
    if data.get("format") != FORMAT:
        raise ValueError("another format")
    samples, names = data["samples"], (data["benchmark"], data["case"], data["candidate"])
    figures, config = data["figures"], data["config"]
    if (
        not all(isinstance(name, str) for name in names)
        or not isinstance(figures, dict)
        or not isinstance(config, dict)
    ):
        raise ValueError("names are text, figures and config have names")
    if not all(type(sample) in (int, float) and 0 < sample < math.inf for sample in samples):
        raise ValueError("samples are positive seconds")
    if not samples or not data["verdict"]["passed"]:
        return None
    return Row(*names, statistics.median(samples), figures, config)


def _machine(path: Path, file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        machine = json.loads(file.read_text(errors="replace"))
    except ValueError:
        machine = None
    if not isinstance(machine, dict):
        raise unreadable(path, file, "no description of a machine")
    return machine
