"""A rank's ways to the experts of its group, and a message on such a way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from moe_engine.config.errors import ConfigError
from moe_engine.distributed.collectives import Communicator, Pending
from moe_engine.ops.window import Window

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Windows:
    """Symmetric memory of one expert-parallel group: for rows, and for their numbers.

    most_rows, most_choices: rows and (token, expert) pairs that a rank takes in one exchange at most.
    """

    rows: Window
    counts: Window
    most_rows: int
    most_choices: int

    def check(self) -> None:
        """Wait for the device. Raises ConfigError if some rank had no room for what it was sent since the start, and
        RankLostError if one does not answer."""
        self.counts.wait()
        self.rows.wait()
        needed = self.rows.most_needed()
        if needed > self.most_choices:
            raise ConfigError(
                f"moe.recv_capacity={self.most_choices}: a rank was to take {needed} (token, expert) pairs at once, "
                f"and no row was sent; use moe.recv_capacity={needed} or more, or 0"
            )
        self.rows.check()
        self.counts.check()


@dataclass(frozen=True)
class Links:
    """Communicators of one expert-parallel group, and how rows use them.

    rows, counts: all ranks of the group, for rows and for their numbers (the same one, where there is no other);
    exact: a row per (token, expert) in place of one per (token, rank);
    fp8: rows go to the experts in fp8, and so do the gradients of what came back; with one rank, too, so that numbers
    do not depend on the layout. What the experts made and the gradients of rows return as they are;
    nodes: between nodes (the ranks with this one's place on theirs) and within this one; None: one hop for all;
    max_recv_rows: the most that a rank holds at once of what it received, see `further`; 0: what comes;
    windows: rows are put by kernels, and the communicators are not used.
    """

    rows: Communicator
    counts: Communicator
    exact: bool = False
    fp8: bool = False
    nodes: tuple[Communicator, Communicator] | None = None
    max_recv_rows: int = 0
    windows: Windows | None = None

    @property
    def size(self) -> int:
        return self.rows.size


class Journey(Generic[T]):
    """A message on its way: `wait()` gives what came of it, and may be called again.

    first: what is started; second: starts the next exchange with the result of the first, on a way of two hops;
    finish: makes of the last result what is wanted.
    """

    def __init__(
        self, first: Pending, finish: Callable[[Tensor], T], second: Callable[[Tensor], Pending] | None = None
    ) -> None:
        self._pending, self._finish, self._second = first, finish, second
        self._done: list[T] = []

    def then(self, finish: Callable[[T], U]) -> Journey[U]:
        """This journey, with something more to make of its result."""
        before = self._finish
        return Journey(self._pending, lambda x: finish(before(x)), self._second)

    def advance(self) -> None:
        """Stand still until the last hop can be started, and start it."""
        if self._second is not None:
            second, self._second = self._second, None
            self._pending = second(self._pending.wait())

    def wait(self) -> T:
        if not self._done:
            self.advance()
            self._done.append(self._finish(self._pending.wait()))
        return self._done[0]


def as_it_is(x: Tensor) -> Tensor:
    """The `finish` of a journey whose last result is what is wanted."""
    return x
