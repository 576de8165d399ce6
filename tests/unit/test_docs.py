"""The pages of docs/: commands have options that there are, links lead somewhere, the index of docs/design is whole."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from moe_engine.cli.bench import BENCHMARKS
from moe_engine.cli.convert import ConvertConfig
from moe_engine.cli.plan import PlanConfig
from moe_engine.config.load import load
from moe_engine.config.schema import Config

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
SCHEMAS = {"train": Config, "plan": PlanConfig, "convert": ConvertConfig}
# In code blocks, where a line may go on after a backslash, and within sentences, where it may be broken.
COMMAND = re.compile(r"^(?: {4})?moe-engine ((?:[^\n\\]|\\\n)+)|`moe-engine ([^`]+)`", re.MULTILINE)
LEFT_TO_THE_READER = re.compile(r"…|<|small_hf/")


def _commands(page: Path) -> list[list[str]]:
    """The words of those that are written out on a page, and have options."""
    found = ["".join(groups).partition("#")[0].replace("\\\n", " ") for groups in COMMAND.findall(page.read_text())]
    return [text.split() for text in found if "=" in text and not LEFT_TO_THE_READER.search(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if _commands(page)], ids=lambda page: page.stem)
def test_commands_have_options_that_there_are(page: Path) -> None:
    for name, *words in _commands(page):
        if name == "bench":
            entry = BENCHMARKS[words.pop(0)]
            load(entry.root, words, importlib.import_module(entry.module).SCHEMA)
        else:
            load(name, words, SCHEMAS[name])


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_of_design_is_in_its_index() -> None:
    index = ROOT / "docs/design/README.md"
    listed = re.findall(r"^\| \[\w+\]\((\w+\.md)\)", index.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in index.parent.glob("*.md") if page != index)
