"""FLOPs and parameter counts against published models, and against what must change them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import ModelConfig
from moe_engine.planner.flops import mfu, parameter_count, sequence_flops

# The published configurations (arXiv 2412.19437, section 4.2; arXiv 2405.04434, appendix B).
DEEPSEEK_V3 = ModelConfig(
    vocab_size=129280,
    dim=7168,
    num_layers=61,
    num_dense_layers=3,
    dense_hidden=18432,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts=256,
    top_k=8,
    expert_hidden=2048,
    num_shared_experts=1,
    mtp_depth=0,
    tied_head=False,
)
DEEPSEEK_V2_LITE = replace(
    DEEPSEEK_V3,
    vocab_size=102400,
    dim=2048,
    num_layers=27,
    num_dense_layers=1,
    dense_hidden=10944,
    num_heads=16,
    q_lora_rank=0,
    num_experts=64,
    top_k=6,
    expert_hidden=1408,
    num_shared_experts=2,
)
WITH_MTP = replace(DEEPSEEK_V3, mtp_depth=1)
MLA, EXPERT = 187_107_328, 44_040_192  # DeepSeek-V3, per layer (the two latent norms included) and per expert
LATENT_NORMS = 1536 + 512


def test_parameters_of_deepseek_v3() -> None:
    count = parameter_count(DEEPSEEK_V3)
    assert count.total == 671_026_404_352
    assert count.router_bias == 14_848
    assert count.active == pytest.approx(37.55e9, abs=0.005e9)
    assert count.by_part == {
        "embedding": 129280 * 7168,
        "attention": 61 * (MLA - LATENT_NORMS),
        "dense_mlp": 3 * 3 * 7168 * 18432,
        "router": 58 * 256 * 7168,
        "shared_experts": 58 * EXPERT,
        "experts": 58 * 256 * EXPERT,
        "norms": 61 * (2 * 7168 + LATENT_NORMS) + 7168,
        "mtp_proj": 0,
        "head": 129280 * 7168,
    }


def test_parameters_of_deepseek_v2_lite() -> None:
    assert parameter_count(DEEPSEEK_V2_LITE).total == 15_706_484_224


@pytest.mark.parametrize(
    ("model", "convention", "document_lengths", "flops"),
    [
        (DEEPSEEK_V3, "nvidia", None, 1_023_230_173_249_536),
        (WITH_MTP, "nvidia", None, 1_064_931_126_411_264),
        (DEEPSEEK_V3, "nvidia", [1024] * 4, 928_912_691_429_376),
        (DEEPSEEK_V3, "matmul", None, 1_023_227_103_019_008),
        (WITH_MTP, "matmul", None, 1_064_927_477_366_784),
        (DEEPSEEK_V2_LITE, "nvidia", None, 67_117_793_673_216),
    ],
    ids=["V3", "V3 with MTP", "V3 packed", "V3 matmul", "V3 with MTP, matmul", "V2-Lite"],
)
def test_flops_of_a_sequence_of_4096_tokens(
    model: ModelConfig, convention: str, document_lengths: list[int] | None, flops: int
) -> None:
    assert sequence_flops(model, 4096, convention, document_lengths) == flops


def test_parts_add_up_and_active_leaves_out_the_experts_not_chosen() -> None:
    count = parameter_count(WITH_MTP)
    assert sum(count.by_part.values()) == count.total
    assert count.total - count.active == 59 * (256 - 8) * EXPERT
    assert parameter_count(replace(WITH_MTP, top_k=256)).active == count.total


def test_an_mtp_module_is_a_block_with_experts_a_projection_and_three_norms() -> None:
    without, once, twice = (parameter_count(replace(DEEPSEEK_V3, mtp_depth=depth)) for depth in range(3))
    block = MLA + 2 * 7168 + 257 * EXPERT + 256 * 7168
    assert once.total - without.total == twice.total - once.total == block + 2 * 7168 * 7168 + 3 * 7168
    assert once.router_bias - without.router_bias == 256


def test_a_tied_head_costs_flops_but_no_parameters() -> None:
    tied = replace(DEEPSEEK_V3, tied_head=True)
    assert parameter_count(DEEPSEEK_V3).total - parameter_count(tied).total == 129280 * 7168
    assert parameter_count(tied).by_part["head"] == 0
    assert sequence_flops(tied, 4096) == sequence_flops(DEEPSEEK_V3, 4096)


def test_attention_cost_grows_with_the_squares_of_document_lengths() -> None:
    whole, halves = sequence_flops(WITH_MTP, 64), sequence_flops(WITH_MTP, 64, document_lengths=[48, 16])
    assert whole - halves == 62 * 3 * 128 * (192 + 128) * (64**2 - 48**2 - 16**2)
    assert sequence_flops(WITH_MTP, 64, document_lengths=[64]) == whole


def test_without_documents_in_sight_of_each_other_cost_is_six_operations_per_active_weight() -> None:
    """Each token its own document: the rest is 6 x tokens x weights, embedding, router and norms left out."""
    count = parameter_count(DEEPSEEK_V3)
    weights = count.active - sum(count.by_part[part] for part in ("embedding", "router", "norms"))
    scores = 61 * 3 * 128 * (192 + 128)
    assert sequence_flops(DEEPSEEK_V3, 8, "matmul", [1] * 8) == 8 * (6 * weights + scores)
    assert sequence_flops(DEEPSEEK_V3, 8, "nvidia", [1] * 8) == 8 * (6 * (weights + 61 * LATENT_NORMS) + scores)


def test_dense_model_has_no_experts() -> None:
    dense = replace(DEEPSEEK_V3, num_dense_layers=61)
    count = parameter_count(dense)
    assert count.active == count.total
    assert count.router_bias == count.by_part["experts"] == count.by_part["router"] == 0


@pytest.mark.parametrize("lengths", [[1024] * 3, [], [4097, -1]])
def test_document_lengths_must_fill_the_sequence(lengths: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"document_lengths=.* add up to seq_len=4096; use \[4096\]"):
        sequence_flops(DEEPSEEK_V3, 4096, document_lengths=lengths)


def test_unknown_convention_is_refused() -> None:
    with pytest.raises(ConfigError, match="convention=megatron: unknown; use one of nvidia, matmul"):
        sequence_flops(DEEPSEEK_V3, 4096, "megatron")


def test_mfu_of_deepseek_v3s_own_step() -> None:
    """2048 H800 at 989 TFLOP/s (bf16), 15360 sequences in 19.926 s (arXiv 2505.09343, table 4): 38.94% causal."""
    peak = 2048 * 989e12
    assert mfu(15360 * sequence_flops(DEEPSEEK_V3, 4096), 19.926, peak) == pytest.approx(0.3894, abs=5e-5)
    assert mfu(15360 * sequence_flops(WITH_MTP, 4096), 19.926, peak) == pytest.approx(0.405, abs=5e-4)
    attention_in_full = sequence_flops(DEEPSEEK_V3, 4096) + 61 * 3 * 128 * (192 + 128) * 4096**2
    assert mfu(15360 * attention_in_full, 19.926, peak) == pytest.approx(0.4373, abs=5e-5)


def test_mfu_needs_a_time_and_a_peak() -> None:
    with pytest.raises(ConfigError, match="step_time_s=0: must be positive"):
        mfu(1e12, 0, 1e12)
    with pytest.raises(ConfigError, match="peak_flops=0.0: must be positive; .* report no MFU"):
        mfu(1e12, 1.0, 0.0)
