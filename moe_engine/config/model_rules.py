"""The rules of section `model`: sizes that fit together, and features of one kind of attention alone."""

from __future__ import annotations

from moe_engine.config.rules import Rules

BYTE_VOCABULARY = 257  # 256 bytes and the end of a document
ATTENTION = ("mla", "gqa")
ROPE_STYLES = ("interleaved", "halves")
ROPE_SCALINGS = ("none", "yarn")
MOST_LAYERS = 10_000


def check_model(rules: Rules) -> None:
    """Sizes and choices of the architecture, with room for the tokenizer."""
    check_architecture(rules)
    if rules["model.vocab_size"] < BYTE_VOCABULARY:
        rules.refuse(
            "model.vocab_size",
            f"the byte tokenizer has {BYTE_VOCABULARY} tokens; use model.vocab_size={BYTE_VOCABULARY} or more",
        )


def check_architecture(rules: Rules) -> None:
    """A model by itself, for any tokens; its experts are checked with the routing."""
    rules.at_least(1, *(f"model.{size}" for size in ("dim", "num_layers", "dense_hidden", "num_heads")))
    rules.at_most(MOST_LAYERS, "model.num_layers", "model.mtp_depth")
    rules.at_least(0, *(f"model.{size}" for size in ("num_dense_layers", "mtp_depth", "init_std", "max_positions")))
    rules.positive(10000.0, "model.rope_theta")
    rules.positive(1e-6, "model.norm_eps")
    rules.one_of("model.rope_style", ROPE_STYLES)
    rules.one_of("model.rope_scaling", ROPE_SCALINGS)
    check_attention(rules)
    if rules["model.rope_scaling"] == "yarn":
        _check_yarn(rules)
    if rules.sound("model.num_dense_layers", "model.num_layers"):
        layers = rules["model.num_layers"]
        if rules["model.num_dense_layers"] > layers:
            rules.refuse(
                "model.num_dense_layers",
                f"the model has model.num_layers={layers}; use model.num_dense_layers={layers} or less",
            )
        _check_dense_layers(rules, layers)


def _check_dense_layers(rules: Rules, layers: int) -> None:
    name, given = "model.dense_layers", rules["model.dense_layers"]
    wrong = [layer for layer in given if not 0 <= layer < layers]
    use = f"use {name}=[{','.join(map(str, sorted(set(given).difference(wrong))))}]"
    if wrong:
        rules.refuse(name, f"layers are counted from 0, and the model has model.num_layers={layers}; {use}")
    elif len(set(given)) < len(given):
        rules.refuse(name, f"names a layer twice; {use}")


def check_attention(rules: Rules) -> None:
    """Its sizes, and that it is built with what is asked for."""
    rules.one_of("model.attention", ATTENTION)
    if rules.sound("model.attention"):
        (_check_latent if rules["model.attention"] == "mla" else _check_grouped)(rules)


def check_length(rules: Rules) -> None:
    """Sequences are not longer than those the model is for."""
    longest, seq_len = "model.max_positions", "train.seq_len"
    if rules.sound(longest) and 0 < rules[longest] < rules[seq_len]:
        rules.refuse(
            seq_len,
            f"the model is for {longest}={rules[longest]} positions; use {seq_len}={rules[longest]} or less, "
            f"or {longest}=0 for any length",
        )


def _check_latent(rules: Rules) -> None:
    rules.at_least(1, *(f"model.{size}" for size in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")))
    rules.at_least(0, "model.q_lora_rank")
    rules.positive(1e-6, "model.latent_norm_eps")
    for name in ("attention_bias", "attention_out_bias", "attention_sinks", "sliding_window"):
        if rules[f"model.{name}"]:
            off = "0" if name == "sliding_window" else "false"
            rule = f"latent attention is built without it; use model.{name}={off}, or model.attention=gqa"
            rules.refuse(f"model.{name}", rule)
    _check_even(rules, "model.qk_rope_head_dim")


def _check_grouped(rules: Rules) -> None:
    heads, kv_heads = "model.num_heads", "model.num_kv_heads"
    rules.at_least(1, kv_heads, "model.sliding_window_every")
    rules.at_least(0, "model.sliding_window")
    _check_even(rules, "model.head_dim")
    if rules["model.rotary_dim"]:
        _check_even(rules, "model.rotary_dim")
    if rules.sound("model.head_dim", "model.rotary_dim") and rules["model.rotary_dim"] > rules["model.head_dim"]:
        size = rules["model.head_dim"]
        rules.refuse("model.rotary_dim", f"a head has model.head_dim={size} numbers; use model.rotary_dim={size} or 0")
    if rules["model.qk_norm_whole"] and not rules["model.qk_norm"]:
        rules.refuse("model.qk_norm_whole", "says over what model.qk_norm=true is; use model.qk_norm_whole=false")
    if rules.sound(heads, kv_heads) and rules[heads] % rules[kv_heads]:
        fitting = max(d for d in range(1, rules[kv_heads] + 1) if rules[heads] % d == 0)
        rules.refuse(kv_heads, f"must divide {heads}={rules[heads]}; use {kv_heads}={fitting}")


def _check_even(rules: Rules, name: str) -> None:
    size = rules[name]
    if size < 2 or size % 2:
        rules.refuse(name, f"RoPE turns pairs, so it must be even; use {name}={max(2, size + 1)}")


def _check_yarn(rules: Rules) -> None:
    factor, fast, slow = "model.rope_factor", "model.rope_beta_fast", "model.rope_beta_slow"
    if not rules[factor] >= 1:
        rules.refuse(factor, f"YaRN stretches the context, so it must be 1 or more, for example {factor}=40")
    rules.at_least(1, "model.rope_original_length")
    if rules.sound("model.rope_theta") and not rules["model.rope_theta"] > 1:
        rules.refuse("model.rope_theta", "YaRN needs pairs of different speeds; use model.rope_theta=10000.0")
    rules.positive(1.0, slow)
    if not rules[fast] >= rules[slow]:
        rules.refuse(fast, f"must be at least {slow}={rules[slow]}, for example {fast}=32")
    rules.at_least(0, "model.rope_mscale", "model.rope_mscale_all_dim")
