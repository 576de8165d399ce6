"""Routing under autograd: choice, weights, scores and loads by one op; the weights' gradient by plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import moe_kernels
from moe_engine.config.schema import MoEConfig
from moe_engine.ops.first_order import first_order
from moe_kernels.reference.route import sigmoid, weigh

Routed = tuple[Tensor, Tensor, Tensor, Tensor | None]


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        expert_bias: Tensor,
        token_mask: Tensor | None,
        config: MoEConfig,
        expert_ids: Tensor | None,
    ) -> Routed:
        ids, weights, scores, loads = _routed(logits, expert_bias, token_mask, config, expert_ids)
        ctx.config = config
        ctx.save_for_backward(logits, ids)
        ctx.mark_non_differentiable(*(x for x in (ids, scores, loads) if x is not None))
        ctx.set_materialize_grads(False)
        return ids, weights, scores, loads

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (logits, ids), d_logits = ctx.saved_tensors, None
        if grads[1] is not None:
            with torch.enable_grad():
                logits = logits.detach().requires_grad_()
                weights = _weigh(logits, ids, ctx.config)
            (d_logits,) = torch.autograd.grad(weights, logits, grads[1])
        return d_logits, None, None, None, None


def route(
    logits: Tensor,
    expert_bias: Tensor,
    token_mask: Tensor | None,
    config: MoEConfig,
    expert_ids: Tensor | None = None,
) -> Routed:
    """`moe_kernels.route` by a layer's options, with the weights' gradient.

    logits [T, E] fp32 or fp64, expert_bias [E] fp32, token_mask [T] bool or None; expert_ids [T, K] int64: a choice
    made elsewhere. Returns expert ids [T, K], weights [T, K], scores [T, E] and loads [E] int64 (None for a choice made
    elsewhere); the weights alone have a gradient.
    """
    if torch.compiler.is_compiling():  # a graph differentiates what it holds: the op's ids, the weights once more
        ids, _, scores, loads = _routed(logits.detach(), expert_bias, token_mask, config, expert_ids)
        return ids, _weigh(logits, ids, config), scores, loads
    routed: Routed = _Route.apply(logits, expert_bias, token_mask, config, expert_ids)
    return routed


def _weigh(logits: Tensor, ids: Tensor, config: MoEConfig) -> Tensor:
    return weigh(logits, ids, config.score_function, config.normalize_weights, config.route_scale)


def _routed(
    logits: Tensor, expert_bias: Tensor, token_mask: Tensor | None, config: MoEConfig, expert_ids: Tensor | None
) -> Routed:
    if expert_ids is not None:
        scores = sigmoid(logits) if config.score_function == "sigmoid" else logits.softmax(dim=1)
        return expert_ids.view_as(expert_ids), _weigh(logits, expert_ids, config), scores, None
    groups = config.num_groups, config.top_groups, config.group_score
    weighing = config.score_function, config.normalize_weights, config.route_scale
    return moe_kernels.route(logits, expert_bias, config.top_k, *groups, *weighing, token_mask)
