"""A pipeline stage of the decoder, and the loss rule.

Loss: each term is its sum over valid items divided by the number of valid items of that term in the whole
global batch, so that gradients are summed, never averaged, over micro-batches and ranks:

    total = main + (lambda / D) * sum_k MTP_k + sum over MoE layers of (alpha * sequence-wise balance loss + z-loss)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_engine.config.schema import ContextParallelConfig, ModelConfig, MoESection, RecomputeConfig
from moe_engine.distributed.groups import Groups
from moe_engine.layout import StageSpec
from moe_engine.model.attention import sequence_context
from moe_engine.model.batch import Batch, ItemCounts
from moe_engine.model.block import Block, Walk, follow
from moe_engine.model.context_parallel import ContextParallel
from moe_engine.model.layers import RMSNorm, Table
from moe_engine.model.mtp import MTPModule
from moe_engine.moe.layer import MoELayer
from moe_engine.ops.embedding import embedding
from moe_engine.ops.fp8 import Fp8, use_fp8
from moe_engine.ops.linear import linear
from moe_engine.ops.loss import cross_entropy
from moe_engine.ops.recompute import closed_segments, recomputed_names, segment
from moe_engine.ops.wgrad_queue import WgradQueue

FIXED_POINT = 2**32  # reported losses are summed as int64, in units of 2^-32 nat, so that no order of sums matters


@dataclass(frozen=True)
class LossRule:
    """The one loss normaliser: global item counts of this step and the weight of the MTP terms."""

    items: ItemCounts
    mtp_weight: float  # lambda

    def depth(self, depth: int, losses: Tensor) -> Tensor:
        """The term of main targets (depth 0) or of MTP module depth-1, from per-token losses [T]."""
        if depth == 0:
            return losses.sum() / max(self.items.tokens, 1)
        return losses.sum() * (self.mtp_weight / len(self.items.mtp) / max(self.items.mtp[depth - 1], 1))

    def aux(self, weighted_sums: Tensor) -> Tensor:
        """An MoE layer's terms [2] from its weighted sums [2]: balance over sequences, z-loss over tokens."""
        balance, z_loss = weighted_sums.unbind()
        return torch.stack((balance / max(self.items.sequences, 1), z_loss / max(self.items.routed, 1)))


@dataclass(frozen=True)
class StageOutput:
    """What one stage makes of one micro-batch.

    x: the residual stream [T, D] for the next stage (the final hidden state on the last one);
    loss: scalar to differentiate, this stage's part of the total (None when it has none);
    loss_sums: int64 [2, 1+D], see `fixed_point_sum`: of the main and the MTP losses over valid targets;
    aux: fp64 [2], this stage's part of the balance loss and of the z-loss, divided by the global numbers of items.
    """

    x: Tensor
    loss: Tensor | None
    loss_sums: Tensor
    aux: Tensor


class Seams:
    """What a forward does with tensors that later phases use: here nothing, one graph under ordinary autograd.

    An executor that runs the backward phase by phase cuts the graph there.
    """

    def cut(self, x: Tensor) -> Tensor:
        """A tensor that a later phase than the present one will read."""
        return x

    def table(self, weight: Tensor) -> Tensor:
        """An embedding table or output head, which several phases may read."""
        return weight


class Stage(nn.Module):
    """The layers of one pipeline stage; where its spec says so also embedding, head with the main loss, and MTP."""

    def __init__(
        self,
        spec: StageSpec,
        model: ModelConfig,
        moe: MoESection,
        groups: Groups | None,
        dtype: torch.dtype,
        device: torch.device | None = None,
        recompute: RecomputeConfig | None = None,
        cp: ContextParallelConfig | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.model, self.dtype = spec, model, dtype
        self.recompute = recomputed_names(recompute or RecomputeConfig())
        shares = groups is not None and groups.cp.size > 1
        sharing = ContextParallel.of(cp or ContextParallelConfig(), groups.cp) if groups and shares else None
        cp_counts = groups.cp_counts if groups and shares else None

        def block(dense: bool, windowed: bool = False) -> Block:
            return Block(model, moe, dense, groups, dtype, device, self.recompute, sharing, cp_counts, windowed)

        self.embedding = Table(model.vocab_size, model.dim, dtype, device) if spec.embedding else None
        self.layers = nn.ModuleDict()
        for i in spec.layers:
            windowed = model.sliding_window > 0 and i % model.sliding_window_every == 0
            self.layers[str(i)] = block(model.is_dense(i), windowed)
        self.norm = RMSNorm(model.dim, model.norm_eps, dtype, device) if spec.head else None
        own_head = (spec.head or bool(spec.mtp)) and not model.tied_head
        self.head = Table(model.vocab_size, model.dim, dtype, device) if own_head else None
        self.mtp = nn.ModuleDict({str(k): MTPModule(model, block(False), dtype, device) for k in spec.mtp})

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def use_fp8(self, fp8: Fp8, first: int = 0, last: int = 0) -> None:
        """Compute layers and MTP in fp8, but for the model's `first` and `last` decoder layers.

        Those round between products too, wherever ranks share sequences or not: their last bits would flip codes
        behind them, and no layout would have the losses of another.
        """
        for part in self.modules():
            if isinstance(part, Block):
                part.keep_wide(False)
        for index, layer in self.layers.items():
            if first <= int(index) < self.model.num_layers - last:
                use_fp8(layer, fp8)
        use_fp8(self.mtp, fp8)

    def share(self, other: Stage) -> None:
        """Use the tables of another stage on this rank (one parameter, one gradient)."""
        if self.embedding is not None and other.embedding is not None:
            self.embedding = other.embedding
        if self.head is not None and other.head is not None:
            self.head = other.head

    def moe_layers(self) -> dict[str, MoELayer]:
        """The MoE layers by global name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, MoELayer)}

    @property
    def num_blocks(self) -> int:
        """Blocks that a training forward walks through, those of MTP included."""
        return len(self.layers) + len(self.mtp)

    def forward(
        self,
        batch: Batch,
        x: Tensor | None,
        rule: LossRule,
        queue: WgradQueue | None = None,
        label: str = "",
    ) -> StageOutput:
        """`x` [T, D] from the stage before (None on the first). See `StageOutput`."""
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
        """The forward, with a stop at each exchange of its blocks; `label` goes into the collective log."""
        context = sequence_context(batch, self.model, self.dtype)
        aux_sums: list[Tensor] = []
        losses: dict[int, Tensor] = {}  # per token, by depth: 0 is the main loss
        if x is None:
            x = self._embed(batch.tokens[0], seams)
        for index, layer in self.layers.items():
            assert isinstance(layer, Block)
            x, aux = yield from layer.walk(x, context, queue, f"layers.{index} {label}")
            aux_sums += [] if aux is None else [aux]
        if self.norm is not None:
            losses[0] = self._token_losses(self.norm, x, batch.labels[0], seams)
        # A batch that carries no inputs for MTP (evaluation, generation) skips those modules.
        for depth, module in zip(range(1, batch.tokens.shape[0]), self.mtp.values(), strict=False):
            assert isinstance(module, MTPModule)
            losses = {earlier: seams.cut(values) for earlier, values in losses.items()}
            embedded = self._embed(batch.tokens[depth], seams)
            x, aux = yield from module.walk(x, embedded, context, queue, f"mtp.{depth - 1} {label}")
            aux_sums += [] if aux is None else [aux]
            losses[depth] = self._token_losses(module.norm, x, batch.labels[depth], seams)
        return self._output(x, losses, aux_sums, rule, batch.labels.shape[0])

    def _output(
        self, x: Tensor, losses: dict[int, Tensor], aux_sums: list[Tensor], rule: LossRule, depths: int
    ) -> StageOutput:
        """The loss terms put together: per-token losses [T] of each depth, balance and z-losses [2] of the layers."""
        aux = [rule.aux(value) for value in aux_sums]
        terms = [rule.depth(depth, values) for depth, values in losses.items()]
        terms += [value.sum() for value in aux]
        loss_sums = torch.zeros(2, depths, dtype=torch.int64, device=x.device)
        for depth, values in losses.items():
            loss_sums[:, depth] = fixed_point_sum(values)
        return StageOutput(
            x=x,
            loss=sum(terms[1:], terms[0]) if terms else None,
            loss_sums=loss_sums,
            aux=torch.stack([value.detach().double() for value in aux]).sum(dim=0)
            if aux
            else x.new_zeros(2, dtype=torch.float64),
        )

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits [N, V] of final hidden states `x` [N, D]."""
        assert self.norm is not None
        return linear(self.norm(x), self._head_weight())

    def _token_losses(self, norm: RMSNorm, x: Tensor, labels: Tensor, seams: Seams) -> Tensor:
        """The head's loss at each token [T], from a hidden state x [T, D] and labels [B, S]."""
        with closed_segments(self.recompute) as segments:
            normed = segment(segments, "norm", norm, x)
            return cross_entropy(normed, seams.table(self._head_weight()), labels.reshape(-1))

    def _embed(self, tokens: Tensor, seams: Seams) -> Tensor:
        assert self.embedding is not None
        return embedding(tokens.reshape(-1), seams.table(self.embedding.weight))

    def _head_weight(self) -> Tensor:
        table = self.head if self.head is not None else self.embedding
        assert table is not None
        return table.weight


def fixed_point_sum(losses: Tensor) -> Tensor:
    """Sum of per-token losses in nats, exact in any order of ranks: int64 [2].

    The finite ones in units of 1/FIXED_POINT; and how many are not finite, since an integer cannot show that.
    """
    finite = losses.detach().isfinite()
    units = (losses.detach().double().where(finite, 0) * FIXED_POINT).round().to(torch.int64)
    return torch.stack([units.sum(), (~finite).sum()])


def mean_losses(loss_sums: Tensor, targets: Sequence[int]) -> list[float]:
    """Nats per target from the `fixed_point_sum`s [2, n] of n losses; 0 without targets, NaN if one was not finite."""
    sums, not_finite = loss_sums.tolist()
    return [
        math.nan if bad else total / FIXED_POINT / max(n, 1)
        for total, bad, n in zip(sums, not_finite, targets, strict=True)
    ]
