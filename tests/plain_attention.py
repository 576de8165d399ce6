"""Attention of the plain model: one document and one head at a time, written from the papers.

Latent attention: DeepSeek-V3 (arXiv 2412.19437), eq. 1-11. Grouped queries: arXiv 2305.13245; norms of queries and
keys: the Qwen3 report (arXiv 2505.09388), over all heads together: OLMoE's (arXiv 2409.02060). Rotary embedding: arXiv
2104.09864; YaRN: arXiv 2309.00071 with the ramp over pairs and the growth of scores of DeepSeek's published code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from moe_engine.config.schema import ModelConfig


def attention(
    model: ModelConfig,
    parameters: Mapping[str, Tensor],
    name: str,
    x: Tensor,
    documents: list[list[int]],
    windowed: bool = False,
) -> Tensor:
    """x [n, D] -> [n, D]; `documents` lists the places of each. Parameters are those below `name`."""
    weight = {key.removeprefix(f"{name}."): value for key, value in parameters.items() if key.startswith(f"{name}.")}
    project = _latent if model.attention == "mla" else _grouped
    size = model.v_head_dim if model.attention == "mla" else model.head_dim
    out = torch.zeros(x.shape[0], model.num_heads * size, dtype=x.dtype)
    for document in documents:
        heads = []
        for h, (q, k, v, scale) in enumerate(project(model, weight, x[document])):
            scores = q @ k.T * scale
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            if windowed:
                hidden = hidden | torch.ones_like(hidden).tril(-model.sliding_window)
            scores = scores.masked_fill(hidden, -math.inf)
            if model.attention_sinks:
                scores = torch.cat((scores, weight["sinks"][h].expand(len(scores), 1)), dim=1)
                v = torch.cat((v, torch.zeros_like(v[:1])))
            heads.append(scores.softmax(dim=-1) @ v)
        out = out.index_copy(0, torch.tensor(document), torch.cat(heads, dim=-1))
    return _linear(weight, "out", out)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * scale


Head = tuple[Tensor, Tensor, Tensor, float]


def _latent(model: ModelConfig, weight: Mapping[str, Tensor], x: Tensor) -> list[Head]:
    """Queries, keys, values and the scale of the scores of every head, for one document."""
    nope, rope, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    if model.q_lora_rank:
        latent_q = rms_norm(x @ weight["q_down.weight"].T, weight["q_norm.weight"], model.latent_norm_eps)
        queries = latent_q @ weight["q_up.weight"].T
    else:
        queries = x @ weight["q_proj.weight"].T
    both = x @ weight["kv_down.weight"].T
    latent, shared_key = both[:, : model.kv_lora_rank], both[:, model.kv_lora_rank :]
    keys_values = rms_norm(latent, weight["kv_norm.weight"], model.latent_norm_eps) @ weight["kv_up.weight"].T
    scale = (nope + rope) ** -0.5
    if model.rope_scaling == "yarn":
        scale *= (0.1 * model.rope_mscale_all_dim * math.log(model.rope_factor) + 1) ** 2
    heads = []
    for h in range(model.num_heads):
        q = queries[:, h * (nope + rope) : (h + 1) * (nope + rope)]
        kv = keys_values[:, h * (nope + value) : (h + 1) * (nope + value)]
        q = torch.cat((q[:, :nope], _rotate(q[:, nope:], model)), dim=-1)
        k = torch.cat((kv[:, :nope], _rotate(shared_key, model)), dim=-1)
        heads.append((q, k, kv[:, nope:], scale))
    return heads


def _grouped(model: ModelConfig, weight: Mapping[str, Tensor], x: Tensor) -> list[Head]:
    size, group, turning = model.head_dim, model.num_heads // model.num_kv_heads, model.rotary_dim or model.head_dim
    queries, keys, values = (_linear(weight, f"{word}_proj", x) for word in "qkv")
    if model.qk_norm and model.qk_norm_whole:
        queries = rms_norm(queries, weight["q_norm.weight"], model.norm_eps)
        keys = rms_norm(keys, weight["k_norm.weight"], model.norm_eps)
    heads = []
    for h in range(model.num_heads):
        own, shared = slice(h * size, (h + 1) * size), slice(h // group * size, (h // group + 1) * size)
        q, k, v = queries[:, own], keys[:, shared], values[:, shared]
        if model.qk_norm and not model.qk_norm_whole:
            q = rms_norm(q, weight["q_norm.weight"], model.norm_eps)
            k = rms_norm(k, weight["k_norm.weight"], model.norm_eps)
        q, k = (torch.cat((_rotate(head[:, :turning], model), head[:, turning:]), dim=-1) for head in (q, k))
        heads.append((q, k, v, size**-0.5))
    return heads


def _linear(weight: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    out = x @ weight[f"{name}.weight"].T
    return out + weight[f"{name}.bias"] if f"{name}.bias" in weight else out


def _rotate(x: Tensor, model: ModelConfig) -> Tensor:
    """Pairs of x [n, d] as complex numbers, turned by position * speed; positions 0 … n-1."""
    n, d = x.shape
    speeds = torch.tensor([_speed(i, d, model) for i in range(d // 2)], dtype=torch.float64)
    turned = torch.arange(n, dtype=torch.float64)[:, None] * speeds
    growth = 1.0
    if model.rope_scaling == "yarn":
        stretch = 0.1 * math.log(model.rope_factor)
        growth = (stretch * model.rope_mscale + 1) / (stretch * model.rope_mscale_all_dim + 1)
    turn = torch.polar(torch.full_like(turned, growth), turned)
    if model.rope_style == "halves":
        pairs = torch.complex(x[:, : d // 2], x[:, d // 2 :]) * turn
        return torch.cat((pairs.real, pairs.imag), dim=-1)
    return torch.view_as_real(torch.view_as_complex(x.reshape(n, d // 2, 2)) * turn).reshape(n, d)


def _speed(i: int, d: int, model: ModelConfig) -> float:
    """Radians a position of pair i of d/2."""
    speed = model.rope_theta ** (-2 * i / d)
    if model.rope_scaling == "none":
        return speed

    def pair_that_turns(times: float) -> float:
        """The pair i with original_length * theta^(-2i/d) = 2 pi times, as a fraction."""
        return d / 2 * math.log(model.rope_original_length / (2 * math.pi * times), model.rope_theta)

    first, last = pair_that_turns(model.rope_beta_fast), pair_that_turns(model.rope_beta_slow)
    if model.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    if first == last:
        last += 0.001
    slowed = min(max((i - first) / (last - first), 0), 1)
    return speed * (1 - slowed) + speed / model.rope_factor * slowed
