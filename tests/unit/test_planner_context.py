"""The arithmetic of context parallelism: DeepSeek-V3's numbers, and which payload is faster over which link."""

from __future__ import annotations

import pytest

from moe_engine.config.load import load
from moe_engine.config.schema import ModelConfig
from moe_engine.planner.context import cost, faster_payload, payload_numbers

V3 = load("train", ["model=deepseek_v3"]).model


def test_latents_are_71_times_fewer_numbers_in_deepseek_v3() -> None:
    assert payload_numbers(V3, "latent") == 512 + 64
    assert payload_numbers(V3, "kv") == 128 * (192 + 128) == 40960


def test_grouped_heads_send_their_own() -> None:
    model = ModelConfig(attention="gqa", num_heads=32, num_kv_heads=8, head_dim=128)
    assert payload_numbers(model, "kv") == 8 * 2 * 128


@pytest.mark.parametrize("payload", ["kv", "latent"])
def test_bytes_of_a_ring_by_hand(payload: str) -> None:
    """4 ranks of 8,192 tokens: three hops forward; three again and four of fp32 sums in backward."""
    found = cost(V3, "ring", payload, rows=1, seq_len=32768, cp=4)
    block = 8192 * payload_numbers(V3, payload)
    assert found.forward.sent == 3 * block * 2
    assert found.backward.sent == 3 * block * 2 + 4 * block * 4


def test_flops_of_the_core_are_the_causal_half() -> None:
    model = ModelConfig(attention="gqa", num_heads=2, num_kv_heads=2, head_dim=4)
    assert cost(model, "ring", "kv", rows=1, seq_len=64, cp=2).forward.flops == 64 * 64 / 2 * 2 * (2 * 4 + 2 * 4) / 2


def test_a_slow_link_wants_latents_and_a_fast_one_keys_and_values() -> None:
    def rule(link: float, model: ModelConfig = V3, cp: int = 8) -> str:
        return faster_payload(model, "ring", seq_len=16384, cp=cp, link_bytes_per_s=link, matrix_flops_per_s=4e14)

    assert rule(40e9) == "latent"  # a 400 Gbit/s network card for each GPU
    assert rule(40e12) == "kv"
    assert rule(1.0, cp=1) == "kv"
    assert rule(1.0, ModelConfig(attention="gqa")) == "kv"


def test_multiplying_up_is_no_slower_for_a_slow_core() -> None:
    """A small layer over 200 Mbit/s: at the core's rate, the extra products would seem to cost what is saved."""
    model = ModelConfig(
        dim=256, num_heads=8, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
    )  # fmt: skip

    def rule(core: float | None, products: float) -> str:
        return faster_payload(
            model, "all_gather", seq_len=1024, cp=2, link_bytes_per_s=25e6, matrix_flops_per_s=products,
            core_flops_per_s=core, size=4,
        )  # fmt: skip

    assert rule(None, 3.35e9) == "kv"
    assert rule(3.35e9, 50e9) == "latent"
