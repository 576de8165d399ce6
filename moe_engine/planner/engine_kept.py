"""What this engine keeps from a forward for its backward, tensor by tensor: what `dryrun` finds, by arithmetic.

A block's numbers are in the compute format, the router's and row weights in fp32 (fp64 in an fp64 model), places of
rows in 64-bit integers. Expert weights multiply inside SwiGLU, so the output of the down projection is not kept; the
rows of experts are, N = T·K of them, each a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moe_engine.planner.activations import Kept
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.routing import RowCounts, row_counts
from moe_engine.planner.strategy import Strategy


@dataclass(frozen=True)
class Sizes:
    """Of one rank and micro-batch: bytes of a number, tokens, rows. load: see `routing.row_counts`."""

    model: Architecture
    strategy: Strategy
    load: float = 1.0

    @property
    def tokens(self) -> float:
        return self.strategy.tokens

    @property
    def number(self) -> float:
        """Bytes in the compute format."""
        return self.strategy.precision.parameter

    @property
    def wide(self) -> float:
        """Bytes where sums and the router's scores are computed."""
        return max(4.0, self.strategy.precision.parameter)

    @property
    def read(self) -> float:
        """Bytes of a number that a matrix product reads again in backward."""
        return 1.0 if self.strategy.precision.fp8_activations else self.number

    @property
    def along(self) -> int:
        """Ranks over which sequence parallelism spreads what tensor parallelism does not cut."""
        return self.strategy.layout.tp if self.strategy.sequence_parallel else 1

    @property
    def vectors(self) -> float:
        """Bytes of one hidden vector for each token."""
        return self.tokens * self.model.dim * self.number / self.along

    @cached_property
    def rows(self) -> RowCounts:
        return row_counts(self.model, round(self.tokens / self.along), self.strategy.layout.ep, self.load)

    @property
    def expert_rows(self) -> float:
        """Rows that this rank's experts work on."""
        return self.tokens / self.along * self.model.top_k * (self.load if self.rows.ep > 1 else 1.0)

    @property
    def slots(self) -> int:
        """Experts that a row can be for."""
        return min(self.model.top_k, self.model.num_experts // self.rows.ep)


def block_tensors(sizes: Sizes, moe: bool) -> list[Kept]:
    """Everything that one block keeps, nothing recomputed."""
    mlp = _moe_tensors(sizes) if moe else _mlp_tensors(sizes, sizes.model.dense_hidden, "mlp")
    return [
        Kept("input", sizes.vectors, stays=True),
        _norm(sizes, "norm1 out", 1),
        *_attention_tensors(sizes),
        Kept("residual", sizes.vectors),
        Kept("norm out", sizes.vectors, ("norm",)),
        *mlp,
    ]


def queued_tensors(sizes: Sizes, moe: bool) -> list[Kept]:
    """What a block's weight gradients need that wait: input and gradient of output of each matrix; in fp8, codes."""
    model, strategy = sizes.model, sizes.strategy
    per_token, tokens = sizes.read / strategy.layout.tp, sizes.tokens
    inputs = [tensor for tensor in block_tensors(sizes, moe) if tensor.name in _READ]
    gradients = sum(matrix.outputs for matrix in model.attention()) * tokens * per_token
    if moe:
        rows = sizes.expert_rows * sizes.read
        gradients += rows * (model.up_factor * model.expert_hidden + model.dim)
        hidden = model.shared_hidden
    else:
        hidden = model.dense_hidden
    gradients += tokens * per_token * model.up_factor * hidden + (
        sizes.vectors * sizes.read / sizes.number if hidden else 0.0
    )
    kept = [Kept(f"queued: {tensor.name}", tensor.bytes, stays=True) for tensor in inputs]
    return [*kept, Kept("queued: gradients", gradients, stays=True)]


# What matrix products read, and so their weight gradients.
_READ = ("norm1 out", "q_norm", "kv_norm", "attention out", "norm out", "mlp act", "shared act", "expert rows",
         "expert act")  # fmt: skip


def stage_tensors(sizes: Sizes, mtp: int, head: bool) -> list[Kept]:
    """What a stage keeps besides its blocks: its output, rotary angles; for each loss and MTP module their inputs."""
    model, tokens = sizes.model, sizes.tokens
    rotary = model.qk_rope_head_dim if model.kv_lora_rank else model.qk_head_dim
    found = [
        Kept("output", sizes.vectors * (1 + mtp), stays=True),
        Kept("rotary angles", tokens * rotary * sizes.wide, stays=True),
    ]
    if head:
        found += [
            Kept("head: normed", (1 + mtp) * sizes.vectors, ("norm",)),
            Kept("head: log-sum-exp", (1 + mtp) * tokens * sizes.wide, stays=True),
        ]
    if mtp:
        found += [
            Kept("MTP: embedded", mtp * sizes.vectors, stays=True),
            Kept("MTP: both normed", mtp * 2 * sizes.vectors, ("norm",)),
        ]
    return found


def _norm(sizes: Sizes, name: str, width: float) -> Kept:
    """A normalised tensor of `width` hidden sizes, with its scale factors."""
    return Kept(name, sizes.vectors * width + sizes.tokens * sizes.wide, ("norm",))


def _attention_tensors(sizes: Sizes) -> list[Kept]:
    model, tokens, number = sizes.model, sizes.tokens, sizes.number
    tp = sizes.strategy.layout.tp
    heads, qk, value = model.num_heads / tp, model.qk_head_dim, model.v_head_dim
    out = [
        Kept("attention out", tokens * heads * value * sizes.read, ("core_attn",)),
        Kept("log-sum-exp", tokens * heads * sizes.wide, ("core_attn",)),
    ]
    queries = Kept("q", tokens * heads * qk * number)
    if not model.kv_lora_rank:
        keys = max(1.0, model.num_kv_heads / tp)
        found = [queries, Kept("k", tokens * keys * qk * number), Kept("v", tokens * keys * value * number)]
        if model.qk_norm:
            found.append(Kept("qk before norm", tokens * (heads + keys) * (qk * number + sizes.wide)))
        return found + out
    up = ("mla_up_proj",)
    found = []
    if model.q_lora_rank:
        latent = tokens * model.q_lora_rank * number
        found += [Kept("q_down", latent), Kept("q_norm", latent + tokens * sizes.wide, ("norm",))]
        queries = Kept("q", queries.bytes, up)
    nope, latent = qk - model.qk_rope_head_dim, tokens * model.kv_lora_rank * number
    return [
        *found,
        queries,
        Kept("kv_down", latent + tokens * model.qk_rope_head_dim * number),
        Kept("kv_norm", latent + tokens * sizes.wide, ("norm",)),
        Kept("k", tokens * heads * qk * number, up),
        Kept("kv_up", tokens * heads * (nope + value) * number, up),  # values are a part of it
        *out,
    ]


def _mlp_tensors(sizes: Sizes, hidden: int, name: str) -> list[Kept]:
    size = sizes.tokens * hidden * sizes.read / sizes.strategy.layout.tp
    return [Kept(f"{name} up", sizes.model.up_factor * size), Kept(f"{name} act", size, ("moe_act",))]


def _moe_tensors(sizes: Sizes) -> list[Kept]:
    model, rows = sizes.model, sizes.rows
    hidden = sizes.expert_rows * model.expert_hidden * sizes.read
    shared = _mlp_tensors(sizes, model.shared_hidden, "shared") if model.shared_hidden else []
    return [
        *shared,
        *_routing_tensors(sizes),
        Kept("expert rows", sizes.expert_rows * model.dim * sizes.read),
        Kept("row weights", sizes.expert_rows * sizes.wide),
        Kept("expert up", model.up_factor * hidden),
        Kept("expert act", hidden, ("moe_act",)),
        *(_arrived(sizes) if rows.ep > 1 else []),
    ]


def _routing_tensors(sizes: Sizes) -> list[Kept]:
    """What is never made again: scores, chosen experts, and where every row comes from and goes."""
    model, tokens, rows = sizes.model, sizes.tokens / sizes.along, sizes.rows
    choices = tokens * model.top_k
    times = 4 if model.sigmoid_scores else 1 if model.normalized_weights else 2
    places = 16 * choices  # chosen ids, as pairs (token, expert)
    if rows.ep > 1:
        places += 8 * (3 * choices + tokens * min(model.top_k, rows.ep) + rows.sent * (sizes.slots + 1))
    arrived = rows.received if rows.ep > 1 else tokens
    places += 8 * (arrived * sizes.slots + sizes.expert_rows)
    return [
        Kept("router scores", times * tokens * model.num_experts * sizes.wide, stays=True),
        Kept("choice weights", (4 if model.sigmoid_scores else 1) * choices * sizes.wide, stays=True),
        Kept("places of rows", places, stays=True),
    ]


def _arrived(sizes: Sizes) -> list[Kept]:
    """Rows that came, kept where their experts are computed again."""
    row = sizes.model.dim * sizes.number + sizes.slots * (8 + 2 * sizes.wide - 4)
    return [Kept("arrived rows", sizes.rows.received * row, stays=True, added_by=("full",))]
