"""The words of a pipeline schedule: one `Action` is one step of work of one rank, on one micro-batch and one stage.

A schedule is one list of actions per rank. The backward of a stage exists in two forms: whole (B), or split in the
gradient of the input (I), which the previous stage waits for, and the gradient of the weights (W), which nobody waits
for and which may therefore fill a bubble. DualPipe adds the overlapped pair [F&B]: the forward of one micro-batch
woven with the backward of another, so that the communication of each hides behind the computation of the other.

This file also holds the only statement of what depends on what: `inputs` and `outputs`. The checker, the simulator and
the executor read these and nothing else.

Sources: "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, section 2) for the split backward; the DeepSeek-V3
report (arXiv 2412.19437, section 3.2.1) for the pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an action does."""

    F = "F"  # forward
    B = "B"  # whole backward: gradients of the input and of the weights
    I = "I"  # gradient of the input only
    W = "W"  # the weight gradient that an earlier I left in the queue
    FB = "F&B"  # an overlapped pair: F of one micro-batch, B of another

    __hash__ = object.__hash__  # as of Output


@dataclass(frozen=True, slots=True)
class Action:
    """One step of work. Stages are numbered 0 … num_stages-1 along the model, whatever rank holds them.

    `micro_batch` and `stage` belong to the forward half of a pair; `backward_*` to its backward half, and are None in
    every other kind.
    """

    kind: Kind
    micro_batch: int
    stage: int
    backward_micro_batch: int | None = None
    backward_stage: int | None = None

    def __post_init__(self) -> None:
        has_backward = self.backward_micro_batch is not None and self.backward_stage is not None
        if (self.kind is Kind.FB) != has_backward or (self.backward_micro_batch is None) != (
            self.backward_stage is None
        ):
            raise ValueError(f"kind={self.kind.value}: a pair, and only a pair, names a backward micro-batch and stage")

    def halves(self) -> tuple[Action, ...]:
        """The simple actions in this one: (F, B) of a pair, otherwise the action itself."""
        if self.backward_micro_batch is None or self.backward_stage is None:
            return (self,)
        return (
            Action(Kind.F, self.micro_batch, self.stage),
            Action(Kind.B, self.backward_micro_batch, self.backward_stage),
        )

    def text(self, with_stage: bool = False) -> str:
        """`F3`, `[F7&B3]`; with the stage, for ranks that hold several: `F3@1`, `[F7@0&B3@7]`."""
        words = [
            f"{half.kind.value}{half.micro_batch}" + (f"@{half.stage}" if with_stage else "") for half in self.halves()
        ]
        return words[0] if len(words) == 1 else f"[{'&'.join(words)}]"

    def __str__(self) -> str:
        return self.text()


def overlapped(forward: Action, backward: Action) -> Action:
    """The pair [F&B] of an F and a B."""
    if forward.kind is not Kind.F or backward.kind is not Kind.B:
        raise ValueError(f"a pair is made of an F and a B, not of {forward} and {backward}")
    return Action(Kind.FB, forward.micro_batch, forward.stage, backward.micro_batch, backward.stage)


class Output(Enum):
    """What an action makes that something else needs."""

    ACTIVATION = "activation"  # the output of a stage: goes to the next one
    GRADIENT = "gradient"  # the gradient of a stage's input: goes to the previous one
    WEIGHT_GRADIENT = "weight gradient"  # stays on the rank

    __hash__ = object.__hash__  # Enum's own hash took a quarter of the checker's time


class Item(NamedTuple):
    """One made thing: `stage` is the stage that made it."""

    output: Output
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.output.value} of micro-batch {self.micro_batch} made by stage {self.stage}"


_MAKES = {
    Kind.F: (Output.ACTIVATION,),
    Kind.B: (Output.GRADIENT, Output.WEIGHT_GRADIENT),
    Kind.I: (Output.GRADIENT,),
    Kind.W: (Output.WEIGHT_GRADIENT,),
}


def outputs(action: Action) -> list[Item]:
    """Everything the action makes."""
    return [Item(output, half.micro_batch, half.stage) for half in action.halves() for output in _MAKES[half.kind]]


def inputs(action: Action, num_stages: int) -> list[Item]:
    """Everything the action needs, from other ranks and from its own.

    F needs the activation of the previous stage; B and I need what their own F saved and the gradient from the next
    stage; W needs its own I.
    """
    needed = []
    for half in action.halves():
        micro_batch, stage = half.micro_batch, half.stage
        if half.kind is Kind.F and stage > 0:
            needed.append(Item(Output.ACTIVATION, micro_batch, stage - 1))
        if half.kind in (Kind.B, Kind.I):
            needed.append(Item(Output.ACTIVATION, micro_batch, stage))
            if stage < num_stages - 1:
                needed.append(Item(Output.GRADIENT, micro_batch, stage + 1))
        if half.kind is Kind.W:
            needed.append(Item(Output.GRADIENT, micro_batch, stage))
    return needed
