"""What context parallelism sends and computes for one layer, and which payload is faster; by arithmetic.

A rank's tokens are n = B S / cp. Forward sends the payload of these tokens (`ring`, `all_gather`: to cp - 1 ranks, be
it by one hop after another) in the compute format, backward sends it again, and the sums of its gradients in fp32.
`ulysses` sends queries and results too, each a share of 1 - 1/cp. Latents are multiplied up where they arrive: work for
bytes. Both exchanges of blocks run beside the computation, so a layer takes the longer of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.schema import ModelConfig


@dataclass(frozen=True)
class Cost:
    """Of one layer and micro-batch on one rank: bytes sent, and FLOPs of attention's core and of multiplying up."""

    forward_bytes: float
    backward_bytes: float
    forward_flops: float
    backward_flops: float

    def seconds(self, link_bytes_per_s: float, matrix_flops_per_s: float) -> float:
        """Forward and backward, each the longer of sending and computing."""
        return max(self.forward_bytes / link_bytes_per_s, self.forward_flops / matrix_flops_per_s) + max(
            self.backward_bytes / link_bytes_per_s, self.backward_flops / matrix_flops_per_s
        )


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
    numbers, share = payload_numbers(model, payload), 1 - 1 / cp
    core = tokens * seq_len * model.num_heads * (key + value)  # two products, a FLOP pair each, causal half
    forward, backward = core, 2.5 * core
    blocks = (cp - 1) * tokens * numbers
    sent, sent_back = blocks * size, blocks * (size + wide)
    if exchange == "ring":
        sent_back += tokens * numbers * wide  # a last hop brings the sums home
    if exchange == "ulysses":
        whole = model.num_heads * (key + value)  # queries there, results back
        if payload == "kv":
            kv_heads = max(model.num_heads if model.attention == "mla" else model.num_kv_heads, cp)
            whole += kv_heads * (key + value)
            sent = sent_back = 0.0
        sent, sent_back = sent + tokens * share * whole * size, sent_back + tokens * share * whole * size
    if model.attention == "mla":
        up = 2.0 * tokens * model.kv_lora_rank * model.num_heads * (model.qk_nope_head_dim + value)
        if payload == "kv":
            forward, backward = forward + up, backward + 2 * up
        else:
            blocks_up = up if exchange == "ulysses" else cp * up  # ulysses: of all tokens, but of a share of heads
            forward, backward = forward + blocks_up, backward + 3 * blocks_up
    return Cost(sent, sent_back, forward, backward)


def faster_payload(
    model: ModelConfig,
    exchange: str,
    *,
    seq_len: int,
    cp: int,
    link_bytes_per_s: float,
    matrix_flops_per_s: float,
    size: int = 2,
) -> str:
    """`kv` or `latent`, whichever makes a layer faster over such a link with such products."""
    if model.attention != "mla" or cp == 1:
        return "kv"

    def seconds(payload: str) -> float:
        found = cost(model, exchange, payload, rows=1, seq_len=seq_len, cp=cp, size=size)
        return found.seconds(link_bytes_per_s, matrix_flops_per_s)

    return min(("kv", "latent"), key=seconds)


def _head_sizes(model: ModelConfig) -> tuple[int, int]:
    """Numbers of a key and of a value of one head."""
    if model.attention == "mla":
        return model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
    return model.head_dim, model.head_dim
