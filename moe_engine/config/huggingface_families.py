"""Families of models in Hugging Face's `config.json`: what each key means, a function to read each.

A reader takes from `Keys` what it knows and refuses values that the engine cannot follow. `config.huggingface_writers`
is the other direction, `config.huggingface` puts the two together and checks that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from moe_engine.config.huggingface_keys import Keys, Values, dense_values
from moe_engine.config.huggingface_rope import read_rope


def _deepseek(keys: Keys, common: Values) -> Values:
    """What DeepSeek-V2 and V3 share: latent attention, leading dense layers, shared experts."""
    keys.present("q_lora_rank")
    nope, rope = keys.take("qk_nope_head_dim", int), keys.take("qk_rope_head_dim", int)
    keys.must("mlp_bias", "MLPs have no biases here", False)
    keys.must("moe_layer_freq", "after the dense layers every layer has experts", 1)
    keys.must("rope_interleave", "the rotary numbers of latent attention are interleaved pairs", True)
    keys.must("num_key_value_heads", "latent attention has as many heads of keys as of queries", common["num_heads"])
    keys.must("qk_head_dim", "is qk_nope_head_dim + qk_rope_head_dim", nope + rope)
    keys.must("head_dim", "is qk_rope_head_dim", rope)
    biases = keys.take("attention_bias", bool, False)
    return read_rope(keys, common, "interleaved", 10000.0) | {
        "attention": "mla",
        "attention_bias": biases,
        "attention_out_bias": biases,
        "q_lora_rank": keys.take("q_lora_rank", int, 0),
        "kv_lora_rank": keys.take("kv_lora_rank", int),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": keys.take("v_head_dim", int),
        **_leading_dense(keys, common),
    }


def _leading_dense(keys: Keys, common: Values) -> Values:
    """Layers and experts in DeepSeek's words, which GLM-4-MoE uses too."""
    keys.present("n_shared_experts", "first_k_dense_replace", "routed_scaling_factor")
    return {
        "num_dense_layers": min(keys.take("first_k_dense_replace", int, 0), common["num_layers"]),
        "dense_hidden": keys.take("intermediate_size", int),
        "num_experts": keys.take("n_routed_experts", int),
        "top_k": keys.take("num_experts_per_tok", int),
        "expert_hidden": keys.take("moe_intermediate_size", int),
        "num_shared_experts": keys.take("n_shared_experts", int, 0),
        "route_scale": keys.take("routed_scaling_factor", float, 1.0),
    }


def _deepseek_v3(keys: Keys, common: Values) -> Values:
    return _deepseek(keys, common) | _sigmoid_routing(keys, "DeepSeek-V3")


def _sigmoid_routing(keys: Keys, who: str) -> Values:
    """DeepSeek-V3's routing and MTP, which GLM-4-MoE has too."""
    keys.present("n_group", "topk_group")
    keys.must("scoring_func", f"{who} scores by sigmoid", "sigmoid")
    keys.must("topk_method", f"{who} balances by a bias without a loss", "noaux_tc")
    renamed = keys.take("num_mtp_layers", int, 0)
    return {
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


def _grouped_queries(
    keys: Keys, common: Values, theta: float, share: float | None = None, style: str = "halves"
) -> Values:
    """Grouped queries and their rotary embedding; share, style: see `read_rope`."""
    head = keys.take("head_dim", int, common["dim"] // max(common["num_heads"], 1))
    return read_rope(keys, common, style, theta, head, share) | {
        "attention": "gqa",
        "num_kv_heads": keys.take("num_key_value_heads", int),
        "head_dim": head,
    }


def _grouped(keys: Keys, common: Values, theta: float) -> Values:
    """What Mixtral, the Qwen models, OLMoE and gpt-oss share: grouped queries, softmax routing, no shared expert."""
    window = keys.take("sliding_window", int, 0)
    if window < 0:
        keys.refuse("sliding_window", window, "so many keys are seen; use 1 or more, or null")
    return _grouped_queries(keys, common, theta) | {
        "top_k": keys.take("num_experts_per_tok", int),
        "num_shared_experts": 0,
        "score_function": "softmax",
        "group_score": "max",
        "sliding_window": window,
    }


def _mixtral(keys: Keys, common: Values) -> Values:
    keys.must("router_jitter_noise", "the router's input is taken as it is", 0.0)
    hidden = keys.take("intermediate_size", int)
    return _grouped(keys, common, 1e6) | {
        "num_experts": keys.take("num_local_experts", int),
        "expert_hidden": hidden,
        "dense_hidden": hidden,
    }


def _qwen(keys: Keys, common: Values) -> Values:
    """What Qwen2-MoE and Qwen3-MoE share."""
    return _grouped(keys, common, 10000.0) | {
        **dense_values(_dense_of_qwen(keys, common["num_layers"])),
        "dense_hidden": keys.take("intermediate_size", int),
        "num_experts": _num_experts(keys),
        "expert_hidden": keys.take("moe_intermediate_size", int),
        "normalize_weights": keys.take("norm_topk_prob", bool),
    }


def _at_least_1(keys: Keys, name: str) -> int:
    """After how many layers one with experts comes."""
    step: int = keys.take(name, int, 1)
    if step < 1:
        keys.refuse(name, step, "the last of so many layers has experts; use 1 or more")
    return max(step, 1)


def _dense_of_qwen(keys: Keys, num_layers: int) -> Iterator[int]:
    """The dense layers: those named, and of every `decoder_sparse_step` all but the last."""
    step, named = _at_least_1(keys, "decoder_sparse_step"), keys.take("mlp_only_layers", list, [])
    if any(not isinstance(layer, int) or not 0 <= layer < num_layers for layer in named):
        rule = f"layers are counted from 0 and there are num_hidden_layers={num_layers}; use those, as in [0, 1]"
        keys.refuse("mlp_only_layers", named, rule)
    return (layer for layer in range(num_layers) if layer in named or (layer + 1) % step)


def _num_experts(keys: Keys) -> int:
    """In the spelling of the published files, or in the newer one."""
    renamed: int = keys.take("num_local_experts", int, 0)
    found: int = keys.take("num_experts", int, renamed) if renamed else keys.take("num_experts", int)
    return found


def _qwen3_moe(keys: Keys, common: Values) -> Values:
    if not keys.take("use_sliding_window", bool, False):
        keys.left.pop("sliding_window", None)
    biases = keys.take("attention_bias", bool, False)
    return _qwen(keys, common) | {"qk_norm": True, "attention_bias": biases, "attention_out_bias": biases}


def _qwen2_moe(keys: Keys, common: Values) -> Values:
    keys.must("use_sliding_window", "windows that alternate from the first layer on are not built here", False)
    keys.left.pop("sliding_window", None)
    _full_attention(keys)
    shared = keys.take("shared_expert_intermediate_size", int)
    values = _qwen(keys, common) | {"attention_bias": keys.take("qkv_bias", bool, True), "shared_gate": True}
    width = values["expert_hidden"]
    if not width or shared < 1 or shared % width:
        rule = f"the shared expert is as wide as whole experts, moe_intermediate_size={width}"
        keys.refuse("shared_expert_intermediate_size", shared, rule)
    return values | {"num_shared_experts": shared // max(width, 1)}


def _olmoe(keys: Keys, common: Values) -> Values:
    keys.must("clip_qkv", "queries, keys and values are not clipped", None)
    hidden = keys.take("intermediate_size", int)
    biases = keys.take("attention_bias", bool, False)
    if keys.left.get("num_key_value_heads") is None:
        keys.left["num_key_value_heads"] = common["num_heads"]
    return _grouped(keys, common, 10000.0) | {
        "qk_norm": True,
        "qk_norm_whole": True,
        "attention_bias": biases,
        "attention_out_bias": biases,
        "num_experts": _num_experts(keys),
        "expert_hidden": hidden,
        "dense_hidden": hidden,
        "normalize_weights": keys.take("norm_topk_prob", bool, False),
    }


def _glm4_moe(keys: Keys, common: Values) -> Values:
    return (
        _grouped_queries(keys, common, 10000.0, share=0.5)
        | _leading_dense(keys, common)
        | _sigmoid_routing(keys, "GLM-4-MoE")
        | {
            "qk_norm": keys.take("use_qk_norm", bool, False),
            "attention_bias": keys.take("attention_bias", bool, False),
        }
    )


def _full_attention(keys: Keys) -> None:
    """Refuse `layer_types`, as newer files have it, unless all layers are the same."""
    types = keys.take("layer_types", list, [])
    if any(kind != "full_attention" for kind in types):
        keys.refuse("layer_types", types, "every layer sees all that came before; use full_attention for each")


def _gpt_oss(keys: Keys, common: Values) -> Values:
    keys.present("head_dim", "sliding_window")
    if not (keys.left.get("rope_parameters") or keys.left.get("rope_scaling")):
        keys.problems.append("rope_scaling: must be in the file, since its absence means the published models' YaRN")
    keys.must("swiglu_alpha", "the gain of gpt-oss's SwiGLU", 1.702)
    keys.left.pop("experts_per_token", None)  # the same as num_experts_per_tok
    hidden, biases = keys.take("intermediate_size", int), keys.take("attention_bias", bool, True)
    limit = keys.take("swiglu_limit", float, 7.0)
    if not limit > 0:
        keys.refuse("swiglu_limit", limit, "gates and ups are clamped to it; use a number above 0 such as 7.0")
    return (
        _grouped(keys, common, 150000.0)
        | _windows(keys, common["num_layers"])
        | {
            "num_experts": keys.take("num_local_experts", int),
            "expert_hidden": hidden,
            "dense_hidden": hidden,
            "attention_bias": biases,
            "attention_out_bias": biases,
            "attention_sinks": True,
            "expert_biases": True,
            "swiglu_limit": limit,
        }
    )


def _windows(keys: Keys, num_layers: int) -> Values:
    """Which layers have the window, from `layer_types`; without it every other one, from the first on."""
    kinds = ("sliding_attention", "full_attention")
    types = keys.take("layer_types", list, [kinds[i % 2] for i in range(num_layers)])
    for every in (1, 2):
        if types == [kinds[i % every] for i in range(num_layers)]:
            return {"sliding_window_every": every}
    if types != [kinds[1]] * num_layers:
        rule = f"one for each of {num_layers} layers; windows are on all, on none, or on every other one from the first"
        keys.refuse("layer_types", types, rule)
    return {"sliding_window": 0}


def _ernie4_5_moe(keys: Keys, common: Values) -> Values:
    """ERNIE-4.5's text models. transformers passes over `num_nextn_predict_layers` and has no MTP of theirs."""
    keys.present("moe_k", "moe_num_experts", "moe_num_shared_experts", "moe_layer_start_index")
    keys.must("use_bias", "no projection has a bias here", False)
    keys.must("moe_norm_min", "the sum that weights are divided by is above it", 1e-12)
    keys.must("moe_gate", "the best experts are chosen", "topk")
    keys.must("moe_gate_act", "ERNIE-4.5 scores by softmax", "softmax")
    for trained in ("num_nextn_predict_layers", "moe_capacity", "moe_use_aux_free"):
        keys.left.pop(trained, None)
    return _grouped_queries(keys, common, 500000.0, style="interleaved") | {
        **dense_values(_dense_of_ernie(keys, common["num_layers"])),
        "dense_hidden": keys.take("intermediate_size", int),
        "num_experts": keys.take("moe_num_experts", int),
        "top_k": keys.take("moe_k", int),
        "expert_hidden": keys.take("moe_intermediate_size", int),
        "num_shared_experts": keys.take("moe_num_shared_experts", int, 0),
        "score_function": "softmax",
        "group_score": "max",
    }


def _dense_of_ernie(keys: Keys, num_layers: int) -> Iterator[int]:
    """The dense layers: those outside of first and last, and of every `moe_layer_interval` all but the last."""
    interval = _at_least_1(keys, "moe_layer_interval")
    first, last = keys.take("moe_layer_start_index", int, 0), keys.take("moe_layer_end_index", int, -1)
    last = num_layers - 1 if last == -1 else last
    return (layer for layer in range(num_layers) if not first <= layer <= last or (layer + 1) % interval)


READERS: Mapping[str, Callable[[Keys, Values], Values]] = MappingProxyType(
    {
        "deepseek_v3": _deepseek_v3,
        "deepseek_v2": _deepseek_v2,
        "kimi_k2": _deepseek_v3,  # DeepSeek-V3's code under another name
        "mixtral": _mixtral,
        "qwen3_moe": _qwen3_moe,
        "qwen2_moe": _qwen2_moe,
        "olmoe": _olmoe,
        "glm4_moe": _glm4_moe,
        "gpt_oss": _gpt_oss,
        "ernie4_5_moe": _ernie4_5_moe,
    }
)
