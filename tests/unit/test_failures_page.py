"""The pages that say which tests show what name tests that exist; that of failures misses no kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DESIGN = TESTS.parent / "docs" / "design"
PAGE = DESIGN / "failures.md"
KINDS = 43
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_every_kind_has_a_row_with_tests() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert [int(number) for number, *_ in rows] == list(range(1, KINDS + 1))
    assert all(re.fullmatch(r"`[\w/]+\.py::\w+`(, `[\w/]+\.py::\w+`)*", shown) for *_, shown in rows)


@pytest.mark.parametrize(
    ("page", "least"),
    [
        (PAGE, KINDS),
        (DESIGN / "fp8_tests.md", 50),
        (DESIGN / "expert_parallel_tests.md", 40),
        (DESIGN / "context_parallel_tests.md", 30),
        (DESIGN / "layer_tests.md", 70),
        (DESIGN / "launch_tests.md", 60),
        (DESIGN / "planner_tests.md", 40),
    ],
)
def test_every_named_test_exists(page: Path, least: int) -> None:
    named = set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", page.read_text()))
    assert len(named) > least
    missing = []
    for file, name in sorted(named):
        path = TESTS / file.removeprefix("tests/")
        if not path.exists() or (name and not re.search(rf"^ *def {name}\(", path.read_text(), re.MULTILINE)):
            missing.append(f"{file}::{name}")
    assert not missing, f"{page.name} names what is not there: {missing}"
