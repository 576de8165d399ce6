"""The table of fitted efficiencies: six numbers for each card, format and software, in one CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_engine.planner.fit import NAMES
from moe_engine.planner.hardware import Efficiency

Group = tuple[str, str, str]  # card, format, software


@dataclass(frozen=True)
class Known:
    """Efficiencies, and on how many measured configurations they rest."""

    efficiency: Efficiency
    rows: int


def write_efficiencies(path: Path, found: Mapping[Group, Known]) -> None:
    """Write the table."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["card", "format", "software", "rows", *NAMES])
        for group, known in sorted(found.items()):
            values = [f"{getattr(known.efficiency, name):.4g}" for name in NAMES]
            writer.writerow([*group, known.rows, *values])


def read_efficiencies(rows: Sequence[Mapping[str, str]]) -> dict[Group, Known]:
    """The table from its rows."""
    return {
        (row["card"], row["format"], row["software"]): Known(
            Efficiency(**{name: float(row[name]) for name in NAMES}), int(row["rows"])
        )
        for row in rows
    }


def efficiency_of_card(
    known: Mapping[Group, Known], card: str, compute: str, software: str, default: Efficiency
) -> tuple[Efficiency, str]:
    """The efficiencies of a card and where they come from: of the software named, else of that with most rows, else
    the defaults."""
    family = card.split()[0]
    found = {group[2]: entry for group, entry in known.items() if group[:2] == (family, compute)}
    if software in found:
        return found[software].efficiency, f"fitted on {found[software].rows} configurations of {software}"
    if software or not found:
        return default, f"defaults: nothing measured for {family} in {compute} with {software or 'any software'}"
    name = max(found, key=lambda software: (found[software].rows, software))
    return found[name].efficiency, f"fitted on {found[name].rows} configurations of {name}"
