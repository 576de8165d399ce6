"""The tool that rules are written with: it collects what is broken, so that all mistakes are shown at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moe_engine.config import strict
from moe_engine.config.errors import ConfigError, there_are


class Rules:
    """Collects the broken rules of one configuration, and which options they were about."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.problems: list[str] = []
        self._refused: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """The value of a dotted option."""
        value = self.config
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def sound(self, *names: str) -> bool:
        """Whether none of these options is refused so far, so that a rule may calculate with them."""
        return not self._refused.intersection(names)

    def refuse(self, name: str, rule: str) -> None:
        self._refused.add(name)
        self.problems.append(f"{strict.shown(name, self[name])}: {rule}")

    def at_least(self, smallest: int, *names: str) -> None:
        for name in names:
            if not self[name] >= smallest:
                self.refuse(name, f"must be {smallest} or more, for example {name}={smallest}")

    def at_most(self, largest: int, *names: str) -> None:
        for name in names:
            if self[name] > largest:
                self.refuse(name, f"must be {largest} or less, for example {name}={largest}")

    def positive(self, example: float, *names: str) -> None:
        for name in names:
            if not self[name] > 0:
                self.refuse(name, f"must be larger than 0, for example {name}={example}")

    def fraction(self, example: float, *names: str) -> None:
        for name in names:
            if not 0 <= self[name] < 1:
                self.refuse(name, f"must be at least 0 and less than 1, for example {name}={example}")

    def one_of(self, name: str, values: Iterable[str]) -> None:
        values = list(values)
        if self[name] not in values:
            close = strict.closest(str(self[name]), values)
            self.refuse(name, f"no such choice; {there_are(values, close)}")

    def finish(self) -> None:
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def nearest(value: int, candidates: list[int]) -> int:
    return min(candidates, key=lambda candidate: (abs(candidate - value), candidate))
