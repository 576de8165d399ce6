"""`check` accepts every schedule we build at every legal size, and names each way in which lists can be wrong."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.config.errors import ConfigError
from moe_engine.schedule.action import Action, Item, Kind, Output, inputs, overlapped
from moe_engine.schedule.check import Channel, ScheduleError, check, producers, received, sent
from moe_engine.schedule.schedules import names, num_stages, schedule, stage_of_rank
from moe_engine.schedule.simulate import Cost, simulate

SIZES = st.tuples(st.sampled_from(names()), st.integers(1, 8), st.integers(1, 20), st.integers(1, 3))


@settings(max_examples=150, deadline=None)
@given(size=SIZES)
def test_every_size_is_proven_or_refused(size: tuple[str, int, int, int]) -> None:
    name, pp, micro_batches, virtual_stages = size
    try:
        lists = schedule(name, pp, micro_batches, virtual_stages)
    except ConfigError as error:
        assert "use " in str(error)
        return
    check(lists, num_stages(name, pp, virtual_stages), micro_batches)
    for actions, stages in zip(lists, stage_of_rank(name, pp, virtual_stages), strict=True):
        assert {half.stage for action in actions for half in action.halves()} <= set(stages)


@pytest.mark.parametrize(
    ("name", "pp"), [(name, pp) for name in names() for pp in (1, 2, 3, 4, 8) if name != "dualpipe" or pp % 2 == 0]
)
def test_memory_is_what_each_schedule_promises(name: str, pp: int) -> None:
    """Activations held: gpipe all, 1F1B and ZB as many as stages, DualPipe one more."""
    micro_batches = 2 * pp + 4 - (2 * pp + 4) % pp if name == "interleaved_1f1b" else 2 * pp + 4
    report = check(schedule(name, pp, micro_batches), num_stages(name, pp), micro_batches)
    ahead = {
        "gpipe": [micro_batches] * pp,
        "1f1b": list(range(pp, 0, -1)),
        "overlapped_1f1b": list(range(2 * pp, 0, -2)),
        "interleaved_1f1b": [min(micro_batches, 2 * (pp - rank) - 1) for rank in range(pp)],
        "split_1f1b": list(range(pp, 0, -1)),
        "zb_h1": list(range(pp, 0, -1)),
        "zbv": [2 * pp] * pp,
        "dualpipe": [pp + 1] * pp,
        "dualpipev": [2 * pp + 1] * pp,
    }
    assert report.peak_activations == ahead[name]
    queued = {
        "split_1f1b": [2] * pp,
        "zb_h1": list(range(1, pp + 1)),
        "zbv": [1 + 2 * rank for rank in range(pp)],
        "dualpipe": [1 + min(rank, pp - 1 - rank) for rank in range(pp)],
        "dualpipev": list(range(1, pp + 1)),
    }
    assert report.peak_weight_gradients == queued.get(name, [0] * pp)
    if name in ("zb_h1", "zbv"):  # what waits for its W takes the place of what a rank need not hold
        assert report.peak_held == [max(ahead[name])] * pp


@settings(max_examples=60, deadline=None)
@given(
    size=SIZES,
    f=st.integers(0, 5),
    w=st.integers(0, 5),
    i=st.integers(0, 5),
    fb=st.integers(0, 9),
    communication=st.integers(0, 3),
)
def test_simulated_times_keep_every_dependency(
    size: tuple[str, int, int, int], f: int, w: int, i: int, fb: int, communication: int
) -> None:
    name, pp, micro_batches, virtual_stages = size
    try:
        lists = schedule(name, pp, micro_batches, virtual_stages)
    except ConfigError:
        return
    stages = num_stages(name, pp, virtual_stages)
    simulation = simulate(lists, stages, Cost(f, i + w, w, fb, communication))
    made_at = producers(lists)
    for rank, actions in enumerate(simulation.timeline):
        assert [timed.action for timed in actions] == lists[rank]
        assert all(first.end <= second.start for first, second in pairwise(actions))
        for timed in actions:
            for item in inputs(timed.action, stages):
                source = made_at[item]
                delay = communication if source.rank != rank else 0
                assert timed.start >= simulation.timeline[source.rank][source.position].end + delay
    assert min(simulation.idle) >= 0


def test_report_of_split_1f1b() -> None:
    report = check(schedule("split_1f1b", 4, 6), 4, 6)
    assert report.peak_activations == [4, 3, 2, 1]
    assert report.peak_weight_gradients == [2, 2, 2, 2]
    assert report.peak_held == [5, 4, 3, 2]


def test_messages_of_a_channel_are_listed_in_their_order() -> None:
    lists = schedule("1f1b", 2, 3)
    forward, backward = Channel(0, 1, Output.ACTIVATION), Channel(1, 0, Output.GRADIENT)
    expected = {
        forward: [Item(Output.ACTIVATION, m, 0) for m in range(3)],
        backward: [Item(Output.GRADIENT, m, 1) for m in range(3)],
    }
    assert sent(lists, 2) == received(lists, 2) == expected


def test_stages_on_one_rank_exchange_no_message() -> None:
    lists = schedule("dualpipev", 2, 4)
    between = Counter((item.stage, item.output) for items in sent(lists, 4).values() for item in items)
    assert (1, Output.ACTIVATION) not in between  # stage 1 and 2 are the bottom of the V, both on rank 1
    assert between == {(0, Output.ACTIVATION): 4, (2, Output.ACTIVATION): 4} | {
        (stage, Output.GRADIENT): 4 for stage in (1, 3)
    }


def read(*ranks: str) -> list[list[Action]]:
    """`F0@1 [F1@0&B0@0]` for each rank."""

    def half(word: str) -> Action:
        micro_batch, stage = word[1:].split("@")
        return Action(Kind(word[0]), int(micro_batch), int(stage))

    def action(word: str) -> Action:
        return overlapped(*map(half, word.strip("[]").split("&"))) if "&" in word else half(word)

    return [[action(word) for word in rank.split()] for rank in ranks]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        pytest.param(("F0@0", "F0@1 B0@1"), "no action makes the gradient of micro-batch 0 made by stage 0", id="no B"),
        pytest.param(("B0@0", "F0@1 B0@1"), "no action makes the activation of micro-batch 0", id="no F"),
        pytest.param(("F0@0 I0@0", "F0@1 B0@1"), "no action makes the weight gradient of micro-batch 0", id="no W"),
        pytest.param(
            ("F0@0 F0@0 B0@0", "F0@1 B0@1"),
            r"made twice: by F0@0 \(rank 0, action 0\) and by F0@0 \(rank 0, action 1\)",
            id="F twice",
        ),
        pytest.param(
            ("F0@0 B0@0 W0@0", "F0@1 B0@1"), "weight gradient of micro-batch 0 .*made twice: by B0@0", id="B and W"
        ),
        pytest.param(
            ("F0@0 B0@0 F1@0 B1@0", "F0@1 B0@1"), r"F1@0 \(rank 0, action 2\) is out of range", id="micro-batch range"
        ),
        pytest.param(("F0@0 B0@0", "F0@1 B0@1 F0@2 B0@2"), "F0@2 .* out of range", id="stage range"),
        pytest.param(("F0@0 B0@1", "F0@1 B0@0"), "spread over ranks", id="backward elsewhere"),
        pytest.param(("F0@0 I0@0", "F0@1 I0@1 W0@0 W0@1"), "spread over ranks", id="weight gradient elsewhere"),
        pytest.param(
            ("B0@0 F0@0", "F0@1 B0@1"),
            r"B0@0 \(rank 0, action 0\) needs the activation of micro-batch 0 .* F0@0 \(rank 0, action 1\)",
            id="B before F",
        ),
        pytest.param(("F0@0 W0@0 I0@0", "F0@1 B0@1"), "W0@0 .* needs the gradient of micro-batch 0", id="W before I"),
        pytest.param(("[F0@0&B0@0]", "F0@1 B0@1"), "needs the activation of micro-batch 0", id="pair of one"),
    ],
)
def test_faults_in_one_rank_are_named(ranks: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(read(*ranks), num_stages=2, micro_batches=1)


def test_gradients_summed_out_of_order_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"B0@0 \(rank 0, action 3\) makes the gradient .* after that of .* 1"):
        check(read("F0@0 F1@0 B1@0 B0@0"), num_stages=1, micro_batches=2)
    with pytest.raises(ScheduleError, match="W0@0 .* makes the weight gradient .* summed in the order"):
        check(read("F0@0 F1@0 I0@0 I1@0 W1@0 W0@0"), num_stages=1, micro_batches=2)
    with pytest.raises(ScheduleError, match="W0@0 .* makes the weight gradient"):  # a W after the B of a later one
        check(read("F0@0 F1@0 I0@0 B1@0 W0@0"), num_stages=1, micro_batches=2)


def test_a_channel_read_in_another_order_than_written_is_named() -> None:
    lists = read("F0@0 F1@0 B0@0 B1@0", "F1@1 F0@1 B0@1 B1@1")
    with pytest.raises(ScheduleError) as error:
        check(lists, num_stages=2, micro_batches=2)
    assert str(error.value) == (
        "activation channel from rank 0 to rank 1, message 0: the receiver wants the activation of micro-batch 1 made "
        "by stage 0, but F0@0 (rank 0, action 0) sends the activation of micro-batch 0 made by stage 0"
    )


def test_gradient_channels_are_compared_too() -> None:
    """Two stages per rank share one channel: their gradients come back in another order than they are taken."""
    lists = read("F0@0 F0@2 B0@2 B0@0", "F0@1 F0@3 B0@3 B0@1")
    assert check(lists, num_stages=4, micro_batches=1).peak_activations == [2, 2]
    lists = read("F0@0 F0@2 F1@0 F1@2 B0@2 B1@2 B0@0 B1@0", "F0@1 F0@3 F1@1 F1@3 B0@3 B0@1 B1@3 B1@1")
    with pytest.raises(ScheduleError, match="gradient channel from rank 1 to rank 0, message 1"):
        check(lists, num_stages=4, micro_batches=2)


def test_a_deadlock_names_what_every_stuck_rank_waits_for() -> None:
    lists = read("F0@0 B0@0 F1@0 B1@0", "F0@1 F1@1 B0@1 B1@1")
    with pytest.raises(ScheduleError) as error:
        check(lists, num_stages=2, micro_batches=2)
    assert str(error.value) == (
        "deadlock: B0@0 (rank 0, action 1) waits for the gradient of micro-batch 0 made by stage 1, made by "
        "B0@1 (rank 1, action 2); F1@1 (rank 1, action 1) waits for the activation of micro-batch 1 made by stage 0, "
        "made by F1@0 (rank 0, action 2)"
    )


def test_a_deadlock_through_pairs_is_found() -> None:
    """Each pair's forward feeds the other rank's pair: neither can start."""
    lists = read("F0@0 [F1@0&B0@0] B1@0", "F0@1 [F1@1&B0@1] B1@1")
    with pytest.raises(ScheduleError, match=r"deadlock: \[F1@0&B0@0\] .*; \[F1@1&B0@1\]"):
        check(lists, num_stages=2, micro_batches=2)


@pytest.mark.parametrize("name", names())
def test_a_fault_anywhere_is_found(name: str) -> None:
    """Drop or repeat any action of any rank, or run a backward first: never accepted."""
    pp, micro_batches = 2, 4
    lists, stages = schedule(name, pp, micro_batches), num_stages(name, pp)
    for rank in range(pp):
        for index, action in enumerate(lists[rank]):
            before, after = lists[rank][:index], lists[rank][index + 1 :]
            for changed in (before + after, [*before, action, action, *after]):
                with pytest.raises(ScheduleError):
                    check([*lists[:rank], changed, *lists[rank + 1 :]], stages, micro_batches)
            if action.kind in (Kind.B, Kind.I, Kind.FB):
                with pytest.raises(ScheduleError):
                    check([*lists[:rank], [action, *before, *after], *lists[rank + 1 :]], stages, micro_batches)
