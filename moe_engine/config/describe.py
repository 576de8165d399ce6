"""The options with their defaults and a line each, from the schema itself: its comments are the only text there is.

An option's line is the comment behind it; where there is none, the comment lines right above it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass

from moe_engine.config import strict

_FIELD = re.compile(r"    (?P<name>\w+): [^#]*?(?:#\s*(?P<comment>.*))?")


def option_lines(schema: type, prefix: str = "") -> Iterator[str]:
    """For each section of `schema` a heading, for each option `name=default` and its line.

    A section inside a section goes on under the same heading.
    """
    hints = typing.get_type_hints(schema)
    comments = _comments(schema)
    for item in fields(schema):
        if is_dataclass(hints[item.name]):
            section = typing.cast(type, hints[item.name])
            if not prefix:
                yield ""
                yield f"{item.name}: {_first_line(section)}"
            yield from option_lines(section, f"{prefix}{item.name}.")
        else:
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            given = strict.shown(f"{prefix}{item.name}", "" if default is MISSING else default)
            line = f"  {given:<32}  {comments.get(item.name, '')}".rstrip()
            yield from textwrap.wrap(line, 120, subsequent_indent=" " * 36)


def _comments(schema: type) -> dict[str, str]:
    """The comment of each option of a section."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(schema).splitlines():
        field = _FIELD.fullmatch(line)
        if field:
            found[field["name"]] = field["comment"] or " ".join(above)
        above = [*above, line.strip("# ")] if line.startswith("    #") else []
    return found


def _first_line(section: type) -> str:
    """What a section is for, without the words that name it."""
    line = (inspect.getdoc(section) or "").partition("\n")[0]
    return re.sub(r"^Section `\w+`[:.]\s*", "", line).rstrip(".")
