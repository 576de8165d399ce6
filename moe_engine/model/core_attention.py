"""softmax(QK^T)V: the core that every kind of attention shares, and the one place that picks it by device.

A CPU runs the blocked attention of `ops.attention`, whatever is visible. On a GPU, libraries' fused kernels: rows of
one document each go to FlashAttention-3 where it is installed and the GPU is a Hopper, else to torch's scaled dot
product attention; packed documents to FlexAttention, which skips blocks that see nothing as well.

Context parallel ranks need more: the share of some keys in the result, with its log-sum-exp, and in the gradients
(`share_forward`, `share_backward`). There 16-bit numbers on a GPU go to FlashAttention in pairs of segments
(`paired_attention`), documents too; FlexAttention would make each share's scores again in backward. Pairs know no
windows: those go to the blocked attention there.

A sink is a score that every query of a head sees beside those of its keys, and that brings no value (gpt-oss, arXiv
2508.10925): one more share, merged by its log-sum-exp, which is the sink itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from moe_engine.model.paired_attention import Flash, PairedVisible, paired_backward, paired_forward
from moe_engine.ops.attention import attention, attention_backward, attention_forward
from moe_engine.ops.autocast import without_autocast
from moe_engine.ops.first_order import first_order
from moe_engine.ops.rotary import Turn
from moe_engine.ops.short_attention import is_short, latent_attention
from moe_engine.ops.visible import Visible

FLASH_HEAD = 256  # the largest head size of FlashAttention


def core_attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    """softmax(scale * q k^T) v over the visible keys: q [B, S, H, d], k [B, S, G, d], v [B, S, G, e] -> [B, S, H, e].

    G divides H: head g of keys and values serves the queries of heads g H/G … (g+1) H/G - 1.
    """
    if not q.is_cuda:
        return attention(q, k, v, visible, scale)
    if visible.q_documents is not None or not (visible.whole_causal or not visible.causal):
        return _flex(q, k, v, visible, scale)
    if _flash3_serves(q):
        return _flash3(q, k, v, scale, visible.causal)
    return fused_attention(q, k, v, scale, visible.causal)


def reads_latent_projections(device: torch.device, visible: Visible) -> bool:
    """Whether `latent_core_attention` is there for these; else `core_attention`, of whole keys and turned queries."""
    return is_short(device, visible)


def keeps_result(device: torch.device, visible: Visible) -> bool:
    """Whether `core_attention` keeps its result for backward; the short way keeps the softmax in its place."""
    return not is_short(device, visible)


def latent_core_attention(
    q: Tensor, kv: Tensor, k_rope: Tensor, visible: Visible, scale: float, turn: Turn, value: int
) -> Tensor:
    """`core_attention` of keys and values as their projection leaves them, with what is still to be done to queries.

    q [B, S, H, n + r]; kv [B, S, H, n + value]; k_rope [B, S, r], turned, of all heads -> [B, S, H, value].
    """
    return latent_attention(q, kv, k_rope, visible, scale, turn, value)


def share_forward(
    q: Tensor, k: Tensor, v: Tensor, visible: PairedVisible, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`ops.attention.attention_forward` by device: output and log-sum-exp of queries over some of their keys."""
    if visible.window or not flash_serves(q, v):
        return attention_forward(q, k, v, visible, scale, dtype=dtype)
    return paired_forward(q, k, v, visible.pairs, scale, dtype, flash(_flash3_serves(q)))


def share_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: PairedVisible,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.attention.attention_backward` by device: out and lse are of all keys, the gradients the share of these."""
    if visible.window or not flash_serves(q, v):
        return attention_backward(d_out, q, k, v, out, lse, visible, scale, dtype=dtype)
    return paired_backward(d_out, q, k, v, out, lse, visible.pairs, scale, dtype, flash(_flash3_serves(q)))


def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, visible: PairedVisible, scale: float) -> Tensor:
    """`core_attention` with one sink [H] more in each head's softmax."""
    out: Tensor = _SinkAttention.apply(q, k, v, sinks, visible, scale)
    return out


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, visible: PairedVisible, scale: float
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = with_sinks(*share_forward(q, k, v, visible, scale, wide), sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.visible, ctx.scale = visible, scale
        return out

    @staticmethod
    @without_autocast
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,), (q, k, v, sinks, out, lse) = grads, ctx.saved_tensors
        d_q, d_k, d_v = share_backward(d_out, q, k, v, out, lse, ctx.visible, ctx.scale, q.dtype)
        return d_q, d_k, d_v, sink_gradient(d_out, out, lse, sinks), None, None


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [..., H, e] and its log-sum-exps [..., H] with sinks [H] in the softmax. Changes `out`."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out.mul_((lse - total).exp_().unsqueeze(-1)), total


def sink_gradient(d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Of sinks [H], from the attention [B, S, H, e] and log-sum-exps [B, S, H] that have them in; fp32 (fp64).

    A sink's share p of the softmax brings 0 where the others bring `out` on average: p (0 - out) d_out.
    """
    share = (sinks.to(lse.dtype) - lse).exp_()
    return -((d_out.to(lse.dtype) * out).sum(dim=-1) * share).sum(dim=(0, 1))


def flash_serves(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention takes such queries [..., d] and values [..., e]."""
    numbers = q.dtype in (torch.bfloat16, torch.float16) and max(q.shape[-1], v.shape[-1]) <= FLASH_HEAD
    return q.is_cuda and numbers and torch.cuda.get_device_capability(q.device)[0] >= 8


@functools.cache
def flash(third: bool) -> Flash:
    """FlashAttention through torch's operators; `third`: these are FlashAttention-3's from now on, where torch can."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if third and activate is not None:
        with contextlib.suppress(RuntimeError):  # builds that show torch no operators: torch's own serve
            activate("FA3")
    return Flash()


def _flash3_serves(q: Tensor) -> bool:
    """Whether FlashAttention-3 is installed and `q` is on a Hopper."""
    return torch.cuda.get_device_capability(q.device)[0] == 9 and _flash3_installed()


@functools.cache
def _flash3_installed() -> bool:
    return importlib.util.find_spec("flash_attn_interface") is not None


def _flash3(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
    y: Tensor = out[0] if isinstance(out, tuple) else out  # some versions give the log-sum-exp too
    return y


def fused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> Tensor:
    """torch's, whose fused paths want equal head sizes: v is padded and the padding cut off again."""
    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1])) if v.shape[-1] < q.shape[-1] else v
    q, k, padded = (x.transpose(1, 2) for x in (q, k, padded))
    y = F.scaled_dot_product_attention(q, k, padded, is_causal=causal, scale=scale, enable_gqa=k.shape[1] < q.shape[1])
    return y.transpose(1, 2)[..., : v.shape[-1]]


def _flex(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    rows = None if visible.q_documents is None else q.shape[0]
    mask = create_block_mask(_seen(visible), rows, None, q.shape[1], k.shape[1], device=str(q.device))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    y: Tensor = _compiled_flex()(*heads_first, block_mask=mask, scale=scale, enable_gqa=k.shape[2] < q.shape[2])
    return y.transpose(1, 2)


def _seen(visible: Visible) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether in row b query i sees key j, as FlexAttention asks."""
    q_places, k_places = visible.q_places, visible.k_places
    q_documents, k_documents = visible.q_documents, visible.k_documents

    def seen(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = k_places[j] <= q_places[i] if visible.causal else j >= 0
        if visible.window:
            found = found & (q_places[i] - k_places[j] < visible.window)
        if q_documents is not None and k_documents is not None:
            found = found & (q_documents[b, i] == k_documents[b, j])
        return found

    return seen


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """FlexAttention is a kernel only when compiled; else it makes all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
