"""Gradients that cannot be differentiated again, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Refuse(torch.autograd.Function):
    """The first `count` tensors as they are; whoever differentiates them, for any of the tensors, is told."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "this gradient cannot be differentiated twice: the engine's operations have first ones alone"
        )


class _Once:
    """An autograd context whose saved tensors are asked for once, as checkpointing wants it."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for `backward` of an autograd function that computes where autograd does not record.

    Who differentiates its results again gets a RuntimeError. Without it they would count as constants, and a part of
    the second derivative would be missing.
    """

    @functools.wraps(backward)
    def inner(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a graph refuses by itself
            return backward(ctx, *grads)
        once = _Once(ctx)
        with torch.no_grad():
            found = backward(once, *grads)
        found = found if isinstance(found, tuple) else (found,)
        made = [x for x in found if x is not None]
        # What the results depend on leads to the refusal, and so does something that always has a gradient: also
        # other values that were kept may depend on the inputs.
        origins = [x for x in (*grads, *once.saved_tensors) if x is not None and x.is_floating_point()]
        refused = iter(_Refuse.apply(len(made), *made, *origins, torch.zeros((), requires_grad=True)))
        return tuple(None if x is None else next(refused) for x in found)

    return inner
