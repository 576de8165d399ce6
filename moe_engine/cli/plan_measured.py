"""`moe-engine plan validate=FILE` and `plan fit=FILE`: the planner against published measurements."""

from __future__ import annotations

from pathlib import Path

from moe_engine.config.errors import ConfigError
from moe_engine.config.load import choices, conf_folder, from_yaml
from moe_engine.planner.calibrate import fitted
from moe_engine.planner.efficiencies import write_efficiencies
from moe_engine.planner.hardware import ClusterConfig
from moe_engine.planner.measured import Tables, read_feasibility, read_measurements, read_table
from moe_engine.planner.report import Table
from moe_engine.planner.validate import check_feasibility, check_memory, validate
from moe_engine.planner.validation_report import feasibility_table, memory_table, validation_tables

MEASURED = ("source", "model", "gpu", "gpus", "tp", "pp", "iter_time_s", "tokens_per_s_per_gpu", "note")
FEASIBLE = ("layers", "hidden", "tp", "pp", "dp", "zero_or_fsdp", "micro_batch", "fits")


def validation(path: Path, cluster: ClusterConfig) -> list[Table]:
    """The tables for a file of measured steps, or of layouts that fitted or not (on cards of `cluster`)."""
    rows = read_table(path)
    columns = set(rows[0]) if rows else set()
    if columns.issuperset(FEASIBLE):
        return [feasibility_table(check_feasibility(read_feasibility(rows, cluster)))]
    _check_columns(path, columns)
    used, dropped = read_measurements(rows, published())
    tables = validation_tables(validate(len(rows), used, dropped))
    checks = check_memory(used)
    return [*tables, memory_table(checks)] if checks else tables


def calibration(path: Path, out: Path) -> list[Table]:
    """Fit efficiencies on all usable rows of a file and write them to `out`."""
    rows = read_table(path)
    _check_columns(path, set(rows[0]) if rows else set())
    used, dropped = read_measurements(rows, published())
    if not used:
        why = f", {dropped[0].reason}" if dropped else ""
        raise ConfigError(f"fit={path}: none of {len(rows)} rows can be used{why}; use a table of measured steps")
    found = fitted(used)
    write_efficiencies(out, found)
    names = list(vars(next(iter(found.groups.values())).efficiency))
    header = ["card", "format", "software", "dense", "with experts", *names]
    cells = [
        [*group, str(known.dense), str(known.experts), *(f"{getattr(known.efficiency, name):.3g}" for name in names)]
        for group, known in sorted(found.groups.items())
    ]
    releases = [[name, f"{factor:.2f}"] for name, factor in sorted(found.releases.items())]
    tables = [Table(f"Efficiencies fitted on {len(used)} rows ({len(dropped)} dropped)", header, cells)]
    if releases:
        title = "Releases: time of models with experts, over others of the same software"
        tables.append(Table(title, ["", "factor"], releases))
    return tables


def published() -> Tables:
    """What is known beside measurements: cards of `conf/cluster`, models and sources of `conf/published`."""
    files = {name: conf_folder() / "cluster" / f"{name}.yaml" for name in choices("cluster", "plan")}
    cards = {name: file for name, file in files.items() if "defaults:" not in file.read_text()}
    clusters = {name: from_yaml(file, ClusterConfig) for name, file in cards.items()}
    folder = conf_folder() / "published"
    models, sources, recipes = (read_table(folder / f"{name}.csv") for name in ("models", "sources", "recipes"))
    return Tables(clusters, models, sources, recipes)


def _check_columns(path: Path, columns: set[str]) -> None:
    missing = [name for name in MEASURED if name not in columns]
    if missing:
        raise ConfigError(
            f"{path}: the column {missing[0]} is missing; measured steps have {', '.join(MEASURED)} and more, "
            f"layouts that fitted or not have {', '.join(FEASIBLE)}"
        )
