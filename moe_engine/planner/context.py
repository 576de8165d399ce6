"""What context parallelism sends and computes for one layer, and which payload is faster; by arithmetic.

A rank's tokens are n = B S / cp. Forward sends the payload of these tokens (`ring`, `all_gather`: to cp - 1 ranks, be
it by one hop after another) in the compute format, backward sends it again, and the sums of its gradients in fp32.
`ulysses` sends queries and results too, each a share of 1 - 1/cp. Latents are multiplied up where they arrive: work for
bytes.

Not all of it has computation beside it. Hops of the ring do, but the last one of backward, which brings the sums home;
of a gathering, only the block that is there already is used meanwhile; heads and sums of gathered gradients are waited
for.

What latents cost more are plain products. Attention's core reaches less of a device's matrix rate than they do, on a
CPU a fraction, so it has a rate of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.schema import ModelConfig


@dataclass(frozen=True)
class Pass:
    """Forward or backward of one layer and micro-batch on one rank.

    core, up: FLOPs of attention's core and of multiplying up; beside: bytes sent while a `share` of both is computed;
    alone: bytes sent with nothing beside them.
    """

    core: float
    up: float
    beside: float
    share: float
    alone: float

    @property
    def flops(self) -> float:
        return self.core + self.up

    @property
    def sent(self) -> float:
        return self.beside + self.alone

    def seconds(self, link_bytes_per_s: float, matrix_flops_per_s: float, core_flops_per_s: float) -> float:
        computing = self.core / core_flops_per_s + self.up / matrix_flops_per_s
        return (
            self.alone / link_bytes_per_s
            + max(self.beside / link_bytes_per_s, self.share * computing)
            + (1 - self.share) * computing
        )


@dataclass(frozen=True)
class Cost:
    """Both passes."""

    forward: Pass
    backward: Pass

    @property
    def flops(self) -> float:
        return self.forward.flops + self.backward.flops

    @property
    def sent(self) -> float:
        return self.forward.sent + self.backward.sent

    def seconds(self, link_bytes_per_s: float, matrix_flops_per_s: float, core_flops_per_s: float) -> float:
        rates = link_bytes_per_s, matrix_flops_per_s, core_flops_per_s
        return self.forward.seconds(*rates) + self.backward.seconds(*rates)


def payload_numbers(model: ModelConfig, payload: str) -> int:
    """Numbers of a token in the payload."""
    if payload == "latent":
        return model.kv_lora_rank + model.qk_rope_head_dim
    kv_heads, (key, value) = (model.num_heads if model.attention == "mla" else model.num_kv_heads), _head_sizes(model)
    return kv_heads * (key + value)


def cost(
    model: ModelConfig, exchange: str, payload: str, *, rows: int, seq_len: int, cp: int, size: int = 2, wide: int = 4
) -> Cost:
    """A layer over `rows` causal sequences of `seq_len` tokens; size, wide: bytes of a number, of a gradient's sum."""
    tokens, (key, value) = rows * seq_len / cp, _head_sizes(model)
    forward, backward = _flops(model, exchange, payload, tokens, seq_len, cp)
    own = tokens * payload_numbers(model, payload)  # numbers of this rank's block
    blocks = (cp - 1) * own * size
    if exchange == "ring":
        return Cost(
            Pass(*forward, blocks, (cp - 1) / cp, 0.0),
            Pass(*backward, blocks + (cp - 1) * own * wide, 1.0, own * wide),
        )
    if exchange == "all_gather":
        return Cost(Pass(*forward, blocks, 1 / cp, 0.0), Pass(*backward, blocks, 1 / cp, (cp - 1) * own * wide))
    heads = model.num_heads * (key + value)  # queries there, results back
    if payload == "kv":
        heads += max(model.num_heads if model.attention == "mla" else model.num_kv_heads, cp) * (key + value)
        alone = tokens * (1 - 1 / cp) * heads * size
        return Cost(Pass(*forward, 0.0, 0.0, alone), Pass(*backward, 0.0, 0.0, alone))
    alone = tokens * (1 - 1 / cp) * heads * size
    return Cost(Pass(*forward, blocks, 1 / cp, alone), Pass(*backward, blocks, 1 / cp, alone + (cp - 1) * own * wide))


def _flops(
    model: ModelConfig, exchange: str, payload: str, tokens: float, seq_len: int, cp: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of forward and of backward: attention's core, causal half, and making keys and values from latents."""
    key, value = _head_sizes(model)
    core = tokens * seq_len * model.num_heads * (key + value)  # two products, a FLOP pair each
    if model.attention != "mla":
        return (core, 0.0), (2.5 * core, 0.0)
    up = 2.0 * tokens * model.kv_lora_rank * model.num_heads * (model.qk_nope_head_dim + value)
    if payload == "kv":
        return (core, up), (2.5 * core, 2 * up)
    # Blocks of all ranks, again in backward; ulysses makes a share of their heads.
    blocks_up = up if exchange == "ulysses" else cp * up
    return (core, blocks_up), (2.5 * core, 3 * blocks_up)


def faster_payload(
    model: ModelConfig,
    exchange: str,
    *,
    seq_len: int,
    cp: int,
    link_bytes_per_s: float,
    matrix_flops_per_s: float,
    core_flops_per_s: float | None = None,
    size: int = 2,
) -> str:
    """`kv` or `latent`, whichever makes a layer faster over such a link with such products, and such a rate of
    attention's core (None: that of products).
    """
    if model.attention != "mla" or cp == 1:
        return "kv"

    def seconds(payload: str) -> float:
        found = cost(model, exchange, payload, rows=1, seq_len=seq_len, cp=cp, size=size)
        return found.seconds(link_bytes_per_s, matrix_flops_per_s, core_flops_per_s or matrix_flops_per_s)

    return min(("kv", "latent"), key=seconds)


def _head_sizes(model: ModelConfig) -> tuple[int, int]:
    """Numbers of a key and of a value of one head."""
    if model.attention == "mla":
        return model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
    return model.head_dim, model.head_dim
