"""Multi-token prediction: module k predicts token t+1+k from the state of depth k-1 and token t+k.

DeepSeek-V3 (arXiv 2412.19437, section 2.2, eq. 21-25): h_k = block(M [norm(h_{k-1}); norm(emb(token t+k))]).
The embedding table and the output head are the main model's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_engine.config.schema import ModelConfig
from moe_engine.model.attention import SequenceContext
from moe_engine.model.block import Block, Walk
from moe_engine.model.layers import RMSNorm
from moe_engine.ops.linear import Linear
from moe_engine.ops.recompute import closed_segments, segment
from moe_engine.ops.wgrad_queue import WgradQueue


class MTPModule(nn.Module):
    """One depth of multi-token prediction."""

    def __init__(self, model: ModelConfig, block: Block, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(model.dim, model.norm_eps, dtype, device)
        self.embedding_norm = RMSNorm(model.dim, model.norm_eps, dtype, device)
        self.proj = Linear(2 * model.dim, model.dim, dtype, device)
        self.block = block
        self.norm = RMSNorm(model.dim, model.norm_eps, dtype, device)

    def walk(
        self,
        hidden: Tensor,
        embedded: Tensor,
        context: SequenceContext,
        queue: WgradQueue | None = None,
        label: str = "",
    ) -> Walk[tuple[Tensor, Tensor | None]]:
        """hidden, embedded [T, D] -> (hidden of this depth [T, D], weighted balance loss and z-loss [2] or None).

        The head reads `self.norm` of the result; the next depth reads the result itself.
        """

        def joined(hidden: Tensor, embedded: Tensor) -> Tensor:
            return torch.cat((self.hidden_norm(hidden), self.embedding_norm(embedded)), dim=-1)

        with closed_segments(self.block.recompute) as segments:
            x = self.proj(segment(segments, "norm", joined, hidden, embedded), queue)
        result = yield from self.block.walk(x, context, queue, label)
        return result
