"""Counting the choices of a router when their backward runs.

A token counts once: evaluation has no backward, and a forward that is computed again for recompute has none of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def count_on_backward(
    x: Tensor, counts: Tensor, expert_ids: Tensor, token_mask: Tensor | None, loads: Tensor | None = None
) -> Tensor:
    """`x` as it is; its first backward adds the choice to `counts`.

    counts [E] int64, changed in place; expert_ids [T, K]; token_mask [T] bool, False for tokens that do not count.
    loads [E]: the choice counted already, where somebody has.
    """
    if torch.compiler.is_compiling():
        in_graph: Tensor = torch.ops.moe_engine.count_on_backward(x, counts, expert_ids, token_mask)
        return in_graph
    out: Tensor = _CountOnBackward.apply(x, counts, _chosen(counts, expert_ids, token_mask) if loads is None else loads)
    return out


def _chosen(counts: Tensor, expert_ids: Tensor, token_mask: Tensor | None) -> Tensor:
    counted = expert_ids if token_mask is None else expert_ids[token_mask]
    return torch.bincount(counted.reshape(-1), minlength=counts.shape[0])


class _CountOnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, more: Tensor) -> Tensor:
        ctx.counts, ctx.more = counts, more
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.more is not None:
            ctx.counts += ctx.more
            ctx.more = None
        return grads[0], None, None


# In a compiled graph, where each op is a node and an op may not return its argument: the same in two ops.
@torch.library.custom_op("moe_engine::count_on_backward", mutates_args=())
def _count_on_backward(x: Tensor, counts: Tensor, expert_ids: Tensor, token_mask: Tensor | None) -> Tensor:
    return x.clone()


@_count_on_backward.register_fake
def _(x: Tensor, counts: Tensor, expert_ids: Tensor, token_mask: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("moe_engine::add_counts", mutates_args=("counts",))
def _add_counts(counts: Tensor, expert_ids: Tensor, token_mask: Tensor | None) -> None:
    counts += _chosen(counts, expert_ids, token_mask)


@_add_counts.register_fake
def _(counts: Tensor, expert_ids: Tensor, token_mask: Tensor | None) -> None:
    return None


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    torch.ops.moe_engine.add_counts(*ctx.saved_tensors)
    return grad, None, None, None


_count_on_backward.register_autograd(_backward, setup_context=_setup)
