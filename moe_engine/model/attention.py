"""Attention: what every layer knows of a micro-batch's rows, and the two ways of making queries, keys and values.

* Latent (MLA; DeepSeek-V3, arXiv 2412.19437, section 2.1.1): keys and values of all heads come from one latent of
  `kv_lora_rank` numbers a token, plus one rotary key of `qk_rope_head_dim` numbers that all heads share.
* Grouped queries (GQA; arXiv 2305.13245): fewer heads of keys and values than of queries, each serving a group; by
  option every head of queries and keys is normalised (Qwen3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_engine.config.schema import ModelConfig
from moe_engine.model.batch import Batch
from moe_engine.model.core_attention import core_attention
from moe_engine.model.layers import RMSNorm
from moe_engine.model.rope import angles, rotate, score_growth
from moe_engine.ops.attention import Visible, whole_rows
from moe_engine.ops.linear import Linear
from moe_engine.ops.recompute import Segments, segment
from moe_engine.ops.wgrad_queue import WgradQueue


@dataclass(frozen=True)
class SequenceContext:
    """What every layer needs to know of a micro-batch's rows, made once per micro-batch and stage.

    cos, sin [B, S, 1, rope/2]: rotary angles; visible: which keys a query sees; token_mask [T] bool or None: False for
    padding.
    """

    shape: tuple[int, int]
    cos: Tensor
    sin: Tensor
    visible: Visible
    token_mask: Tensor | None


def sequence_context(batch: Batch, model: ModelConfig, dtype: torch.dtype) -> SequenceContext:
    """Angles and masks of a batch. Angles are computed in fp32 (fp64 for an fp64 model)."""
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = angles(batch.positions, model, wide)
    return SequenceContext(
        shape=batch.shape,
        cos=cos,
        sin=sin,
        visible=_visible(batch.document_ids, batch.token_mask),
        token_mask=None if batch.token_mask is None else batch.token_mask.reshape(-1),
    )


def _visible(document_ids: Tensor, token_mask: Tensor | None) -> Visible:
    """Causal and within one document. Padding, wherever it stands, is a document of its own."""
    if token_mask is not None:
        document_ids = document_ids.where(token_mask, -1)
    one = bool((document_ids == document_ids[:, :1]).all())
    return whole_rows(document_ids.shape[1], None if one else document_ids, document_ids.device)


class LatentAttention(nn.Module):
    """MLA. Parameters q_proj or (q_down, q_norm, q_up), kv_down, kv_norm, kv_up, out."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.model = model
        heads, qk = model.num_heads, model.qk_nope_head_dim + model.qk_rope_head_dim
        if model.q_lora_rank:
            self.q_down = Linear(model.dim, model.q_lora_rank, dtype, device)
            self.q_norm = RMSNorm(model.q_lora_rank, model.latent_norm_eps, dtype, device)
            self.q_up = Linear(model.q_lora_rank, heads * qk, dtype, device)
        else:
            self.q_proj = Linear(model.dim, heads * qk, dtype, device)
        self.kv_down = Linear(model.dim, model.kv_lora_rank + model.qk_rope_head_dim, dtype, device)
        self.kv_norm = RMSNorm(model.kv_lora_rank, model.latent_norm_eps, dtype, device)
        self.kv_up = Linear(model.kv_lora_rank, heads * (model.qk_nope_head_dim + model.v_head_dim), dtype, device)
        self.out = Linear(heads * model.v_head_dim, model.dim, dtype, device)

    def forward(
        self,
        x: Tensor,
        context: SequenceContext,
        queue: WgradQueue | None = None,
        segments: Segments | None = None,
    ) -> Tensor:
        """x [T, D] -> [T, D]."""
        q = self._queries(x, context, queue, segments)
        k, v = self._keys_values(x, context, queue, segments)
        scale = q.shape[-1] ** -0.5 * score_growth(self.model)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return core_attention(q, k, v, context.visible, scale).flatten(2).flatten(0, 1)  # [T, H * v]

        return self.out(segment(segments, "attention", attend, q, k, v), queue)

    def _queries(
        self, x: Tensor, context: SequenceContext, queue: WgradQueue | None, segments: Segments | None
    ) -> Tensor:
        """[B, S, H, nope + rope]."""
        nope, rope = self.model.qk_nope_head_dim, self.model.qk_rope_head_dim

        def turned(q: Tensor) -> Tensor:
            q_nope, q_rope = q.view(*context.shape, self.model.num_heads, nope + rope).split((nope, rope), dim=-1)
            return torch.cat((q_nope, rotate(q_rope, context.cos, context.sin, self.model.rope_style)), dim=-1)

        if not self.model.q_lora_rank:
            return turned(self.q_proj(x, queue))
        latent = segment(segments, "norm", self.q_norm, self.q_down(x, queue))
        q: Tensor = segment(segments, "mla_up", lambda latent: turned(self.q_up(latent, queue)), latent)
        return q

    def _keys_values(
        self, x: Tensor, context: SequenceContext, queue: WgradQueue | None, segments: Segments | None
    ) -> tuple[Tensor, Tensor]:
        """[B, S, H, nope + rope] and [B, S, H, v]."""
        model = self.model
        latent, k_rope = self.kv_down(x, queue).split((model.kv_lora_rank, model.qk_rope_head_dim), dim=-1)
        nope, value = model.qk_nope_head_dim, model.v_head_dim

        def up(latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
            kv = self.kv_up(latent, queue).view(*context.shape, model.num_heads, nope + value)
            k_nope, v = kv.split((nope, value), dim=-1)
            k_rope = k_rope.reshape(*context.shape, 1, model.qk_rope_head_dim)
            k_rope = rotate(k_rope, context.cos, context.sin, model.rope_style)
            return torch.cat((k_nope, k_rope.expand(-1, -1, model.num_heads, -1)), dim=-1), v

        keys_values: tuple[Tensor, Tensor] = segment(
            segments, "mla_up", up, segment(segments, "norm", self.kv_norm, latent), k_rope
        )
        return keys_values


class GroupedAttention(nn.Module):
    """GQA. Parameters q_proj, k_proj, v_proj, out and, with `qk_norm`, q_norm and k_norm [head_dim]."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.model = model
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.q_proj = Linear(model.dim, queries, dtype, device)
        self.k_proj = Linear(model.dim, keys, dtype, device)
        self.v_proj = Linear(model.dim, keys, dtype, device)
        self.out = Linear(queries, model.dim, dtype, device)
        self.q_norm = RMSNorm(model.head_dim, model.norm_eps, dtype, device) if model.qk_norm else None
        self.k_norm = RMSNorm(model.head_dim, model.norm_eps, dtype, device) if model.qk_norm else None

    def forward(
        self,
        x: Tensor,
        context: SequenceContext,
        queue: WgradQueue | None = None,
        segments: Segments | None = None,
    ) -> Tensor:
        """x [T, D] -> [T, D]."""
        q = self._turned(self.q_proj(x, queue), self.q_norm, context)
        k = self._turned(self.k_proj(x, queue), self.k_norm, context)
        v = self.v_proj(x, queue).view(*context.shape, self.model.num_kv_heads, self.model.head_dim)
        scale = self.model.head_dim**-0.5

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return core_attention(q, k, v, context.visible, scale).flatten(2).flatten(0, 1)  # [T, H * head_dim]

        return self.out(segment(segments, "attention", attend, q, k, v), queue)

    def _turned(self, x: Tensor, norm: RMSNorm | None, context: SequenceContext) -> Tensor:
        """Projected queries or keys, normalised and rotated: [B, S, heads, head_dim]."""
        heads = x.view(*context.shape, x.shape[1] // self.model.head_dim, self.model.head_dim)
        if norm is not None:
            heads = norm(heads)
        return rotate(heads, context.cos, context.sin, self.model.rope_style)
