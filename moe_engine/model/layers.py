"""The small parts of a decoder: linear, norm, embedding, dense MLP. Parameters only; the maths is in `ops`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_engine.ops.activation import swiglu
from moe_engine.ops.linear import linear
from moe_engine.ops.norm import rms_norm
from moe_engine.ops.wgrad_queue import WgradQueue


class Linear(nn.Module):
    """y = x W^T without bias; weight [out, in]."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))

    def forward(self, x: Tensor, queue: WgradQueue | None = None) -> Tensor:
        return linear(x, self.weight, queue)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with a scale [dim]."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Table(nn.Module):
    """A [V, D] table: the embedding, or the output head."""

    def __init__(self, vocab_size: int, dim: int, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype, device=device))


class DenseMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); gate and up are one matrix [2F, D], gate rows first."""

    def __init__(self, dim: int, hidden: int, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.gate_up = Linear(dim, 2 * hidden, dtype, device)
        self.down = Linear(hidden, dim, dtype, device)

    def forward(self, x: Tensor, queue: WgradQueue | None = None) -> Tensor:
        return self.down(swiglu(self.gate_up(x, queue)), queue)
