"""Keeping experts evenly loaded: the bias without a loss, and the losses.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) balances by a bias that is added to the scores for the choice alone
and moves against the load after every step, and by a very small loss within each sequence (eq. 17-20).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.distributed.collectives import Communicator
from moe_engine.ops.activation import log_sigmoid, sigmoid
from moe_engine.ops.choose import choose


@dataclass(frozen=True)
class WholeRows:
    """Rows of which this rank holds some tokens: valid [B] int64, those of each whole row; ranks, who share them."""

    valid: Tensor
    ranks: Communicator


def sequence_balance_loss(
    router_logits: Tensor,
    shape: tuple[int, int],
    top_k: int,
    score_function: str,
    token_mask: Tensor | None = None,
    whole: WholeRows | None = None,
) -> Tensor:
    """Balance loss of each sequence, summed over sequences (not divided by their number): a scalar.

    router_logits [T, E] with T = B*S and `shape` = (B, S); token_mask [T] bool, False for padding.
    Of one sequence: sum_i f_i P_i with f_i = E/(K n) * (its tokens whose K best unbiased scores include i) and
    P_i the mean of the scores normalised over experts; n counts valid tokens, and without any the term is 0.
    It is 1 for perfect balance. No tensor is larger than [T, E]. Source: eq. 17-20; group limits and bias are not
    applied. With `whole` this is the share of this rank's tokens, f being that of the whole rows; the ranks' shares add
    up to the loss, and each differentiates its own.
    """
    B, S = shape
    E = router_logits.shape[1]
    by_sequence = (B, S, E)
    if score_function == "sigmoid":
        shares = log_sigmoid(router_logits).softmax(dim=1)  # s / sum(s), also where every s underflows
        chosen = choose(sigmoid(router_logits.detach()), top_k)
    else:
        shares = router_logits.softmax(dim=1)
        chosen = choose(shares.detach(), top_k)
    valid = torch.full((B,), S, dtype=torch.int64, device=router_logits.device)
    if token_mask is not None:
        shares = shares.masked_fill(~token_mask[:, None], 0)
        chosen = chosen & token_mask[:, None]
        valid = token_mask.view(B, S).sum(dim=1)
    counts = chosen.view(by_sequence).sum(dim=1)
    if whole is not None:
        valid, counts = whole.valid, whole.ranks.all_reduce_sum(counts, "sequence counts")
    valid = valid.clamp(min=1)[:, None]
    load = counts.to(shares.dtype) * (E / top_k) / valid  # f [B, E]
    return (load * shares.view(by_sequence).sum(dim=1) / valid).sum()


def router_z_loss(router_logits: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """Sum over valid tokens of logsumexp(logits)^2, which keeps logits small (ST-MoE, arXiv 2202.08906, eq. 5)."""
    squares = router_logits.logsumexp(dim=1).square()
    return squares.sum() if token_mask is None else squares.masked_fill(~token_mask, 0).sum()


@torch.no_grad()
def update_expert_bias(expert_bias: Tensor, num_tokens_per_expert: Tensor, step: float) -> None:
    """Move each expert's bias, in place, by `step` up if it got fewer tokens than the mean, down if more.

    expert_bias [E] fp32; num_tokens_per_expert [E] int64, summed over all ranks that routed tokens of this layer in
    this optimizer step. The comparison is exact, in integers: loads near 40,960 must not pass through bf16.
    """
    load = num_tokens_per_expert
    expert_bias += step * torch.sign(load.sum() - load * load.numel()).to(expert_bias.dtype)
