"""softmax(QK^T)V: the core that every kind of attention shares, and the one place that picks it by device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to this length a plain softmax(QK^T)V beats torch's CPU flash path, forward and backward.
PLAIN_ATTENTION_LENGTH = 512
# What torch's CPU matrix products need to treat every sequence alike (as `moe_kernels.gemm` does for rows).
MIN_LENGTH = 16
HEAD_MULTIPLE = 4


def core_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * q k^T) v over the allowed keys: q [B, H, S, d], k [B, G, S, d], v [B, G, S, e] -> [B, H, S, e].

    G divides H: head g of keys and values serves the queries of heads g H/G … (g+1) H/G - 1. `allowed` [B, 1, S, S]
    bool, or None for plain causal attention.
    """
    if q.device.type == "cpu" and q.shape[2] <= PLAIN_ATTENTION_LENGTH:
        return _plain_attention(q, k, v, allowed, scale)
    # The fused paths want equal head sizes: v is padded and the padding cut off again.
    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1])) if v.shape[-1] < q.shape[-1] else v
    y = F.scaled_dot_product_attention(
        q, k, padded, attn_mask=allowed, is_causal=allowed is None, scale=scale, enable_gqa=k.shape[1] < q.shape[1]
    )
    return y[..., : v.shape[-1]]


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """In fp32 (fp64): many CPUs have no 16-bit products, and scores deserve the precision."""
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    S, value = v.shape[-2:]
    if allowed is None:
        allowed = torch.ones(S, S, dtype=torch.bool, device=q.device).tril()
    q, k, v, allowed = _filled_up(q.to(wide), k.to(wide), v.to(wide), allowed)
    # The queries of all heads that share keys are rows of one product: [B, G, H/G * S, d] @ [B, G, d, S].
    B, H, rows, _ = q.shape
    scores = (q * scale).reshape(B, k.shape[1], -1, q.shape[-1]) @ k.transpose(-1, -2)
    weights = scores.view(B, H, rows, rows).masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    y = weights.view(scores.shape) @ v
    return y.view(B, H, rows, -1)[..., :S, :value].to(dtype)


def _filled_up(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Zeros after short rows and odd head sizes, whose products on a CPU would depend on how many rows are beside them.

    The keys that this adds are seen only by the queries that it adds.
    """
    rows = max(MIN_LENGTH - q.shape[-2], 0)
    d, e = -q.shape[-1] % HEAD_MULTIPLE, -v.shape[-1] % HEAD_MULTIPLE
    if d or e or rows:
        q, k, v = F.pad(q, (0, d, 0, rows)), F.pad(k, (0, d, 0, rows)), F.pad(v, (0, e, 0, rows))
    if rows:
        allowed = F.pad(F.pad(allowed, (0, rows)), (0, 0, 0, rows), value=True)
    return q, k, v, allowed
