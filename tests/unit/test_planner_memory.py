"""Memory of the planner against figures that are known exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import ModelConfig
from moe_engine.layout import Layout
from moe_engine.planner import flops
from moe_engine.planner.activations import block_tensors, kept_bytes
from moe_engine.planner.architecture import Architecture, architecture
from moe_engine.planner.memory import live_counts, megatron_estimate, rank_memory, state_bytes, zero_table
from moe_engine.planner.routing import distinct_ranks
from moe_engine.planner.stages import cut
from moe_engine.planner.strategy import Precision, Strategy
from moe_engine.planner.timing import has_pairs
from moe_engine.schedule import schedules
from moe_engine.schedule.check import count_memory

MIB, GB = 2**20, 1e9


def deepseek_v3(mtp_depth: int = 0) -> ModelConfig:
    return ModelConfig(
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
        num_groups=8,
        top_groups=4,
        mtp_depth=mtp_depth,
    )


GPT_22B = Architecture(51200, 6144, 48, 48, 24576, 64, 64, 96, 96, gated=False, biases=True, learned_positions=2048)


@pytest.mark.parametrize("mtp_depth", [0, 1])
def test_architecture_counts_as_flops_does(mtp_depth: int) -> None:
    config = deepseek_v3(mtp_depth)
    model = architecture(config)
    assert model.parameters() == flops.parameter_count(config).total
    assert 3 * model.forward_flops(4096) == flops.sequence_flops(config, 4096, "matmul")
    assert architecture(deepseek_v3()).parameters() == 671_026_404_352
    near = replace(config, attention="gqa", num_kv_heads=8, sliding_window=128, sliding_window_every=2, num_layers=7)
    assert 3 * architecture(near).forward_flops(4096) == flops.sequence_flops(near, 4096, "matmul")


def test_megatron_estimator_of_deepseek_v3() -> None:
    model = architecture(deepseek_v3(mtp_depth=1))
    assert megatron_estimate(model, Strategy(Layout(pp=16, dp=64, ep=64))) == 27_743_860_116
    assert megatron_estimate(model, Strategy(Layout(pp=8, dp=64, tp=2, ep=64))) == 26_977_865_904


# Decoder layers of DeepSeek-V3's stages: 4 each, three MoE layers beside MTP and head on the last.
STAGES = (4,) * 14 + (2, 3)


def states(strategy: Strategy) -> list[float]:
    model = architecture(deepseek_v3(mtp_depth=1))
    held = cut(model, strategy)
    return [rank.states for rank in rank_memory(held)]


def test_real_stages_of_deepseek_v3() -> None:
    strategy = Strategy(Layout(pp=16, dp=64, ep=64), micro_batches=32, stage_layers=STAGES)
    found = states(strategy)
    copy = state_bytes(129280 * 7168, 2 * 64, strategy).total  # of the embedding, for MTP, on the last stage
    assert found[-1] - copy == pytest.approx(24.82 * GB, rel=1e-3)
    assert found[5] == pytest.approx(18.45 * GB, rel=1e-3)


def test_dualpipe_shards_over_both_holders() -> None:
    found = states(Strategy(Layout(pp=16, dp=64, ep=64), schedule="dualpipe", micro_batches=32, stage_layers=STAGES))
    assert found[0] == pytest.approx(40.26 * GB, rel=1e-3)
    assert found[7] == pytest.approx(28.27 * GB, rel=1e-3)
    assert found == found[::-1]


def test_kept_activations_of_a_moe_layer() -> None:
    model = architecture(deepseek_v3())
    tensors = {t.name: t.bytes / MIB for t in block_tensors(model, Strategy(Layout(dp=64, ep=64)), True)}
    assert tensors == {
        "input": 56,
        "q_down": 12,
        "q_norm": 12,
        "kv_down": 4,
        "kv_norm": 4,
        "q": 192,
        "k": 192,
        "v": 128,
        "attention out": 128,
        "logsumexp": 2,
        "residual": 56,
        "norm out": 56,
        "shared in": 56,
        "shared up": 32,
        "shared act": 16,
        "probabilities": 2,
        "row map": 8,
        "permuted input": 448,
        "expert up": 256,
        "expert act": 128,
        "unpermute input": 448,
    }
    assert sum(tensors.values()) == 2236


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, True), (8, False), (8, True)])
def test_kept_activations_of_a_dense_layer(tp: int, sequence_parallel: bool) -> None:
    """Korthikanti et al., table 2, in bytes over s·b·h, without flash attention."""
    strategy = Strategy(
        Layout(tp=tp), micro_batch=4, seq_len=2048, sequence_parallel=sequence_parallel, flash=False, dropout=True
    )
    tensors = block_tensors(GPT_22B, strategy, False)
    unit = 2048 * 4 * 6144
    scores = 5 * 64 * 2048 / 6144
    whole = 1 if not sequence_parallel else tp
    assert sum(t.bytes for t in tensors) / unit == pytest.approx(10 / whole + 24 / tp + scores / tp)
    selective = sum(kept_bytes(tensors, frozenset({"core_attn"})).values()) / unit
    assert selective == pytest.approx(10 / whole + 24 / tp)
    assert sum(kept_bytes(tensors, frozenset({"full"})).values()) / unit == pytest.approx(2 / whole)


def test_distinct_ranks_of_random_experts() -> None:
    model = replace(architecture(deepseek_v3()), num_groups=1, top_groups=1)
    found = [round(distinct_ranks(model, ep), 4) for ep in (8, 16, 32, 64)]
    assert found == [5.2947, 6.5233, 7.2668, 7.6758]


def test_zero_of_seven_and_a_half_billion() -> None:
    found = [round(state.total / GB, 1) for state in zero_table(7.5e9, 64).values()]
    assert found == [120, 31.4, 16.6, 1.9]


def test_zero_of_seventy_billion() -> None:
    plain = zero_table(70e9, 512)["plain data parallel"]
    assert (plain.parameters, plain.gradients, plain.master + plain.moments) == (140 * GB, 140 * GB, 840 * GB)


def test_experts_shard_over_their_replicas_alone() -> None:
    model = architecture(deepseek_v3())
    whole = rank_memory(cut(model, Strategy(Layout(pp=16, dp=64, ep=64), micro_batches=32)))[5]
    assert whole.experts > 0
    precision = Precision()
    assert whole.master == pytest.approx(precision.master * (whole.dense / 64 + whole.experts))


@pytest.mark.parametrize("name", schedules.names())
def test_in_flight_is_what_check_counts(name: str) -> None:
    pp, micro_batches = 4, 16
    report = count_memory(schedules.schedule(name, pp, micro_batches))
    for rank, moments in enumerate(live_counts(name, pp, micro_batches, 1)):
        most = max(sum(moment[:-1]) for moment in moments)
        # Inside a pair a forward grows while a backward shrinks: `check` counts both whole, memory only what is after.
        assert report.peak_activations[rank] - has_pairs(name, pp) <= most <= report.peak_held[rank]


def test_full_recompute_keeps_inputs_and_works_on_one_block() -> None:
    model = architecture(deepseek_v3())
    kept, full = (
        rank_memory(cut(model, Strategy(Layout(pp=16, dp=64, ep=64), micro_batches=32, recompute=frozenset(what))))[5]
        for what in ((), ("full",))
    )
    assert full.activations["input"] == kept.activations["input"]
    assert not {"q", "k", "expert rows", "expert up", "norm out"} & set(full.activations)
    assert {"arrived rows", "router scores", "places of rows"} <= set(full.activations)
    assert full.working > kept.working
    assert full.total < kept.total


def test_wrong_strategies_are_refused() -> None:
    with pytest.raises(ConfigError, match="recompute=attention: cannot be computed again; use some of norm"):
        Strategy(recompute=frozenset({"attention"}))
    with pytest.raises(ConfigError, match="zero=4"):
        Strategy(zero=4)
    with pytest.raises(ConfigError, match=r"stage_layers=\[1, 2\]: needs 2 numbers adding up to the 61 layers"):
        cut(architecture(deepseek_v3()), Strategy(Layout(pp=2), stage_layers=(1, 2)))
    with pytest.raises(ConfigError, match="keeping=everything"):
        rank_memory(cut(GPT_22B, Strategy()), "everything")
