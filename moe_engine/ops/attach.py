"""Identities that change a backward: a loss that rides on an activation, a gradient that is scaled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.like, ctx.scale = (loss.dtype, loss.device), scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return grads[0], torch.full((), ctx.scale, dtype=dtype, device=device), None


def attach(x: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """`x` as it is; the backward of anything made from it also runs that of the scalar `loss`, times `scale`."""
    out: Tensor = _Attach.apply(x, loss, scale)
    return out


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x` as it is; its gradient times `factor`."""
    out: Tensor = _ScaleGradient.apply(x, factor)
    return out
