"""The one exception for a user's mistake: the command line prints its message alone and exits with code 2."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 8  # of a long list


class ConfigError(ValueError):
    """A wrong value, file or layout.

    The message holds `name=value`, the rule it breaks, and a value that works. Several mistakes found
    together are one error, a line each.
    """


def in_one_line(problems: Sequence[str]) -> str:
    """Some of many mistakes found together in a file, and how many more there are."""
    more = len(problems) - SHOWN
    return "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
