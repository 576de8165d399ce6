"""The keys of a `config.json`, each taken by someone or refused, and those that all families share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from moe_engine.config.errors import ConfigError
from moe_engine.config.model_rules import MOST_LAYERS
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


def dense_values(layers: Iterable[int]) -> Values:
    """The options of `ModelConfig` that say which layers are dense: how many lead, and which others there are."""
    dense = sorted(set(layers))
    leading = sum(place == layer for place, layer in enumerate(dense))
    return {"num_dense_layers": leading, "dense_layers": dense[leading:]}


def read_common(keys: Keys, eps: Any = ..., tied: bool = False) -> Values:
    """eps: of the norms, in a family whose files need not say it; tied: the head is, where the file does not say."""
    layers = keys.take("num_hidden_layers", int)
    if layers > MOST_LAYERS:
        keys.refuse("num_hidden_layers", layers, f"must be {MOST_LAYERS} or less")
        layers = MOST_LAYERS
    keys.must("hidden_act", "the engine's MLPs are SwiGLU", "silu")
    keys.must("attention_dropout", "the engine has no dropout", 0.0)
    return {
        "vocab_size": keys.take("vocab_size", int),
        "dim": keys.take("hidden_size", int),
        "num_layers": layers,
        "num_heads": keys.take("num_attention_heads", int),
        "norm_eps": keys.take("rms_norm_eps", float, eps),
        "tied_head": keys.take("tie_word_embeddings", bool, tied),
        "init_std": keys.take("initializer_range", float, 0.02),
        "max_positions": keys.take("max_position_embeddings", int, 0),
        "num_dense_layers": 0,
    }
