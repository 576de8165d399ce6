"""The page of failures names tests that exist, and misses no kind."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "design" / "failures.md"
KINDS = 43
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_every_kind_has_a_row_with_tests() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert [int(number) for number, *_ in rows] == list(range(1, KINDS + 1))
    assert all(re.fullmatch(r"`[\w/]+\.py::\w+`(, `[\w/]+\.py::\w+`)*", shown) for *_, shown in rows)


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE.read_text()))
    assert len(named) > KINDS
    missing = []
    for file, name in sorted(named):
        path = TESTS / file.removeprefix("tests/")
        if not path.exists() or (name and not re.search(rf"^ *def {name}\(", path.read_text(), re.MULTILINE)):
            missing.append(f"{file}::{name}")
    assert not missing, f"{PAGE.name} names what is not there: {missing}"
