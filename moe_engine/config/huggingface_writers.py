"""Models as Hugging Face's `config.json` of their families: a function to write the keys of each.

What a family has no key for is not written; `config.huggingface` reads the result back and refuses what got lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from moe_engine.config.errors import ConfigError
from moe_engine.config.huggingface_keys import Values, dense_values
from moe_engine.config.huggingface_rope import rotary_share
from moe_engine.config.schema import ModelConfig
from moe_engine.config.strict import shown


def family_of(model: ModelConfig) -> str:
    """Whose `config.json` a model's is, by the features that only one family has."""
    if model.attention == "mla":
        return "deepseek_v3" if model.score_function == "sigmoid" else "deepseek_v2"
    if model.expert_biases or model.attention_sinks:
        return "gpt_oss"
    if model.score_function == "sigmoid" or model.rotary_dim:
        return "glm4_moe"
    if model.shared_gate:
        return "qwen2_moe"
    if model.qk_norm:
        return "olmoe" if model.qk_norm_whole else "qwen3_moe"
    return "ernie4_5_moe" if model.rope_style == "interleaved" else "mixtral"


def _write_deepseek(model: ModelConfig) -> Values:
    hf: Values = {
        "num_key_value_heads": model.num_heads,
        "q_lora_rank": model.q_lora_rank or None,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "attention_bias": model.attention_bias,
        "moe_layer_freq": 1,
        "scoring_func": model.score_function,
        **_write_leading_dense(model),
    }
    if model.score_function == "sigmoid":
        return hf | {"topk_method": "noaux_tc", "num_nextn_predict_layers": model.mtp_depth}
    return hf | {"topk_method": "group_limited_greedy" if model.top_groups < model.num_groups else "greedy"}


def _write_leading_dense(model: ModelConfig) -> Values:
    if not model.num_shared_experts:
        raise ConfigError(
            f"model.num_shared_experts=0: a {family_of(model)} config.json needs a shared expert; use 1 or more"
        )
    return {
        "first_k_dense_replace": dense_values(model.all_dense_layers())["num_dense_layers"],
        "intermediate_size": model.dense_hidden,
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "moe_intermediate_size": model.expert_hidden,
        "n_shared_experts": model.num_shared_experts,
        "n_group": model.num_groups,
        "topk_group": model.top_groups,
        "norm_topk_prob": model.normalize_weights,
        "routed_scaling_factor": model.route_scale,
    }


def _write_grouped(model: ModelConfig) -> Values:
    return {
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "num_experts_per_tok": model.top_k,
        "sliding_window": model.sliding_window or None,
    }


def _write_mixtral(model: ModelConfig) -> Values:
    return _write_grouped(model) | {"num_local_experts": model.num_experts, "intermediate_size": model.expert_hidden}


def _write_qwen(model: ModelConfig) -> Values:
    return _write_grouped(model) | {
        "use_sliding_window": bool(model.sliding_window),
        "decoder_sparse_step": 1,
        "mlp_only_layers": model.all_dense_layers(),
        "intermediate_size": model.dense_hidden,
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_hidden,
        "norm_topk_prob": model.normalize_weights,
    }


def _write_qwen3_moe(model: ModelConfig) -> Values:
    return _write_qwen(model) | {"attention_bias": model.attention_bias}


def _write_qwen2_moe(model: ModelConfig) -> Values:
    shared = model.num_shared_experts * model.expert_hidden
    return _write_qwen(model) | {"qkv_bias": model.attention_bias, "shared_expert_intermediate_size": shared}


def _write_olmoe(model: ModelConfig) -> Values:
    hf = _write_grouped(model) | {
        "attention_bias": model.attention_bias,
        "clip_qkv": None,
        "intermediate_size": model.expert_hidden,
        "num_experts": model.num_experts,
        "norm_topk_prob": model.normalize_weights,
    }
    del hf["head_dim"]  # that of its norms follows from the width
    return hf


def _write_glm4_moe(model: ModelConfig) -> Values:
    hf = _write_grouped(model) | _write_leading_dense(model)
    del hf["sliding_window"]
    return hf | {
        "attention_bias": model.attention_bias,
        "use_qk_norm": model.qk_norm,
        "partial_rotary_factor": rotary_share(model),
        "num_nextn_predict_layers": model.mtp_depth,
    }


def _write_gpt_oss(model: ModelConfig) -> Values:
    full = ["full_attention"]
    kinds = ["sliding_attention"] + full * (model.sliding_window_every - 1) if model.sliding_window else full
    rope = {} if model.rope_scaling != "none" else {"rope_scaling": {"rope_type": "default"}}
    return (
        _write_mixtral(model)
        | rope
        | {
            "attention_bias": model.attention_bias,
            "sliding_window": model.sliding_window or 128,  # transformers wants one, used or not
            "swiglu_limit": model.swiglu_limit,
            "layer_types": [kinds[i % len(kinds)] for i in range(model.num_layers)],
        }
    )


def _write_ernie4_5_moe(model: ModelConfig) -> Values:
    hf = _write_grouped(model)
    del hf["sliding_window"], hf["num_experts_per_tok"]
    return hf | {
        "use_bias": False,
        "intermediate_size": model.dense_hidden,
        "moe_num_experts": model.num_experts,
        "moe_k": model.top_k,
        "moe_intermediate_size": model.expert_hidden,
        "moe_num_shared_experts": model.num_shared_experts,
        **_pattern_of_ernie(model),
    }


def _pattern_of_ernie(model: ModelConfig) -> Values:
    """First, last and interval of the layers with experts. Raises ConfigError for another pattern."""
    layers = model.all_moe_layers() or [model.num_layers]
    first, last, interval = layers[0], layers[-1], layers[1] - layers[0] if layers[1:] else 1
    if interval > 1 and (first + 1) % interval or layers != list(range(first, last + 1, interval)):
        problem = shown("model.dense_layers", model.dense_layers)
        raise ConfigError(
            f"{problem}: an ernie4_5_moe config.json has experts in every n-th layer; use equal distances"
        )
    return {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": interval}


WRITERS: Mapping[str, Callable[[ModelConfig], Values]] = MappingProxyType(
    {
        "deepseek_v3": _write_deepseek,
        "deepseek_v2": _write_deepseek,
        "mixtral": _write_mixtral,
        "qwen3_moe": _write_qwen3_moe,
        "qwen2_moe": _write_qwen2_moe,
        "olmoe": _write_olmoe,
        "glm4_moe": _write_glm4_moe,
        "gpt_oss": _write_gpt_oss,
        "ernie4_5_moe": _write_ernie4_5_moe,
    }
)
