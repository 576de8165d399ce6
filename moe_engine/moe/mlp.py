"""The dense SwiGLU MLP: a model's first layers, and the shared expert of an MoE layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_engine.ops.activation import swiglu
from moe_engine.ops.linear import Linear
from moe_engine.ops.recompute import Segments, segment
from moe_engine.ops.wgrad_queue import WgradQueue


class DenseMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of width `hidden`; gate and up are one matrix [2F, D], gate rows first."""

    def __init__(
        self, dim: int, hidden: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.gate_up = Linear(dim, 2 * hidden, dtype, device)
        self.down = Linear(hidden, dim, dtype, device)

    def forward(self, x: Tensor, queue: WgradQueue | None = None, segments: Segments | None = None) -> Tensor:
        """x [..., D] -> [..., D]."""
        out: Tensor = self.down(segment(segments, "swiglu", swiglu, self.gate_up(x, queue)), queue)
        return out
