"""One executor runs any schedule: it walks this rank's list of actions and knows nothing of how it was made.

    F      forward of a micro-batch through a stage; the result is sent on as soon as it exists
    B      full backward;  I  input gradient only, weight gradients go to the queue;  W  those weight gradients
    F&B    a forward and a backward of different micro-batches, woven phase by phase (`overlap`, `schedule.pair`) where
           experts are spread over ranks; without exchanges to hide, or without an order, one after the other

A receive is posted one action ahead (`schedule.check` proves that this order cannot deadlock) and waited for at
its first use; messages are tagged by stage and micro-batch. The graph is cut at stage borders, which the
executor owns: nothing inside a stage detaches. Between two stages of one rank tensors are handed over directly.

A stage may be held by several ranks (DualPipe's two directions): the lists say which of them a micro-batch meets,
so the executor reads those of all ranks and runs its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_engine.distributed.collectives import Pending
from moe_engine.distributed.groups import Groups
from moe_engine.model.batch import Batch
from moe_engine.model.transformer import LossRule, Stage, StageOutput
from moe_engine.ops.wgrad_queue import WgradQueue
from moe_engine.pipeline.overlap import CutMicroBatch, Exchanges
from moe_engine.pipeline.recorder import Recorder, recorded
from moe_engine.pipeline.sends import Sends
from moe_engine.schedule import pair
from moe_engine.schedule.action import Action, Item, Kind, Output, inputs
from moe_engine.schedule.check import Lists, rank_of_work


@dataclass
class StepSums:
    """Loss sums of the micro-batches and stages that ran on this rank; see `StageOutput`.

    hidden: by micro-batch, the final hidden state [T, D]; only after `forward_only` and where the head is.
    """

    loss_sums: Tensor  # int64 [2, 1+D]
    aux: Tensor  # fp64 [2]
    hidden: dict[int, Tensor] = field(default_factory=dict)

    def add(self, output: StageOutput) -> None:
        self.loss_sums += output.loss_sums
        self.aux += output.aux


@dataclass
class _Whole:
    """A micro-batch between its forward and its backward on one stage, as one graph."""

    x: Tensor | None
    output: StageOutput
    place: tuple[int, int]
    queue: WgradQueue
    d_output: Tensor | None = None

    def backward(self, defer: bool) -> None:
        roots: list[tuple[Tensor, Tensor | None]] = []
        roots += [(self.output.x, self.d_output)] if self.d_output is not None else []
        roots += [(self.output.loss, None)] if self.output.loss is not None else []
        with self.queue.defer(self.place, defer):
            torch.autograd.backward([made for made, _ in roots], [gradient for _, gradient in roots])


@dataclass
class _Step:
    """Everything in flight during one pass over the actions."""

    batches: Sequence[Batch]
    rule: LossRule
    sums: StepSums
    rank_of: dict[tuple[int, int], int]  # by (stage, micro-batch): the pipeline rank where they meet
    paired: set[tuple[int, int]]  # (stage, micro-batch) with a half in a woven pair
    sends: Sends
    live: dict[tuple[int, int], _Whole | CutMicroBatch] = field(default_factory=dict)
    received: dict[Item, Pending] = field(default_factory=dict)
    local: dict[Item, Tensor] = field(default_factory=dict)


class Executor:
    """Runs action lists over the stages that this rank holds.

    stages: by stage index; hidden size and dtype of the border tensors come from the stages themselves.
    order: of the phases in a pair, see `schedule.pair`; None: the forward, then the backward. The same bits.
    recorder: is told what happens when (see `recorder`); may be set between runs.
    pair_sms: multiprocessors of a GPU for the products of a woven pair, which leave the others to its exchanges.
    hopper: grouped products run in their Hopper forms (`train.kernels`).
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        groups: Groups,
        order: str | None = None,
        recorder: Recorder | None = None,
        pair_sms: int | None = None,
        hopper: bool = False,
    ) -> None:
        self.stages, self.groups, self.order, self.recorder = stages, groups, order, recorder
        self.pair_sms = pair_sms
        self.num_stages = len(groups.placement.stages)
        self.here = groups.layout.coordinate(groups.rank).pp
        self.queue = WgradQueue(hopper)
        self.exchanges = Exchanges()

    def run(self, lists: Lists, batches: Sequence[Batch], rule: LossRule) -> StepSums:
        """One pass: gradients are added to the parameters' `.grad`, the loss sums returned (of this rank only).

        `lists` are those of all pipeline ranks; this one runs its own.
        """
        device = batches[0].tokens.device
        sums = StepSums(
            torch.zeros(2, batches[0].labels.shape[0], dtype=torch.int64, device=device),
            torch.zeros(2, dtype=torch.float64, device=device),
        )
        actions = lists[self.here]
        step = _Step(batches, rule, sums, rank_of_work(lists), self._paired(actions), Sends(lists))
        self.exchanges.recorder = self.recorder
        for i, action in enumerate(actions):
            for upcoming in actions[i : i + 2]:
                self._post_receives(step, upcoming)
            with recorded(self.recorder, action.text(with_stage=True)):
                self._act(step, action)
        step.sends.wait()
        if step.live or len(self.queue):
            raise ValueError(
                f"the schedule ended with {list(step.live)} live and {len(self.queue)} weight gradients queued"
            )
        return step.sums

    def forward_only(self, batches: Sequence[Batch], rule: LossRule) -> StepSums:
        """Evaluate: forwards alone, no gradients, no routing statistics; on the first holder of each stage."""
        first = {stage: ranks[0] for stage, ranks in self.groups.placement.rank_of_stage.items()}
        lists = [
            [Action(Kind.F, m, stage) for m in range(len(batches)) for stage in sorted(held) if first[stage] == pp]
            for pp, held in enumerate(self.groups.placement.stages_of_rank)
        ]
        for stage in self.stages.values():
            stage.eval()
        with torch.no_grad():
            sums = self.run(lists, batches, rule)
        for stage in self.stages.values():
            stage.train()
        return sums

    def _paired(self, actions: Sequence[Action]) -> set[tuple[int, int]]:
        """Where weaving has something to hide, the micro-batches and stages that it needs cut in phases."""
        if self.order is None or self.groups.ep.size == 1:
            return set()
        found = [action for action in actions if action.kind is Kind.FB]
        return {(half.stage, half.micro_batch) for action in found for half in action.halves()}

    def _act(self, step: _Step, action: Action) -> None:
        if action.kind is Kind.FB and step.paired:
            self.queue.num_sms = self.pair_sms
            self._pair(step, action)
            self.queue.num_sms = None
            return
        for half in action.halves():
            if half.kind is Kind.F:
                self._forward(step, half.stage, half.micro_batch)
            elif half.kind is Kind.W:
                self.queue.run((half.stage, half.micro_batch))
            else:
                self._backward(step, half.stage, half.micro_batch, defer=half.kind is Kind.I)

    def _forward(self, step: _Step, stage: int, m: int) -> None:
        if (stage, m) in step.paired:
            cut = self._enter(step, stage, m)
            cut.forward()
            self._leave(step, cut)
            return
        x = self._input(step, stage, m)
        output = self.stages[stage](step.batches[m], x, step.rule, self.queue, f"micro_batch {m}")
        self._leave(step, _Whole(x, output, (stage, m), self.queue))

    def _backward(self, step: _Step, stage: int, m: int, defer: bool) -> None:
        live = self._turn_back(step, stage, m)
        live.backward(defer)
        self._give_gradient(step, live)

    def _pair(self, step: _Step, action: Action) -> None:
        """Both halves, phase by phase; what goes to other stages leaves as soon as it is there."""
        forward, backward = action.halves()
        back, ahead = self._turn_back(step, backward.stage, backward.micro_batch), None
        assert self.order is not None and isinstance(back, CutMicroBatch)
        back.by_courier = self.order == pair.BLOCKING
        for each in pair.steps(self.order, self.stages[forward.stage].num_blocks, back.blocks):
            if each.part == "F":
                if ahead is None:
                    ahead = self._enter(step, forward.stage, forward.micro_batch)
                    ahead.by_courier = self.order == pair.BLOCKING
                ahead.run(each)
            else:
                done = back.done
                back.run(each)
                if back.done and not done:
                    self._give_gradient(step, back)
        self.exchanges.catch_up()
        assert ahead is not None
        self._leave(step, ahead)

    def _input(self, step: _Step, stage: int, m: int) -> Tensor | None:
        """What the forward of a micro-batch starts from; None on the first stage."""
        if (stage, m) in step.live:
            raise ValueError(f"micro-batch {m} enters stage {stage} twice")
        if stage == 0:
            return None
        return self._take(step, Item(Output.ACTIVATION, m, stage - 1)).requires_grad_(torch.is_grad_enabled())

    def _enter(self, step: _Step, stage: int, m: int) -> CutMicroBatch:
        x = self._input(step, stage, m)
        return CutMicroBatch(self.stages[stage], step.batches[m], x, step.rule, (stage, m), self.queue, self.exchanges)

    def _leave(self, step: _Step, live: _Whole | CutMicroBatch) -> None:
        """After its forward: the output goes on to the next stage."""
        (stage, m), output = live.place, live.output
        assert output is not None
        step.sums.add(output)
        if torch.is_grad_enabled():
            step.live[stage, m] = live
        if stage + 1 < self.num_stages:
            self._give(step, Item(Output.ACTIVATION, m, stage), stage + 1, output.x.detach())
        if not torch.is_grad_enabled() and self.stages[stage].spec.head:
            step.sums.hidden[m] = output.x

    def _turn_back(self, step: _Step, stage: int, m: int) -> _Whole | CutMicroBatch:
        """Before its backward: the gradient of the output comes from the next stage."""
        live = step.live.pop((stage, m))
        if stage + 1 < self.num_stages:
            live.d_output = self._take(step, Item(Output.GRADIENT, m, stage + 1))
        return live

    def _give_gradient(self, step: _Step, live: _Whole | CutMicroBatch) -> None:
        stage, m = live.place
        if live.x is not None:
            assert live.x.grad is not None
            self._give(step, Item(Output.GRADIENT, m, stage), stage - 1, live.x.grad)

    def _post_receives(self, step: _Step, action: Action) -> None:
        """Post what `action` will wait for, if another rank makes it and it is not posted yet."""
        for item in inputs(action, self.num_stages):
            source = step.rank_of[item.stage, item.micro_batch]
            if source == self.here or item in step.received:
                continue
            link = self.groups.edges[source, self.here, item.output.value]
            buffer = self._border_tensor(step.batches[item.micro_batch])
            step.received[item] = link.receive(buffer, 1 - link.rank, self._tag(step, item), str(item))

    def _border_tensor(self, batch: Batch) -> Tensor:
        """Room for what crosses a stage border, [T, D]."""
        stage = next(iter(self.stages.values()))
        rows = batch.shape[0] * batch.shape[1]
        return torch.empty(rows, stage.model.dim, dtype=stage.dtype, device=batch.tokens.device)

    def _take(self, step: _Step, item: Item) -> Tensor:
        if item in step.local:
            return step.local.pop(item)
        with recorded(self.recorder, f"wait for the {item}"):
            x = step.received.pop(item).wait()
        step.sends.heard(item, step.rank_of[item.stage, item.micro_batch])
        return x

    def _give(self, step: _Step, item: Item, user: int, x: Tensor) -> None:
        """Pass `x` to the stage that uses it: directly on this rank, or by a message that is started now."""
        target = step.rank_of[user, item.micro_batch]
        if target == self.here:
            step.local[item] = x
            return
        link = self.groups.edges[self.here, target, item.output.value]
        sent = link.send(x, 1 - link.rank, self._tag(step, item), str(item))
        step.sends.add(sent, item.output, item.micro_batch, user, target)

    def _tag(self, step: _Step, item: Item) -> int:
        return item.stage * len(step.batches) + item.micro_batch
