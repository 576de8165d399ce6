"""softmax(QK^T)V: the core that every kind of attention shares, and the one place that picks it by device."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from moe_engine.ops.attention import causal_attention

# Up to this length keeping the softmax for backward beats torch's CPU flash path, which makes it again.
BLOCKED_ATTENTION_LENGTH = 512


def core_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * q k^T) v over the allowed keys: q [B, H, S, d], k [B, G, S, d], v [B, G, S, e] -> [B, H, S, e].

    G divides H: head g of keys and values serves the queries of heads g H/G … (g+1) H/G - 1. `allowed` [B, 1, S, S]
    bool and False above the diagonal, or None for plain causal attention.
    """
    if q.device.type == "cpu" and q.shape[2] <= BLOCKED_ATTENTION_LENGTH:
        return causal_attention(q, k, v, allowed, scale)
    # The fused paths want equal head sizes: v is padded and the padding cut off again.
    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1])) if v.shape[-1] < q.shape[-1] else v
    y = F.scaled_dot_product_attention(
        q, k, padded, attn_mask=allowed, is_causal=allowed is None, scale=scale, enable_gqa=k.shape[1] < q.shape[1]
    )
    return y[..., : v.shape[-1]]
