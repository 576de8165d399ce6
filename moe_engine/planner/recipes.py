"""What publishers' recipes say of measured runs beyond their tables of results: a table of rules, later over earlier.

A rule fits a row by a part of its source's name, the start of its model's, its card, its format and its release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Row = Mapping[str, str]
SETTINGS = ("recompute", "graphs", "ep_hidden", "dispatch", "fused_biases")


def recipe_of(row: Row, card: str, compute: str, recipes: Sequence[Row]) -> dict[str, str]:
    """The settings that recipes give for a row of measurements, on `card`, with products in `compute`."""
    name, release = re.sub(r"[^a-z0-9]", "", row["model"].lower()), release_of(row)
    found: dict[str, str] = {}
    for recipe in recipes:
        fits = recipe["match"] in row["source"] and any(map(name.startswith, recipe["models"].split()))
        fits &= card.split()[0] in recipe["cards"].split() and compute in recipe["formats"].split()
        if fits and recipe["since"] <= release <= recipe["until"]:
            found |= {setting: recipe[setting] for setting in SETTINGS if recipe[setting]}
    return found


def release_of(row: Row) -> str:
    """Year and month of the software that a row's source states, else nothing."""
    version = re.search(r"release (\d\d\.\d\d)", row["source"])
    return version[1] if version else ""
