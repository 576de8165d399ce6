"""Sends are asked after once the schedule says that they have arrived, and no earlier."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_engine.distributed.collectives import Pending
from moe_engine.pipeline.sends import Sends
from moe_engine.schedule import schedules
from moe_engine.schedule.action import Item, Output


class Work:
    """As Gloo's: finished when it has been waited for."""

    def __init__(self) -> None:
        self.finished = False

    def is_completed(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self.finished = True


def started(sends: Sends, output: Output, micro_batch: int, user: int, target: int) -> Any:
    work = Work()
    sends.add(Pending(torch.zeros(1), work), output, micro_batch, user, target)
    return work


def test_an_answer_says_that_what_it_needed_has_arrived() -> None:
    sends = Sends(schedules.schedule("1f1b", 2, 4))  # rank 1: F0 B0 F1 B1 …
    works = [started(sends, Output.ACTIVATION, m, user=1, target=1) for m in range(3)]
    sends.heard(Item(Output.GRADIENT, 0, 1), source=1)
    assert [work.finished for work in works] == [True, False, False]
    sends.heard(Item(Output.GRADIENT, 2, 1), source=1)
    assert all(work.finished for work in works)


def test_a_gradient_has_arrived_when_a_later_activation_comes() -> None:
    sends = Sends(schedules.schedule("1f1b", 2, 4))  # rank 0: F0 F1 B0 F2 B1 F3 …
    work = started(sends, Output.GRADIENT, 0, user=0, target=0)
    sends.heard(Item(Output.ACTIVATION, 1, 0), source=0)
    assert not work.finished
    sends.heard(Item(Output.ACTIVATION, 2, 0), source=0)
    assert work.finished


def test_other_ranks_say_nothing_of_a_send_and_the_end_waits_for_it() -> None:
    sends = Sends(schedules.schedule("1f1b", 3, 4))
    work = started(sends, Output.ACTIVATION, 0, user=2, target=2)
    sends.heard(Item(Output.ACTIVATION, 3, 0), source=0)
    assert not work.finished
    sends.wait()
    assert work.finished


@pytest.mark.parametrize("name", schedules.names())
def test_every_message_of_a_schedule_has_its_turn(name: str) -> None:
    sends = Sends(schedules.schedule(name, 2, 8))
    stages = schedules.num_stages(name, 2)
    for micro_batch in range(8):
        for user in range(1, stages):
            assert not started(sends, Output.ACTIVATION, micro_batch, user, target=0).finished
            assert not started(sends, Output.GRADIENT, micro_batch, user - 1, target=0).finished
