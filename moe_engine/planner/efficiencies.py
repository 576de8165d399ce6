"""The table of fitted efficiencies, one CSV file: six numbers for each card, format and software, and for releases of a
software a factor on the time of models with experts."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moe_engine.config.errors import ConfigError
from moe_engine.planner.hardware import Efficiency
from moe_engine.planner.many import NAMES

Group = tuple[str, str, str]  # card, format, software
ANY = "any"  # card and format of a release
COLUMNS = ("card", "format", "software", "year", "dense", "experts", *NAMES, "time")
ENOUGH = 10  # rows with which the newest software is preferred


@dataclass(frozen=True)
class Known:
    """Efficiencies; on how many measured configurations of dense models, and of models with experts, they rest; year
    of the software."""

    efficiency: Efficiency
    dense: int
    experts: int
    year: int = 0


@dataclass(frozen=True)
class Table:
    """Efficiencies by group; factors on time by software and release."""

    groups: Mapping[Group, Known]
    releases: Mapping[str, float] = field(default_factory=dict)


def write_efficiencies(path: Path, table: Table) -> None:
    """Write the table."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for group, known in sorted(table.groups.items()):
            values = [f"{getattr(known.efficiency, name):.4g}" for name in NAMES]
            writer.writerow([*group, known.year, known.dense, known.experts, *values, ""])
        for release, factor in sorted(table.releases.items()):
            writer.writerow([ANY, ANY, release, "", "", "", *[""] * len(NAMES), f"{factor:.4g}"])


def read_efficiencies(rows: Sequence[Mapping[str, str]], path: Path) -> Table:
    """The table from its rows; `path` is where they are from. Raises ConfigError where they are no such table."""
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise _no_table(path, f"the column {missing[0]} is missing" if rows else "has no rows")
    try:
        groups = {
            (row["card"], row["format"], row["software"]): Known(
                Efficiency(**{name: float(row[name]) for name in NAMES}),
                *(int(row[name]) for name in ("dense", "experts", "year")),
            )
            for row in rows
            if not row["time"]
        }
        return Table(groups, {row["software"]: float(row["time"]) for row in rows if row["time"]})
    except (ValueError, TypeError) as error:  # TypeError: a line that ends early
        raise _no_table(path, f"a number is missing or none ({error})") from None


def _no_table(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"plan.efficiencies={path}: {why}; use a table that `plan fit=measured.csv out=efficiencies.csv` wrote, or a "
        "folder of `moe-engine bench`"
    )


def efficiency_of_card(
    table: Table, card: str, compute: str, software: str, default: Efficiency, experts: bool
) -> tuple[Efficiency, str]:
    """The efficiencies of a card and where they come from: of the software named, or its release; else of the newest
    with enough rows of such models (`experts`: with experts), or that with most; else the defaults."""
    family = card.split()[0]
    found = {group[2]: known for group, known in table.groups.items() if group[:2] == (family, compute)}
    named = [name for name in found if software and software in (name, *_releases(table, name))]
    if not named and (software or not found):
        return default, f"defaults: nothing measured for {family} in {compute} with {software or 'any software'}"

    def preferred(name: str) -> tuple[int, int, str]:
        rows = found[name].experts if experts else found[name].dense
        return (found[name].year if rows >= ENOUGH else 0, rows, name)

    name = named[0] if named else max(found, key=preferred)
    known, factor = found[name], table.releases.get(software, 1.0) if experts else 1.0
    words = f"fitted on {known.dense + known.experts} configurations of {name}"
    if factor != 1.0:
        words += f", times {factor:.2f} for {software}"
    return scaled(known.efficiency, factor), words


def scaled(efficiency: Efficiency, factor: float) -> Efficiency:
    """Efficiencies with which all takes `factor` times as long."""
    rates = {name: getattr(efficiency, name) / factor for name in NAMES if name != "block_us"}
    return replace(efficiency, **rates, block_us=efficiency.block_us * factor)


def _releases(table: Table, software: str) -> list[str]:
    return [name for name in table.releases if name.startswith(f"{software} ")]
