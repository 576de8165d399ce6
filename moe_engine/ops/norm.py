"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), computed in fp32 with two saved tensors: x and 1/rms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.ops.first_order import first_order


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (d_out,), (x, weight, inverse) = grads, ctx.saved_tensors
        normed = x.to(inverse.dtype) * inverse
        d_out = d_out.to(inverse.dtype)
        d_x = d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (d_out * normed).reshape(-1, x.shape[-1]).sum(dim=0)
        if ctx.needs_input_grad[0]:
            d_normed = d_out * weight
            along = (d_normed * normed).mean(dim=-1, keepdim=True)
            d_x = normed.mul_(-along).add_(d_normed).mul_(inverse).to(x.dtype)
        return d_x, d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: x [..., D], weight [D] -> [..., D] in x's dtype.

    Inside everything is fp32 (fp64 for fp64 x); the weight's gradient leaves in that dtype too.
    """
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out
