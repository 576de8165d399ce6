"""Every schedule over many sizes: how many actions of each kind, how long, how idle, how much is held at most."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.config.errors import ConfigError
from moe_engine.schedule.action import Action, Kind
from moe_engine.schedule.check import check
from moe_engine.schedule.compare import TEST_ONLY, best, compare, even_fb, share_of_cost
from moe_engine.schedule.schedules import names, num_stages, schedule, stage_of_rank
from moe_engine.schedule.simulate import Cost, formula_bubble, simulate

UNIT = Cost(f=1, b=2, w=1, fb=3)
RANKS = [pp if pp in (2, 3, 4, 8) else pytest.param(pp, marks=pytest.mark.slow) for pp in range(2, 17)]
SPLIT = ("split_1f1b", "zb_h1", "zbv")  # every backward of these is an I and a W


def legal(name: str, pp: int, micro_batches: int) -> bool:
    try:
        schedule(name, pp, micro_batches)
    except ConfigError:
        return False
    return True


def kinds(actions: list[Action]) -> Counter[Kind]:
    return Counter(half.kind for action in actions for half in action.halves())


@pytest.mark.parametrize("pp", RANKS)
@pytest.mark.parametrize("name", names())
def test_counts_makespan_idle_and_peaks(name: str, pp: int) -> None:
    """Work is M micro-batches of every stage; idle time is the formula's wherever the pipeline can fill."""
    sizes = [m for m in (1, 2, pp, 2 * pp, 2 * pp + 2, 3 * pp, 4 * pp + 6) if legal(name, pp, m)]
    assert sizes or (name == "dualpipe" and pp % 2)
    for micro_batches in sizes:
        lists, stages = schedule(name, pp, micro_batches), num_stages(name, pp)
        held = stage_of_rank(name, pp)
        copies = sum(0 in own for own in held)
        report, simulation = check(lists, stages, micro_batches), simulate(lists, stages, UNIT)
        for rank, actions in enumerate(lists):
            work = micro_batches * len(held[rank]) // copies
            found = kinds(actions)
            assert found[Kind.F] == found[Kind.B] + found[Kind.I] == work
            assert found[Kind.W] == found[Kind.I] == (work if name in SPLIT else found[Kind.I])
            assert simulation.makespan == 3 * work + simulation.idle[rank]
            assert report.peak_held[rank] <= report.peak_activations[rank] + report.peak_weight_gradients[rank]
        formula = formula_bubble(name, pp, UNIT)
        if formula is not None and (micro_batches >= 2 * pp - 1 or name in ("gpipe", "1f1b", "interleaved_1f1b")):
            assert simulation.idle == [formula] * pp, (name, pp, micro_batches)


@pytest.mark.parametrize("pp", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("extra", [0, 4, 24])
def test_dualpipe_kinds_of_a_rank(pp: int, extra: int) -> None:
    """From the table of phases: a rank runs q+1 weight gradients late, and pairs in all but fill and drain."""
    half, m = pp // 2, (2 * pp + extra) // 2
    for rank, actions in enumerate(schedule("dualpipe", pp, 2 * m)):
        q = min(rank, pp - 1 - rank)
        outer, inner = half - q - 1, q + 1
        whole = Counter(action.kind for action in actions)
        middle = 1 if outer == 0 else 0
        assert whole[Kind.FB] == 2 * (m - pp + inner) + outer - middle
        assert whole[Kind.W] == whole[Kind.I] == 2 * outer + inner
        assert whole[Kind.F] == 2 * outer + 2 * inner + outer + middle
        assert whole[Kind.B] == outer + inner + middle


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(names()),
    pp=st.integers(1, 16),
    micro_batches=st.integers(1, 48),
    virtual_stages=st.integers(1, 6),
    times=st.tuples(*[st.integers(1, 9)] * 4),
    communication=st.integers(0, 3),
)
def test_no_schedule_beats_its_work_or_its_critical_path(
    name: str, pp: int, micro_batches: int, virtual_stages: int, times: tuple[int, ...], communication: int
) -> None:
    """A step is as long as the busiest rank's work at least, and as the way of one micro-batch there and back."""
    f, i, w, fb = times
    cost = Cost(f, i + w, w, fb, communication)
    try:
        lists = schedule(name, pp, micro_batches, virtual_stages)
    except ConfigError as error:
        assert "use " in str(error)
        return
    stages = num_stages(name, pp, virtual_stages)
    check(lists, stages, micro_batches)
    simulation = simulate(lists, stages, cost)
    work = [sum(cost.of(action.kind) for action in actions) for actions in lists]
    assert simulation.makespan >= max(work)
    assert simulation.idle == [simulation.makespan - own for own in work]
    if fb >= f + i + w:
        assert simulation.makespan >= stages * (f + i)


def test_comparison_does_the_same_work_in_every_row() -> None:
    comparison = compare(8, 32, UNIT, virtual_stages=3)
    assert [row.name for row in comparison.rows] == [name for name in names() if name not in TEST_ONLY]
    assert comparison.refused.keys() == set() or comparison.refused.keys() <= {"interleaved_1f1b"}
    for row in comparison.rows:
        assert row.makespan - row.idle == pytest.approx(32 * 3)
        if row.formula_idle is not None:
            assert row.idle == pytest.approx(row.formula_idle)
    by_name = {row.name: row for row in comparison.rows}
    assert by_name["1f1b"].activations == 8 and by_name["gpipe"].activations == 32
    assert (by_name["dualpipe"].copies, by_name["dualpipev"].copies) == (2, 1)
    assert by_name["dualpipe"].activations == 9 and by_name["dualpipev"].activations == 8.5
    assert by_name["interleaved_1f1b"].stages_per_rank == 3
    assert best(comparison.rows).name == "zbv"


def test_overlap_that_hides_enough_turns_the_choice() -> None:
    rows = compare(8, 32, UNIT).rows
    even = even_fb("dualpipev", 8, 32, UNIT, best(rows).makespan)
    assert even is not None and 2.8 < even < 2.9
    assert best(compare(8, 32, Cost(1, 2, 1, even + 0.05)).rows).name != "dualpipev"
    cheaper = compare(8, 32, Cost(1, 2, 1, even - 0.05)).named("dualpipev")
    assert cheaper is not None and cheaper.makespan < best(rows).makespan
    assert even_fb("dualpipev", 8, 32, UNIT, 1.0) is None and even_fb("dualpipev", 8, 32, UNIT, 1e6) is None


def test_refused_rows_say_why() -> None:
    refused = compare(3, 4, UNIT).refused
    assert refused.keys() == {"interleaved_1f1b", "zbv", "dualpipe", "dualpipev"}
    assert all("use " in why for why in refused.values())


def test_a_finer_cut_has_shares_of_the_times() -> None:
    assert share_of_cost(Cost(4, 8, 2, 10, 1), pp=4, num_stages=8) == Cost(2, 4, 1, 5, 1)
