"""A pipeline stage whose computation is sleep: it takes a given time and no processor.

With real computation, ranks that share cores give their idle time to one another, and a bubble cannot be seen. With
stages that sleep, the executor, its messages and the wire are the real ones and everything else takes the time it is
told, so what a step takes beyond the simulator's answer is theirs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_engine.config.schema import ModelConfig
from moe_engine.distributed.groups import Groups
from moe_engine.model.batch import Batch
from moe_engine.model.transformer import LossRule, StageOutput
from moe_engine.ops.wgrad_queue import WgradQueue, leaf, weight_gradient
from moe_engine.schedule.simulate import Cost

CALIBRATION_SLEEPS = 50
CALIBRATION_SECONDS = 0.002


@dataclass(frozen=True)
class Sleep:
    """`sleep(seconds)` that ends on time: the system's own, less the median by which it oversleeps here."""

    overshoot: float

    @classmethod
    def calibrated(cls) -> Sleep:
        late = []
        for _ in range(CALIBRATION_SLEEPS):
            start = time.perf_counter()
            time.sleep(CALIBRATION_SECONDS)
            late.append(time.perf_counter() - start - CALIBRATION_SECONDS)
        return cls(statistics.median(late))

    def __call__(self, seconds: float) -> None:
        if seconds > self.overshoot:
            time.sleep(seconds - self.overshoot)


class TimedStage(nn.Module):
    """What an executor needs of a stage; cost: seconds. Its one weight's gradient counts the micro-batches."""

    def __init__(self, index: int, num_stages: int, cost: Cost, sleep: Sleep, dim: int) -> None:
        super().__init__()
        self.last, self.cost, self.sleep = index == num_stages - 1, cost, sleep
        self.model, self.dtype = ModelConfig(dim=dim), torch.float32
        self.weight = nn.Parameter(torch.zeros(1))
        self.num_blocks = 1

    def forward(
        self, batch: Batch, x: Tensor | None, rule: LossRule, queue: WgradQueue | None = None, label: str = ""
    ) -> StageOutput:
        """x [T, D] -> the same, later."""
        if x is None:
            x = torch.zeros(batch.shape[0] * batch.shape[1], self.model.dim)
        cost = self.cost
        out = sleeping(x, self.weight, (cost.f, cost.b - cost.w, cost.w), queue, self.sleep)
        return StageOutput(
            x=out,
            loss=out.sum() if self.last else None,
            loss_sums=torch.zeros(2, batch.labels.shape[0], dtype=torch.int64),
            aux=torch.zeros(2, dtype=torch.float64),
        )


class _Work(torch.autograd.Function):
    """See `sleeping`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        times: tuple[float, float, float],
        queue: WgradQueue | None,
        sleep: Callable[[float], None],
    ) -> Tensor:
        ctx.times, ctx.queue, ctx.sleep, ctx.parameter, ctx.shape = times, queue, sleep, leaf(weight), weight.shape
        sleep(times[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.sleep(ctx.times[1])

        def make() -> Tensor:
            ctx.sleep(ctx.times[2])
            return torch.ones(ctx.shape)

        return grads[0], weight_gradient(ctx.queue, ctx.parameter, make), None, None, None


def sleeping(
    x: Tensor,
    weight: Tensor,
    times: tuple[float, float, float],
    queue: WgradQueue | None,
    sleep: Callable[[float], None],
) -> Tensor:
    """x, which takes its time in forward, in backward, and for the weight's gradient, which is 1 and may be queued."""
    out: Tensor = _Work.apply(x, weight, times, queue, sleep)
    return out


def timed_stages(groups: Groups, held: Sequence[int], cost: Cost, sleep: Sleep, dim: int) -> dict[int, TimedStage]:
    """The stages `held` by this rank."""
    num_stages = len(groups.placement.stages)
    return {index: TimedStage(index, num_stages, cost, sleep, dim) for index in held}
