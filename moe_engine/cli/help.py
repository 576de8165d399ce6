"""What the commands' help texts have in common."""

from __future__ import annotations

import textwrap

from moe_engine.config.load import choices, groups

INDENT = " " * 16


def available(command: str) -> str:
    """The groups of ready choices of a command, one a paragraph: `  pipeline=     1f1b | dualpipe | …`."""
    lines = [f"  {group + '=':<13} {' | '.join(choices(group, command))}" for group in groups(command)]
    return "\n".join(textwrap.fill(line, 116, subsequent_indent=INDENT) for line in lines)
