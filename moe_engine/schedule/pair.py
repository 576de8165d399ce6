"""The overlapped pair [F&B], phase by phase: what depends on what, and the orders in which a rank runs it.

A pair weaves the forward of one micro-batch with the backward of another, block by block, so that the exchanges of
each hide behind the computation of the other. A block has the phases `attn`, `dispatch`, `mlp`, `combine` (see
`model.block`), in the backward from back to front, with the weight gradients (W) of the two compute phases apart.
Before the first block of the backward stands `tail`, what comes after a stage's last block: the loss, or nothing but
the sum of the rows that came back; so it ends the forward. Embedding and MTP's inputs belong to the `attn` after them.

`needs` is the only statement of the dependencies. An order is data too; `steps` writes it out for two stages, which
may have different numbers of blocks, and proves that every phase comes once and after what it needs. An exchange is
*started* at its place in the order, and waited for by the phase that needs it.

Source of the pair and of LAUNCHING: the DeepSeek-V3 report (arXiv 2412.19437, section 3.2.1, figure 4) and its
published profile (github.com/deepseek-ai/profile-data). docs/design/overlap.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from moe_engine.schedule.action import Action, Kind
from moe_engine.schedule.check import ScheduleError

EXCHANGES = ("dispatch", "combine")


class Step(NamedTuple):
    """One phase of a pair: phase attn | dispatch | mlp | combine | tail, part F | B | W, and the block in its stage."""

    phase: str
    part: str
    block: int

    def __str__(self) -> str:
        return f"{self.phase}({self.part}){self.block}"


# One round of each order: block i of the forward, block j of the backward, and the `combine(B)` of block j-1, which
# follows from `attn(B)` of j. The first combine(B) stands before the first round.

# For a device whose computation blocks the caller: each exchange starts as soon as its input is there. For
# `dispatch(F)` that is when its counts have arrived, a moment after attn(F): see `pipeline.overlap.Exchanges`.
BLOCKING = "attn(F) dispatch(F) mlp(B) dispatch(B) mlp(W) mlp(F) combine(F) attn(B) combine(B) attn(W)"

# The same without a second thread: dispatch(F) starts only after mlp(B), when its counts are surely there.
WITHOUT_COURIER = "attn(F) mlp(B) dispatch(F) dispatch(B) mlp(W) mlp(F) combine(F) attn(B) attn(W) combine(B)"

# For a device that queues: computation on one stream, exchanges on another, an event for each dependency.
LAUNCHING = "attn(F) mlp(B) dispatch(F) dispatch(B) mlp(W) mlp(F) attn(B) attn(W) combine(F) combine(B)"

# No weaving: all of the forward, then all of the backward. What the others are measured against.
ONE_AFTER_THE_OTHER = "F B"


def needs(step: Step, blocks: int) -> list[Step]:
    """What must come before a phase of a half whose stage has this many blocks."""
    phase, part, block = step
    if part == "W":
        return [Step(phase, "B", block)]
    if part == "F":
        before = {"dispatch": "attn", "mlp": "dispatch", "combine": "mlp"}
        if phase in before:
            return [Step(before[phase], "F", block)]
        return [Step("combine", "F", block - 1)] if block > 0 else []
    after = {"mlp": "combine", "dispatch": "mlp", "attn": "dispatch"}
    if phase in after:
        return [Step(after[phase], "B", block)]
    if phase == "tail":
        return []
    return [Step("attn", "B", block + 1) if block + 1 < blocks else Step("tail", "B", blocks)]


def phases(blocks: int, backward: bool) -> list[Step]:
    """All phases of one half by itself, in the plain order: each exchange is waited for where it starts."""
    if not backward:
        names = ("attn", "dispatch", "mlp", "combine")
        return [Step(name, "F", i) for i in range(blocks) for name in names] + [Step("tail", "F", blocks)]
    words = (("combine", "B"), ("mlp", "B"), ("mlp", "W"), ("dispatch", "B"), ("attn", "B"), ("attn", "W"))
    order = [Step(name, part, j) for j in reversed(range(blocks)) for name, part in words]
    return [Step("tail", "B", blocks), *order]


def steps(order: str, forward_blocks: int, backward_blocks: int) -> list[Step]:
    """The whole pair in an order such as BLOCKING. Raises ScheduleError when the order is not legal."""
    if order == ONE_AFTER_THE_OTHER:
        return [*phases(forward_blocks, backward=False), *phases(backward_blocks, backward=True)]
    found = [Step("tail", "B", backward_blocks)]
    if backward_blocks:
        found.append(Step("combine", "B", backward_blocks - 1))
    for i in range(max(forward_blocks, backward_blocks)):
        j = backward_blocks - 1 - i
        for word in order.split():
            phase, part = word[:-1].split("(")
            block = i if part == "F" else j - 1 if (phase, part) == ("combine", "B") else j
            if (i < forward_blocks) if part == "F" else block >= 0:
                found.append(Step(phase, part, block))
    found.append(Step("tail", "F", forward_blocks))
    check_pair(found, forward_blocks, backward_blocks)
    return found


def check_pair(order: Sequence[Step], forward_blocks: int, backward_blocks: int) -> None:
    """Raises ScheduleError unless every phase of both halves comes exactly once and after what it needs."""
    expected = {*phases(forward_blocks, backward=False), *phases(backward_blocks, backward=True)}
    done: set[Step] = set()
    for step in order:
        if step not in expected or step in done:
            raise ScheduleError(f"a pair of {forward_blocks} and {backward_blocks} blocks has one more {step}")
        missing = set(needs(step, forward_blocks if step.part == "F" else backward_blocks)) - done
        if missing:
            raise ScheduleError(f"in a pair {step} comes before {', '.join(map(str, missing))}, which it needs")
        done.add(step)
    if done != expected:
        raise ScheduleError(f"a pair lacks {', '.join(map(str, sorted(expected - done)))}")


class Exchange(NamedTuple):
    """One exchange of one rank: phase counts | dispatch | combine, part F | B, and where."""

    phase: str
    part: str
    stage: int
    block: int
    micro_batch: int


def exchanges(actions: Sequence[Action], blocks: Mapping[int, int], order: str | None) -> Iterator[Exchange]:
    """The one total order in which a rank starts its exchanges, from its list: equal on all ranks that share experts.

    blocks: by stage, how many it has, all with experts (leave out what dense ones would exchange). order: of the
    phases in pairs; None: the forward, then the backward. Counts start at the end of attn(F).
    """
    for action in actions:
        halves = [half for half in action.halves() if half.kind is not Kind.W]
        backwards = [half.kind is not Kind.F for half in halves]
        if len(halves) == 2 and order is not None:
            found = steps(order, *(blocks[half.stage] for half in halves))
        else:
            found = [
                step for half, back in zip(halves, backwards, strict=True) for step in phases(blocks[half.stage], back)
            ]
        for phase, part, block in found:
            half = halves[-1] if part != "F" else halves[0]
            if phase in EXCHANGES:
                yield Exchange(phase, part, half.stage, block, half.micro_batch)
            elif (phase, part) == ("attn", "F"):
                yield Exchange("counts", part, half.stage, block, half.micro_batch)
