"""A decoder block in four phases, which an executor may interleave with those of another micro-batch.

    attn      norm, attention, norm, router, packing of rows; ends by starting the exchange of counts
    dispatch  rows travel to their experts (communication only)
    mlp       shared expert, then, once the rows are there, routed experts, sum of a row's experts on this rank
    combine   rows travel back (communication only), are summed over ranks in fixed order and added to the residual

The phases are plain functions that never detach. `Block.walk` strings them together as a generator that stops at
each exchange and goes on with what has arrived: `follow` goes through without a stop, the ordinary forward under
ordinary autograd; an executor may stop there, detach, and do something else while the exchange is under way. A dense
block has the same four phases, two of them empty.

What the two computing phases keep for backward is chosen by names (`ops.recompute`); routing, its counts and all
communication are outside of what is recomputed, and so happen once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moe_engine.config.schema import ModelConfig, MoESection, moe_layer_config
from moe_engine.distributed.collectives import Communicator
from moe_engine.distributed.groups import Groups
from moe_engine.model.attention import GroupedAttention, LatentAttention, SequenceContext
from moe_engine.model.context_parallel import ContextParallel
from moe_engine.model.layers import RMSNorm
from moe_engine.moe import dispatch as wire
from moe_engine.moe.balance import WholeRows
from moe_engine.moe.layer import Arrived, MoELayer, Packed
from moe_engine.moe.mlp import DenseMLP
from moe_engine.ops.recompute import BLOCK, Segments, hooks, segment
from moe_engine.ops.wgrad_queue import WgradQueue


@dataclass(frozen=True)
class AttnOut:
    """End of the first phase: the residual stream [T, D], its norm [T, D], and the packed rows of an MoE block.

    segments: what of it is recomputed in backward, for the third phase to go on with; None: nothing.
    """

    residual: Tensor
    normed: Tensor
    packed: Packed | None
    segments: Segments | None = None

    @property
    def aux_loss(self) -> Tensor | None:
        """Weighted balance loss and z-loss [2], summed over this micro-batch's sequences and tokens (not divided)."""
        return None if self.packed is None else self.packed.aux_loss


@dataclass(frozen=True)
class MlpOut:
    """End of the third phase: rows to send back (none in a dense block) and what this rank adds itself [T, D].

    After the exchange `rows` are those that came back, [R_sent, D]. further: those of further rounds, where the rows of
    a rank are bounded and did not fit.
    """

    rows: Tensor | None
    local: Tensor | None
    further: Tensor | None = None


@dataclass(frozen=True)
class Dispatch:
    """A stop on a walk: the rows in `out` are to travel. Goes on with (`out`, a wait for what arrives, or None)."""

    out: AttnOut


@dataclass(frozen=True)
class Combine:
    """A stop on a walk: the rows in `mlp` are to travel back the way of `handle`. Goes on with `mlp` and what came."""

    mlp: MlpOut
    handle: wire.DispatchHandle | None


R = TypeVar("R")
Arrival = Callable[[], Arrived]  # waits for rows that are on their way
Walk = Generator[Dispatch | Combine, Any, R]  # forward through blocks, stopping before each exchange; returns R


def follow(walk: Walk[R]) -> R:
    """Go to the end of a walk, waiting for each exchange where it is started, everything under ordinary autograd."""
    try:
        stop = next(walk)
        while True:
            if isinstance(stop, Dispatch):
                stop = walk.send((stop.out, _arrival(stop.out.packed)))
            else:
                rows = stop.mlp.rows
                if rows is not None:
                    rows = wire.combine_arrive(wire.combine_start(rows, stop.handle))
                stop = walk.send(replace(stop.mlp, rows=rows))
    except StopIteration as end:
        result: R = end.value
        return result


def _arrival(packed: Packed | None) -> Arrival | None:
    """Start what is packed on its way."""
    if packed is None:
        return None
    pending = wire.dispatch_start(packed.rows, packed.handle)
    return lambda: wire.dispatch_wait(pending)


class Block(nn.Module):
    """Attention and an MLP or MoE layer, both behind a norm and a residual."""

    def __init__(
        self,
        model: ModelConfig,
        moe: MoESection,
        dense: bool,
        groups: Groups | None,
        dtype: torch.dtype,
        device: torch.device | None,
        recompute: frozenset[str] = frozenset(),
        cp: ContextParallel | None = None,
        cp_counts: Communicator | None = None,
        windowed: bool = False,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.cp_counts = cp_counts
        self.attention_norm = RMSNorm(model.dim, model.norm_eps, dtype, device)
        self.attention: GroupedAttention | LatentAttention
        if model.attention == "gqa":
            self.attention = GroupedAttention(model, dtype, device, cp, windowed)
        else:
            self.attention = LatentAttention(model, dtype, device, cp)
        self.mlp_norm = RMSNorm(model.dim, model.norm_eps, dtype, device)
        self.mlp: DenseMLP | None = None
        self.moe: MoELayer | None = None
        if dense:
            self.mlp = DenseMLP(model.dim, model.dense_hidden, dtype, device)
        else:
            self.moe = MoELayer(
                moe_layer_config(model, moe),
                ep=groups.ep if groups else None,
                ep_counts=groups.ep_counts if groups else None,
                ep_nodes=groups.ep_nodes if groups else None,
                ep_windows=groups.ep_windows if groups else None,
                seed=None,
                dtype=dtype,
                device=device,
            )
        self.keep_wide(True)

    def keep_wide(self, wide: bool) -> None:
        """Whether what stands between two products keeps their format (`ops.linear.widened`)."""
        self.attention.wide = wide
        if self.mlp is not None:
            self.mlp.wide = wide
        if self.moe is not None:
            self.moe.experts.wide = wide
        if self.moe is not None and self.moe.shared is not None:
            self.moe.shared.wide = wide

    def attn_phase(
        self, x: Tensor, context: SequenceContext, queue: WgradQueue | None = None, label: str = ""
    ) -> AttnOut:
        segments = Segments(self.recompute) if self.recompute else None
        parts = _parts(segments)

        def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.attention.project(segment(parts, "norm", self.attention_norm, x), context, queue, parts)

        def finish(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x = x + self.attention.project_out(y, context, queue)
            return x, segment(parts, "norm", self.mlp_norm, x)

        def attend(x: Tensor) -> tuple[Tensor, Tensor]:
            return finish(x, self.attention.core(project(x), context, queue, parts, label))

        with hooks(segments):
            if context.shared is None:
                x, normed = segment(segments, BLOCK, attend, x)
            else:  # the core communicates, and what communicates is not recomputed
                y = self.attention.core(segment(segments, BLOCK, project, x), context, queue, parts, label)
                x, normed = segment(segments, BLOCK, finish, x, y)
            packed = None
            if self.moe is not None:
                rows = None
                if context.shared is not None and self.cp_counts is not None:
                    rows = WholeRows(context.shared.shard.valid, self.cp_counts)
                packed = self.moe.pack(normed, context.shape, context.token_mask, label, rows)
        return AttnOut(x, normed, packed, segments)

    def mlp_phase(self, out: AttnOut, arrival: Arrival | None, queue: WgradQueue | None = None) -> MlpOut:
        """The shared expert works before the rows are waited for."""
        moe, mlp, parts = self.moe, self.mlp, _parts(out.segments)

        def everybody(x: Tensor) -> Tensor | None:
            if moe is not None:
                return moe.compute_shared(x, queue, parts)
            assert mlp is not None
            return mlp(x, queue, parts)

        with hooks(out.segments):
            found = MlpOut(None, segment(out.segments, BLOCK, everybody, out.normed))
            if arrival is not None:
                arrived = arrival()

                def experts(rows: Tensor, weights: Tensor) -> Tensor:
                    assert moe is not None
                    return moe.compute(replace(arrived, x=rows, weights=weights), queue, parts)

                rows = segment(out.segments, BLOCK, experts, arrived.x, arrived.weights)
                found = replace(found, rows=rows)
            if moe is not None and out.packed is not None:
                found = replace(found, further=moe.compute_further(out.normed, out.packed, queue))
        if out.segments is not None:
            out.segments.close()
        return found

    def sum_phase(self, out: AttnOut, back: MlpOut) -> Tensor:
        """What the exchange of `combine` brought, summed and added to the residual: [T, D]."""
        x = out.residual if back.local is None else out.residual + back.local
        if out.packed is None or back.rows is None:
            return x
        return x + wire.sum_rows(back.rows, out.packed.handle, back.further)

    def walk(
        self, x: Tensor, context: SequenceContext, queue: WgradQueue | None = None, label: str = ""
    ) -> Walk[tuple[Tensor, Tensor | None]]:
        """x [T, D] -> ([T, D], weighted balance loss and z-loss, summed but not divided, [2] or None)."""
        out = self.attn_phase(x, context, queue, label)
        out, arrival = yield Dispatch(out)
        mlp = self.mlp_phase(out, arrival, queue)
        back = yield Combine(mlp, out.packed and out.packed.handle)
        return self.sum_phase(out, back), out.aux_loss

    def forward(
        self, x: Tensor, context: SequenceContext, queue: WgradQueue | None = None, label: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        """The walk without a stop."""
        return follow(self.walk(x, context, queue, label))


def _parts(segments: Segments | None) -> Segments | None:
    """The segments inside a phase: none where the whole phase is one."""
    return None if segments is None or BLOCK in segments.names else segments
