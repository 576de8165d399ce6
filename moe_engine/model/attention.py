"""Attention: what every layer knows of a micro-batch's rows, and the two ways of making queries, keys and values.

* Latent (MLA; DeepSeek-V3, arXiv 2412.19437, section 2.1.1): keys and values of all heads come from one latent of
  `kv_lora_rank` numbers a token, plus one rotary key of `qk_rope_head_dim` numbers that all heads share.
* Grouped queries (GQA; arXiv 2305.13245): fewer heads of keys and values than of queries, each serving a group; by
  option every head of queries and keys is normalised (Qwen3), or all heads together (OLMoE), the projections have
  biases (Qwen2-MoE), a part of each head turns with the position (GLM-4), every softmax has a sink, and some layers see
  the nearest tokens alone (gpt-oss).

Both go in three parts: `project`, `core` (softmax(QK^T)V, the one that communicates where ranks share sequences) and
`out`, so that a block can recompute the first and the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from moe_engine.config.schema import ModelConfig
from moe_engine.model.batch import Batch
from moe_engine.model.context_parallel import ContextParallel, SharedRows, shared_attention
from moe_engine.model.core_attention import (
    core_attention,
    keeps_result,
    latent_core_attention,
    reads_latent_projections,
    sink_attention,
)
from moe_engine.model.layers import RMSNorm
from moe_engine.model.paired_attention import PairedVisible, paired_rows
from moe_engine.model.payload import KeysValues, Latents
from moe_engine.model.rope import angles, rotate, score_growth
from moe_engine.ops.linear import Linear, linears, narrowed, widened
from moe_engine.ops.recompute import Segments, segment
from moe_engine.ops.rotary import Turn
from moe_engine.ops.short_attention import turned_in_place
from moe_engine.ops.visible import Visible, whole_rows
from moe_engine.ops.wgrad_queue import WgradQueue


@dataclass(frozen=True)
class SequenceContext:
    """What every layer needs to know of a micro-batch's rows, made once per micro-batch and stage.

    cos, sin [B, S, 1, rope/2]: rotary angles; visible: which keys a query sees; token_mask [T] bool or None: False for
    padding; interleaved: how numbers that turn together lie (see `rotate`); shared: where other ranks hold the rest of
    the rows, what is seen of it (`visible` is then of this part); near: the same for layers with a sliding window.
    """

    shape: tuple[int, int]
    cos: Tensor
    sin: Tensor
    visible: Visible
    token_mask: Tensor | None
    interleaved: bool = True
    shared: SharedRows | None = None
    near: SequenceContext | None = None

    @cached_property
    def paired(self) -> PairedVisible:
        """`visible` for kernels that take pairs."""
        return paired_rows(self.visible, self.shape[0])

    @cached_property
    def turn(self) -> Turn:
        """The angles for vectors that turn in place."""
        return Turn.of(self.cos, self.sin, self.interleaved)


def sequence_context(batch: Batch, model: ModelConfig, dtype: torch.dtype) -> SequenceContext:
    """Angles and masks of a batch. Angles are computed in fp32 (fp64 for an fp64 model)."""
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = angles(batch.positions, model, wide)
    documents = _documents(batch.document_ids, batch.token_mask)

    def with_window(window: int, near: SequenceContext | None) -> SequenceContext:
        return SequenceContext(
            shape=batch.shape,
            cos=cos,
            sin=sin,
            visible=whole_rows(batch.document_ids.shape[1], documents, batch.document_ids.device, window),
            token_mask=None if batch.token_mask is None else batch.token_mask.reshape(-1),
            interleaved=model.rope_style == "interleaved",
            shared=None if batch.shard is None else SharedRows(batch.shard, window=window),
            near=near,
        )

    window = model.sliding_window
    return with_window(0, with_window(window, None) if window else None)


def _documents(document_ids: Tensor, token_mask: Tensor | None) -> Tensor | None:
    """Those to tell apart, None where each row is one. Padding, wherever it stands, is a document of its own."""
    if token_mask is not None:
        document_ids = document_ids.where(token_mask, -1)
    one = bool((document_ids == document_ids[:, :1]).all())
    return None if one else document_ids


class Attention(nn.Module):
    """What both kinds share. Parameter out; `cp`: the ranks that share sequences, if any do."""

    out: Linear
    windowed = False  # whether this layer has the model's sliding window
    wide = False  # what stands between the projections: see `moe.experts.through_experts`
    sinks: nn.Parameter | None  # [H], see `core_attention.sink_attention`

    def __init__(self, model: ModelConfig, cp: ContextParallel | None) -> None:
        super().__init__()
        self.model, self.cp = model, cp
        self.register_parameter("sinks", None)

    def forward(
        self,
        x: Tensor,
        context: SequenceContext,
        queue: WgradQueue | None = None,
        segments: Segments | None = None,
        label: str = "",
    ) -> Tensor:
        """x [T, D] -> [T, D]."""
        projected = self.project(x, context, queue, segments)
        return self.project_out(self.core(projected, context, queue, segments, label), context, queue)

    def project(
        self, x: Tensor, context: SequenceContext, queue: WgradQueue | None, segments: Segments | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D] -> queries, keys, values, [B, S, heads, …]; or what else of them the core reads."""
        raise NotImplementedError

    def core(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        context: SequenceContext,
        queue: WgradQueue | None,
        segments: Segments | None,
        label: str = "",
    ) -> Tensor:
        """What `project` gave -> [T, H * value], the heads' results side by side. Over ranks it is never recomputed."""
        if self.windowed and context.near is not None:
            context = context.near
        if context.shared is not None:
            assert self.cp is not None, "rows are shared out, and no ranks to share them"
            q, *payload = projected
            y = shared_attention(
                q,
                self._payload(*payload),
                self.cp,
                context.shared,
                self._scale(),
                queue,
                f"{label} attention",
                self.sinks,
            )
            return y.flatten(2).flatten(0, 1)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(q, k, v, context).flatten(2).flatten(0, 1)

        result: Tensor = segment(segments, "attention", attend, *projected)
        return result

    def project_out(self, y: Tensor, context: SequenceContext, queue: WgradQueue | None) -> Tensor:
        """The core's result y [T, H * value] -> [T, D]. In most ways of its own the core keeps y for its backward."""
        if context.shared is None:
            held = self.sinks is not None or keeps_result(y.device, context.visible)
        else:
            held = self.cp is not None and self.cp.exchange != "ulysses"  # there y came back from other ranks
        return narrowed(self.out(y, queue, held), self.out.weight)

    def _wide(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x in the format of all that follows up to `project_out`; what may travel between ranks keeps its own."""
        return widened(x) if self.wide and context.shared is None and self.out.fp8 is None else x

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """The core on one rank, of what `project` gave: [B, S, H, value]."""
        if self.sinks is not None:
            return sink_attention(q, k, v, self.sinks, context.paired, self._scale())
        return core_attention(q, k, v, context.visible, self._scale())

    def _payload(self, first: Tensor, second: Tensor) -> KeysValues | Latents:
        """What `project` gave beside the queries, as what travels."""
        return KeysValues(first, second)

    def _scale(self) -> float:
        """Of the scores."""
        raise NotImplementedError


class LatentAttention(Attention):
    """MLA. Parameters q_proj or (q_down, q_norm, q_up), kv_down, kv_norm, kv_up, out."""

    def __init__(
        self, model: ModelConfig, dtype: torch.dtype, device: torch.device | None, cp: ContextParallel | None = None
    ) -> None:
        super().__init__(model, cp)
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

    def project(
        self, x: Tensor, context: SequenceContext, queue: WgradQueue | None, segments: Segments | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; or, where latents travel, queries, [B, S, rank] and [B, S, rope]; or, where the
        core reads projections, queries that are not yet turned, [B, S, H, nope + v] and [B, S, rope].
        """
        into_queries = self.q_down if self.model.q_lora_rank else self.q_proj
        queries, latent = linears(self._wide(x, context), [into_queries, self.kv_down], queue)
        q = self._queries(queries, context, queue, segments)
        return q, *self._keys_values(latent, context, queue, segments)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        if v.dim() == 4:
            return super()._attend(q, k, v, context)
        value = self.model.v_head_dim
        return latent_core_attention(q, k, v, context.visible, self._scale(), context.turn, value)

    def _scale(self) -> float:
        return (self.model.qk_nope_head_dim + self.model.qk_rope_head_dim) ** -0.5 * score_growth(self.model)

    def _core_turns(self, x: Tensor, context: SequenceContext) -> bool:
        return context.shared is None and reads_latent_projections(x.device, context.visible)

    def _sends_latents(self, context: SequenceContext) -> bool:
        return context.shared is not None and self.cp is not None and self.cp.payload == "latent"

    def _payload(self, first: Tensor, second: Tensor) -> KeysValues | Latents:
        if first.dim() == 4:
            return KeysValues(first, second)
        model = self.model
        heads = model.num_heads
        return Latents(first, second, self.kv_up, model.v_head_dim, first=0, heads=heads, num_heads=heads)

    def _queries(
        self, x: Tensor, context: SequenceContext, queue: WgradQueue | None, segments: Segments | None
    ) -> Tensor:
        """From the first projection of x: [B, S, H, nope + rope], turned unless the core does that."""
        nope, rope = self.model.qk_nope_head_dim, self.model.qk_rope_head_dim

        def turned(q: Tensor) -> Tensor:
            heads = q.view(*context.shape, self.model.num_heads, nope + rope)
            if self._core_turns(q, context):
                if turned_in_place(heads):
                    context.turn.ends(heads)
                return heads
            return rotate(heads, context.cos, context.sin, self.model.rope_style)

        if not self.model.q_lora_rank:
            return turned(x)
        latent = segment(segments, "norm", self.q_norm, x)
        q: Tensor = segment(segments, "mla_up", lambda latent: turned(self.q_up(latent, queue)), latent)
        return q

    def _keys_values(
        self, x: Tensor, context: SequenceContext, queue: WgradQueue | None, segments: Segments | None
    ) -> tuple[Tensor, Tensor]:
        """From the latent and the rotary key, see `project`."""
        model = self.model
        latent, k_rope = x.split((model.kv_lora_rank, model.qk_rope_head_dim), dim=-1)
        nope, value = model.qk_nope_head_dim, model.v_head_dim
        normed = segment(segments, "norm", self.kv_norm, latent)
        if self._sends_latents(context):
            return normed.unflatten(0, context.shape), self._turned(k_rope, context)[:, :, 0]

        def up(latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
            kv = self.kv_up(latent, queue).view(*context.shape, model.num_heads, nope + value)
            if self._core_turns(kv, context):
                return kv, self._turned(k_rope, context)[:, :, 0]
            k_nope, v = kv.split((nope, value), dim=-1)
            return torch.cat((k_nope, self._turned(k_rope, context).expand(-1, -1, model.num_heads, -1)), dim=-1), v

        keys_values: tuple[Tensor, Tensor] = segment(segments, "mla_up", up, normed, k_rope)
        return keys_values

    def _turned(self, k_rope: Tensor, context: SequenceContext) -> Tensor:
        """The shared key [T, rope], rotated: [B, S, 1, rope]."""
        k_rope = k_rope.reshape(*context.shape, 1, self.model.qk_rope_head_dim)
        return rotate(k_rope, context.cos, context.sin, self.model.rope_style)


class GroupedAttention(Attention):
    """GQA. Parameters q_proj, k_proj, v_proj, out and, with `qk_norm`, q_norm and k_norm: [head_dim], or of all heads
    together with `qk_norm_whole`; with `attention_sinks`, sinks [H]. windowed: this layer has the sliding
    window.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | None,
        cp: ContextParallel | None = None,
        windowed: bool = False,
    ) -> None:
        super().__init__(model, cp)
        self.windowed = windowed
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.q_proj = Linear(model.dim, queries, dtype, device, model.attention_bias)
        self.k_proj = Linear(model.dim, keys, dtype, device, model.attention_bias)
        self.v_proj = Linear(model.dim, keys, dtype, device, model.attention_bias)
        self.out = Linear(queries, model.dim, dtype, device, model.attention_out_bias)

        def norm(width: int) -> RMSNorm | None:
            normed = width if model.qk_norm_whole else model.head_dim
            return RMSNorm(normed, model.norm_eps, dtype, device) if model.qk_norm else None

        self.q_norm, self.k_norm = norm(queries), norm(keys)
        if model.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(model.num_heads, dtype=dtype, device=device))

    def project(
        self, x: Tensor, context: SequenceContext, queue: WgradQueue | None, segments: Segments | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = linears(self._wide(x, context), [self.q_proj, self.k_proj, self.v_proj], queue)
        q, k = self._turned(q, self.q_norm, context), self._turned(k, self.k_norm, context)
        return q, k, v.view(*context.shape, self.model.num_kv_heads, self.model.head_dim)

    def _scale(self) -> float:
        return self.model.head_dim**-0.5

    def _turned(self, x: Tensor, norm: RMSNorm | None, context: SequenceContext) -> Tensor:
        """Projected queries or keys, normalised and rotated: [B, S, heads, head_dim]."""
        if norm is not None and self.model.qk_norm_whole:
            x = norm(x)
        heads = x.view(*context.shape, x.shape[1] // self.model.head_dim, self.model.head_dim)
        if norm is not None and not self.model.qk_norm_whole:
            heads = norm(heads)
        return rotate(heads, context.cos, context.sin, self.model.rope_style, start=True)
