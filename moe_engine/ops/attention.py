"""Causal attention for a CPU: softmax(QK^T)V in blocks that stay in its cache, with its own backward.

For a few heads of one row at a time, queries are taken in blocks of `QUERY_BLOCK`. A block's keys end where the block
ends, so most of the half of the score matrix that no query may see is never computed, and scores, softmax and their
gradients are read again while they are still in the second-level cache. Everything inside is fp32 (fp64 for fp64):
many CPUs have no 16-bit products, and scores deserve the precision. Backward keeps the softmax of forward
(B H S^2 / 2 numbers): to make it again would cost more time than to read it, up to the lengths this is meant for.

A row is computed by itself in products of fixed shape, so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_engine.ops.autocast import without_autocast

QUERY_BLOCK = 64  # smaller ones skip more of the upper half, and multiply slower
HEADS = 4  # key-value heads at a time: their queries, keys, values and one block of scores take about 2 MB


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
        (B, H, S, _), G = q.shape, k.shape[1]
        out = torch.empty(B, S, H, v.shape[-1], dtype=v.dtype, device=q.device)
        weights: list[Tensor] = []
        for b, heads, queries in _heads(B, H, G):
            q_, k_, v_ = _grouped(q, b, queries, heads).mul_(scale), _wide(k[b, heads]), _wide(v[b, heads])
            to = out[b, :, queries].unflatten(1, (k_.shape[0], H // G))  # [S, heads, H/G, e]
            for rows in _query_blocks(S):
                scores = torch.bmm(q_[:, :, rows].flatten(1, 2), k_[:, : rows.stop].transpose(1, 2))
                _hide(scores.unflatten(1, (H // G, rows.stop - rows.start)), rows, allowed, b)
                weights.append(scores.softmax(dim=-1))
                block = torch.bmm(weights[-1], v_[:, : rows.stop])  # [heads, H/G * rows, e]
                to[rows] = block.unflatten(1, (H // G, rows.stop - rows.start)).permute(2, 0, 1, 3)
        ctx.save_for_backward(q, k, v, *weights)
        ctx.scale = scale
        return out.transpose(1, 2)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (d_out,), (q, k, v, *weights), scale = grads, ctx.saved_tensors, ctx.scale
        (B, H, S, _), G = q.shape, k.shape[1]
        # Laid out [B, S, heads, …], as the projections want them.
        d_q, d_k, d_v = (torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format) for x in (q, k, v))
        each_weights = iter(weights)
        for b, heads, queries in _heads(B, H, G):
            q_, d_out_ = _grouped(q, b, queries, heads).mul_(scale), _grouped(d_out, b, queries, heads)
            k_, v_ = _wide(k[b, heads]), _wide(v[b, heads])
            d_k_, d_v_ = torch.zeros_like(k_), torch.zeros_like(v_)
            to = d_q[b, :, queries].unflatten(1, (k_.shape[0], H // G))
            for rows in _query_blocks(S):
                p, keys = next(each_weights), slice(0, rows.stop)
                d_block = d_out_[:, :, rows].flatten(1, 2)
                d_v_[:, keys].baddbmm_(p.transpose(1, 2), d_block)
                d_p = torch.bmm(d_block, v_[:, keys].transpose(1, 2))
                d_scores = torch.ops.aten._softmax_backward_data(d_p, p, -1, p.dtype)
                d_k_[:, keys].baddbmm_(d_scores.transpose(1, 2), q_[:, :, rows].flatten(1, 2))
                block = torch.bmm(d_scores, k_[:, keys]).mul_(scale)
                to[rows] = block.unflatten(1, (H // G, rows.stop - rows.start)).permute(2, 0, 1, 3)
            d_k[b, :, heads], d_v[b, :, heads] = d_k_.transpose(0, 1), d_v_.transpose(0, 1)
        return d_q.transpose(1, 2), d_k.transpose(1, 2), d_v.transpose(1, 2), None, None


def _heads(B: int, H: int, G: int) -> Iterator[tuple[int, slice, slice]]:
    """Each row, a few key-value heads, and the query heads that they serve."""
    for b in range(B):
        for start in range(0, G, HEADS):
            stop = min(start + HEADS, G)
            yield b, slice(start, stop), slice(start * (H // G), stop * (H // G))


def _query_blocks(S: int) -> Iterator[slice]:
    for start in range(0, S, QUERY_BLOCK):
        yield slice(start, min(start + QUERY_BLOCK, S))


def _wide(x: Tensor) -> Tensor:
    """A copy in fp32 (fp64), contiguous."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide, copy=True, memory_format=torch.contiguous_format)


def _grouped(x: Tensor, b: int, queries: slice, heads: slice) -> Tensor:
    """Some query heads of row b, by the key-value head that serves them: [heads, H/G, S, …], wide."""
    groups = heads.stop - heads.start
    return _wide(x[b, queries]).unflatten(0, (groups, (queries.stop - queries.start) // groups))


def _hide(scores: Tensor, rows: slice, allowed: Tensor | None, b: int) -> None:
    """-inf for keys that a query may not see: scores [heads, H/G, rows, keys up to rows.stop]."""
    if allowed is not None:
        scores.masked_fill_(~allowed[b, :, rows, : rows.stop], float("-inf"))
        return
    n = rows.stop - rows.start  # only the last n keys are later than some of these queries
    later = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu_(1)
    scores[..., rows].masked_fill_(later, float("-inf"))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * q k^T) v: q [B, H, S, d], k [B, G, S, d], v [B, G, S, e] -> [B, H, S, e] in v's dtype.

    G divides H: head g of keys and values serves the queries of heads g H/G … (g+1) H/G - 1. A query sees keys up to
    its own place; `allowed` [B, 1, S, S] bool takes more of them away (it must be False above the diagonal, and leave
    every query a key); None: none.
    """
    out: Tensor = _CausalAttention.apply(q, k, v, allowed, scale)
    return out
