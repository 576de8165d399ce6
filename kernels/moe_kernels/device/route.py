"""Routing in one kernel: scores, group limit, the K best, their weights, the load (see `reference.route`).

One program has a few tokens' scores in registers, as [tokens, groups, experts of a group]. The K best are taken one
by one; of equal ones the lower index. Loads are integers, so that adding them atomically has one result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.device.tuning import Variant

TOKENS = 4  # of a program
WARPS = 4


@triton.jit
def _ordered(value):
    """fp32 -> int32 in the same order, NaN as the smallest number; above the least int32."""
    value = tl.where(value != value, float("-inf"), value) + 0.0  # also makes one zero of two
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _choose(keys, count, SIZE: tl.constexpr):
    """Mask of the `count` largest keys in each row of [TOKENS, SIZE]; of equal ones, the first."""
    index = tl.arange(0, SIZE)[None, :]
    chosen = keys != keys
    for _ in range(count):
        best = tl.argmax(keys, 1, tie_break_left=True)
        here = index == best[:, None]
        chosen = chosen | here
        keys = tl.where(here, -2147483648, keys)
    return chosen


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, mask_ptr, ids_ptr, weights_ptr, scores_ptr, counts_ptr,
    tokens, num_experts, top_k, num_groups, top_groups, route_scale,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, SUM_TOP2: tl.constexpr, LIMITED: tl.constexpr,
    MASKED: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = GROUPS * MEMBERS
    members = num_experts // num_groups
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.arange(0, size)
    expert = place // MEMBERS * members + place % MEMBERS
    exists = (place // MEMBERS < num_groups) & (place % MEMBERS < members)
    inside = (token < tokens)[:, None] & exists[None, :]
    address = token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    logits = tl.load(logits_ptr + address, mask=inside, other=float("-inf"))  # [TOKENS, size]
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]
    tl.store(scores_ptr + address, scores, mask=inside)
    biased = scores + tl.load(bias_ptr + expert, mask=exists, other=0.0)[None, :]
    if LIMITED:
        grouped = tl.where(exists[None, :], biased, float("-inf")).reshape(TOKENS, GROUPS, MEMBERS)
        broken = tl.max((grouped != grouped).to(tl.int32), 2) > 0
        group_score = tl.max(grouped, 2)
        if SUM_TOP2:
            first = tl.argmax(grouped, 2, tie_break_left=True)
            rest = tl.where(tl.arange(0, MEMBERS)[None, None, :] == first[:, :, None], float("-inf"), grouped)
            group_score += tl.max(rest, 2)
        keys = tl.where((tl.arange(0, GROUPS) < num_groups)[None, :],
                        _ordered(tl.where(broken, float("-inf"), group_score)), -2147483648)  # fmt: skip
        allowed = _choose(keys, top_groups, GROUPS)
        outside = ~allowed[:, :, None] & (tl.full((TOKENS, GROUPS, MEMBERS), 1, tl.int1))
        # -inf, not 0: a masked expert must lose against any allowed one, however negative its bias.
        biased = tl.where(outside.reshape(TOKENS, size), float("-inf"), biased)
    chosen = _choose(tl.where(exists[None, :], _ordered(biased), -2147483648), top_k, size)
    if NORMALIZE:
        # In log space: scores that underflow still have weights that sum to 1.
        logs = logits
        if SIGMOID:
            logs = tl.minimum(logits, 0.0) - tl.log(1 + tl.exp(-tl.abs(logits)))
        powers = tl.where(chosen, tl.exp(logs - tl.max(tl.where(chosen, logs, float("-inf")), 1)[:, None]), 0.0)
        weights = powers / tl.sum(powers, 1)[:, None]
    else:
        weights = scores
    slot = tl.cumsum(chosen.to(tl.int32), 1) - 1  # ids ascend in each row
    target = token.to(tl.int64)[:, None] * top_k + slot
    kept = chosen & (token < tokens)[:, None]
    tl.store(ids_ptr + target, expert.to(tl.int64)[None, :] + tl.zeros((TOKENS, size), tl.int64), mask=kept)
    tl.store(weights_ptr + target, weights * route_scale, mask=kept)
    if MASKED:
        kept = kept & (tl.load(mask_ptr + token, mask=token < tokens, other=0) != 0)[:, None]
    load = tl.sum(kept.to(tl.int32), 0)
    tl.atomic_add(counts_ptr + expert, load.to(tl.int64), mask=exists & (load > 0))


def route(
    logits: Tensor,
    expert_bias: Tensor,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "sum_top2",
    score_function: str = "sigmoid",
    normalize: bool = True,
    route_scale: float = 1.0,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.route`; logits fp32."""
    tokens, num_experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    scores = torch.empty_like(logits)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=logits.device)
    if tokens:
        _route_kernel[(triton.cdiv(tokens, TOKENS),)](
            logits.contiguous(), expert_bias, None if token_mask is None else token_mask.to(torch.uint8), ids, weights,
            scores, counts, tokens, num_experts, top_k, num_groups, top_groups, route_scale,
            SIGMOID=score_function == "sigmoid", NORMALIZE=normalize, SUM_TOP2=group_score == "sum_top2",
            LIMITED=top_groups < num_groups, MASKED=token_mask is not None, TOKENS=TOKENS,
            GROUPS=triton.next_power_of_2(num_groups), MEMBERS=triton.next_power_of_2(num_experts // num_groups),
            num_warps=WARPS,
        )  # fmt: skip
    return ids, weights, scores, counts


def variants() -> list[Variant]:
    """DeepSeek-V3's routing (256 experts in 8 groups) and plain softmax routing (128 experts), for `aot`."""
    arguments = {
        "logits_ptr": "*fp32", "bias_ptr": "*fp32", "mask_ptr": "*u8", "ids_ptr": "*i64", "weights_ptr": "*fp32",
        "scores_ptr": "*fp32", "counts_ptr": "*i64", "route_scale": "fp32",
        **dict.fromkeys(("tokens", "num_experts", "top_k", "num_groups", "top_groups"), "i32"),
    }  # fmt: skip
    common = {"NORMALIZE": True, "SUM_TOP2": True, "MASKED": True, "TOKENS": TOKENS}
    limited = {**common, "SIGMOID": True, "LIMITED": True, "GROUPS": 8, "MEMBERS": 32}
    plain = {**common, "SIGMOID": False, "LIMITED": False, "GROUPS": 1, "MEMBERS": 128}
    return [
        Variant("route sigmoid 8 groups of 32", _route_kernel, arguments, limited, {"num_warps": WARPS}),
        Variant("route softmax 128", _route_kernel, arguments, plain, {"num_warps": WARPS}),
    ]
