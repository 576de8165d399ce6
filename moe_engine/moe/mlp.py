"""The dense MLP: a model's first layers, and the shared expert of an MoE layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_engine.ops.expert_activation import Activation, expert_activation
from moe_engine.ops.fp8_linear import fp8_mlp
from moe_engine.ops.gate import gate_rows
from moe_engine.ops.linear import Linear, narrowed, widened
from moe_engine.ops.recompute import Segments, segment
from moe_engine.ops.wgrad_queue import WgradQueue


class DenseMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of width `hidden`; gate and up are one matrix [2F, D], gate rows first.

    Other activations, also those without a gate ([F, D]), by `activation`.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        activation: Activation = Activation(),  # noqa: B008 - it is frozen
    ) -> None:
        super().__init__()
        self.activation = activation
        self.wide = False  # what stands between the projections: see `moe.experts.through_experts`
        self.up_name = "gate_up" if activation.gated else "up"
        self.add_module(self.up_name, Linear(dim, activation.width(hidden), dtype, device))
        self.down = Linear(hidden, dim, dtype, device)

    def forward(self, x: Tensor, queue: WgradQueue | None = None, segments: Segments | None = None) -> Tensor:
        """x [..., D] -> [..., D]."""
        first = getattr(self, self.up_name)
        if first.fp8 is not None and self.activation == Activation():
            flat = x.reshape(-1, x.shape[-1])
            return fp8_mlp(flat, first.weight, self.down.weight, first.fp8, queue).view(x.shape)

        def activate(up: Tensor) -> Tensor:
            return expert_activation(up, None, self.activation)

        up = first(widened(x) if self.wide and first.fp8 is None else x, queue)
        out = self.down(segment(segments, "swiglu", activate, up), queue)
        return narrowed(out, self.down.weight)


class SharedGate(nn.Module):
    """How much of the shared expert's output a token takes: sigmoid(x w). Parameter weight [1, D], left as it is."""

    def __init__(self, dim: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, dim, dtype=dtype, device=device))

    def forward(self, out: Tensor, x: Tensor) -> Tensor:
        """The shared expert's output [..., D] for x [..., D], gated."""
        return gate_rows(out, x, self.weight)
