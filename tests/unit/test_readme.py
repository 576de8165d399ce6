"""The README's commands that need no folder of the reader's own are accepted as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_engine.cli.plan import PlanConfig
from moe_engine.cli.plan_dry import job
from moe_engine.config.load import load
from moe_engine.config.validate import resolve, validate

README = Path(__file__).parents[2] / "README.md"
COMMANDS = [line.split()[1:] for line in README.read_text().splitlines() if line.startswith("moe-engine ")]
NOT_HERE = ("--multirun", "data.text_paths=", "small_hf/")


def _of(command: str) -> list[list[str]]:
    return [words for name, *words in COMMANDS if name == command and not any(n in w for n in NOT_HERE for w in words)]


@pytest.mark.parametrize("words", _of("train"), ids=" ".join)
def test_what_is_to_be_trained_is_a_valid_job(words: list[str]) -> None:
    config = load("train", words)
    validate(config)
    resolve(config)


@pytest.mark.parametrize("words", _of("plan"), ids=" ".join)
def test_what_is_to_be_planned_is_a_valid_job(words: list[str]) -> None:
    job(load("plan", words, PlanConfig))


def test_the_readme_shows_each_of_these_commands() -> None:
    assert len(_of("train")) >= 4 and len(_of("plan")) == 3
