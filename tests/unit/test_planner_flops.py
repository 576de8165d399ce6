"""FLOPs and parameter counts against published models, and against what must change them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_engine.config.errors import ConfigError
from moe_engine.config.load import load
from moe_engine.config.schema import ModelConfig
from moe_engine.planner.flops import mfu, parameter_count, sequence_flops


def preset(name: str, **changes: object) -> ModelConfig:
    return replace(load("train", [f"model={name}"]).model, **changes)


DEEPSEEK_V3 = preset("deepseek_v3", mtp_depth=0)
DEEPSEEK_V2_LITE = preset("deepseek_v2_lite")
MIXTRAL, QWEN3, GPT_OSS = preset("mixtral_8x7b"), preset("qwen3_30b_a3b"), preset("gpt_oss_20b")
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


def test_parameters_of_models_with_grouped_queries() -> None:
    assert parameter_count(MIXTRAL).total == 46_702_792_704
    qwen3 = parameter_count(QWEN3)
    assert qwen3.total == 30_532_110_336 + 12_288  # of which norms of queries and keys
    assert qwen3.by_part["norms"] == 48 * 2 * (2048 + 128) + 2048
    assert qwen3.active == pytest.approx(3.35e9, abs=0.005e9)


def test_parameters_of_gpt_oss_are_counted_though_not_trained() -> None:
    """arXiv 2508.10925, table 1: 20.91 and 116.83 billion in all; 3.61 and 5.13 active, without the embedding."""
    for model, total, active in ((GPT_OSS, 20_914_757_184, 3.61e9), (preset("gpt_oss_120b"), 116_829_156_672, 5.13e9)):
        count = parameter_count(model)
        assert count.total == total == sum(count.by_part.values())
        assert count.active - count.by_part["embedding"] == pytest.approx(active, abs=0.005e9)
    vectors = {"attention_bias": False, "attention_out_bias": False, "attention_sinks": False, "expert_biases": False}
    without = parameter_count(replace(GPT_OSS, **vectors))
    attention = 24 * (64 * (64 + 2 * 8) + 2880 + 64)
    assert parameter_count(GPT_OSS).by_part["attention"] - without.by_part["attention"] == attention
    assert parameter_count(GPT_OSS).by_part["router"] - without.by_part["router"] == 24 * 32
    assert parameter_count(GPT_OSS).by_part["experts"] - without.by_part["experts"] == 24 * 32 * 3 * 2880
    assert sequence_flops(GPT_OSS, 4096) == sequence_flops(replace(GPT_OSS, **vectors), 4096)


def test_biases_of_latent_attention_are_those_that_meet_the_hidden_state() -> None:
    biases = {"attention_bias": True, "attention_out_bias": True}
    more = parameter_count(replace(DEEPSEEK_V3, **biases)).total - parameter_count(DEEPSEEK_V3).total
    assert more == 61 * (1536 + 512 + 64 + 7168)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_sliding_window_leaves_out_the_scores_outside_it(every: int) -> None:
    """Counted pair by pair: the half on the diagonal and below, as S^2/2 does without a window."""
    model = replace(MIXTRAL, num_layers=7, sliding_window=5, sliding_window_every=every)
    S, layers = 12, -(-7 // every)
    far = sum(min(1.0, max(0.0, (q - k) - 5 + 0.5)) for q in range(S) for k in range(q))  # pairs of halves
    outside = sequence_flops(replace(model, sliding_window=0), S) - sequence_flops(model, S)
    assert far == (S - 5) ** 2 / 2
    assert outside == layers * 3 * 32 * 2 * 128 * 2 * far
    wide = replace(model, sliding_window=S)
    assert sequence_flops(wide, S) == sequence_flops(replace(model, sliding_window=0), S)


@pytest.mark.parametrize(
    ("model", "convention", "document_lengths", "flops"),
    [
        (DEEPSEEK_V3, "nvidia", None, 1_023_230_173_249_536),
        (WITH_MTP, "nvidia", None, 1_064_931_126_411_264),
        (DEEPSEEK_V3, "nvidia", [1024] * 4, 928_912_691_429_376),
        (DEEPSEEK_V3, "matmul", None, 1_023_227_103_019_008),
        (WITH_MTP, "matmul", None, 1_064_927_477_366_784),
        (DEEPSEEK_V2_LITE, "nvidia", None, 67_117_793_673_216),
        (MIXTRAL, "nvidia", None, 326_477_644_038_144),
        (QWEN3, "nvidia", None, 94_233_729_957_888),
    ],
    ids=["V3", "V3 with MTP", "V3 packed", "V3 matmul", "V3 with MTP, matmul", "V2-Lite", "Mixtral", "Qwen3"],
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
