"""The stages hold exactly the published number of parameters, cut in any way; made on the meta device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts import Case, config_of

from moe_engine.config.schema import ModelConfig, MoESection
from moe_engine.layout import Placement, split_stages
from moe_engine.model.names import named_parameters
from moe_engine.model.transformer import Stage
from moe_engine.moe.router import Router
from moe_engine.planner.flops import parameter_count

# arXiv 2412.19437, section 4.2, and arXiv 2405.04434, appendix B.
DEEPSEEK_V3 = ModelConfig(
    vocab_size=129280, dim=7168, num_layers=61, num_dense_layers=3, dense_hidden=18432, num_heads=128,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    num_experts=256, top_k=8, expert_hidden=2048, num_shared_experts=1, num_groups=8, top_groups=4,
)  # fmt: skip
DEEPSEEK_V2_LITE = replace(
    DEEPSEEK_V3, vocab_size=102400, dim=2048, num_layers=27, num_dense_layers=1, dense_hidden=10944, num_heads=16,
    q_lora_rank=0, num_experts=64, top_k=6, expert_hidden=1408, num_shared_experts=2, num_groups=1, top_groups=1,
)  # fmt: skip


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


@pytest.mark.parametrize(
    ("model", "num_stages", "parameters", "router_bias"),
    [(DEEPSEEK_V3, 16, 671_026_404_352, 14_848), (DEEPSEEK_V2_LITE, 1, 15_706_484_224, 26 * 64)],
    ids=["deepseek_v3", "deepseek_v2_lite"],
)
def test_published_models_have_their_published_size(
    model: ModelConfig, num_stages: int, parameters: int, router_bias: int
) -> None:
    shapes, stages = parameters_by_name(model, num_stages)
    assert sum(shape.numel() for shape in shapes.values()) == parameters == parameter_count(model).total
    routers = [module for stage in stages for module in stage.modules() if isinstance(module, Router)]
    assert sum(router.expert_bias.numel() for router in routers) == router_bias == parameter_count(model).router_bias
    assert {router.expert_bias.dtype for router in routers} == {torch.float32}
    assert {router.num_tokens_per_expert.dtype for router in routers} == {torch.int64}


@pytest.mark.parametrize("changes", [
    {}, {"tied_head": True}, {"tied_head": True, "mtp_depth": 0}, {"mtp_depth": 0}, {"mtp_depth": 3, "q_lora_rank": 0},
    {"num_dense_layers": 4}, {"num_dense_layers": 0, "num_shared_experts": 0}, {"num_shared_experts": 2},
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
