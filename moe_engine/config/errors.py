"""The one exception for a user's mistake: the command line prints its message alone and exits with code 2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHOWN = 8  # of a long list


class ConfigError(ValueError):
    """A wrong value, file or layout.

    The message holds `name=value`, the rule it breaks, and a value that works. Several mistakes found
    together are one error, a line each.
    """

    @property
    def lines(self) -> list[str]:
        """The mistakes, one by one."""
        return str(self).splitlines()

    def about(self, what: str) -> ConfigError:
        """The same with `what` before each line: a file or an option that the mistakes are in."""
        return ConfigError("\n".join(what + line for line in self.lines))


def there_are(known: Iterable[str], close: Sequence[str]) -> str:
    """The names to choose from, after the one that may be meant: `did you mean train? There are train, plan`."""
    return f"{f'did you mean {close[0]}? There are' if close else 'there are'} {', '.join(known)}"


def in_one_line(problems: Sequence[str]) -> str:
    """Some of many mistakes found together in a file, and how many more there are."""
    more = len(problems) - SHOWN
    return "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
