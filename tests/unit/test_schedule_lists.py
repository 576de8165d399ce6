"""Which action each rank runs when: against published lists, and refusal of what cannot run."""

from __future__ import annotations

import re

import pytest

from moe_engine.config.errors import ConfigError
from moe_engine.schedule.action import Action, Kind, overlapped
from moe_engine.schedule.schedules import names, num_stages, schedule, stage_of_rank


def words(actions: list[Action]) -> str:
    return " ".join(map(str, actions))


def read(text: str, stage: int, primed_stage: int, primed_first: int) -> list[Action]:
    """`F6 I'0 [F7&B'3]`: a prime marks the other side of the rank, whose micro-batches start at `primed_first`."""
    actions = []
    for word in text.replace("|", " ").replace("][", "] [").split():
        halves = []
        for kind, prime, number in re.findall(r"([FBIW])('?)(\d+)", word):
            first, side = (primed_first, primed_stage) if prime else (0, stage)
            halves.append(Action(Kind(kind), first + int(number), side))
        actions.append(overlapped(*halves) if len(halves) == 2 else halves[0])
    return actions


# P=8, M=20: the list of the outermost and of the innermost rank of a direction
OUTER = """F0 F1 F2 F3 F4 F5 | F6 F'0 | I'0 W'0 F'1 I'1 W'1 F'2 I'2 W'2 F'3
| [F7&B'3][F'4&B0][F8&B'4][F'5&B1][F9&B'5][F'6&B2] | B'6 [F'7&B3] B'7 [F'8&B4] B'8 [F'9&B5]
| B'9 I6 | W6 I7 W7 I8 W8 I9 | W9"""
INNER = """F0 F'0 F1 F'1 F2 F'2 F3 F'3
| F4 B'0 [F'4&B0][F5&B'1][F'5&B1][F6&B'2][F'6&B2][F7&B'3][F'7&B3][F8&B'4][F'8&B4][F9&B'5][F'9&B5]
| B'6 B6 B'7 B7 I'8 I8 I'9 I9 | W'8 W8 W'9 W9"""


@pytest.mark.parametrize(("rank", "text"), [(0, OUTER), (3, INNER)])
def test_dualpipe_runs_the_published_lists(rank: int, text: str) -> None:
    lists = schedule("dualpipe", 8, 20)
    assert lists[rank] == read(text, stage=rank, primed_stage=7 - rank, primed_first=10)


@pytest.mark.parametrize("rank", range(4))
def test_dualpipe_is_its_own_mirror_image(rank: int) -> None:
    """Rank 7-r runs what rank r runs, with the directions exchanged: same stages, micro-batches 10 apart."""

    def mirrored(action: Action) -> Action:
        halves = [Action(half.kind, (half.micro_batch + 10) % 20, half.stage) for half in action.halves()]
        return overlapped(*halves) if len(halves) == 2 else halves[0]

    lists = schedule("dualpipe", 8, 20)
    assert lists[7 - rank] == [mirrored(action) for action in lists[rank]]


@pytest.mark.parametrize(("rank", "text"), [(0, OUTER), (3, INNER)])
def test_dualpipev_runs_the_lists_of_half_of_dualpipe(rank: int, text: str) -> None:
    assert schedule("dualpipev", 4, 10)[rank] == read(text, stage=rank, primed_stage=7 - rank, primed_first=0)


def test_dualpipev_on_one_rank() -> None:
    assert [a.text(with_stage=True) for a in schedule("dualpipev", 1, 2)[0]] == [
        *("F0@0", "F0@1", "F1@0", "B0@1", "[F1@1&B0@0]", "B1@1", "I1@0", "W1@0")
    ]


def test_gpipe_runs_all_forwards_then_all_backwards_in_the_same_order() -> None:
    assert [words(actions) for actions in schedule("gpipe", 2, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_runs_one_forward_ahead_for_each_later_stage() -> None:
    assert [words(actions) for actions in schedule("1f1b", 3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_fewer_micro_batches_than_stages_is_legal() -> None:
    assert [words(actions) for actions in schedule("1f1b", 4, 2)] == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]


def test_split_1f1b_makes_every_weight_gradient_one_backward_late() -> None:
    assert [words(actions) for actions in schedule("split_1f1b", 2, 3)] == [
        "F0 F1 I0 F2 I1 W0 I2 W1 W2",
        "F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]


def test_overlapped_1f1b_pairs_each_backward_with_a_forward() -> None:
    assert [words(actions) for actions in schedule("overlapped_1f1b", 2, 5)] == [
        "F0 F1 F2 [F3&B0] [F4&B1] B2 B3 B4",
        "F0 [F1&B0] [F2&B1] [F3&B2] [F4&B3] B4",
    ]
    assert [words(actions) for actions in schedule("overlapped_1f1b", 2, 2)] == ["F0 F1 B0 B1", "F0 [F1&B0] B1"]


def test_zb_h1_keeps_weight_gradients_of_later_ranks_for_the_end() -> None:
    assert [words(actions) for actions in schedule("zb_h1", 3, 4)] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_interleaved_1f1b_passes_groups_of_micro_batches_through_all_stages_of_a_rank() -> None:
    rank0 = schedule("interleaved_1f1b", 2, 4, virtual_stages=2)[0]
    forwards = [a.text(with_stage=True) for a in rank0 if a.kind is Kind.F]
    backwards = [a.text(with_stage=True) for a in rank0 if a.kind is Kind.B]
    assert forwards == ["F0@0", "F1@0", "F0@2", "F1@2", "F2@0", "F3@0", "F2@2", "F3@2"]
    assert backwards == ["B0@2", "B1@2", "B0@0", "B1@0", "B2@2", "B3@2", "B2@0", "B3@0"]
    assert words(rank0[:6]) == "F0 F1 F0 F1 F2 B0"  # 2 * (pp - 1) + (virtual_stages - 1) * pp = 4 ahead


def test_interleaved_1f1b_with_one_stage_per_rank_is_1f1b() -> None:
    lists = schedule("interleaved_1f1b", 4, 8)
    assert [sorted(map(str, a)) for a in lists] == [sorted(map(str, a)) for a in schedule("1f1b", 4, 8)]
    assert words(lists[3]) == words(schedule("1f1b", 4, 8)[3])


def test_stages_of_ranks() -> None:
    assert stage_of_rank("1f1b", 3) == [[0], [1], [2]]
    assert stage_of_rank("interleaved_1f1b", 2, virtual_stages=3) == [[0, 2, 4], [1, 3, 5]]
    assert stage_of_rank("dualpipe", 4) == [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert stage_of_rank("dualpipev", 2) == stage_of_rank("zbv", 2) == [[0, 3], [1, 2]]
    assert [num_stages(name, 4) for name in names()] == [4, 4, 4, 4, 4, 4, 8, 4, 8]
    assert num_stages("interleaved_1f1b", 4, virtual_stages=3) == 12


@pytest.mark.parametrize(
    ("name", "pp", "micro_batches", "virtual_stages", "said", "works"),
    [
        ("2f2b", 4, 8, 1, "pipeline.schedule=2f2b", ("1f1b", 4, 8, 1)),
        ("1f1b", 0, 8, 1, "parallel.pp=0", ("1f1b", 1, 8, 1)),
        ("1f1b", 4, 0, 1, "pipeline.micro_batches=0", ("1f1b", 4, 1, 1)),
        ("1f1b", 4, 8, 2, "pipeline.virtual_stages=2", ("interleaved_1f1b", 4, 8, 2)),
        ("interleaved_1f1b", 4, 8, 0, "pipeline.virtual_stages=0", ("interleaved_1f1b", 4, 8, 1)),
        ("interleaved_1f1b", 4, 9, 2, "pipeline.micro_batches=9", ("interleaved_1f1b", 4, 12, 2)),
        ("interleaved_1f1b", 4, 3, 2, "pipeline.micro_batches=3", ("interleaved_1f1b", 4, 4, 2)),
        ("dualpipe", 3, 12, 1, "parallel.pp=3", ("dualpipe", 4, 12, 1)),
        ("dualpipe", 1, 12, 1, "parallel.pp=1", ("dualpipe", 2, 12, 1)),
        ("dualpipe", 4, 9, 1, "pipeline.micro_batches=9", ("dualpipe", 4, 10, 1)),
        ("dualpipe", 4, 6, 1, "pipeline.micro_batches=6", ("dualpipe", 4, 8, 1)),
        ("dualpipev", 4, 7, 1, "pipeline.micro_batches=7", ("dualpipev", 4, 8, 1)),
        ("zbv", 4, 6, 1, "pipeline.micro_batches=6", ("zbv", 4, 7, 1)),
    ],
)
def test_illegal_sizes_are_refused_with_values_that_work(
    name: str, pp: int, micro_batches: int, virtual_stages: int, said: str, works: tuple[str, int, int, int]
) -> None:
    with pytest.raises(ConfigError) as error:
        schedule(name, pp, micro_batches, virtual_stages)
    message = str(error.value)
    assert message.startswith(said)
    changed = next(new for old, new in zip((name, pp, micro_batches, virtual_stages), works, strict=True) if old != new)
    assert re.search(rf"use .*\b{changed}\b", message)
    assert len(schedule(*works)) == works[1]


def test_several_mistakes_are_one_error_with_a_line_each() -> None:
    with pytest.raises(ConfigError) as error:
        schedule("dualpipe", 5, 7)
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "parallel.pp=5",
        "pipeline.micro_batches=7",
    ]


def test_text_of_actions() -> None:
    pair = overlapped(Action(Kind.F, 7, 0), Action(Kind.B, 3, 5))
    assert (str(pair), pair.text(with_stage=True)) == ("[F7&B3]", "[F7@0&B3@5]")
    assert (str(Action(Kind.W, 3, 2)), Action(Kind.W, 3, 2).text(with_stage=True)) == ("W3", "W3@2")


@pytest.mark.parametrize(
    "fields", [(Kind.FB, 0, 0), (Kind.F, 0, 0, 1, 1), (Kind.FB, 0, 0, 1, None), (Kind.B, 0, 0, None, 1)]
)
def test_only_a_pair_has_a_backward_half(fields: tuple[Kind, int, int]) -> None:
    with pytest.raises(ValueError, match="a pair, and only a pair"):
        Action(*fields)


def test_a_pair_is_a_forward_and_a_whole_backward() -> None:
    with pytest.raises(ValueError, match="an F and a B"):
        overlapped(Action(Kind.F, 0, 0), Action(Kind.I, 1, 0))
