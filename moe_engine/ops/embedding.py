"""Table lookup whose gradient is summed in fp32, whatever the table's dtype, in the order of the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        return weight[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (tokens,), (d_out,) = ctx.saved_tensors, grads
        wide = torch.promote_types(ctx.dtype, torch.float32)
        d_weight = torch.zeros(ctx.rows, d_out.shape[-1], dtype=wide, device=d_out.device)
        rows = d_out.reshape(-1, d_out.shape[-1]).to(wide)
        if d_weight.is_cuda:
            # There index_add_ adds by atomics, in any order; this one sorts and adds each row's terms in their order.
            d_weight.index_put_((tokens.reshape(-1),), rows, accumulate=True)
        else:
            d_weight.index_add_(0, tokens.reshape(-1), rows)
        return None, d_weight


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` [V, D] for `tokens` […], int64: […, D] in the weight's dtype."""
    out: Tensor = _Embedding.apply(tokens, weight)
    return out
