"""The stages hold exactly the published number of parameters, cut in any way; made on the meta device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layout_cases import Case, config_of

from moe_engine.checkpoint.whole_model import LanguageModel
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import choices, load
from moe_engine.config.schema import ModelConfig, MoESection
from moe_engine.layout import Placement, split_stages
from moe_engine.model.names import named_parameters
from moe_engine.model.transformer import Stage
from moe_engine.moe.router import Router
from moe_engine.planner.flops import parameter_count


def parameters_by_name(model: ModelConfig, num_stages: int) -> tuple[dict[str, torch.Size], list[Stage]]:
    """The shape of every parameter by global name; what several stages hold must agree and counts once."""
    specs = split_stages(model, num_stages)
    placement = Placement(tuple(specs), tuple((i,) for i in range(num_stages)))
    stages = [Stage(spec, model, MoESection(), None, torch.bfloat16, torch.device("meta")) for spec in specs]
    shapes: dict[str, torch.Size] = {}
    held: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for named in named_parameters([stage], placement):
            assert named.parameter.is_meta and named.parameter.dtype == torch.bfloat16
            for name, piece in named.pieces():
                assert shapes.setdefault(name, piece.shape) == piece.shape
                held.setdefault(name, []).append(index)
                assert named.holders == placement.holders(name)
    for name, ranks in held.items():
        assert tuple(ranks) == placement.holders(name), name
    return shapes, stages


# What transformers counts in the published models; DeepSeek-V3's has one MTP module besides.
PUBLISHED = {
    "deepseek_v2": 235_741_434_880,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_404_352,
    "kimi_k2": 1_026_408_209_408,
    "mixtral_8x22b": 140_620_634_112,
    "mixtral_8x7b": 46_702_792_704,
    "moonlight_16b_a3b": 15_960_108_544,
    "gpt_oss_120b": 116_829_156_672,
    "gpt_oss_20b": 20_914_757_184,
    "glm4_5": 352_797_814_784,
    "glm4_5_air": 106_852_245_504,
    "olmoe_1b_7b": 6_919_161_856,
    "qwen1_5_moe_a2_7b": 14_315_784_192,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_30b_a3b": 30_532_122_624,
}
NUM_STAGES = {"deepseek_v3": 16, "qwen3_30b_a3b": 3}


@pytest.mark.parametrize("name", choices("model", "train"))
def test_the_model_of_every_preset_has_exactly_the_planned_size(name: str) -> None:
    model = load("train", [f"model={name}"]).model
    shapes, stages = parameters_by_name(model, NUM_STAGES.get(name, 1))
    total = sum(shape.numel() for shape in shapes.values())
    assert total == parameter_count(model).total
    if name in PUBLISHED:
        assert parameter_count(replace(model, mtp_depth=0)).total == PUBLISHED[name]
    routers = [module for stage in stages for module in stage.modules() if isinstance(module, Router)]
    assert sum(router.expert_bias.numel() for router in routers) == parameter_count(model).router_bias
    assert all(router.expert_bias.dtype == torch.float32 for router in routers)
    assert all(router.num_tokens_per_expert.dtype == torch.int64 for router in routers)
    assert len(routers) == model.num_layers + model.mtp_depth - model.num_dense_layers


GROUPED = {"attention": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "num_shared_experts": 0}


@pytest.mark.parametrize("changes", [
    {}, {"tied_head": True}, {"tied_head": True, "mtp_depth": 0}, {"mtp_depth": 0}, {"mtp_depth": 3, "q_lora_rank": 0},
    GROUPED, {**GROUPED, "qk_norm": True, "qk_norm_whole": True, "attention_out_bias": True},
    {**GROUPED, "num_shared_experts": 2, "shared_gate": True, "attention_bias": True, "rotary_dim": 4},
    {**GROUPED, "attention_sinks": True, "expert_biases": True, "swiglu_limit": 7.0, "sliding_window": 4},
    {**GROUPED, "qk_norm": True, "tied_head": True}, {"num_dense_layers": 4},
    {"num_dense_layers": 0, "num_shared_experts": 0}, {"num_shared_experts": 2}, {"dense_layers": [2]},
    {"num_dense_layers": 0, "dense_layers": [0, 1, 2, 3], "mtp_depth": 0},
])  # fmt: skip
def test_any_cut_has_the_same_names_and_the_planned_count(changes: dict[str, object]) -> None:
    model = replace(config_of(Case()).model, **changes)
    whole, _ = parameters_by_name(model, 1)
    assert sum(shape.numel() for shape in whole.values()) == parameter_count(model).total
    for num_stages in (2, 3, 4):
        assert parameters_by_name(model, num_stages)[0] == whole


def test_names_are_those_of_the_contract() -> None:
    shapes, _ = parameters_by_name(config_of(Case()).model, 2)
    D, V, F, E = 32, 61, 16, 8
    expected = {
        "embedding.weight": (V, D),
        "head.weight": (V, D),
        "norm.weight": (D,),
        "layers.0.mlp.gate_up.weight": (96, D),
        "layers.0.mlp.down.weight": (D, 48),
        "layers.3.attention_norm.weight": (D,),
        "layers.3.mlp_norm.weight": (D,),
        "layers.3.attention.q_down.weight": (24, D),
        "layers.3.attention.q_norm.weight": (24,),
        "layers.3.attention.q_up.weight": (2 * 12, 24),
        "layers.3.attention.kv_down.weight": (16 + 4, D),
        "layers.3.attention.kv_norm.weight": (16,),
        "layers.3.attention.kv_up.weight": (2 * 16, 16),
        "layers.3.attention.out.weight": (D, 16),
        "layers.3.moe.router.weight": (E, D),
        "layers.3.moe.shared.gate_up.weight": (2 * F, D),
        "layers.3.moe.shared.down.weight": (D, F),
        "layers.3.moe.experts.7.gate_up": (2 * F, D),
        "layers.3.moe.experts.7.down": (D, F),
        "mtp.0.hidden_norm.weight": (D,),
        "mtp.0.embedding_norm.weight": (D,),
        "mtp.0.proj.weight": (D, 2 * D),
        "mtp.0.norm.weight": (D,),
        "mtp.0.block.attention.q_up.weight": (2 * 12, 24),
        "mtp.0.block.moe.experts.0.down": (D, F),
    }
    assert {name: tuple(shapes[name]) for name in expected} == expected
    attention, dense_mlp, moe = 2 + 7, 2, 1 + 2 + 2 * E  # with the block's two norms
    assert len(shapes) == 3 + (attention + dense_mlp) + 3 * (attention + moe) + (4 + attention + moe)


@pytest.mark.parametrize(
    "option", [{"attention_bias": True}, {"attention_out_bias": True}, {"attention_sinks": True}, {"sliding_window": 4}]
)
def test_a_whole_model_is_not_made_without_what_its_latent_attention_asks_for(option: dict[str, bool | int]) -> None:
    (name,) = option
    with pytest.raises(ConfigError, match=f"model.{name}=.* latent attention is built without it"):
        LanguageModel(replace(ModelConfig(), **option), device="meta")
