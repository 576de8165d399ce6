"""The small parts of a decoder that hold parameters only: norm and table. The maths is in `ops`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_engine.ops.norm import rms_norm


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
