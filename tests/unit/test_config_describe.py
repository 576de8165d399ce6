"""The help of `train` names every option with its default and a line of its own, in sections."""

from __future__ import annotations

import re

from moe_engine.config import strict
from moe_engine.config.describe import option_lines
from moe_engine.config.schema import Config


def test_every_option_has_its_default_and_a_line() -> None:
    lines = {line.split("=")[0].strip(): line for line in option_lines(Config) if re.match(r"  \w+(\.\w+)+=", line)}
    options = strict.options(Config)
    assert lines.keys() == options.keys()
    assert [name for name, line in lines.items() if not re.match(r"  \S.*? {2,}\S", line)] == []
    assert lines["optim.clip"].endswith("largest global gradient norm; 0 turns clipping off")
    assert "optim.clip=1.0 " in lines["optim.clip"]
    assert lines["pipeline.stages"].split("  ")[-1].startswith("What each stage holds"), "the comment above the option"
    assert max(map(len, option_lines(Config))) <= 120


def test_sections_have_their_line() -> None:
    headings = [line for line in option_lines(Config) if line and not line.startswith(" ")]
    assert [line.partition(":")[0] for line in headings] == list(
        dict.fromkeys(n.split(".")[0] for n in strict.options(Config))
    )
    assert all(len(line.partition(": ")[2]) > 10 for line in headings)
