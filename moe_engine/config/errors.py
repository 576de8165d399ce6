"""The one exception for a user's mistake: the command line prints its message alone and exits with code 2."""

from __future__ import annotations


class ConfigError(ValueError):
    """A wrong value, file or layout.

    The message holds `name=value`, the rule it breaks, and a value that works. Several mistakes found
    together are one error, a line each.
    """
