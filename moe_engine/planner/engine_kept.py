"""What this engine keeps from a forward for its backward, tensor by tensor: what `dryrun` finds, by arithmetic.

A block's numbers are in the compute format, the router's and row weights in fp32 (fp64 in an fp64 model), places of
rows in 64-bit integers. Expert weights multiply inside SwiGLU, so the output of the down projection is not kept; the
rows of experts are, N = T·K of them, each a copy.

In fp8 a product keeps its input as codes, a byte a number and a scale for 128 of them, and an MLP those of its input
and of gate|up alone; rows of experts are read from where they arrived, without a copy. The codes of weights, as they
are and transposed, are made at their first use in a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from moe_engine.planner.activations import Kept
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.routing import RowCounts, row_counts
from moe_engine.planner.strategy import TILE, Strategy
from moe_engine.planner.travel import Travel, travel, travels


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
    def fp8(self) -> bool:
        """Whether products take codes as this engine's do; a plan may assume other software's, one byte a number."""
        return self.strategy.precision.codes

    def read(self, rows: float, width: float) -> float:
        """Bytes of what a product reads again in backward, [rows, width]."""
        if self.fp8:
            return rows * (width + 4 * math.ceil(width / TILE))
        return rows * width * (1.0 if self.strategy.precision.fp8_activations else self.number)

    def waiting(self, rows: float, width: float, groups: float = 1) -> float:
        """Bytes of a product's gradient that waits for the weight's; in fp8 codes with a scale for 128 rows, each of
        the groups filled up to whole ones, or the numbers where the weight's product takes those."""
        if not self.fp8:
            return self.read(rows, width)
        if self.strategy.precision.wgrad == "bf16":
            return rows * width * self.number
        return width * (TILE + 4) * (math.ceil(rows / TILE) + groups)

    @property
    def along(self) -> int:
        """Ranks over which sequence parallelism spreads what tensor parallelism does not cut."""
        return self.strategy.layout.tp if self.strategy.sequence_parallel else 1

    @property
    def vectors(self) -> float:
        """Bytes of one hidden vector for each token."""
        return self.tokens * self.model.dim * self.number / self.along

    @cached_property
    def travel(self) -> Travel | None:
        """Where rows go in hops or rounds, or are limited."""
        if self.strategy.layout.ep == 1 or not travels(self.strategy):
            return None
        return travel(self.model, self.strategy, round(self.tokens / self.along), self.load)

    @cached_property
    def rows(self) -> RowCounts:
        tokens, exact = round(self.tokens / self.along), self.strategy.dispatch == "expert"
        if self.travel is not None:
            first, ep = self.travel.legs[0], self.strategy.layout.ep
            return RowCounts(ep, first.sent, busiest=first.received // ep)
        return row_counts(self.model, tokens, self.strategy.layout.ep, self.load, exact).in_windows(
            self.strategy.windows
        )

    @property
    def expert_rows(self) -> float:
        """Rows that this rank's experts work on."""
        if self.strategy.windows is not None:
            return self.strategy.windows.most_choices
        if self.travel is not None:
            return self.travel.legs[0].choices
        return self.tokens / self.along * self.model.top_k * (self.load if self.rows.ep > 1 else 1.0)

    @property
    def slots(self) -> int:
        """Experts that a row can be for."""
        if self.strategy.dispatch == "expert" and self.rows.ep > 1:
            return 1
        return min(self.model.top_k, self.model.num_experts // self.rows.ep)


def block_tensors(sizes: Sizes, moe: bool) -> list[Kept]:
    """Everything that one block keeps, nothing recomputed."""
    mlp = _moe_tensors(sizes) if moe else _mlp_tensors(sizes, sizes.model.dense_hidden, "mlp")
    tokens = sizes.tokens / sizes.along
    found = [
        Kept("input", sizes.vectors, stays=True),
        *_read_after_norm(sizes, "norm1 out", sizes.model.dim, tokens),
        *_attention_tensors(sizes),
        Kept("residual", sizes.vectors),
    ]
    if not sizes.fp8:
        return [*found, Kept("norm out", sizes.vectors, ("norm",)), *mlp]
    into_mlp = not moe or sizes.model.shared_hidden > 0
    return [
        *found,
        Kept("norm out", sizes.vectors * moe + tokens * sizes.wide, ("norm",)),  # the router reads numbers
        Kept("norm out codes", sizes.read(tokens, sizes.model.dim) * into_mlp),
        *mlp,
    ]


def queued_tensors(sizes: Sizes, moe: bool) -> list[Kept]:
    """What a block's weight gradients need that wait: input and gradient of output of each matrix; in fp8, codes."""
    model, tp, tokens = sizes.model, sizes.strategy.layout.tp, sizes.tokens
    kept = {tensor.name: tensor.bytes for tensor in block_tensors(sizes, moe) if tensor.name in _READ[sizes.fp8]}
    latents = sizes.strategy.layout.cp > 1 and sizes.strategy.payload == "latent"
    if sizes.fp8:  # made in backward, from the numbers that attention keeps
        kept["attention out codes"] = sizes.read(tokens, model.num_heads / tp * model.v_head_dim)
    matrices = [matrix for matrix in model.attention() if not (latents and matrix.name == "kv up")]
    gradients = sum(sizes.waiting(tokens, matrix.outputs / tp) for matrix in matrices)
    if latents:  # its weight gradient is made with the others' latents at hand, and waits as it is
        kept.pop("kv_norm", None)
        gradients += sum(matrix.size * sizes.wide for matrix in model.attention() if matrix.name == "kv up")
    hidden = model.shared_hidden if moe else model.dense_hidden
    if moe:
        experts = model.num_experts / sizes.rows.ep
        widths = (model.up_factor * model.expert_hidden, model.dim)
        gradients += sum(sizes.waiting(sizes.expert_rows, width, experts) for width in widths)
    if moe and sizes.fp8:  # made again in backward, from gate|up
        kept["expert act"] = sizes.read(sizes.expert_rows, model.expert_hidden) + 8 * sizes.expert_rows
    if hidden:
        gradients += sizes.waiting(tokens, model.up_factor * hidden / tp)
        gradients += sizes.waiting(tokens / sizes.along, model.dim)
        if sizes.fp8:
            kept["mlp act"] = sizes.read(tokens, hidden / tp)
    queued = [Kept(f"queued: {name}", size, stays=True) for name, size in kept.items()]
    return [*queued, Kept("queued: gradients", gradients, stays=True)]


# What matrix products read, and so their weight gradients; and where they take codes.
_READ = {
    False: ("norm1 out", "q_norm", "kv_norm", "attention out", "norm out", "mlp act", "shared act", "expert rows",
            "expert act"),
    True: ("norm1 out codes", "q_norm codes", "kv_norm codes", "attention out codes", "norm out codes", "expert rows"),
}  # fmt: skip


def weight_codes(sizes: Sizes, moe: bool) -> float:
    """Bytes of the codes of a block's weights, with those that are transposed."""
    model, layout = sizes.model, sizes.strategy.layout
    matrices = [(matrix.inputs, matrix.outputs, 1.0 / layout.tp) for matrix in model.attention()]
    if moe:
        local = model.num_experts / layout.ep / sizes.strategy.etp
        matrices += [(matrix.inputs, matrix.outputs, local) for matrix in model.mlp(model.expert_hidden)]
    hidden = model.shared_hidden if moe else model.dense_hidden
    matrices += [(matrix.inputs, matrix.outputs, 1.0 / layout.tp) for matrix in model.mlp(hidden) if hidden]
    copies = sizes.strategy.precision.code_copies
    return sum(
        copies * number * (inputs * outputs + 4 * math.ceil(inputs / TILE) * math.ceil(outputs / TILE))
        for inputs, outputs, number in matrices
    )


def stage_tensors(sizes: Sizes, mtp: int, head: bool) -> list[Kept]:
    """What a stage keeps besides its blocks: its output, rotary angles; for each loss and MTP module their inputs."""
    model, tokens = sizes.model, sizes.tokens
    rotary = model.qk_rope_head_dim if model.kv_lora_rank else model.rotary_dim or model.qk_head_dim
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
        both = sizes.read(tokens / sizes.along, 2 * model.dim)
        found += [
            Kept("MTP: embedded", mtp * sizes.vectors, stays=True),
            Kept("MTP: both normed", mtp * both, () if sizes.fp8 else ("norm",), stays=sizes.fp8),
        ]
    return found


def stage_queued(sizes: Sizes, mtp: int) -> list[Kept]:
    """What the weight gradients of MTP's projections need that wait."""
    model, tokens = sizes.model, sizes.tokens / sizes.along
    size = sizes.read(tokens, 2 * model.dim) + sizes.waiting(tokens, model.dim)
    return [Kept("queued: MTP", mtp * size, stays=True)]


def _read_after_norm(
    sizes: Sizes, name: str, width: float, tokens: float, recomputed: tuple[str, ...] = ()
) -> list[Kept]:
    """A normalised tensor [tokens, width] that products read, with its scale factors; in fp8 those alone, and codes.

    recomputed: the parts that the products belong to. Where codes are made again, so are the numbers from which, or
    they are kept.
    """
    factors, numbers = tokens * sizes.wide, tokens * width * sizes.number
    if not sizes.fp8:
        return [Kept(name, numbers + factors, ("norm",))]
    found = [
        Kept(name, factors, ("norm",)),
        Kept(f"{name} codes", sizes.read(tokens, width), recomputed),
    ]
    return [*found, Kept(f"{name} numbers", numbers, ("norm",), added_by=recomputed)] if recomputed else found


def _attention_tensors(sizes: Sizes) -> list[Kept]:
    alone = _attention_of_one_rank(sizes)
    return _over_ranks(sizes, alone) if sizes.strategy.layout.cp > 1 else alone


def _over_ranks(sizes: Sizes, alone: list[Kept]) -> list[Kept]:
    """What attention keeps over ranks that share sequences: its core is never made again. Latents that travel are
    multiplied up where they arrive, and that is not kept; by heads, it keeps what came, and its results twice, as they
    were made and as they came back."""
    model, strategy, tokens, number = sizes.model, sizes.strategy, sizes.tokens, sizes.number
    dropped: set[str] = set()
    found: list[Kept] = []
    if strategy.payload == "latent":
        dropped |= {"k", "kv_up", "kv_norm codes", "kv_norm numbers"}
        found.append(Kept("rotary keys", tokens * model.qk_rope_head_dim * number))
        if sizes.fp8:
            found.append(Kept("latents", tokens * model.kv_lora_rank * number, ("norm",)))
    if strategy.exchange == "ulysses":
        if sizes.fp8:  # the projection keeps what came back as codes
            dropped.add("attention out")
            found.append(Kept("attention out codes", sizes.read(tokens, model.num_heads * model.v_head_dim)))
        dropped.add("q")
        found.append(Kept("q", tokens * model.num_heads * model.qk_head_dim * number, stays=True))
        found.append(Kept("results of heads", tokens * model.num_heads * model.v_head_dim * number, stays=True))
        if strategy.payload == "kv":
            dropped |= {"k", "v", "kv_up"}
            vectors = tokens * heads_over_ranks(model, strategy.layout.cp) * number
            found += [
                Kept("k", vectors * model.qk_head_dim, stays=True),
                Kept("v", vectors * model.v_head_dim, stays=True),
            ]
    for tensor in alone:
        if tensor.name in ("attention out", "log-sum-exp") and tensor.name not in dropped:
            found.append(Kept(tensor.name, tensor.bytes, stays=True))
        elif tensor.name not in dropped:
            found.append(tensor)
    return found


def heads_over_ranks(model: Architecture, cp: int) -> int:
    """Heads of keys and values on `cp` ranks that share out the queries' heads, each counted where it is needed."""
    share, served = model.num_heads // cp, model.num_heads // model.num_kv_heads
    return sum(((rank + 1) * share - 1) // served - rank * share // served + 1 for rank in range(cp))


def _attention_of_one_rank(sizes: Sizes) -> list[Kept]:
    model, tokens, number = sizes.model, sizes.tokens, sizes.number
    tp = sizes.strategy.layout.tp
    heads, qk, value = model.num_heads / tp, model.qk_head_dim, model.v_head_dim
    numbers = tokens * heads * value * number
    out = [
        Kept("attention out", numbers if sizes.fp8 else sizes.read(tokens, heads * value), ("core_attn",)),
        Kept("log-sum-exp", tokens * heads * sizes.wide, ("core_attn",)),
    ]
    queries = Kept("q", tokens * heads * qk * number)
    if not model.kv_lora_rank:
        keys = max(1.0, model.num_kv_heads / tp)
        found = [queries, Kept("k", tokens * keys * qk * number), Kept("v", tokens * keys * value * number)]
        if model.qk_norm:
            factors = 2 if model.qk_norm_whole else heads + keys
            found.append(Kept("qk before norm", tokens * ((heads + keys) * qk * number + factors * sizes.wide)))
        return found + out
    up = ("mla_up_proj",)
    found = []
    if model.q_lora_rank:
        latent = tokens * model.q_lora_rank * number
        found += [Kept("q_down", latent), *_read_after_norm(sizes, "q_norm", model.q_lora_rank, tokens, up)]
        queries = Kept("q", queries.bytes, up)
    nope, latent = qk - model.qk_rope_head_dim, tokens * model.kv_lora_rank * number
    return [
        *found,
        queries,
        Kept("kv_down", latent + tokens * model.qk_rope_head_dim * number),
        *_read_after_norm(sizes, "kv_norm", model.kv_lora_rank, tokens, up),
        Kept("k", tokens * heads * qk * number, up),
        Kept("kv_up", tokens * heads * (nope + value) * number, up),  # values are a part of it
        *out,
    ]


def _mlp_tensors(sizes: Sizes, hidden: int, name: str) -> list[Kept]:
    width = hidden / sizes.strategy.layout.tp
    up = Kept(f"{name} up", sizes.read(sizes.tokens, sizes.model.up_factor * width))
    return [up] if sizes.fp8 else [up, Kept(f"{name} act", sizes.read(sizes.tokens, width), ("moe_act",))]


def _moe_tensors(sizes: Sizes) -> list[Kept]:
    model, rows = sizes.model, sizes.rows
    fused = sizes.fp8 and not (model.clamped or model.expert_biases)  # an MLP of codes, from its input to its output
    read, width = sizes.expert_rows, model.up_factor * model.expert_hidden
    up = sizes.read(sizes.expert_rows, width)
    if sizes.fp8 and not fused:
        up = sizes.expert_rows * width * sizes.number
    if fused:
        read = rows.received if rows.ep > 1 else sizes.tokens / sizes.along
    found = [
        *(_mlp_tensors(sizes, model.shared_hidden, "shared") if model.shared_hidden else []),
        *([Kept("shared out", sizes.vectors + sizes.tokens * sizes.wide)] if model.shared_gate else []),
        *_routing_tensors(sizes),
        Kept("expert rows", sizes.read(read, model.dim)),
        Kept("row weights", sizes.expert_rows * sizes.wide),
        Kept("expert up", up),
        *(_arrived(sizes) if rows.ep > 1 else []),
    ]
    if not fused:
        found.append(Kept("expert act", sizes.read(sizes.expert_rows, model.expert_hidden), ("moe_act",)))
    return found


def _routing_tensors(sizes: Sizes) -> list[Kept]:
    """What is never made again: scores, chosen experts, and where every row comes from and goes."""
    model, tokens, rows = sizes.model, sizes.tokens / sizes.along, sizes.rows
    choices = tokens * model.top_k
    times = 4 if model.sigmoid_scores else 1 if model.normalized_weights else 2
    places = 16 * choices  # chosen ids, as pairs (token, expert)
    if sizes.travel is not None:
        places += 8 * _places_on_the_way(sizes.travel, choices, tokens, model.top_k, rows.ep, sizes.strategy.on_node)
    elif rows.ep > 1:
        places += 8 * (3 * choices + tokens * min(model.top_k, rows.ep) + rows.sent * (sizes.slots + 1))
    arrived = rows.received if rows.ep > 1 else tokens
    places += 8 * (arrived * sizes.slots + sizes.expert_rows)
    return [
        Kept("router scores", times * tokens * model.num_experts * sizes.wide, stays=True),
        Kept("places of rows", places, stays=True),
    ]


def _places_on_the_way(found: Travel, choices: float, tokens: float, top_k: int, ep: int, on_node: int) -> float:
    """Numbers that say where rows go in all rounds, and with two hops where those that pass through go on."""
    units, slots = (found.nodes, found.node_slots) if found.nodes else (ep, found.slots)
    total = 0.0
    for number, leg in enumerate(found.legs):
        total += (3 if number == 0 else 2) * choices + tokens * min(top_k, units) + leg.sent * (slots + 1)
        if found.nodes and number == 0:  # of further rounds it is found again in backward
            total += leg.onward * (found.slots + 1) + leg.passing * (min(slots, on_node) + slots) + 2 * leg.received
    if len(found.legs) > 1:  # the round of each choice, and the order of all rounds' rows
        total += choices + tokens * min(top_k, units) + sum(leg.sent for leg in found.legs)
    return total


def _arrived(sizes: Sizes) -> list[Kept]:
    """Rows that came, as numbers or as codes, kept where their experts are computed again."""
    rows, dim = sizes.rows.received, sizes.model.dim
    size = rows * (dim + 4 * math.ceil(dim / TILE) if sizes.strategy.wire_fp8 else dim * sizes.number)
    slots = rows * sizes.slots * (8 + 2 * sizes.wide - 4)
    return [Kept("arrived rows", size + slots, stays=True, added_by=("full",))]
