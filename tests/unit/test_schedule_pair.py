"""The table of the overlapped pair: its orders written out, and every way to break one refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_engine.schedule.check import ScheduleError
from moe_engine.schedule.pair import (
    BLOCKING,
    LAUNCHING,
    ONE_AFTER_THE_OTHER,
    WITHOUT_COURIER,
    Exchange,
    Step,
    check_pair,
    exchanges,
    needs,
    phases,
    steps,
)
from moe_engine.schedule.schedules import schedule

ORDERS = [BLOCKING, WITHOUT_COURIER, LAUNCHING]
ALL_ORDERS = [*ORDERS, ONE_AFTER_THE_OTHER]
BLOCKS = st.integers(0, 4)


def words(found: list[Step]) -> str:
    return " ".join(f"{step.phase}({step.part})" for step in found)


def test_the_published_launch_order() -> None:
    """DeepSeek's trace of one layer, between the tails of two stages of one block."""
    assert words(steps(LAUNCHING, 1, 1)) == (
        "tail(B) combine(B) attn(F) mlp(B) dispatch(F) dispatch(B) mlp(W) mlp(F) attn(B) attn(W) combine(F) tail(F)"
    )


def test_the_next_combine_of_the_backward_starts_before_the_forward_waits_for_its_own() -> None:
    for order in ORDERS:
        found = steps(order, 2, 2)
        assert found.index(Step("combine", "B", 0)) < found.index(Step("attn", "F", 1))
        assert needs(Step("attn", "F", 1), 2) == [Step("combine", "F", 0)]


def test_blocking_starts_every_exchange_right_after_what_it_needs() -> None:
    found = steps(BLOCKING, 3, 3)
    for place, step in enumerate(found):
        if step.phase in ("dispatch", "combine"):
            assert needs(step, 3) == [found[place - 1]]


@given(forward=BLOCKS, backward=BLOCKS, order=st.sampled_from(ALL_ORDERS))
def test_stages_of_any_sizes_pair(forward: int, backward: int, order: str) -> None:
    found = steps(order, forward, backward)
    assert len(found) == 4 * forward + 6 * backward + 2
    for part, blocks in (("F", forward), ("B", backward)):
        own = [step for step in found if (step.part == "F") == (part == "F")]
        compute = [step for step in own if step.part == part and step.phase in ("attn", "mlp")]
        assert [step.block for step in compute] == sorted((step.block for step in compute), reverse=part == "B")
        assert len(own) == len(phases(blocks, backward=part == "B"))


@given(forward=st.integers(1, 3), backward=st.integers(1, 3), order=st.sampled_from(ALL_ORDERS), data=st.data())
def test_a_phase_too_early_missing_or_twice_is_refused(
    forward: int, backward: int, order: str, data: st.DataObject
) -> None:
    found = steps(order, forward, backward)
    place = data.draw(st.integers(0, len(found) - 1))
    step, rest = found[place], found[:place] + found[place + 1 :]
    blocks = forward if step.part == "F" else backward
    with pytest.raises(ScheduleError, match="lacks|needs"):
        check_pair(rest, forward, backward)
    with pytest.raises(ScheduleError, match="one more"):
        check_pair([*found, step], forward, backward)
    if needs(step, blocks):
        too_early = rest.index(needs(step, blocks)[0])
        with pytest.raises(ScheduleError, match="which it needs"):
            check_pair([*rest[:too_early], step, *rest[too_early:]], forward, backward)


def test_an_order_of_its_own_that_is_not_legal_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"mlp\(F\)0 comes before dispatch\(F\)0, which it needs"):
        steps("attn(F) mlp(F) dispatch(F) combine(F) mlp(B) dispatch(B) mlp(W) attn(B) combine(B) attn(W)", 1, 1)


def test_exchanges_of_a_rank_follow_from_its_list() -> None:
    """F0, then the pair [F1&B0], then B1, on a stage of one block."""
    (actions,) = schedule("overlapped_1f1b", 1, 2)
    found = [(e.phase, e.part, e.micro_batch) for e in exchanges(actions, {0: 1}, BLOCKING)]
    assert found == [
        ("counts", "F", 0), ("dispatch", "F", 0), ("combine", "F", 0),
        ("combine", "B", 0), ("counts", "F", 1), ("dispatch", "F", 1), ("dispatch", "B", 0), ("combine", "F", 1),
        ("combine", "B", 1), ("dispatch", "B", 1),
    ]  # fmt: skip
    plain = list(exchanges(actions, {0: 1}, None))
    assert plain[3:6] == [Exchange(phase, "F", 0, 0, 1) for phase in ("counts", "dispatch", "combine")]
