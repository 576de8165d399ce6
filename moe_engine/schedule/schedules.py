"""The schedules by name: which stages each rank holds, and what it runs in which order.

`schedule(name, pp, micro_batches)` is a pure function; its lists are what the executor runs, literally. To add a
schedule: write a function that makes the list of one rank, and give it a line in `_definitions`; `check` and the
property tests do the rest.

This file has the schedules whose ranks go through the model in one direction; `dualpipe` has those that fold it.
Backward passes of a stage run in the order of the micro-batches in all of them, so that gradients are summed in one
order and have the same bits.

Sources: GPipe (arXiv 1811.06965); 1F1B, "PipeDream-Flush" (arXiv 2006.09503) and its interleaved form (arXiv
2104.04473, section 2.2); ZB-H1 (arXiv 2401.10241, section 2.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import PipelineConfig
from moe_engine.schedule import dualpipe
from moe_engine.schedule.action import Action, Kind, overlapped

MOST_RANKS = 10_000  # of a pipeline
MOST_PASSES = 2_000_000  # micro-batches times ranks of a pipeline


def names() -> list[str]:
    """Every schedule there is."""
    return list(_definitions(virtual_stages=1))


def schedule(name: str, pp: int, micro_batches: int, virtual_stages: int = 1) -> list[list[Action]]:
    """The list of actions of each of the `pp` ranks, for one step of `micro_batches` micro-batches.

    `virtual_stages` is the number of stages per rank; only interleaved_1f1b leaves it free. Raises ConfigError, with
    sizes that work, for an unknown name and for a size the schedule cannot run at.
    """
    check_size(name, pp, micro_batches, virtual_stages)
    actions = _definition(name, pp, virtual_stages).actions
    return [actions(rank, pp, micro_batches) for rank in range(pp)]


def check_size(name: str, pp: int, micro_batches: int, virtual_stages: int = 1) -> None:
    """Raises ConfigError as `schedule` does, without making the lists."""
    problems = _at_least_one("pipeline.micro_batches", micro_batches)
    problems = problems or _definition(name, pp, virtual_stages).problems(pp, micro_batches)
    if micro_batches > MOST_PASSES // max(1, pp):
        problems.append(
            f"pipeline.micro_batches={micro_batches}: the lists of parallel.pp={pp} ranks would take gigabytes; "
            f"use {MOST_PASSES // max(1, pp)} or fewer"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def check_batch(pipeline: PipelineConfig, pp: int, dp: int, global_batch: int, micro_batch: int) -> None:
    """Raises ConfigError as `check_size` does, in the batch that the number of micro-batches follows from."""
    name, chunks, given = pipeline.schedule, pipeline.virtual_stages, global_batch // (dp * micro_batch)
    try:
        check_size(name, pp, given, chunks)
    except ConfigError as error:
        lines = [
            _in_sequences(line, given, dp * micro_batch, global_batch, pp, partial(_fits, name, pp, chunks))
            for line in str(error).splitlines()
        ]
        raise ConfigError("\n".join(lines)) from None


def _in_sequences(line: str, given: int, unit: int, global_batch: int, pp: int, fits: Callable[[int], bool]) -> str:
    """The refusal of a number of micro-batches as that of the batch they are cut from, `unit` sequences each."""
    option, _, rule = line.partition(": ")
    if option != f"pipeline.micro_batches={given}":
        return line
    start = min(given, MOST_PASSES // pp)
    enough = next((count for step in range(4 * pp + 1) for count in (start + step, start - step) if fits(count)), None)
    use = f"; use train.global_batch={enough * unit}" if enough else ""
    return f"train.global_batch={global_batch}: gives {given} micro-batches; {rule.rpartition(';')[0]}{use}"


def _fits(name: str, pp: int, virtual_stages: int, micro_batches: int) -> bool:
    """Whether the schedule runs at this size."""
    try:
        check_size(name, pp, micro_batches, virtual_stages)
    except ConfigError:
        return False
    return True


def stage_of_rank(name: str, pp: int, virtual_stages: int = 1) -> list[list[int]]:
    """The stages each rank holds, in the order of the model. Raises ConfigError as `schedule` does."""
    definition = _definition(name, pp, virtual_stages)
    return [definition.stages(rank, pp) for rank in range(pp)]


def num_stages(name: str, pp: int, virtual_stages: int = 1) -> int:
    """How many stages the model is cut into. Raises ConfigError as `schedule` does."""
    return 1 + max(max(stages) for stages in stage_of_rank(name, pp, virtual_stages))


def _one_stage(rank: int, pp: int) -> list[int]:
    return [rank]


def _any_size(pp: int, micro_batches: int) -> list[str]:
    """No rule of its own: fewer micro-batches than stages only make the bubble larger."""
    return []


@dataclass(frozen=True)
class _Definition:
    """One schedule: the list of a rank, the stages of a rank, and what is wrong with a size, a line each."""

    actions: Callable[[int, int, int], list[Action]]  # of (rank, pp, micro_batches)
    stages: Callable[[int, int], list[int]] = _one_stage  # of (rank, pp)
    problems: Callable[[int, int], list[str]] = _any_size  # of (pp, micro_batches)


def _definitions(virtual_stages: int) -> dict[str, _Definition]:
    """All schedules, by name."""
    return {
        "gpipe": _Definition(_gpipe),
        "1f1b": _Definition(_1f1b),
        "overlapped_1f1b": _Definition(_overlapped_1f1b),
        "interleaved_1f1b": _Definition(
            partial(_interleaved_1f1b, virtual_stages=virtual_stages),
            lambda rank, pp: list(range(rank, pp * virtual_stages, pp)),
            _interleaved_problems,
        ),
        "split_1f1b": _Definition(_split_1f1b),
        "zb_h1": _Definition(_zb_h1),
        "zbv": _Definition(dualpipe.zbv, dualpipe.v_stages, dualpipe.zbv_problems),
        "dualpipe": _Definition(dualpipe.dualpipe, dualpipe.mirrored_stages, dualpipe.dualpipe_problems),
        "dualpipev": _Definition(dualpipe.dualpipev, dualpipe.v_stages, dualpipe.dualpipev_problems),
    }


def _definition(name: str, pp: int, virtual_stages: int) -> _Definition:
    """The schedule of that name. Raises ConfigError if there is none, or pp or virtual_stages is wrong for it."""
    problems = _at_least_one("parallel.pp", pp) + _at_least_one("pipeline.virtual_stages", virtual_stages)
    problems += [
        f"{option}={value}: no pipeline is as long; use {MOST_RANKS} or less"
        for option, value in (("parallel.pp", pp), ("pipeline.virtual_stages", virtual_stages))
        if value > MOST_RANKS
    ]
    if name not in names():
        problems.append(f"pipeline.schedule={name}: no such schedule; use one of {', '.join(names())}")
    elif name != "interleaved_1f1b" and virtual_stages > 1:
        problems.append(
            f"pipeline.virtual_stages={virtual_stages}: {name} fixes the stages of a rank itself; "
            f"use 1, or pipeline.schedule=interleaved_1f1b"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return _definitions(virtual_stages)[name]


def _at_least_one(option: str, value: int) -> list[str]:
    return [] if value >= 1 else [f"{option}={value}: must be at least 1; use 1 or more"]


def _gpipe(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards."""
    return [Action(kind, micro_batch, rank) for kind in (Kind.F, Kind.B) for micro_batch in range(micro_batches)]


def _1f1b(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """As many forwards ahead as there are later stages, then forward and backward in turn, then the backwards left."""
    forwards = [Action(Kind.F, micro_batch, rank) for micro_batch in range(micro_batches)]
    backwards = [Action(Kind.B, micro_batch, rank) for micro_batch in range(micro_batches)]
    return _one_in_turn(forwards, backwards, ahead=pp - 1 - rank)


def _overlapped_1f1b(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """1F1B in pairs [F&B], each rank two forwards further ahead than the next one, so that no pair waits for another.

    With a rank alone (pp=1) two micro-batches are in flight. It holds up to twice the activations of 1F1B.
    """
    actions = _one_in_turn(
        [Action(Kind.F, m, rank) for m in range(micro_batches)],
        [Action(Kind.B, m, rank) for m in range(micro_batches)],
        ahead=2 * (pp - 1 - rank) + 1,
    )
    ahead = min(2 * (pp - 1 - rank) + 1, micro_batches)
    steady, last = actions[ahead : 2 * micro_batches - ahead], actions[2 * micro_batches - ahead :]
    return actions[:ahead] + [overlapped(f, b) for f, b in zip(steady[::2], steady[1::2], strict=True)] + last


def _interleaved_1f1b(rank: int, pp: int, micro_batches: int, virtual_stages: int) -> list[Action]:
    """1F1B over several stages per rank, pp apart: groups of pp micro-batches pass all stages of a rank in turn.

    The pipeline fills and empties in units of one stage, so the bubble is `virtual_stages` times smaller.
    """
    chunks = range(virtual_stages)
    groups = [range(first, first + pp) for first in range(0, micro_batches, pp)]
    forwards = [Action(Kind.F, m, rank + chunk * pp) for group in groups for chunk in chunks for m in group]
    backwards = [Action(Kind.B, m, rank + chunk * pp) for group in groups for chunk in reversed(chunks) for m in group]
    return _one_in_turn(forwards, backwards, ahead=2 * (pp - 1 - rank) + (virtual_stages - 1) * pp)


def _interleaved_problems(pp: int, micro_batches: int) -> list[str]:
    if micro_batches % pp == 0:
        return []
    below = micro_batches // pp * pp
    works = f"{below} or {below + pp}" if below else f"{pp}"
    return [
        f"pipeline.micro_batches={micro_batches}: interleaved_1f1b needs a multiple of parallel.pp={pp}; use {works}"
    ]


def _one_in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    actions = forwards[:ahead]
    for step, backward in enumerate(backwards):
        actions += forwards[ahead + step : ahead + step + 1]
        actions.append(backward)
    return actions


def _split_1f1b(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """1F1B with the backward split and every weight gradient one backward late, on every rank.

    It wins nothing: it is the smallest schedule that has I and W apart, made for testing the split.
    """
    return _split_backward(_1f1b(rank, pp, micro_batches), queue_length=1)


def _zb_h1(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """1F1B with the backward split; rank r keeps up to r weight gradients for the bubbles of the end.

    A later rank runs fewer forwards ahead, so it can queue as many weight gradients more and no rank holds more than
    1F1B's first one.
    """
    return _split_backward(_1f1b(rank, pp, micro_batches), queue_length=rank)


def _split_backward(actions: list[Action], queue_length: int) -> list[Action]:
    """Each B as an I, its W after the following `queue_length` backwards; what is queued at the end runs then."""
    split: list[Action] = []
    queue: deque[Action] = deque()
    for action in actions:
        if action.kind is Kind.B:
            split.append(Action(Kind.I, action.micro_batch, action.stage))
            queue.append(Action(Kind.W, action.micro_batch, action.stage))
            if len(queue) > queue_length:
                split.append(queue.popleft())
        else:
            split.append(action)
    return split + list(queue)
