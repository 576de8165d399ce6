"""Floating-point operations and parameters of a model, by arithmetic on its configuration.

These are *model* FLOPs, what the mathematics of forward and backward needs, so that MFU compares engines and not their
waste: recomputed forwards, padding and the half of the attention matrix above the diagonal do not count. A weight
matrix costs 2 operations per token forward (multiply, add) and 4 backward (two gradients). Two conventions:

* `matmul`: matrix products only: projections, experts, head, attention scores and their product with the values.
* `nvidia`: the same, plus 6 per token for each weight of the norms on MLA's latent vectors and of the norms of an MTP
  module, as Megatron's `num_floating_point_operations` counts. The difference is about 3 in a million.

Both leave out the router and the shared expert's gate, the embedding look-up, the other norms, biases and the
optimizer. In a layer with a sliding window the scores outside it do not count either.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1, appendix B) for MLA; DeepSeek-V3 (arXiv 2412.19437, sections 2.1
and 2.2) for experts and MTP; PaLM (arXiv 2204.02311, appendix B) for MFU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import ModelConfig

CONVENTIONS = ("nvidia", "matmul")


@dataclass(frozen=True)
class ParameterCount:
    """Trained scalars of a model. `router_bias` is a buffer, moved by the load and not by a gradient: not in `total`.

    active: those that one token passes, embedding and head included; only the chosen experts of each layer.
    by_part: embedding, attention, dense_mlp, router, shared_experts, experts, norms, mtp_proj, head; an MTP module is
    spread over its parts. They add up to `total`.
    """

    total: int
    active: int
    router_bias: int
    by_part: dict[str, int]


@dataclass(frozen=True)
class _Sizes:
    """Weights of one of each building block; matrices without norms."""

    attention: int
    attention_vectors: int  # biases and sinks
    latent_norms: int  # of MLA
    head_norms: int  # of queries and keys in GQA
    dense_mlp: int
    expert: int
    expert_biases: int
    mtp_proj: int
    mtp_norms: int  # of hidden state, embedding and output
    head: int


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Count the parameters of a model, MTP modules included (embedding and head are shared with them)."""
    sizes, blocks, moe_blocks = _sizes(model), _blocks(model), _moe_blocks(model)
    by_part = {
        "embedding": model.vocab_size * model.dim,
        "attention": blocks * (sizes.attention + sizes.attention_vectors),
        "dense_mlp": len(model.all_dense_layers()) * sizes.dense_mlp,
        "router": moe_blocks * model.num_experts * (model.dim + model.expert_biases),
        "shared_experts": moe_blocks * (model.num_shared_experts * sizes.expert + model.shared_gate * model.dim),
        "experts": moe_blocks * model.num_experts * (sizes.expert + sizes.expert_biases),
        "norms": blocks * (2 * model.dim + sizes.latent_norms + sizes.head_norms)
        + model.dim
        + model.mtp_depth * sizes.mtp_norms,
        "mtp_proj": model.mtp_depth * sizes.mtp_proj,
        "head": 0 if model.tied_head else sizes.head,
    }
    total = sum(by_part.values())
    idle = moe_blocks * (model.num_experts - model.top_k) * (sizes.expert + sizes.expert_biases)
    return ParameterCount(total, total - idle, moe_blocks * model.num_experts, by_part)


def sequence_flops(
    model: ModelConfig, seq_len: int, convention: str = "nvidia", document_lengths: Sequence[int] | None = None
) -> int:
    """Model FLOPs of forward and backward of one sequence of `seq_len` tokens.

    Attention counts the causal half, S²/2 scores of S tokens; where a sequence is packed from documents that do not
    see each other, give their lengths (they must add up to `seq_len`). Raises ConfigError for an unknown convention or
    lengths that do not fit.
    """
    if convention not in CONVENTIONS:
        raise ConfigError(f"convention={convention}: unknown; use one of {', '.join(CONVENTIONS)}")
    lengths = [seq_len] if document_lengths is None else list(document_lengths)
    if sum(lengths) != seq_len or min(lengths, default=0) < 0:
        raise ConfigError(
            f"document_lengths={lengths}: must be 0 or more and add up to seq_len={seq_len}; use [{seq_len}] for one"
        )
    sizes, blocks = _sizes(model), _blocks(model)
    weights = (
        blocks * sizes.attention
        + len(model.all_dense_layers()) * sizes.dense_mlp
        + _moe_blocks(model) * (model.top_k + model.num_shared_experts) * sizes.expert
        + model.mtp_depth * sizes.mtp_proj
        + (1 + model.mtp_depth) * sizes.head
    )
    if convention == "nvidia":
        weights += blocks * sizes.latent_norms + model.mtp_depth * sizes.mtp_norms
    # forward: 2 operations for each of L²/2 scores and value products per head dimension; backward: twice that
    windowed = -(-model.num_layers // model.sliding_window_every) if model.sliding_window else 0
    pairs = (blocks - windowed) * _pairs(lengths) + windowed * _pairs(lengths, model.sliding_window)
    return 6 * weights * seq_len + 3 * _attention_width(model) * pairs


def mfu(flops_per_step: float, step_time_s: float, peak_flops: float) -> float:
    """Model FLOPs utilisation, a fraction: FLOPs of a step over what the devices could have done in its time.

    `peak_flops` is the FLOP/s of all devices of the job together. Raises ConfigError where time or peak is not
    positive: with no known peak there is no MFU.
    """
    for name, value in (("step_time_s", step_time_s), ("peak_flops", peak_flops)):
        if value <= 0:
            raise ConfigError(f"{name}={value}: must be positive; use a measured value, or report no MFU")
    return flops_per_step / (step_time_s * peak_flops)


def _blocks(model: ModelConfig) -> int:
    """Transformer blocks; every MTP module has one."""
    return model.num_layers + model.mtp_depth


def _moe_blocks(model: ModelConfig) -> int:
    """Blocks with experts; that of an MTP module is one."""
    return len(model.all_moe_layers()) + model.mtp_depth


def _pairs(lengths: Sequence[int], window: int = 0) -> int:
    """Twice the pairs of a query and a key that it sees: L² of a document, less those farther apart than the window."""
    return sum(L * L - (max(L - window, 0) ** 2 if window else 0) for L in lengths)


def _attention_width(model: ModelConfig) -> int:
    """Multiply-adds for one query and one key, over all heads: their score, and its product with the value."""
    if model.attention == "gqa":
        return model.num_heads * 2 * model.head_dim
    return model.num_heads * (model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim)


def _sizes(model: ModelConfig) -> _Sizes:
    latent = model.attention == "mla"
    return _Sizes(
        attention=_latent_attention(model) if latent else _grouped_attention(model),
        attention_vectors=_attention_vectors(model),
        latent_norms=model.q_lora_rank + model.kv_lora_rank if latent else 0,
        head_norms=0 if latent or not model.qk_norm else _head_norms(model),
        dense_mlp=3 * model.dim * model.dense_hidden,
        expert=3 * model.dim * model.expert_hidden,
        expert_biases=model.expert_biases * (2 * model.expert_hidden + model.dim),
        mtp_proj=2 * model.dim * model.dim,
        mtp_norms=3 * model.dim,
        head=model.vocab_size * model.dim,
    )


def _latent_attention(model: ModelConfig) -> int:
    """Weights of MLA's projections."""
    query_width = model.num_heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    key_value_width = model.num_heads * (model.qk_nope_head_dim + model.v_head_dim)
    if model.q_lora_rank:
        queries = model.q_lora_rank * (model.dim + query_width)
    else:
        queries = model.dim * query_width
    keys_values = model.dim * (model.kv_lora_rank + model.qk_rope_head_dim) + model.kv_lora_rank * key_value_width
    return queries + keys_values + model.num_heads * model.v_head_dim * model.dim


def _grouped_attention(model: ModelConfig) -> int:
    """Weights of GQA's projections: queries and output, keys and values."""
    return 2 * model.dim * model.head_dim * (model.num_heads + model.num_kv_heads)


def _head_norms(model: ModelConfig) -> int:
    """Weights of the norms of queries and keys in GQA."""
    return model.head_dim * (model.num_heads + model.num_kv_heads if model.qk_norm_whole else 2)


def _attention_vectors(model: ModelConfig) -> int:
    """Biases of the projections that read the hidden state or write to it, and a sink a head."""
    if model.attention == "gqa":
        biases = model.head_dim * (model.num_heads + 2 * model.num_kv_heads)
    else:
        biases = model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim
    biases *= model.attention_bias
    return biases + model.attention_out_bias * model.dim + model.attention_sinks * model.num_heads
