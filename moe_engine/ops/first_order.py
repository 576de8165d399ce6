"""Gradients that cannot be differentiated again, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for `backward` of an autograd function that computes where autograd does not record.

    Who differentiates its results again gets a RuntimeError. Without it they would count as constants, and a part of
    the second derivative would be missing.
    """
    once: Callable[..., Any] = once_differentiable(backward)

    @functools.wraps(backward)
    def inner(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # as if all were to be differentiated: results depend on what was saved, too
            grads = tuple(grad.detach().requires_grad_() for grad in grads)
        return once(ctx, *grads)

    return inner
