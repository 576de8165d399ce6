"""What a block keeps from its forward for its backward, tensor by tensor, in bytes on one rank.

Each tensor says which recompute makes it unnecessary. Tensor parallelism cuts what lies between a column-split and a
row-split matrix; sequence parallelism cuts the rest along the tokens; context parallelism has already cut the tokens.

This is what Megatron keeps, with the output rows of the experts and a copy of the shared expert's input; what this
engine keeps is in `engine_kept`.

Sources: Korthikanti et al. (arXiv 2205.05198, section 4) for the dense block, its 34 sbh and 5 as²b; DeepSeek-V3
(arXiv 2412.19437, section 3.2.3) and Megatron-Core's MoE paper (arXiv 2603.07685) for what recompute is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.planner.architecture import Architecture
from moe_engine.planner.strategy import Strategy


@dataclass(frozen=True)
class Kept:
    """A tensor kept for backward. `by`: the parts of RECOMPUTE that make it unnecessary; `full` does too, unless it
    `stays`. added_by: the parts of which one must be computed again for it to be kept at all; empty: it always is.
    """

    name: str
    bytes: float
    by: tuple[str, ...] = ()
    stays: bool = False
    added_by: tuple[str, ...] = ()


def block_tensors(model: Architecture, strategy: Strategy, moe: bool, load: float = 1.0) -> list[Kept]:
    """Everything that one block keeps of one micro-batch, nothing recomputed.

    load: rows that arrive at this rank's experts over the mean (1: balanced).
    """
    tensors = _attention_tensors(model, strategy)
    if moe:
        return tensors + _moe_tensors(model, strategy, load)
    return tensors + _mlp_tensors(model, strategy, model.dense_hidden, "mlp")


def kept_bytes(tensors: list[Kept], recompute: frozenset[str]) -> dict[str, float]:
    """The tensors that stay when `recompute` is computed again, by name."""
    return {tensor.name: tensor.bytes for tensor in tensors if tensor.bytes and _stays(tensor, recompute)}


def _stays(tensor: Kept, recompute: frozenset[str]) -> bool:
    if tensor.added_by and not recompute.intersection(tensor.added_by):
        return False
    if "full" in recompute and not tensor.stays:
        return False
    return not recompute.intersection(tensor.by)


def head_tensors(model: Architecture, strategy: Strategy) -> list[Kept]:
    """What the last stage keeps of one micro-batch between the head's forward and its backward.

    Logits in fp32 and their gradient in the compute format, over the whole micro-batch; the input of the final norm.
    """
    tokens, tp = strategy.tokens, strategy.layout.tp
    logits = tokens * model.vocab_size / tp
    return [
        Kept("head input", 2 * 2 * tokens * model.dim / _sequence_cut(strategy)),
        Kept("logits", logits * 4),
        Kept("logits gradient", logits * strategy.precision.parameter),
    ]


def _sequence_cut(strategy: Strategy) -> int:
    """Ranks over which sequence parallelism spreads what tensor parallelism does not cut."""
    return strategy.layout.tp if strategy.sequence_parallel else 1


def _attention_tensors(model: Architecture, strategy: Strategy) -> list[Kept]:
    tokens, tp, cut = strategy.tokens, strategy.layout.tp, _sequence_cut(strategy)
    two, eight = 2.0 * tokens, (1.0 if strategy.precision.fp8_activations else 2.0) * tokens
    heads = model.num_heads / tp
    if model.kv_lora_rank:
        tensors = [Kept("input", two * model.dim / cut, stays=True)]
        if model.q_lora_rank:
            tensors += [
                Kept("q_down", two * model.q_lora_rank / cut),
                Kept("q_norm", two * model.q_lora_rank / cut, ("norm",)),
            ]
        tensors += [
            Kept("kv_down", two * model.kv_lora_rank / cut),
            Kept("kv_norm", two * model.kv_lora_rank / cut, ("norm",)),
        ]
        up: tuple[str, ...] = ("mla_up_proj",)
        key_value_heads = heads
    else:
        tensors = [
            Kept("input", two * model.dim / cut, stays=True),
            Kept("norm1 out", eight * model.dim / cut, ("norm",)),
        ]
        up, key_value_heads = (), max(1.0, model.num_kv_heads / tp)
        if model.qk_norm:
            tensors.append(Kept("qk before norm", two * (heads + key_value_heads) * model.qk_head_dim, ("norm",)))
    tensors += [
        Kept("q", two * heads * model.qk_head_dim, up),
        Kept("k", two * key_value_heads * model.qk_head_dim, up),
        Kept("v", two * key_value_heads * model.v_head_dim, up),
    ]
    tensors.append(Kept("attention out", eight * heads * model.v_head_dim))
    if strategy.flash:
        tensors.append(Kept("logsumexp", 4 * tokens * heads, ("core_attn",)))
    else:
        scores = heads * tokens * strategy.seq_len
        tensors.append(Kept("scores", (5 if strategy.dropout else 2) * scores, ("core_attn",)))
    if strategy.dropout:
        tensors.append(Kept("attention dropout", tokens * model.dim / cut))
    tensors.append(Kept("residual", two * model.dim / cut))
    return tensors


def _mlp_tensors(model: Architecture, strategy: Strategy, hidden: int, name: str) -> list[Kept]:
    """Input, what the activation function reads, and what it makes."""
    tokens, tp, cut = strategy.tokens, strategy.layout.tp, _sequence_cut(strategy)
    eight = (1.0 if strategy.precision.fp8_activations else 2.0) * tokens
    tensors = [
        Kept(f"{name} norm out", eight * model.dim / cut, ("norm",)),
        Kept(f"{name} up", eight * model.up_factor * hidden / tp, ("mlp",)),
        Kept(f"{name} act", eight * hidden / tp, ("mlp", "moe_act")),
    ]
    if strategy.dropout:
        tensors.append(Kept(f"{name} dropout", tokens * model.dim / cut))
    return tensors


def _moe_tensors(model: Architecture, strategy: Strategy, load: float) -> list[Kept]:
    tokens, cut = strategy.tokens / _sequence_cut(strategy), _sequence_cut(strategy)
    tp, two = strategy.layout.tp, 2.0 * tokens
    eight = 1.0 if strategy.precision.fp8_activations else 2.0
    tensors = [Kept("norm out", two * model.dim, ("norm",))]
    if model.shared_hidden:
        # the shared expert is cut by tensor parallelism: all tokens, part of the width
        tensors += [
            Kept("shared in", two * model.dim, ("norm",)),
            Kept("shared up", eight * tokens * cut * model.up_factor * model.shared_hidden / tp, ("moe",)),
            Kept("shared act", eight * tokens * cut * model.shared_hidden / tp, ("moe", "moe_act")),
        ]
    rows = tokens * model.top_k * load * strategy.etp
    return [
        *tensors,
        Kept("probabilities", 2 * tokens * model.num_experts),
        Kept("row map", 8 * tokens * model.num_experts),
        Kept("permuted input", eight * rows * model.dim, ("moe",)),
        Kept("expert up", eight * rows * model.up_factor * model.expert_hidden / strategy.etp, ("moe",)),
        Kept("expert act", eight * rows * model.expert_hidden / strategy.etp, ("moe", "moe_act")),
        Kept("unpermute input", 2 * rows * model.dim, ("moe",)),
    ]
