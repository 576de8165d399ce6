"""`moe-engine train --multirun`: a run for every combination of the values of some options, and a table at the end.

`optim.lr=1e-3,3e-3 train.seed=range(3)` are Hydra's words for several values. Every combination is checked before the
first run starts. Hydra's launcher starts the runs: by default one after the other on this machine; with
`hydra/launcher=submitit_slurm` (the extra `slurm`) each as a Slurm job. A run is the ordinary command in a process of
its own, in the folder <run.dir>/<run.name>/<number>.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from moe_engine.cli import run_folder
from moe_engine.cli.check import layout_lines
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import load
from moe_engine.config.schema import Config

FLAGS = ("--multirun", "-m")
_QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null"]

Check = Callable[[Config], Config]


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep. Called by Hydra's launcher, here or in a job of the cluster, with the number of one."""

    fixed: tuple[str, ...]  # words of every run
    chosen: tuple[tuple[str, ...], ...]  # words of each run
    folder: str

    def __call__(self, config: DictConfig) -> int:
        number = int(config.number)
        print(f"run {number} (of {len(self.chosen)}): {' '.join(self.chosen[number])}", flush=True)
        words = [*self.fixed, *self.chosen[number], f"run.dir={self.folder}", f"run.name={number}"]
        return subprocess.run([sys.executable, "-m", "moe_engine", "train", *words], check=False).returncode


def run(words: Sequence[str], check: Check) -> int:
    """Run the sweep; 0 if all runs have come to their end, else 1. Raises ConfigError before the first run."""
    words = [word for word in words if word not in FLAGS]
    for_hydra = [word for word in words if word.startswith(("hydra/", "hydra."))]
    fixed, swept = _split([word for word in words if word not in for_hydra])
    combinations = list(itertools.product(*swept.values()))
    folder, runs = _checked(fixed, combinations, check)
    _check_launcher(for_hydra)
    sweep = Sweep(tuple(fixed), tuple(combinations), str(folder))
    if any(config.run.check for config in runs):
        for i, (config, chosen) in enumerate(zip(runs, combinations, strict=True)):
            print("\n".join([f"run {i}: {' '.join(chosen)}", *(f"  {line}" for line in layout_lines(config))]))
        return 0
    numbers = ",".join(map(str, range(len(combinations))))
    with _command_line("--multirun", f"+number={numbers}", *_QUIET, f"hydra.sweep.dir='{folder}/jobs'", *for_hydra):
        hydra.main(version_base="1.3", config_path=None)(sweep)()
    return _report(folder, list(swept), combinations)


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words with one value, and those with several: for each name, a word for each value."""
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException:
            fixed.append(word)  # for `load` to refuse
            continue
        if override.is_sweep_override():
            swept[override.key_or_group] = [f"{override.key_or_group}={value}" for value in _values(word, override)]
        else:
            fixed.append(word)
    if not swept:
        raise ConfigError("--multirun: no option has several values; write them with commas, optim.lr=1e-3,3e-3 say")
    if "run.name" in swept or "run.dir" in swept:
        raise ConfigError("run.name: a sweep numbers its runs itself, in the folder run.name; use one value")
    return fixed, swept


def _values(word: str, override: Override) -> list[str]:
    """The values of an option. Raises ConfigError for what is a range of numbers, a pattern, or empty."""
    try:
        values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []
    except HydraException:
        values = []
    if not values:
        raise ConfigError(f"{word}: gives no list of values; write them with commas, optim.lr=1e-3,3e-3 say")
    return values


def _checked(fixed: list[str], combinations: list[tuple[str, ...]], check: Check) -> tuple[Path, list[Config]]:
    """The sweep's folder and the configuration of each run. Raises ConfigError with the mistakes of all of them."""
    problems: list[str] = []
    configs: list[Config] = []
    for number, chosen in enumerate(combinations):
        try:
            config = check(load("train", [*fixed, *chosen]))
            folder = Path(config.run.dir) / config.run.name
            config.run.dir, config.run.name = str(folder), str(number)
            if not config.run.check:
                run_folder.check(config)
            configs.append(config)
        except ConfigError as error:
            problems += error.lines
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return folder, configs


def _check_launcher(words: list[str]) -> None:
    """Raises ConfigError for a launcher or an option of it that Hydra does not know."""
    try:
        with initialize(config_path=None, version_base="1.3"):
            compose(overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        hint = "hydra/launcher=basic, or submitit_slurm from the extra `slurm` (pip install 'moe-engine[slurm]')"
        raise ConfigError(f"{' '.join(words)}: {reason}; use {hint}") from None


@contextmanager
def _command_line(*words: str) -> Iterator[None]:
    """Hydra's decorator takes its words from the process's command line."""
    before = sys.argv
    sys.argv = ["moe-engine", *words]
    try:
        yield
    finally:
        sys.argv = before


def _report(folder: Path, names: list[str], combinations: list[tuple[str, ...]]) -> int:
    """Print the table, keep it as sweep.json; 1 if a run has not come to its end."""
    rows = [_result(folder / str(i), chosen) for i, chosen in enumerate(combinations)]
    (folder / "sweep.json").write_text(json.dumps(rows, indent=1) + "\n")
    table = Table("run", *names, "steps", "loss", "validation loss", "tokens/s", title=str(folder))
    for number, row in enumerate(rows):
        values = [word.partition("=")[2] for word in row["options"]]
        figures = [f"{row[key]:,.4g}" if row[key] is not None else "-" for key in ("loss", "validation_loss")]
        speed = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
        state = str(row["steps"]) if row["complete"] else f"{row['steps']}, failed"
        table.add_row(str(number), *values, state, *figures, speed)
    Console().print(table)
    return 0 if all(row["complete"] for row in rows) else 1


def _result(folder: Path, chosen: tuple[str, ...]) -> dict[str, Any]:
    """What a run's folder says: its last step, whether it has come to its end."""
    metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    found: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    return {
        "options": list(chosen),
        "complete": summary.exists(),
        "steps": last["step"] if last else 0,
        "loss": last.get("loss"),
        "validation_loss": found.get("validation_loss"),
        "tokens_per_s": last.get("tokens_per_s"),
    }
