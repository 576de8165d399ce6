"""Whole models against transformers: logits of its folders here, and of ours there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import equal, our_logits, our_mtp_states, relative, tensors_of, write_folder

pytest.importorskip("transformers")

from hf_models import (  # noqa: E402
    ERNIE4_5,
    GLM4,
    GPT_OSS,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN3,
    V2_LITE,
    V3,
    VOCABULARY,
    YARN,
    add_mtp,
    logits_of,
    opened,
    random_model,
)
from transformers import AutoModelForCausalLM  # noqa: E402

from moe_engine.checkpoint.huggingface.writer import write_huggingface  # noqa: E402
from moe_engine.checkpoint.weights import open_weights, write_checkpoint  # noqa: E402

BOUND = 1e-5  # of the relative error of fp32 logits
SQUARE = dict(intermediate_size=32, moe_intermediate_size=32)  # a transposed matrix would have the right shape
DEEP_YARN = YARN | dict(mscale=1.0, mscale_all_dim=1.0)

V3_MODELS: dict[str, dict[str, Any]] = {
    "q_lora": V3,
    "no q_lora": V3 | dict(q_lora_rank=None),
    "top 2 in 2 of 4 groups": V3 | dict(num_experts_per_tok=2, topk_group=2),
    "top 4 in 2 of 4 groups": V3 | dict(num_experts_per_tok=4, topk_group=2, n_routed_experts=16),
    "top 4 in 1 of 4 groups": V3 | dict(num_experts_per_tok=4, topk_group=1, n_routed_experts=16),
    "no groups": V3 | dict(n_group=1, topk_group=1),
    "weights not normalised": V3 | dict(norm_topk_prob=False),
    "yarn": V3 | dict(rope_scaling=DEEP_YARN),
    "yarn, no q_lora": V3 | dict(rope_scaling=DEEP_YARN, q_lora_rank=None),
    "tied": V3 | dict(tie_word_embeddings=True),
    "square": V3 | SQUARE | dict(q_lora_rank=32, kv_lora_rank=32, num_attention_heads=2, v_head_dim=16),
    "two shared experts": V3 | dict(n_shared_experts=2),
    "all layers with experts": V3 | dict(first_k_dense_replace=0),
}
MODELS: dict[str, dict[str, Any]] = {
    **{f"v3, {name}": config for name, config in V3_MODELS.items()},
    "v2_lite": V2_LITE,
    "v2_lite, square": V2_LITE | SQUARE | dict(n_shared_experts=1, kv_lora_rank=32, v_head_dim=16),
    "v2_lite, yarn": V2_LITE | dict(rope_scaling=YARN | dict(mscale=0.707, mscale_all_dim=0.707)),
    "v2, groups": V2_LITE | dict(q_lora_rank=24, n_group=4, topk_group=2, topk_method="group_limited_greedy"),
    "v2_lite, scaled": V2_LITE | dict(routed_scaling_factor=16.0, tie_word_embeddings=True),
    "mixtral": MIXTRAL,
    "mixtral, square": MIXTRAL | dict(intermediate_size=32, num_key_value_heads=4),
    "mixtral, tied": MIXTRAL | dict(tie_word_embeddings=True, num_key_value_heads=1),
    "qwen3": QWEN3,
    "qwen3, square": QWEN3 | dict(moe_intermediate_size=32, head_dim=8, num_key_value_heads=4),
    "qwen3, first layer dense": QWEN3 | dict(mlp_only_layers=[0]),
    "qwen3, dense, dense, dense, experts": QWEN3
    | dict(mlp_only_layers=[1], decoder_sparse_step=2, num_hidden_layers=4),
    "qwen3, experts, dense": QWEN3 | dict(mlp_only_layers=[1]),
    "qwen3, weights not normalised": QWEN3 | dict(norm_topk_prob=False, tie_word_embeddings=True),
    "qwen3, yarn": QWEN3 | dict(rope_scaling=YARN),
    "qwen2": QWEN2,
    "qwen2, square": QWEN2 | SQUARE | dict(num_key_value_heads=4, norm_topk_prob=True),
    "qwen2, dense, experts, dense": QWEN2 | dict(decoder_sparse_step=2, num_hidden_layers=3),
    "qwen2, no biases, first layer dense": QWEN2 | dict(qkv_bias=False, mlp_only_layers=[0], tie_word_embeddings=True),
    "olmoe": OLMOE,
    "olmoe, square": OLMOE | dict(intermediate_size=32, num_key_value_heads=4, norm_topk_prob=True),
    "olmoe, biases": OLMOE | dict(attention_bias=True, tie_word_embeddings=True),
    "glm4": GLM4,
    "glm4, square": GLM4 | SQUARE | dict(head_dim=8, num_key_value_heads=4, use_qk_norm=False),
    "glm4, groups, a quarter turns, yarn": GLM4
    | dict(
        n_group=4,
        topk_group=2,
        partial_rotary_factor=0.25,
        rope_scaling=YARN,
        attention_bias=False,
    ),
    "ernie4_5": ERNIE4_5,
    "ernie4_5, dense, dense, dense, experts, dense": ERNIE4_5
    | dict(
        num_hidden_layers=5,
        moe_layer_interval=2,
        moe_layer_start_index=2,
        moe_num_shared_experts=0,
        tie_word_embeddings=False,
    ),
    "ernie4_5, experts, experts, dense": ERNIE4_5 | dict(moe_layer_start_index=0, moe_layer_end_index=1, moe_k=3),
    "gpt_oss": GPT_OSS,
    "gpt_oss, square": GPT_OSS | dict(intermediate_size=16, hidden_size=32, head_dim=8, num_key_value_heads=4),
    "gpt_oss, windows nowhere": GPT_OSS | dict(layer_types=["full_attention"] * 3),
    "gpt_oss, no biases in attention, windows everywhere, no yarn": GPT_OSS
    | dict(
        attention_bias=False,
        layer_types=["sliding_attention"] * 3,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0),
    ),
}


def tokens(length: int = 48) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    """A folder saved by transformers gives its logits here, and comes back as a folder that gives them there."""
    model = random_model(config)
    model.save_pretrained(tmp_path / "source")
    weights = open_weights(tmp_path / "source")
    right = logits_of(model, tokens())
    assert relative(our_logits(weights, tokens()), right) < BOUND
    write_checkpoint(weights, tmp_path / "checkpoint", None, 10**9)
    write_huggingface(open_weights(tmp_path / "checkpoint"), tmp_path / "back", None, 50_000)
    assert torch.equal(logits_of(opened(tmp_path / "back"), tokens()), right)


@pytest.mark.parametrize(
    "config",
    [V3, V2_LITE, MIXTRAL, QWEN3, QWEN2, OLMOE, GLM4, ERNIE4_5],
    ids=["v3", "v2_lite", "mixtral", "qwen3", "qwen2", "olmoe", "glm4", "ernie4_5"],
)
def test_fused_experts_are_read(config: dict[str, Any], tmp_path: Path) -> None:
    """As transformers has a layer in memory, which it saves when told not to go back to the published layout."""
    model = random_model(config)
    model.save_pretrained(tmp_path / "source", save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in tensors_of(tmp_path / "source"))
    weights = open_weights(tmp_path / "source")
    assert relative(our_logits(weights, tokens()), logits_of(model, tokens())) < BOUND


@pytest.mark.parametrize("config", [V3, V3 | dict(tie_word_embeddings=True), GLM4], ids=["v3", "v3, tied", "glm4"])
def test_mtp_tensors_come_back_bit_for_bit(config: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    random_model(config).save_pretrained(source)
    add_mtp(source)
    weights = open_weights(source)
    assert weights.model.mtp_depth == 1 and not weights.notes
    weights.check_copies()
    write_checkpoint(weights, tmp_path / "checkpoint", None, 30_000)
    write_huggingface(open_weights(tmp_path / "checkpoint"), tmp_path / "back", None, 30_000)
    assert equal(tensors_of(tmp_path / "back"), tensors_of(source))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_bf16_folder_keeps_its_bits(tmp_path: Path) -> None:
    model = random_model(V3).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    write_checkpoint(open_weights(tmp_path / "source"), tmp_path / "checkpoint", None, 10**9)
    write_huggingface(open_weights(tmp_path / "checkpoint"), tmp_path / "back", None, 10**9)
    back, there = tensors_of(tmp_path / "back"), tensors_of(tmp_path / "source")
    assert back.keys() == there.keys() and all(torch.equal(back[key].float(), there[key].float()) for key in there)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("config", [V3, GLM4], ids=["v3", "glm4"])
def test_mtp_module_is_that_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    """From the same hidden state and tokens; transformers reads the folder's MTP layer by itself."""
    from transformers.modeling_layers import MtpModel

    random_model(config).save_pretrained(tmp_path / "source")
    add_mtp(tmp_path / "source")
    main = AutoModelForCausalLM.from_pretrained(tmp_path / "source", attn_implementation="eager").eval()
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]  # how transformers knows MTP layers
    hidden = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        theirs = MtpModel.from_pretrained(main).eval()
        right = theirs.forward_layer(0, hidden, torch.arange(20)[None], None, input_ids=tokens(20))
    weights = open_weights(tmp_path / "source")
    assert relative(our_mtp_states(weights, hidden, tokens(20)), right) < BOUND


def test_gpt_oss_in_mxfp4_is_read(tmp_path: Path) -> None:
    """As published: experts in blocks with exponents. transformers' own way to numbers is the truth."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = random_model(GPT_OSS | dict(intermediate_size=32))
    chance = torch.Generator().manual_seed(6)
    packed: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            E, columns, rows = parameter.shape
            blocks = torch.randint(0, 256, (E, rows, columns // 32, 16), generator=chance, dtype=torch.uint8)
            scales = torch.randint(120, 126, (E, rows, columns // 32), generator=chance, dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.save_pretrained(tmp_path / "numbers")
    config = json.loads((tmp_path / "numbers" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    numbers = tensors_of(tmp_path / "numbers")
    others = {key: value for key, value in numbers.items() if f"{key}_blocks" not in packed}
    weights = open_weights(write_folder(tmp_path / "source", config, others | packed, files=3))
    assert relative(our_logits(weights, tokens()), logits_of(model, tokens())) < BOUND
    write_checkpoint(weights, tmp_path / "checkpoint", None, 10**9)
    write_huggingface(open_weights(tmp_path / "checkpoint"), tmp_path / "back", None, 10**9)
    back = tensors_of(tmp_path / "back")
    assert all(torch.equal(back[key].float(), numbers[key]) for key in numbers)
