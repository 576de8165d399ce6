"""The losses that MegaBlocks' layers leave behind in a forward, for the training loop to collect.

Its functions take no layer, so what layers save has to lie in one place of the process: the two lists here, which
nothing else in the engine reads. Layers save in training alone, so that evaluation leaves nothing behind.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from moe_engine.integrations.megablocks.arguments import Arguments
from moe_engine.moe.balance import router_z_loss

_BALANCE: list[tuple[Tensor, Tensor]] = []
_ROUTER_LOGITS: list[Tensor] = []


def save_load_balancing_loss(loss: tuple[Tensor, Tensor]) -> None:
    """Append (tokens of each expert [E], scores [T, E]) of one forward of one layer."""
    _BALANCE.append(loss)


def get_load_balancing_loss() -> list[tuple[Tensor, Tensor]]:
    """What was saved since it was last cleared, in the order of the forwards."""
    return _BALANCE


def clear_load_balancing_loss() -> None:
    """Forget it: once per forward of the model."""
    _BALANCE.clear()


def batched_load_balancing_loss(args: Arguments) -> Tensor | float:
    """The layers' balance losses, a scalar, 0.0 where `moe_loss_weight` is 0.

    moe_loss_weight * mean over layers of E / (T K) sum_e tokens_e * mean score_e: moe_loss_weight where balanced.
    Raises ValueError unless exactly one forward of each layer of this pipeline stage was saved.
    """
    if args.moe_loss_weight == 0:
        return 0.0
    if len(_BALANCE) != args.layers_here:
        raise ValueError(
            f"{len(_BALANCE)} forwards of layers were saved and {args.layers_here} expected (num_layers="
            f"{args.num_layers}, pipeline_model_parallel_size={args.pipeline_model_parallel_size}, "
            f"num_layers_per_virtual_pipeline_stage={args.num_layers_per_virtual_pipeline_stage}); call "
            "clear_load_balancing_loss() after each forward of the model"
        )
    terms = []
    for tokens_per_expert, scores in _BALANCE:
        choices = max(scores.shape[0], 1) * args.moe_top_k
        mean = scores.sum(dim=0) / max(scores.shape[0], 1)
        terms.append(args.moe_num_experts / choices * torch.dot(tokens_per_expert.to(mean.dtype), mean))
    return args.moe_loss_weight / args.num_layers * torch.stack(terms).sum()


def save_router_logits(logits: Tensor) -> None:
    """Append the router's logits [T, E] of one forward of one layer."""
    _ROUTER_LOGITS.append(logits)


def clear_router_zloss() -> None:
    """Forget them: once per forward of the model."""
    _ROUTER_LOGITS.clear()


def batched_router_zloss(args: Arguments) -> Tensor | float:
    """moe_zloss_weight * mean over tokens of logsumexp(logits)^2, one for each layer: [layers]."""
    if args.moe_zloss_weight == 0:
        warnings.warn("batched_router_zloss: moe_zloss_weight=0, so nothing was saved", stacklevel=2)
        return 0
    losses = [router_z_loss(logits) / max(logits.shape[0], 1) for logits in _ROUTER_LOGITS]
    return args.moe_zloss_weight * torch.stack(losses)
