"""Families of models in Hugging Face's `config.json`: what each key means; a function to read each, one to write it.

A reader takes from `Keys` what it knows and refuses values that the engine cannot follow; a writer gives the keys of
its family. `config.huggingface` puts them together and checks that nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import ModelConfig
from moe_engine.config.strict import shown

Values = dict[str, Any]

# Keys of every family that say nothing about the architecture: how a library runs or stores the model, its tokenizer's
# special tokens, losses of a training that the file does not otherwise describe.
IRRELEVANT = frozenset(
    (
        *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
        *("quantization_config", "use_cache", "ep_size", "pretraining_tp", "chunk_size_feed_forward", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "is_encoder_decoder", "problem_type"),
        *("id2label", "label2id", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "max_window_layers", "initial_context_length"),
    )
)

_KINDS: Mapping[type, str] = MappingProxyType(
    {
        int: "a whole number such as 1",
        float: "a number such as 1.0",
        bool: "true or false",
        str: "a text",
        list: "a list such as []",
        dict: "an object such as {}",
    }
)


class Keys:
    """The keys of a file, taken one by one; what nobody takes is refused."""

    def __init__(self, data: Mapping[str, Any], prefix: str = "") -> None:
        self.left = dict(data)
        self.prefix = prefix
        self.problems: list[str] = []

    def take(self, name: str, kind: type, default: Any = ...) -> Any:
        """The value of a key; null counts as absent. Without a default the key is needed."""
        value = self.left.pop(name, None)
        if value is None:
            if default is ...:
                self.problems.append(f"{self.prefix}{name}: a value is needed, {_KINDS[kind]}")
                return kind()
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.refuse(name, value, f"must be {_KINDS[kind]}")
            return kind() if default is ... else default
        return value

    def present(self, *names: str) -> None:
        """Refuse files without these keys (null is allowed): absent, they mean one published model's value."""
        rule = "must be in the file, if only as null, since its absence means a value of its own"
        self.problems += [f"{name}: {rule}" for name in names if name not in self.left]

    def must(self, name: str, rule: str, *allowed: Any) -> None:
        """Refuse the key unless it is absent, null or one of `allowed`."""
        value = self.left.pop(name, None)
        if value is not None and value not in allowed:
            self.refuse(name, value, f"{rule}; use {shown(self.prefix + name, allowed[0])}")

    def refuse(self, name: str, value: Any, rule: str) -> None:
        self.problems.append(f"{shown(self.prefix + name, value)}: {rule}")

    def finish(self, irrelevant: frozenset[str] = IRRELEVANT) -> None:
        for name, value in self.left.items():
            if value is not None and name not in irrelevant:
                self.refuse(name, value, "unknown key, which may change the model; remove it if it does not")
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def read_common(keys: Keys) -> Values:
    keys.must("hidden_act", "the engine's MLPs are SwiGLU", "silu")
    keys.must("attention_dropout", "the engine has no dropout", 0.0)
    return {
        "vocab_size": keys.take("vocab_size", int),
        "dim": keys.take("hidden_size", int),
        "num_layers": keys.take("num_hidden_layers", int),
        "num_heads": keys.take("num_attention_heads", int),
        "norm_eps": keys.take("rms_norm_eps", float),
        "tied_head": keys.take("tie_word_embeddings", bool, False),
        "init_std": keys.take("initializer_range", float, 0.02),
        "max_positions": keys.take("max_position_embeddings", int, 0),
        "num_dense_layers": 0,
    }


def _deepseek(keys: Keys, common: Values) -> Values:
    """What DeepSeek-V2 and V3 share: latent attention, leading dense layers, shared experts."""
    keys.present("q_lora_rank", "n_shared_experts", "first_k_dense_replace", "routed_scaling_factor")
    nope, rope = keys.take("qk_nope_head_dim", int), keys.take("qk_rope_head_dim", int)
    keys.must("mlp_bias", "MLPs have no biases here", False)
    keys.must("moe_layer_freq", "after the dense layers every layer has experts", 1)
    keys.must("rope_interleave", "the rotary numbers of latent attention are interleaved pairs", True)
    keys.must("num_key_value_heads", "latent attention has as many heads of keys as of queries", common["num_heads"])
    keys.must("qk_head_dim", "is qk_nope_head_dim + qk_rope_head_dim", nope + rope)
    keys.must("head_dim", "is qk_rope_head_dim", rope)
    return _rope(keys, common, "interleaved", 10000.0) | {
        "attention": "mla",
        "attention_bias": keys.take("attention_bias", bool, False),
        "q_lora_rank": keys.take("q_lora_rank", int, 0),
        "kv_lora_rank": keys.take("kv_lora_rank", int),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": keys.take("v_head_dim", int),
        "num_dense_layers": keys.take("first_k_dense_replace", int, 0),
        "dense_hidden": keys.take("intermediate_size", int),
        "num_experts": keys.take("n_routed_experts", int),
        "top_k": keys.take("num_experts_per_tok", int),
        "expert_hidden": keys.take("moe_intermediate_size", int),
        "num_shared_experts": keys.take("n_shared_experts", int, 0),
        "route_scale": keys.take("routed_scaling_factor", float, 1.0),
    }


def _deepseek_v3(keys: Keys, common: Values) -> Values:
    keys.present("n_group", "topk_group")
    keys.must("scoring_func", "DeepSeek-V3 scores by sigmoid", "sigmoid")
    keys.must("topk_method", "DeepSeek-V3 balances by a bias without a loss", "noaux_tc")
    renamed = keys.take("num_mtp_layers", int, 0)
    return _deepseek(keys, common) | {
        "score_function": "sigmoid",
        "num_groups": keys.take("n_group", int, 1),
        "top_groups": keys.take("topk_group", int, 1),
        "group_score": "sum_top2",
        "normalize_weights": keys.take("norm_topk_prob", bool, True),
        "mtp_depth": keys.take("num_nextn_predict_layers", int, renamed),
    }


def _deepseek_v2(keys: Keys, common: Values) -> Values:
    keys.must("scoring_func", "DeepSeek-V2 scores by softmax", "softmax")
    keys.must("norm_topk_prob", "libraries differ in what DeepSeek-V2 does with normalised weights", False)
    method = keys.take("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        keys.refuse("topk_method", method, "DeepSeek-V2 chooses otherwise; use greedy or group_limited_greedy")
    groups, kept = keys.take("n_group", int, 1), keys.take("topk_group", int, 1)
    return _deepseek(keys, common) | {
        "score_function": "softmax",
        "num_groups": 1 if method == "greedy" else groups,
        "top_groups": 1 if method == "greedy" else kept,
        "group_score": "max",
        "normalize_weights": False,
    }


def _grouped(keys: Keys, common: Values, theta: float) -> Values:
    """What Mixtral, Qwen3-MoE and gpt-oss share: grouped queries, softmax routing, no shared expert."""
    return _rope(keys, common, "halves", theta) | {
        "attention": "gqa",
        "num_kv_heads": keys.take("num_key_value_heads", int),
        "head_dim": keys.take("head_dim", int, common["dim"] // max(common["num_heads"], 1)),
        "top_k": keys.take("num_experts_per_tok", int),
        "num_shared_experts": 0,
        "score_function": "softmax",
        "group_score": "max",
        "sliding_window": keys.take("sliding_window", int, 0),
    }


def _mixtral(keys: Keys, common: Values) -> Values:
    keys.must("router_jitter_noise", "the router's input is taken as it is", 0.0)
    hidden = keys.take("intermediate_size", int)
    return _grouped(keys, common, 1e6) | {
        "num_experts": keys.take("num_local_experts", int),
        "expert_hidden": hidden,
        "dense_hidden": hidden,
    }


def _qwen3_moe(keys: Keys, common: Values) -> Values:
    keys.must("decoder_sparse_step", "after the dense layers every layer has experts", 1)
    dense = keys.take("mlp_only_layers", list, [])
    if dense != list(range(len(dense))):
        keys.refuse("mlp_only_layers", dense, "dense layers come first; use the first layers, as in [0, 1]")
    if not keys.take("use_sliding_window", bool, False):
        keys.left.pop("sliding_window", None)
    renamed = keys.take("num_local_experts", int, 0)
    return _grouped(keys, common, 10000.0) | {
        "qk_norm": True,
        "attention_bias": keys.take("attention_bias", bool, False),
        "num_dense_layers": len(dense),
        "dense_hidden": keys.take("intermediate_size", int),
        "num_experts": keys.take("num_experts", int, renamed) if renamed else keys.take("num_experts", int),
        "expert_hidden": keys.take("moe_intermediate_size", int),
        "normalize_weights": keys.take("norm_topk_prob", bool),
    }


def _gpt_oss(keys: Keys, common: Values) -> Values:
    keys.present("head_dim", "sliding_window", "rope_parameters" if "rope_parameters" in keys.left else "rope_scaling")
    keys.must("swiglu_alpha", "the gain of gpt-oss's SwiGLU", 1.702)
    keys.left.pop("experts_per_token", None)  # the same as num_experts_per_tok
    types = keys.take("layer_types", list, ["sliding_attention", "full_attention"])
    every = 1 if "full_attention" not in types else 2
    if types != [("sliding_attention", "full_attention")[i % every] for i in range(len(types))]:
        keys.refuse("layer_types", types, "windows are on all layers or on every other one, the first included")
    hidden = keys.take("intermediate_size", int)
    return _grouped(keys, common, 150000.0) | {
        "num_experts": keys.take("num_local_experts", int),
        "expert_hidden": hidden,
        "dense_hidden": hidden,
        "sliding_window_every": every,
        "attention_bias": keys.take("attention_bias", bool, True),
        "attention_sinks": True,
        "expert_biases": True,
        "swiglu_limit": keys.take("swiglu_limit", float, 7.0),
    }


def _rope(keys: Keys, common: Values, style: str, theta: float) -> Values:
    """Rotary options, in the old spelling (rope_theta, rope_scaling) or the new one (rope_parameters)."""
    given = {"rope_theta": keys.left.pop("rope_theta", None)}
    given |= keys.take("rope_scaling", dict, {}) | keys.take("rope_parameters", dict, {})
    rope = Keys(given, "rope_parameters.")
    kind = rope.take("type", str, "default")
    kind = rope.take("rope_type", str, kind)
    values: Values = {"rope_style": style, "rope_theta": rope.take("rope_theta", float, theta)}
    rope.must("partial_rotary_factor", "the whole head turns", 1.0)
    if kind == "yarn":
        values |= _yarn(rope, common["max_positions"])
    elif kind != "default":
        rope.refuse("rope_type", kind, "not built here; use default or yarn")
        rope.left.clear()
    try:
        rope.finish(frozenset())
    except ConfigError as error:
        keys.problems += str(error).splitlines()
    return values


def _yarn(rope: Keys, longest: int) -> Values:
    original = rope.take("original_max_position_embeddings", int)
    factor = rope.take("factor", float, longest / max(original, 1))
    mscale, all_dim = rope.take("mscale", float, 0.0), rope.take("mscale_all_dim", float, 0.0)
    if bool(mscale) != bool(all_dim) and (mscale, all_dim) != (1.0, 0.0):
        name, value = ("mscale", mscale) if mscale else ("mscale_all_dim", all_dim)
        rope.refuse(name, value, "libraries differ in what one of mscale and mscale_all_dim means; give both or none")
    values = {
        "rope_scaling": "yarn",
        "rope_factor": factor,
        "rope_original_length": original,
        "rope_beta_fast": rope.take("beta_fast", float, 32.0),
        "rope_beta_slow": rope.take("beta_slow", float, 1.0),
        "rope_truncate": rope.take("truncate", bool, True),
        "rope_mscale": mscale or 1.0,
        "rope_mscale_all_dim": all_dim,
    }
    growth = (1 + 0.1 * (mscale or 1.0) * math.log(max(factor, 1.0))) / (1 + 0.1 * all_dim * math.log(max(factor, 1.0)))
    attention_factor = rope.take("attention_factor", float, growth)
    if not math.isclose(attention_factor, growth, rel_tol=1e-6):
        rule = f"here it follows from the other values; leave it out, or use {growth:.6f}"
        rope.refuse("attention_factor", attention_factor, rule)
    return values


def family_of(model: ModelConfig) -> str:
    """Whose `config.json` a model's is, by the features that only one family has."""
    if model.attention == "mla":
        return "deepseek_v3" if model.score_function == "sigmoid" else "deepseek_v2"
    if model.expert_biases or model.attention_sinks:
        return "gpt_oss"
    return "qwen3_moe" if model.qk_norm else "mixtral"


def rope_keys(model: ModelConfig) -> Values:
    if model.rope_scaling == "none":
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": model.rope_factor,
        "original_max_position_embeddings": model.rope_original_length,
        "beta_fast": model.rope_beta_fast,
        "beta_slow": model.rope_beta_slow,
    }
    if model.rope_mscale_all_dim:
        scaling |= {"mscale": model.rope_mscale, "mscale_all_dim": model.rope_mscale_all_dim}
    if not model.rope_truncate:
        scaling["truncate"] = False
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


def _write_deepseek(model: ModelConfig) -> Values:
    if not model.num_shared_experts:
        raise ConfigError(
            f"model.num_shared_experts=0: a {family_of(model)} config.json needs a shared expert; use 1 or more"
        )
    hf: Values = {
        "num_key_value_heads": model.num_heads,
        "q_lora_rank": model.q_lora_rank or None,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "attention_bias": model.attention_bias,
        "first_k_dense_replace": model.num_dense_layers,
        "intermediate_size": model.dense_hidden,
        "moe_layer_freq": 1,
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "moe_intermediate_size": model.expert_hidden,
        "n_shared_experts": model.num_shared_experts,
        "n_group": model.num_groups,
        "topk_group": model.top_groups,
        "norm_topk_prob": model.normalize_weights,
        "routed_scaling_factor": model.route_scale,
        "scoring_func": model.score_function,
    }
    if model.score_function == "sigmoid":
        return hf | {"topk_method": "noaux_tc", "num_nextn_predict_layers": model.mtp_depth}
    return hf | {"topk_method": "group_limited_greedy" if model.top_groups < model.num_groups else "greedy"}


def _write_grouped(model: ModelConfig) -> Values:
    return {
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "num_experts_per_tok": model.top_k,
        "sliding_window": model.sliding_window or None,
    }


def _write_mixtral(model: ModelConfig) -> Values:
    return _write_grouped(model) | {"num_local_experts": model.num_experts, "intermediate_size": model.expert_hidden}


def _write_qwen3_moe(model: ModelConfig) -> Values:
    return _write_grouped(model) | {
        "attention_bias": model.attention_bias,
        "use_sliding_window": bool(model.sliding_window),
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(model.num_dense_layers)),
        "intermediate_size": model.dense_hidden,
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_hidden,
        "norm_topk_prob": model.normalize_weights,
    }


def _write_gpt_oss(model: ModelConfig) -> Values:
    kinds = ["sliding_attention"] + ["full_attention"] * (model.sliding_window_every - 1)
    return _write_mixtral(model) | {
        "attention_bias": model.attention_bias,
        "swiglu_limit": model.swiglu_limit,
        "layer_types": [kinds[i % len(kinds)] for i in range(model.num_layers)],
    }


READERS: Mapping[str, Callable[[Keys, Values], Values]] = MappingProxyType(
    {
        "deepseek_v3": _deepseek_v3,
        "deepseek_v2": _deepseek_v2,
        "kimi_k2": _deepseek_v3,  # DeepSeek-V3's code under another name
        "mixtral": _mixtral,
        "qwen3_moe": _qwen3_moe,
        "gpt_oss": _gpt_oss,
    }
)
WRITERS: Mapping[str, Callable[[ModelConfig], Values]] = MappingProxyType(
    {
        "deepseek_v3": _write_deepseek,
        "deepseek_v2": _write_deepseek,
        "mixtral": _write_mixtral,
        "qwen3_moe": _write_qwen3_moe,
        "gpt_oss": _write_gpt_oss,
    }
)
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
    }
)
