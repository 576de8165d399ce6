"""A pipeline stage whose computation is sleep: the real executor, exchanges and messages, no work for the processor.

With real computation, ranks that share cores slow one another down and the network's threads compute too; what an
order hides, and what a schedule idles, can then not be told from who got which core. A sleeping phase takes its time
wherever it runs. Rows really are packed, sent, received and summed: every token goes to one expert of each rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_engine.bench.timed_stage import sleeping
from moe_engine.distributed.groups import Groups
from moe_engine.layout import StageSpec
from moe_engine.model.batch import Batch
from moe_engine.model.block import AttnOut, Combine, Dispatch, MlpOut, Walk, follow
from moe_engine.model.transformer import LossRule, Seams, StageOutput
from moe_engine.moe import dispatch as wire
from moe_engine.moe.layer import Packed
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.ops.wgrad_queue import WgradQueue


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of each compute phase of a block: forward, backward (input gradient) and weight gradients."""

    attn_f: float
    mlp_f: float
    mlp_b: float
    mlp_w: float
    attn_b: float
    attn_w: float

    @property
    def total(self) -> float:
        """Of one micro-batch in one block, there and back."""
        return self.attn_f + self.mlp_f + self.mlp_b + self.mlp_w + self.attn_b + self.attn_w


class TimedBlocks(nn.Module):
    """A stage of `blocks` blocks with experts over rows x [T, dim] fp32, in place of a `Stage` in an executor."""

    def __init__(self, spec: StageSpec, blocks: int, tokens: int, dim: int, times: PhaseTimes, groups: Groups) -> None:
        super().__init__()
        self.spec, self.num_blocks, self.times, self.groups, self.dtype = spec, blocks, times, groups, torch.float32
        self.model = _Sizes(dim)
        self.placement = ExpertPlacement(groups.ep.size, groups.ep.size)
        self.expert_ids = torch.arange(groups.ep.size).expand(tokens, -1).contiguous()
        self.links = wire.Links(groups.ep, groups.ep_counts)
        self.weight = nn.Parameter(torch.ones(()))
        self.input = nn.Parameter(torch.ones(tokens, dim))

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def forward(
        self, batch: Batch, x: Tensor | None, rule: LossRule, queue: WgradQueue | None = None, label: str = ""
    ) -> StageOutput:
        return follow(self.walk(batch, x, rule, Seams(), queue, label))

    def walk(
        self,
        batch: Batch,
        x: Tensor | None,
        rule: LossRule,
        seams: Seams,
        queue: WgradQueue | None = None,
        label: str = "",
    ) -> Walk[StageOutput]:
        """As `Stage.walk`; the loss is the sum of the last stage's output."""
        x = self.input * 1 if x is None else x
        for block in range(self.num_blocks):
            x = yield from self._block(x, queue, f"layers.{block} {label}")
        loss = x.sum() if self.spec.last else None
        return StageOutput(x, loss, torch.zeros(2, batch.labels.shape[0], dtype=torch.int64), torch.zeros(2).double())

    def _block(self, x: Tensor, queue: WgradQueue | None, label: str) -> Walk[Tensor]:
        times = self.times
        normed = sleeping(x, self.weight, (times.attn_f, times.attn_b, times.attn_w), queue, time.sleep)
        handle = wire.plan(self.expert_ids, self.placement, self.links, label)
        weights = self.weight * torch.ones(self.expert_ids.shape)
        rows = wire.pack_rows(normed, self.expert_ids, weights, self.placement, handle)
        out, arrival = yield Dispatch(AttnOut(x, normed, Packed(rows, handle, None)))
        done = sleeping(arrival().x, self.weight, (times.mlp_f, times.mlp_b, times.mlp_w), queue, time.sleep)
        back = yield Combine(MlpOut(done, None), handle)
        total: Tensor = out.residual + wire.sum_rows(back.rows, handle)
        return total


@dataclass(frozen=True)
class _Sizes:
    """What an executor asks a stage's model."""

    dim: int
