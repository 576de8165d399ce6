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

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import MoEConfig
from moe_engine.config.validate import validate_moe
from moe_engine.distributed.collectives import Communicator
from moe_engine.distributed.sharded import fill
from moe_engine.moe import dispatch as wire
from moe_engine.moe.balance import WholeRows, router_z_loss, sequence_balance_loss
from moe_engine.moe.capacity import limit_load
from moe_engine.moe.choices import Choices
from moe_engine.moe.dispatch import graph
from moe_engine.moe.experts import Experts, activation_of
from moe_engine.moe.mlp import DenseMLP, SharedGate
from moe_engine.moe.placement import ExpertPlacement
from moe_engine.moe.router import Router, Routing, check_start, check_tokens
from moe_engine.ops.attach import attach
from moe_engine.ops.autocast import check_precision, products_in
from moe_engine.ops.backend import check_backend
from moe_engine.ops.count import count_on_backward
from moe_engine.ops.expert_activation import Activation
from moe_engine.ops.fp8 import Fp8, use_fp8
from moe_engine.ops.random import normal
from moe_engine.ops.recompute import Segments
from moe_engine.ops.wgrad_queue import WgradQueue

Arrived = wire.Rows


@dataclass(frozen=True)
class Packed:
    """Tokens ready to travel.

    rows: what is sent; handle: its layout (None with one rank); aux_loss: weighted balance loss summed over this
    micro-batch's sequences and weighted z-loss summed over its tokens, [2] (None where both weights are 0): the caller
    divides by the numbers of sequences and tokens. expert_weights [T, K]: for rows of further rounds, where rows are
    bounded.
    """

    rows: wire.Rows
    handle: wire.DispatchHandle | None
    aux_loss: Tensor | None
    expert_weights: Tensor | None = None


class MoELayer(nn.Module):
    """Routed experts and, optionally, a shared expert: DeepSeek-V3's DeepSeekMoE (arXiv 2412.19437, section 2.1.2).

    ep, ep_counts: communicators of the expert-parallel group, for rows and for their counts; or `ep_group`, a torch
    process group or a one-dimensional DeviceMesh, in their place. Each rank of the group holds num_experts / size
    experts. None: all experts here.
    ep_nodes: for dispatch=hierarchical, the communicators between nodes and within this rank's node.
    ep_windows: for dispatch=nvshmem, the symmetric memory of the ranks of `ep` (`dispatch.open_windows`).
    precision: of the matrix products: bf16 | fp8 (block-scaled, from bf16), whatever the parameters have | native, that
    of the parameters, also under autocast. None: that of the parameters, or of autocast where it is on. The router
    computes in fp32 always.
    backend: whose kernels compute the routed experts: auto (this engine's, by the device) | torch (its reference in
    plain torch, on any device) | triton (its Triton kernels, bf16 on a GPU) | megablocks (MegaBlocks' grouped products,
    bf16 on a GPU). All but auto have SwiGLU experts without biases, outside compiled graphs, not in fp8.
    attach_aux_loss: every backward through the output also runs that of the balance losses, times the attribute
    `aux_loss_scale` (1; a loss scaler's or an accumulation's factor goes there), so that nobody has to add them.
    average_gradients: the ranks' gradients will be averaged (DDP, FSDP2), not summed: those of experts, which already
    are summed over the expert-parallel group, are divided by its size.
    name, seed: parameters start as normal numbers of `config.init_std`, a function of their global names (below
    `name`) and the seed alone, biases from 0; with seed=None they are left as they are, for whoever fills them (the
    engine's optimizer does). Raises ConfigError for values that do not fit together.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        ep: Communicator | None = None,
        ep_counts: Communicator | None = None,
        ep_nodes: tuple[Communicator, Communicator] | None = None,
        ep_windows: wire.Windows | None = None,
        ep_group: Any = None,
        precision: str | None = None,
        backend: str = "auto",
        attach_aux_loss: bool = False,
        average_gradients: bool = False,
        name: str = "moe",
        seed: int | None = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        validate_moe(config)
        check_start(name, seed, dtype)
        if ep_group is not None:
            ep = ep_counts = Communicator.of_group(ep_group)
        self.config = config
        check_precision(precision)
        check_backend(backend, activation_of(config) == Activation() and not config.expert_biases, precision)
        self.precision = precision
        self.attach_aux_loss, self.aux_loss_scale = attach_aux_loss, 1.0
        self.name, self.seed = name, seed
        self.ep = ep or Communicator.alone()
        self.ep_counts = ep_counts or self.ep
        self.links = self._links(ep_nodes, ep_windows)
        # Choices of this rank's tokens dropped by `capacity_factor` in training, and all of them, since these were last
        # cleared; counted as the router's loads are. No buffer: DDP overwrites those of all ranks with the first one's.
        self.dropped_choices = torch.zeros(2, dtype=torch.int64, device=device)
        self.choices: Choices | None = None  # who chooses in the router's place, or watches
        self.placement = ExpertPlacement(config.num_experts, self.ep.size)
        self.router = Router(config, dtype, device, seed=None)
        ids, activation = self.placement.experts_of(self.ep.rank), activation_of(config)
        self.experts = Experts(ids, config.dim, config.expert_hidden, dtype, device, activation, config.expert_biases)
        self.experts.backend = backend
        if average_gradients:
            self.experts.gradient_scale = 1 / self.ep.size
        self.shared: DenseMLP | None = None
        if config.num_shared_experts:
            shared_hidden = config.num_shared_experts * config.expert_hidden
            self.shared = DenseMLP(config.dim, shared_hidden, dtype, device, activation)
        self.shared_gate = SharedGate(config.dim, dtype, device) if config.shared_gate else None
        if precision == "fp8":
            use_fp8(self, Fp8(keep=False))
        if seed is not None:
            self.reset_parameters()

    def _links(self, ep_nodes: tuple[Communicator, Communicator] | None, ep_windows: wire.Windows | None) -> wire.Links:
        config = self.config
        nvshmem = config.dispatch == "nvshmem" and self.ep.size > 1
        if nvshmem and ep_windows is None:
            raise ConfigError("dispatch=nvshmem: needs ep_windows as well as ep; use dispatch=all_to_all without them")
        hierarchical = config.dispatch == "hierarchical"
        if hierarchical and ep_nodes is None and self.ep.size > 1:
            raise ConfigError(
                "dispatch=hierarchical: needs ep_nodes as well as ep; use dispatch=all_to_all without them"
            )
        exact, fp8 = config.combine == "exact", config.wire == "fp8"
        if 0 < config.max_recv_rows < self.ep.size:
            raise ConfigError(
                f"max_recv_rows={config.max_recv_rows}: each of {self.ep.size} ranks needs a share of it; "
                f"use max_recv_rows={self.ep.size} or more"
            )
        nodes = ep_nodes if hierarchical else None
        windows = ep_windows if nvshmem else None
        return wire.Links(self.ep, self.ep_counts, exact, fp8, nodes, config.max_recv_rows, windows)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the weights again by name and seed (None: 0), biases, the balancing one and counts with 0.

        After `to_empty` of a layer made on the meta device, whether FSDP2 has sharded it or not.
        """
        seed, std = self.seed or 0, self.config.init_std
        for owner_name, owner in self.named_modules(prefix=self.name):
            for name, parameter in owner.named_parameters(recurse=False):
                if name.endswith("bias"):
                    parameter.zero_()
                    continue
                shape, place = parameter.shape, (parameter.dtype, parameter.device)
                if isinstance(owner, Experts):
                    names = owner.expert_names(owner_name, name)
                    fill(parameter, torch.stack([normal(shape[1:], std, piece, seed, *place) for piece in names]))
                else:
                    fill(parameter, normal(shape, std, f"{owner_name}.{name}", seed, *place))
        self.router.expert_bias.zero_()
        self.router.num_tokens_per_expert.zero_()
        self.dropped_choices.zero_()

    def place(self, placement: ExpertPlacement) -> None:
        """The experts here are those of `placement` from now on; their parameters are the caller's to bring."""
        self.placement = placement
        self.experts.ids = tuple(placement.experts_of(self.ep.rank))

    def pack(
        self,
        x: Tensor,
        shape: tuple[int, int],
        token_mask: Tensor | None = None,
        label: str = "",
        whole: WholeRows | None = None,
    ) -> Packed:
        """Route, take the balance loss, lay out the rows to send and start the exchange of their counts.

        x [T, D], T = B*S with `shape` = (B, S); token_mask [T] bool, False for padding; label: for the collective log,
        in the engine with the micro-batch's number at its end; whole: where other ranks hold the rest of the rows.
        """
        choices = self.choices if self.training else None
        given = None if choices is None else choices.given(len(x), x.device, label)
        routing = self.router(x, token_mask, given)
        if choices is not None:
            choices.taken(routing.expert_ids, label)
        ids, weights = self._within_capacity(routing, token_mask)
        handle = wire.plan(ids, self.placement, self.links, label)
        rows = wire.pack_rows(x, ids, weights, self.placement, handle)
        aux_loss = self._aux_loss(routing.router_logits, shape, token_mask, whole)
        bounded = handle is not None and handle.rounds is not None
        return Packed(rows, handle, aux_loss, weights if bounded else None)

    def _within_capacity(self, routing: Routing, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Expert ids and weights [T, K] without the choices that `capacity_factor` drops; those are counted."""
        config = self.config
        ids, weights = routing.expert_ids, routing.expert_weights
        if not config.capacity_factor:
            return ids, weights
        by_score = config.drop == "score"
        ids, weights, dropped = limit_load(
            ids, weights, config.num_experts, config.capacity_factor, by_score, token_mask
        )
        if self.training:
            if self.dropped_choices.device != dropped.device:  # the layer was moved, or filled after the meta device
                self.dropped_choices = torch.zeros_like(dropped)
            if torch.compiler.is_compiling() or (torch.is_grad_enabled() and not weights.requires_grad):
                self.dropped_choices += dropped
            else:  # as the router's loads: a forward that is computed again counts nothing
                weights = count_on_backward(weights, self.dropped_choices, ids, None, dropped)
        return ids, weights

    def _aux_loss(
        self, router_logits: Tensor, shape: tuple[int, int], token_mask: Tensor | None, whole: WholeRows | None = None
    ) -> Tensor | None:
        """See `Packed`."""
        config = self.config
        if not config.aux_loss_weight and not config.z_loss_weight:
            return None
        balance = z_loss = router_logits.new_zeros(())
        if config.aux_loss_weight:
            balance = config.aux_loss_weight * sequence_balance_loss(
                router_logits, shape, config.top_k, config.score_function, token_mask, whole
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

    def compute_shared(
        self, x: Tensor, queue: WgradQueue | None = None, segments: Segments | None = None
    ) -> Tensor | None:
        """The shared expert's output for `x` [T, D], if there is one; it needs no exchange."""
        if self.shared is None:
            return None
        if self.shared_gate is None:
            out: Tensor = self.shared(x, queue, segments)
            return out
        x = x.view_as(x)  # where both gradients meet, before others join: of three, the order would be the layout's
        gated: Tensor = self.shared_gate(self.shared(x, queue, segments), x)
        return gated

    def compute(self, arrived: Arrived, queue: WgradQueue | None = None, segments: Segments | None = None) -> Tensor:
        """The routed experts' rows to send back [R, D]."""
        rows: Tensor = self.experts(arrived, queue, segments)
        return rows

    def compute_further(self, x: Tensor, packed: Packed, queue: WgradQueue | None = None) -> Tensor | None:
        """The rows of tokens x [T, D] that did not fit, there and back; None if all did. Communicates."""
        rows, weights = packed.rows.further, packed.expert_weights
        if rows is None or weights is None:
            return None

        def exchange(handle: wire.DispatchHandle, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            sent = wire.pack_for(handle, x, weights)
            arrived = wire.dispatch_wait(wire.dispatch_start(sent, handle))
            made = self.compute(arrived, None if queue is None else queue.without_waiting())
            return sent.x, wire.combine_arrive(wire.combine_start(made, handle))

        return wire.further_rows(rows, x, weights, packed.handle, exchange, list(self.experts.parameters()))

    def combine_start(self, rows: Tensor, packed: Packed) -> wire.PendingCombine:
        """Start sending the experts' rows [R, D] back."""
        return wire.combine_start(rows, packed.handle)

    def forward(
        self, x: Tensor, token_mask: Tensor | None = None, return_aux: bool = False, queue: WgradQueue | None = None
    ) -> Any:
        """x [B, S, D] (or [T, D]: one sequence) -> the same shape, in x's dtype; token_mask without the last dimension.

        token_mask: False for padding, which is routed but counts neither as load nor in the balance losses.
        With return_aux also the weighted balance loss, averaged over the sequences of this call (those with any token),
        and z-loss, averaged over its tokens: their sum, a scalar (to look at only, where it is attached). Raises
        ValueError where x or token_mask are something else.
        """
        check_tokens(x, token_mask, self.config.dim)
        if self.precision is None:
            out, aux = self._forward(x, token_mask, queue)
        else:
            with products_in(self.precision, x.device.type):
                out, aux = self._forward(x.to(self.router.weight.dtype), token_mask, queue)
            out = out.to(x.dtype)
        if aux is not None and self.attach_aux_loss:
            out, aux = attach(out, aux, self.aux_loss_scale), aux.detach()
        if not return_aux:
            return out
        return out, out.new_zeros(()) if aux is None else aux

    def _forward(self, x: Tensor, token_mask: Tensor | None, queue: WgradQueue | None) -> tuple[Tensor, Tensor | None]:
        S = x.shape[-2] if x.dim() > 1 else 1
        B = math.prod(x.shape[:-2])
        flat = x.reshape(-1, x.shape[-1])
        token_mask = None if token_mask is None else token_mask.reshape(-1)
        exchange = self._exchange_in_graph if torch.compiler.is_compiling() else self._exchange
        out, shared, aux = exchange(flat, (B, S), token_mask, queue)
        if shared is not None:
            out = out + shared
        return out.view(x.shape), None if aux is None else _mean(aux, (B, S), token_mask)

    def _exchange(
        self, x: Tensor, shape: tuple[int, int], token_mask: Tensor | None, queue: WgradQueue | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Output of the routed experts and of the shared one, [T, D] each, and the losses of `Packed`."""
        packed = self.pack(x, shape, token_mask)
        pending = self.dispatch_start(packed)
        shared = self.compute_shared(x, queue)  # while the rows travel
        rows = self.compute(self.dispatch_wait(pending), queue)
        further = self.compute_further(x, packed, queue)
        back = wire.combine_arrive(self.combine_start(rows, packed))
        return wire.sum_rows(back, packed.handle, further), shared, packed.aux_loss

    def _exchange_in_graph(
        self, x: Tensor, shape: tuple[int, int], token_mask: Tensor | None, queue: WgradQueue | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The same in a graph that is being compiled."""
        if self.links.size == 1 and not self.links.fp8:
            return self._exchange(x, shape, token_mask, queue)
        if self.links.max_recv_rows or self.links.nodes or self.links.windows:
            raise ConfigError(
                f"max_recv_rows={self.config.max_recv_rows} dispatch={self.config.dispatch}: a compiled graph has one "
                "round of one hop; use max_recv_rows=0 and dispatch=all_to_all, or do not compile the layer"
            )
        routing = self.router(x, token_mask)
        ids, weights = self._within_capacity(routing, token_mask)
        rows, way = graph.dispatch(x, ids, weights, self.placement, self.links)
        out = graph.combine(self.compute(rows, queue), way, self.links)
        return out, self.compute_shared(x, queue), self._aux_loss(routing.router_logits, shape, token_mask)

    def update_balance(self, group: Any = None) -> None:
        """Move the balancing bias by the loads since the last call and clear them.

        Call it on all ranks, once per optimizer step. group: all ranks that routed tokens of this layer, where they are
        more than its expert-parallel group (data-parallel replicas): a process group or a one-dimensional DeviceMesh.
        """
        self.router.move_bias(self.ep_counts if group is None else Communicator.of_group(group))

    def update_balance_after(self, optimizer: torch.optim.Optimizer, group: Any = None) -> Any:
        """Call `update_balance(group)` after every step of the optimizer; what is returned can `remove()` it again."""
        return optimizer.register_step_post_hook(lambda *_: self.update_balance(group))


def _mean(losses: Tensor, shape: tuple[int, int], token_mask: Tensor | None) -> Tensor:
    """Balance loss by sequence plus z-loss by token, of their sums [2]; padding is neither."""
    B, S = shape
    if token_mask is None:
        return losses[0] / max(B, 1) + losses[1] / max(B * S, 1)
    sequences, tokens = token_mask.view(B, S).any(dim=1).sum(), token_mask.sum()
    return losses[0] / sequences.clamp(min=1) + losses[1] / tokens.clamp(min=1)
