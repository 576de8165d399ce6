"""The attention core with fewer heads of keys than of queries, and what rotary embedding promises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.config.schema import ModelConfig
from moe_engine.model.core_attention import core_attention
from moe_engine.model.rope import angles, frequencies, rotate, score_growth
from moe_engine.ops.visible import KEY_TILE, whole_rows

LONG = KEY_TILE + 88


def two_documents(S: int, border: int) -> Tensor:
    """Two rows: one document, and two with a border."""
    ids = torch.zeros(2, S, dtype=torch.int64)
    ids[1, border:] = 1
    return ids


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("S", [5, 40, LONG])
def test_shared_keys_equal_copied_keys(S: int, kv_heads: int, masked: bool) -> None:
    """Output and gradients; in fp64, against a softmax written out."""
    chance = torch.Generator().manual_seed(1)
    q, d_out = (torch.randn(2, S, 6, 10, generator=chance, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, S, kv_heads, 10, generator=chance, dtype=torch.float64) for _ in range(2))
    documents = two_documents(S, S // 2) if masked else torch.zeros(2, S)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = core_attention(q, k, v, whole_rows(S, documents if masked else None), 0.3)
    gradients = torch.autograd.grad(found, leaves, d_out)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    keys, values = (x.repeat_interleave(6 // kv_heads, dim=2).transpose(1, 2) for x in (k, v))
    weights = (0.3 * q.transpose(1, 2) @ keys.mT).masked_fill(~seen, -math.inf).softmax(dim=-1)
    expected = (weights @ values).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for gradient, right in zip(gradients, torch.autograd.grad(expected, leaves, d_out), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-9, atol=1e-11)


MODEL = ModelConfig(attention="gqa", head_dim=16, rope_theta=100.0)
YARN = replace(MODEL, rope_scaling="yarn", rope_factor=8.0, rope_original_length=64, rope_beta_fast=4.0)


@pytest.mark.parametrize("style", ["interleaved", "halves"])
@pytest.mark.parametrize("model", [MODEL, YARN], ids=["plain", "yarn"])
def test_scores_of_rotated_vectors_depend_on_the_distance_alone(model: ModelConfig, style: str) -> None:
    chance = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 1, 1, 16, generator=chance, dtype=torch.float64) for _ in range(2))

    def at(x: Tensor, position: int) -> Tensor:
        return rotate(x, *angles(torch.tensor([[position]]), model, torch.float64), style).flatten()

    assert at(q, 3) @ at(k, 1) == pytest.approx(float(at(q, 903) @ at(k, 901)), rel=1e-10)
    assert at(q, 3) @ at(k, 1) != pytest.approx(float(at(q, 4) @ at(k, 1)), rel=1e-3)
    growth = float(at(q, 5).norm() / q.norm())
    assert growth == pytest.approx(1.0 if model is MODEL else 1 + 0.1 * math.log(8), rel=1e-12)


def test_the_styles_differ_by_the_order_of_numbers() -> None:
    x = torch.randn(2, 3, 4, 16, generator=torch.Generator().manual_seed(3))
    turn = angles(torch.arange(6).view(2, 3), MODEL, torch.float32)
    order = torch.arange(16).view(2, 8).T.reshape(-1)  # interleaved place of number i of the halves
    assert torch.equal(rotate(x, *turn, "halves")[..., order], rotate(x[..., order], *turn, "interleaved"))


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    plain, slowed = frequencies(MODEL), frequencies(YARN)
    turns = 64 * plain / (2 * math.pi)  # in the original length
    assert torch.equal(slowed[turns > 4], plain[turns > 4]) and bool((turns > 4).any())
    torch.testing.assert_close(slowed[turns < 0.7], plain[turns < 0.7] / 8, rtol=1e-14, atol=0)
    assert bool(((slowed <= plain) & (slowed >= plain / 8)).all()) and bool((turns < 0.7).any())


def test_latent_attention_scores_grow_by_the_square() -> None:
    """DeepSeek-V3's: factor 40 and mscale_all_dim 1."""
    assert score_growth(ModelConfig()) == score_growth(replace(YARN, rope_mscale_all_dim=0.0)) == 1.0
    deepseek = ModelConfig(rope_scaling="yarn", rope_factor=40.0, rope_mscale_all_dim=1.0)
    assert score_growth(deepseek) == pytest.approx((0.1 * math.log(40) + 1) ** 2, rel=1e-14)
