"""Rotary position embedding: pairs of numbers turn by position times a speed of their own (arXiv 2104.09864).

YaRN (arXiv 2309.00071, section 3) makes a model read contexts longer than those it was trained on: fast pairs, which
tell near positions apart, keep their speed, slow ones are slowed by the factor of the stretch, and between the two is
a ramp; the entropy that longer contexts add to attention is taken back by slightly larger scores. What is computed
is what DeepSeek's code and Hugging Face transformers compute, which differ from the paper in where that growth goes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_engine.config.schema import ModelConfig
from moe_engine.ops.rotary import rotate_end, rotate_start


def rotary_dim(model: ModelConfig) -> int:
    """How many numbers of each head turn."""
    return model.qk_rope_head_dim if model.attention == "mla" else model.rotary_dim or model.head_dim


def angles(positions: Tensor, model: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, S, 1, rope/2] for positions [B, S], with YaRN's growth in them; computed in fp64."""
    turned = (positions[..., None] * frequencies(model, positions.device))[:, :, None]  # [B, S, 1, rope/2]
    growth = 1.0
    if model.rope_scaling == "yarn":
        growth = _growth(model.rope_factor, model.rope_mscale) / _growth(model.rope_factor, model.rope_mscale_all_dim)
    return (turned.cos() * growth).to(dtype), (turned.sin() * growth).to(dtype)


def frequencies(model: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Radians a position of every pair, fastest first: [rope/2] fp64."""
    pairs = rotary_dim(model) // 2
    speeds = model.rope_theta ** (-torch.arange(pairs, dtype=torch.float64, device=device) / pairs)
    if model.rope_scaling == "none":
        return speeds
    low, high = _ramp(model)
    slowed = ((torch.arange(pairs, dtype=torch.float64, device=device) - low) / (high - low)).clamp(0, 1)  # share
    return speeds * (1 - slowed) + speeds / model.rope_factor * slowed


def score_growth(model: ModelConfig) -> float:
    """What latent attention multiplies its scores by under YaRN: m(rope_mscale_all_dim)^2; otherwise 1.

    Grouped-query attention has the growth in cos and sin alone.
    """
    if model.rope_scaling == "none":
        return 1.0
    return _growth(model.rope_factor, model.rope_mscale_all_dim) ** 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str = "interleaved", start: bool = False) -> Tensor:
    """Rotary embedding of the last rope numbers of each head, the others kept: x [B, S, heads, n], same dtype.

    start: of the first ones in their place. Pairs are (2i, 2i+1) when interleaved, (i, i + rope/2) in `halves`.
    """
    return (rotate_start if start else rotate_end)(x, cos, sin, style == "interleaved")


def _ramp(model: ModelConfig) -> tuple[float, float]:
    """The pairs between which speeds change from kept to slowed."""
    pairs = rotary_dim(model) // 2

    def pair_with(turns: float) -> float:
        """Which pair, as a fraction, turns this often within the original length."""
        return pairs * math.log(model.rope_original_length / (2 * math.pi * turns)) / math.log(model.rope_theta)

    low, high = pair_with(model.rope_beta_fast), pair_with(model.rope_beta_slow)
    if model.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    return low, high if high != low else low + 0.001


def _growth(factor: float, mscale: float) -> float:
    return 1.0 + 0.1 * mscale * math.log(factor)
