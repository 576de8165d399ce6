"""The MoE layer: router, dispatch, experts, combine, shared expert. Works alone in any PyTorch model.

    layer = MoELayer(MoEConfig(dim=256, expert_hidden=128, num_experts=16, top_k=4))
    y = layer(x)              # x [..., 256]; ordinary autograd, no process group
    loss(y).backward()
    optimizer.step()
    layer.update_balance()    # moves the balancing bias

Inside the engine a block runs the four phases itself: `pack` and `compute` calculate, `dispatch` and `combine`
communicate. They are plain functions that never detach, and all state of a micro-batch is in what they return.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_engine.config.schema import MoEConfig
from moe_engine.config.validate import validate_moe
from moe_engine.distributed.collectives import Communicator
from moe_engine.moe import dispatch as wire
from moe_engine.moe.balance import router_z_loss, sequence_balance_loss, update_expert_bias
from moe_engine.moe.experts import Experts, activation_of
from moe_engine.moe.mlp import DenseMLP
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.moe.router import Router
from moe_engine.ops.random import normal
from moe_engine.ops.recompute import Segments
from moe_engine.ops.wgrad_queue import WgradQueue

Arrived = wire.Rows


@dataclass(frozen=True)
class Packed:
    """Tokens ready to travel.

    rows: what is sent; handle: its layout (None with one rank); aux_loss: weighted balance loss summed over this
    micro-batch's sequences and weighted z-loss summed over its tokens, [2] (None where both weights are 0): the caller
    divides by the numbers of sequences and tokens.
    """

    rows: wire.Rows
    handle: wire.DispatchHandle | None
    aux_loss: Tensor | None


class MoELayer(nn.Module):
    """Routed experts and, optionally, a shared expert: DeepSeek-V3's DeepSeekMoE (arXiv 2412.19437, section 2.1.2).

    ep, ep_counts: communicators of the expert-parallel group, for rows and for their counts; or `ep_group`, a torch
    process group, in their place. Each rank of the group holds num_experts / size experts. None: all experts here.
    name, seed: parameters start as normal numbers of `config.init_std`, a function of their global names (below
    `name`) and the seed alone; with seed=None they are left as they are, for whoever fills them (the engine's optimizer
    does). Raises ConfigError for values that do not fit together.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        ep: Communicator | None = None,
        ep_counts: Communicator | None = None,
        ep_group: Any = None,
        name: str = "moe",
        seed: int | None = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        validate_moe(config)
        if ep_group is not None:
            ep = ep_counts = Communicator.of_group(ep_group)
        self.config = config
        self.ep = ep or Communicator.alone()
        self.ep_counts = ep_counts or self.ep
        self.placement = ExpertPlacement(config.num_experts, self.ep.size)
        self.router = Router(config, dtype, device)
        ids, activation = self.placement.experts_of(self.ep.rank), activation_of(config)
        self.experts = Experts(ids, config.dim, config.expert_hidden, dtype, device, activation, config.expert_biases)
        self.shared: DenseMLP | None = None
        if config.num_shared_experts:
            shared_hidden = config.num_shared_experts * config.expert_hidden
            self.shared = DenseMLP(config.dim, shared_hidden, dtype, device, activation)
        if seed is not None:
            self.reset_parameters(name, seed)

    @torch.no_grad()
    def reset_parameters(self, prefix: str, seed: int) -> None:
        """Fill all weights by their global names below `prefix`; biases, the balancing one too, and counts with 0."""
        for owner_name, owner in self.named_modules(prefix=prefix):
            for name, parameter in owner.named_parameters(recurse=False):
                if name.endswith("bias"):
                    parameter.zero_()
                    continue
                if isinstance(owner, Experts):
                    names, pieces = owner.expert_names(owner_name, name), list(parameter)
                else:
                    names, pieces = [f"{owner_name}.{name}"], [parameter]
                for piece_name, piece in zip(names, pieces, strict=True):
                    piece.copy_(normal(piece.shape, self.config.init_std, piece_name, seed, piece.dtype, piece.device))
        self.router.expert_bias.zero_()
        self.router.num_tokens_per_expert.zero_()

    def pack(
        self,
        x: Tensor,
        shape: tuple[int, int],
        token_mask: Tensor | None = None,
        label: str = "",
    ) -> Packed:
        """Route, take the balance loss, lay out the rows to send and start the exchange of their counts.

        x [T, D], T = B*S with `shape` = (B, S); token_mask [T] bool, False for padding; label: for the collective log.
        """
        config = self.config
        routing = self.router(x, token_mask)
        exact = config.combine == "exact"
        ids, weights = routing.expert_ids, routing.expert_weights
        if not exact:
            ids, weights = self.placement.by_rank(ids, weights)
        handle = wire.plan(ids, self.placement, self.ep, self.ep_counts, exact, label)
        rows = wire.pack_rows(x, ids, weights, self.placement, handle)
        return Packed(rows, handle, self._aux_loss(routing.router_logits, shape, token_mask))

    def _aux_loss(self, router_logits: Tensor, shape: tuple[int, int], token_mask: Tensor | None) -> Tensor | None:
        """See `Packed`."""
        config = self.config
        if not config.aux_loss_weight and not config.z_loss_weight:
            return None
        balance = z_loss = router_logits.new_zeros(())
        if config.aux_loss_weight:
            balance = config.aux_loss_weight * sequence_balance_loss(
                router_logits, shape, config.top_k, config.score_function, token_mask
            )
        if config.z_loss_weight:
            z_loss = config.z_loss_weight * router_z_loss(router_logits, token_mask)
        return torch.stack((balance, z_loss))

    def dispatch_start(self, packed: Packed) -> wire.PendingDispatch:
        """Start sending the rows to their experts."""
        return wire.dispatch_start(packed.rows, packed.handle)

    def dispatch_wait(self, pending: wire.PendingDispatch) -> Arrived:
        """The rows that arrived for this rank's experts."""
        return wire.dispatch_wait(pending)

    def dispatch(self, packed: Packed) -> Arrived:
        """Start and wait."""
        return self.dispatch_wait(self.dispatch_start(packed))

    def compute(
        self, x: Tensor, arrived: Arrived, queue: WgradQueue | None = None, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The routed experts' rows to send back [R, D], and the shared expert's output for `x` [T, D] or None."""
        shared = None if self.shared is None else self.shared(x, queue, segments)
        rows: Tensor = self.experts(arrived, queue, segments)
        return rows, shared

    def combine_start(self, rows: Tensor, packed: Packed) -> wire.PendingCombine:
        """Start sending the experts' rows [R, D] back."""
        return wire.combine_start(rows, packed.handle)

    def combine_wait(self, pending: wire.PendingCombine) -> Tensor:
        """The routed output [T, D], summed in fp32 in fixed order, in x's dtype."""
        return wire.combine_wait(pending)

    def combine(self, rows: Tensor, packed: Packed) -> Tensor:
        """Start and wait."""
        return self.combine_wait(self.combine_start(rows, packed))

    def forward(
        self, x: Tensor, token_mask: Tensor | None = None, return_aux: bool = False, queue: WgradQueue | None = None
    ) -> Any:
        """x [B, S, D] (or [T, D]: one sequence) -> the same shape, in x's dtype; token_mask without the last dimension.

        With return_aux also the weighted balance loss, averaged over the sequences of this call, and z-loss, averaged
        over its tokens: their sum, a scalar.
        """
        S = x.shape[-2] if x.dim() > 1 else 1
        B = math.prod(x.shape[:-2])
        flat = x.reshape(-1, x.shape[-1])
        packed = self.pack(flat, (B, S), None if token_mask is None else token_mask.reshape(-1))
        rows, shared = self.compute(flat, self.dispatch(packed), queue)
        out = self.combine(rows, packed)
        if shared is not None:
            out = out + shared
        out = out.view(x.shape)
        if not return_aux:
            return out
        if packed.aux_loss is None:
            return out, out.new_zeros(())
        tokens = B * S if token_mask is None else int(token_mask.sum())
        return out, packed.aux_loss[0] / max(B, 1) + packed.aux_loss[1] / max(tokens, 1)

    def update_balance(self) -> None:
        """Move the balancing bias by the loads since the last call, summed over the expert-parallel group; clear them.

        Call it on all ranks, once per optimizer step. Data-parallel replicas of a whole group must sum their
        `router.num_tokens_per_expert` first.
        """
        counts = self.ep_counts.all_reduce_sum(self.router.num_tokens_per_expert, "balance")
        update_expert_bias(self.router.expert_bias, counts, self.config.bias_step)
        self.router.num_tokens_per_expert.zero_()
