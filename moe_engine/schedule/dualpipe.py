"""The folded schedules: every rank holds two stages, one on the way into the model and one on the way out.

DualPipe feeds micro-batches from both ends: rank r holds stages r and pp-1-r, every stage lives on two ranks, and a
rank always has work of one direction to hide the communication of the other behind. DualPipeV cuts this in half: the
model is laid over the ranks as a V (rank r holds stages r and 2pp-1-r), every stage once, and the way out plays the
part of the other direction. ZB-V has the same V and a split backward, but no overlapped pairs.

All three are a table of phases, (how often, what). In the words of a table a rank has two sides: side 0 is the one
nearer to where its micro-batches enter, side 1 the one nearer to the end. `F0` is the next forward of side 0; `B1` the
next whole backward of side 1; `I0` an input gradient; `W` the oldest queued weight gradient; `F0&B1` a pair.

Sources: the DeepSeek-V3 report (arXiv 2412.19437, section 3.2.1, figure 5) and the DualPipe README
(github.com/deepseek-ai/DualPipe); ZB-V: "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, section 6).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from moe_engine.schedule.action import Action, Kind, overlapped

Phases = list[tuple[int, str]]  # (how often, the body: words with spaces between)


def mirrored_stages(rank: int, pp: int) -> list[int]:
    """DualPipe: stage r of one direction and of the other."""
    return sorted([rank, pp - 1 - rank])


def v_stages(rank: int, pp: int) -> list[int]:
    """A V over the ranks: down on stages 0 … pp-1, up again on pp … 2pp-1."""
    return [rank, 2 * pp - 1 - rank]


def dualpipe(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """Half of the micro-batches enter at rank 0, the other half (the higher numbers) at the last rank."""
    down = _Side(stage=rank, next_forward=0, next_backward=0)
    up = _Side(stage=pp - 1 - rank, next_forward=micro_batches // 2, next_backward=micro_batches // 2)
    sides = (down, up) if rank < pp // 2 else (up, down)
    return _actions(_dualpipe_phases(min(rank, pp - 1 - rank), pp // 2, micro_batches // 2), sides)


def dualpipev(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """All micro-batches enter at rank 0 and leave there: the first half of DualPipe's ranks, at 2pp stages."""
    return _actions(_dualpipe_phases(rank, pp, micro_batches), _v_sides(rank, pp))


def zbv(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """The V with a split backward: with f = i = w no rank idles but for the fill of the pipeline."""
    return _actions(_zbv_phases(rank, pp, micro_batches), _v_sides(rank, pp))


def dualpipe_problems(pp: int, micro_batches: int) -> list[str]:
    """What is wrong with a size for dualpipe, a line each."""
    problems = []
    if pp % 2:
        works = f"{pp - 1} or {pp + 1}" if pp > 1 else "2"
        problems.append(
            f"parallel.pp={pp}: dualpipe needs an even number of ranks; use {works}, or pipeline.schedule=dualpipev"
        )
    if micro_batches % 2 or micro_batches < 2 * pp:
        works = str(max(2 * pp, micro_batches + micro_batches % 2))
        problems.append(
            f"pipeline.micro_batches={micro_batches}: dualpipe halves them between two directions and needs an even "
            f"number, at least 2 * parallel.pp = {2 * pp}; use {works}"
        )
    return problems


def dualpipev_problems(pp: int, micro_batches: int) -> list[str]:
    """What is wrong with a size for dualpipev."""
    return _too_few("dualpipev", "2 * parallel.pp", 2 * pp, micro_batches)


def zbv_problems(pp: int, micro_batches: int) -> list[str]:
    """What is wrong with a size for zbv."""
    return _too_few("zbv", "2 * parallel.pp - 1", 2 * pp - 1, micro_batches)


def _too_few(name: str, rule: str, least: int, micro_batches: int) -> list[str]:
    if micro_batches >= least:
        return []
    return [f"pipeline.micro_batches={micro_batches}: {name} needs at least {rule} = {least}; use {least} or more"]


def _dualpipe_phases(position: int, half: int, micro_batches: int) -> Phases:
    """`position` counts ranks from the nearer end; `half` is half the number of stages; micro-batches of one side.

    A rank in the middle runs its very first F0 and B1 one after the other: the activation leaves before the gradient
    for B1 is there, which shortens the step where messages take time.
    """
    outer, inner = half - position - 1, position + 1
    pairs = micro_batches - 2 * half + position + 1
    in_the_middle = 1 if outer == 0 else 0
    return [
        (2 * outer, "F0"),
        (inner, "F0 F1"),
        (outer, "I1 W F1"),
        (in_the_middle, "F0 B1 F1&B0"),
        (pairs - in_the_middle, "F0&B1 F1&B0"),
        (outer, "B1 F1&B0"),
        # the backwards that are left: the second half of them split, so that their W fill the end
        (inner // 2, "B1 B0"),
        (inner % 2, "B1 I0"),
        (inner // 2, "I1 I0"),
        (outer, "W I0"),
        (inner, "W"),
    ]


def _zbv_phases(rank: int, pp: int, micro_batches: int) -> Phases:
    after = pp - rank  # ranks from this one to the bottom of the V
    return [
        (2 * after - 1, "F0"),
        (rank, "F1 F0"),
        (after, "F1 I1 W"),
        (micro_batches - 2 * pp + rank + 1, "F0 I0 W F1 I1 W"),
        (after - 1, "I0 W F1 I1 W"),
        (rank, "I0 I1"),
        (after, "I0 W"),
        (rank * 2, "W"),
    ]


@dataclass
class _Side:
    """One of a rank's two stages, and which micro-batch it takes next."""

    stage: int
    next_forward: int
    next_backward: int

    def forward(self) -> Action:
        self.next_forward += 1
        return Action(Kind.F, self.next_forward - 1, self.stage)

    def backward(self, kind: Kind) -> Action:
        self.next_backward += 1
        return Action(kind, self.next_backward - 1, self.stage)


def _v_sides(rank: int, pp: int) -> tuple[_Side, _Side]:
    down, up = v_stages(rank, pp)
    return _Side(down, 0, 0), _Side(up, 0, 0)


def _actions(phases: Phases, sides: tuple[_Side, _Side]) -> list[Action]:
    """The list of a rank from its table."""
    actions: list[Action] = []
    queue: deque[Action] = deque()
    words = [word for repeats, body in phases for _ in range(repeats) for word in body.split()]
    for word in words:
        if word == "W":
            actions.append(queue.popleft())
        elif "&" in word:
            forward, backward = word.split("&")
            actions.append(overlapped(sides[int(forward[1])].forward(), sides[int(backward[1])].backward(Kind.B)))
        elif word[0] == "F":
            actions.append(sides[int(word[1])].forward())
        else:
            actions.append(sides[int(word[1])].backward(Kind(word[0])))
        if word[0] == "I":
            queue.append(Action(Kind.W, actions[-1].micro_batch, actions[-1].stage))
    return actions
