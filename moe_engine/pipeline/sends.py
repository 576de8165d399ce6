"""Sends that are under way: each holds its tensor until it is known that the message has arrived.

Gloo never says of a send that it is finished, but when one waits for it; and to wait for a send holds a rank up until
the receiver is there. But the schedule says it: what comes from a rank was made by one of its actions, and by then all
that its earlier actions had needed had come. So a rank asks after a send once it has heard of a later action, and then
it has nothing to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.distributed.collectives import Pending
from moe_engine.schedule.action import Item, Output, outputs
from moe_engine.schedule.check import Lists


@dataclass(frozen=True)
class _Send:
    pending: Pending
    target: int
    turn: int  # of the action that needs it, in the list of `target`


class Sends:
    """The sends of one pass over `lists`."""

    def __init__(self, lists: Lists) -> None:
        self._turn = {
            item: turn for actions in lists for turn, action in enumerate(actions) for item in outputs(action)
        }
        self._sends: list[_Send] = []

    def add(self, pending: Pending, output: Output, micro_batch: int, user: int, target: int) -> None:
        """A send to the pipeline rank `target`, which needs it on the stage `user` to make the same kind of thing."""
        self._sends.append(_Send(pending, target, self._turn[Item(output, micro_batch, user)]))
        self._sends = [each for each in self._sends if not each.pending.done()]

    def heard(self, item: Item, source: int) -> None:
        """`item` has come from the pipeline rank `source`."""
        turn, left = self._turn[item], []
        for each in self._sends:
            if each.target == source and each.turn < turn:
                each.pending.wait()
            else:
                left.append(each)
        self._sends = left

    def wait(self) -> None:
        """For all that is left."""
        for each in self._sends:
            each.pending.wait()
        self._sends = []
