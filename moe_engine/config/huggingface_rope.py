"""Rotary embedding in a `config.json`, also YaRN: read in the old and the new spelling, written in the old one."""

from __future__ import annotations

import math

from moe_engine.config.errors import ConfigError
from moe_engine.config.huggingface_keys import Keys, Values
from moe_engine.config.schema import ModelConfig


def read_rope(
    keys: Keys, common: Values, style: str, theta: float, head: int = 0, share: float | None = None
) -> Values:
    """Rotary options, in the old spelling (rope_theta, rope_scaling) or the new one (rope_parameters).

    share: of the numbers of a head, `head`, how many turn where the file does not say; None: all do, always.
    """
    given = {"rope_theta": keys.left.pop("rope_theta", None)}
    scaling, parameters = keys.take("rope_scaling", dict, {}), keys.take("rope_parameters", dict, {})
    if _contradict(_one_spelling(scaling), _one_spelling(parameters)):
        keys.refuse("rope_scaling", scaling, "rope_parameters says something else; leave one of both out")
    given |= scaling | parameters
    rope = Keys(given, "rope_parameters.")
    kind = rope.take("type", str, "default")
    kind = rope.take("rope_type", str, kind)
    values: Values = {"rope_style": style, "rope_theta": rope.take("rope_theta", float, theta)}
    if share is None:
        rope.must("partial_rotary_factor", "the whole head turns", 1.0)
    else:
        share = keys.take("partial_rotary_factor", float, share)
        share = rope.take("partial_rotary_factor", float, share)
        turned = int(head * share) if 0 < share <= 1 else 0  # also of NaN
        if turned < 2 or turned % 2:
            rope.refuse("partial_rotary_factor", share, f"pairs turn: above 0 to 1, and an even number of {head}")
        values["rotary_dim"] = 0 if turned == head else turned
    if kind == "yarn":
        values |= _yarn(rope, common["max_positions"])
    elif kind != "default":
        rope.refuse("rope_type", kind, "not built here; use default or yarn")
        rope.left.clear()
    try:
        rope.finish(frozenset())
    except ConfigError as error:
        keys.problems += error.lines
    return values


def _one_spelling(given: Values) -> Values:
    """With the kind as `rope_type` alone, where it is said."""
    kind = given.get("rope_type", given.get("type"))
    return {name: value for name, value in (given | {"type": None, "rope_type": kind}).items() if value is not None}


def _contradict(one: Values, other: Values) -> bool:
    return any(one[name] != other[name] for name in one.keys() & other.keys())


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


def rotary_share(model: ModelConfig) -> float:
    """`partial_rotary_factor`: what readers multiply by and round down, so it is rounded up where it must be."""
    turned, share = model.rotary_dim or model.head_dim, (model.rotary_dim or model.head_dim) / model.head_dim
    return share if int(model.head_dim * share) == turned else math.nextafter(share, 2.0)


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
