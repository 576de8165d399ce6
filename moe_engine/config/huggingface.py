"""Hugging Face's `config.json` to our `ModelConfig` and back.

Reading is strict: every key is either used, or listed as saying nothing about the architecture, or refused by name
with the rule that it breaks. Writing goes through reading: what comes back from the
written keys must be the model that was given, else the option that got lost is named.

Sources: the `config.json` files published with the models, and what Hugging Face transformers 5.24 makes of each key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_engine.config.errors import ConfigError, there_are
from moe_engine.config.huggingface_families import READERS
from moe_engine.config.huggingface_keys import Keys, Values, dense_values, read_common
from moe_engine.config.huggingface_rope import rope_keys
from moe_engine.config.huggingface_writers import WRITERS, family_of
from moe_engine.config.schema import ModelConfig
from moe_engine.config.strict import closest, shown

DEFAULT_CONTEXT = 4096
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "glm4_moe": "Glm4MoeForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    }
)


def read_model_config(path: Path) -> ModelConfig:
    """The model that a `config.json`, or a folder with one, describes. Raises ConfigError naming the file."""
    file = path / "config.json" if path.is_dir() else path
    if file.exists() and not file.is_file():  # a device or a pipe might never end
        raise ConfigError(f"{file}: not a file; name a Hugging Face config.json or the folder it is in")
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; name a Hugging Face config.json or the folder it is in") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f'{file}: an object with keys is expected, for example {{"model_type": "deepseek_v3", …}}')
    try:
        return model_config(data)
    except ConfigError as error:
        raise error.about(f"{file}: ") from None


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The model that the keys of a `config.json` describe.

    Raises ConfigError with a line for each key that is missing, unknown, of a wrong type, or not built here.
    """
    keys = Keys(hf)
    family = keys.take("model_type", str, "")
    if family not in READERS:
        known = there_are(READERS, closest(family, READERS))
        raise ConfigError(f"{shown('model_type', family)}: the engine does not know it; {known}")
    values = read_common(keys, 1e-5 if family == "olmoe" else ..., tied=family == "ernie4_5_moe")
    values |= READERS[family](keys, values)
    keys.finish()
    return ModelConfig(name=family, **values)


def huggingface_config(model: ModelConfig, context_length: int = DEFAULT_CONTEXT) -> Values:
    """The keys of a `config.json` for a model, in the spelling that old and new versions of transformers read.

    `context_length` is written where `model.max_positions` is open. Raises ConfigError naming the options that none of
    the families' files can express.
    """
    family = family_of(model)
    hf: Values = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "initializer_range": model.init_std,
        "max_position_embeddings": model.max_positions or context_length,
        "attention_dropout": 0.0,
    }
    hf |= rope_keys(model) | WRITERS[family](model)
    _refuse_what_got_lost(model, model_config(hf), family)
    return hf


def _refuse_what_got_lost(model: ModelConfig, back: ModelConfig, family: str) -> None:
    given, read = effective(model), effective(back)
    lost = [
        f"{shown('model.' + item.name, getattr(given, item.name))}: a {family} config.json cannot say this; "
        f"it would mean {shown('model.' + item.name, getattr(read, item.name))}"
        for item in fields(ModelConfig)
        if getattr(given, item.name) != getattr(read, item.name)
    ]
    if lost:
        raise ConfigError("\n".join(lost))


def effective(model: ModelConfig) -> ModelConfig:
    """The model with every option that has no effect on it at its default, and what can be said in two ways in one."""
    idle = ["name", "max_positions"]
    if model.attention == "mla":
        idle += ["num_kv_heads", "head_dim", "qk_norm", "rotary_dim"]
    else:
        idle += ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norm_eps"]
    if model.rope_scaling == "none":
        idle += [item.name for item in fields(ModelConfig) if item.name.startswith("rope_")]
        idle = [name for name in idle if name not in ("rope_theta", "rope_style", "rope_scaling")]
    if model.top_groups == model.num_groups:
        idle += ["num_groups", "top_groups", "group_score"]
    if model.rotary_dim == model.head_dim:
        idle += ["rotary_dim"]
    if not model.qk_norm or model.attention == "mla":
        idle += ["qk_norm_whole"]
    dense = model.all_dense_layers()
    if not dense:
        idle += ["dense_hidden"]
    if not model.sliding_window or model.num_layers == 1:
        idle += ["sliding_window_every"]
    defaults = ModelConfig()
    return replace(model, **dense_values(dense), **{name: getattr(defaults, name) for name in idle})
