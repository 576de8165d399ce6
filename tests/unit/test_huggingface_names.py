"""The list of tensors: all that a model has, each in one place."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hf_folders import ERNIE4_5, GLM4, GPT_OSS, MIXTRAL, OLMOE, QWEN2, QWEN3, V2, V3

from moe_engine.checkpoint.huggingface.names import FAMILIES, Names, names
from moe_engine.config.huggingface_writers import family_of
from moe_engine.config.schema import ModelConfig, MoESection
from moe_engine.layout import Placement, split_stages
from moe_engine.model.names import named_parameters
from moe_engine.model.transformer import Stage

MODELS = {
    "v3": V3,
    "v3, two MTP modules": replace(V3, mtp_depth=2),
    "v3, tied": replace(V3, tied_head=True),
    "v3, all layers dense": replace(V3, num_dense_layers=3, mtp_depth=0),
    "v3, square": replace(V3, dense_hidden=32, expert_hidden=32),
    "v2": V2,
    "mixtral": MIXTRAL,
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "olmoe": OLMOE,
    "glm4": GLM4,
    "gpt_oss": GPT_OSS,
    "ernie4_5": ERNIE4_5,
    "qwen3, first layer dense": replace(QWEN3, num_dense_layers=1),
    "qwen3, layer between dense": replace(QWEN3, dense_layers=[1]),
}


def both(model: ModelConfig) -> Names:
    return names(model, FAMILIES[family_of(model)])


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_list_is_what_the_model_has(model: ModelConfig) -> None:
    specs = split_stages(model, 1)
    stage = Stage(specs[0], model, MoESection(), None, torch.float32, torch.device("meta"))
    pieces = [
        piece for named in named_parameters([stage], Placement(tuple(specs), ((0,),))) for piece in named.pieces()
    ]
    built = {name: tuple(tensor.shape) for name, tensor in pieces}
    built |= {f"{name}.router.expert_bias": (model.num_experts,) for name in stage.moe_layers()}
    assert {name: mapped.shape for name, mapped in both(model).tensors.items()} == built


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_form_has_all_rows_and_no_place_twice(model: ModelConfig) -> None:
    found = both(model)
    for mapped in found.tensors.values():
        for form in mapped.forms:
            assert sum(rows.shape[0] for rows in form) == mapped.shape[0]
            assert all(rows.shape[1:] == mapped.shape[1:] for rows in form)
    for which in (0, -1):
        places = Counter(
            (rows.key, rows.index) for mapped in found.tensors.values() if mapped.forms for rows in mapped.forms[which]
        )
        assert set(places.values()) == {1}


def test_names_of_deepseek_v3() -> None:
    """Some names of the published files, written out."""
    found = both(V3)
    assert [rows.key for rows in found.tensors["layers.0.mlp.gate_up.weight"].forms[0]] == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ]
    one_name = {name: mapped.forms[0][0].key for name, mapped in found.tensors.items()}
    expected = {
        "layers.1.attention.kv_down.weight": "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "layers.2.moe.router.expert_bias": "model.layers.2.mlp.gate.e_score_correction_bias",
        "layers.2.moe.experts.7.down": "model.layers.2.mlp.experts.7.down_proj.weight",
        "layers.2.moe.shared.down.weight": "model.layers.2.mlp.shared_experts.down_proj.weight",
        "mtp.0.proj.weight": "model.layers.3.eh_proj.weight",
        "mtp.0.norm.weight": "model.layers.3.shared_head.norm.weight",
        "mtp.0.block.moe.experts.0.down": "model.layers.3.mlp.experts.0.down_proj.weight",
    }
    assert expected.items() <= one_name.items()
    assert {copy.key for copy in found.copies} == {
        "model.layers.3.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight",
    }


DEEPSEEK_V3 = ModelConfig(
    vocab_size=129280, dim=7168, num_layers=61, num_dense_layers=3, dense_hidden=18432, num_heads=128, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=256, top_k=8,
    expert_hidden=2048, num_groups=8, top_groups=4,
)  # fmt: skip
MIXTRAL_8X7B = ModelConfig(
    vocab_size=32000, dim=4096, num_layers=32, num_dense_layers=0, attention="gqa", num_heads=32, num_kv_heads=8,
    head_dim=128, num_experts=8, top_k=2, expert_hidden=14336, num_shared_experts=0, score_function="softmax",
)  # fmt: skip
QWEN3_30B = ModelConfig(
    vocab_size=151936, dim=2048, num_layers=48, num_dense_layers=0, attention="gqa", num_heads=32, num_kv_heads=4,
    head_dim=128, qk_norm=True, num_experts=128, top_k=8, expert_hidden=768, num_shared_experts=0,
    score_function="softmax",
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(DEEPSEEK_V3, 671_026_404_352), (MIXTRAL_8X7B, 46_702_792_704), (QWEN3_30B, 30_532_110_336 + 12_288)],
    ids=["DeepSeek-V3", "Mixtral-8x7B", "Qwen3-30B-A3B"],
)
def test_published_models_have_their_published_sizes(model: ModelConfig, parameters: int) -> None:
    shapes = {name: mapped.shape for name, mapped in both(model).tensors.items() if not name.endswith("expert_bias")}
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters
