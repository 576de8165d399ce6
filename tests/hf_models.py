"""Tiny random models made and saved by transformers: the other side of every parity test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

VOCABULARY = 64
DEEPSEEK = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
    first_k_dense_replace=1, num_attention_heads=2, num_key_value_heads=2, qk_rope_head_dim=8, qk_nope_head_dim=16,
    v_head_dim=12, q_lora_rank=24, kv_lora_rank=16, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
    routed_scaling_factor=2.5, rms_norm_eps=1e-5, max_position_embeddings=256,
)  # fmt: skip
V3 = DEEPSEEK | dict(model_type="deepseek_v3", n_group=4, topk_group=2, norm_topk_prob=True)
V2_LITE = DEEPSEEK | dict(
    model_type="deepseek_v2", q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1, topk_method="greedy",
    routed_scaling_factor=1.0,
)  # fmt: skip
GROUPED = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    num_experts_per_tok=2, rms_norm_eps=1e-5, max_position_embeddings=256,
)  # fmt: skip
MIXTRAL = GROUPED | dict(model_type="mixtral", intermediate_size=48, num_local_experts=4)
QWEN3 = GROUPED | dict(
    model_type="qwen3_moe", intermediate_size=48, moe_intermediate_size=16, num_experts=8, head_dim=16,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
QWEN2 = GROUPED | dict(
    model_type="qwen2_moe", intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=32,
    num_experts=8, norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
OLMOE = GROUPED | dict(model_type="olmoe", intermediate_size=16, num_experts=8, norm_topk_prob=False)
GLM4 = GROUPED | dict(
    model_type="glm4_moe", intermediate_size=48, moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=1,
    head_dim=16, first_k_dense_replace=1, num_hidden_layers=3, n_group=1, topk_group=1, norm_topk_prob=True,
    routed_scaling_factor=2.5, attention_bias=True, use_qk_norm=True,
)  # fmt: skip
GPT_OSS = GROUPED | dict(
    model_type="gpt_oss", intermediate_size=24, num_local_experts=8, head_dim=16, sliding_window=8, swiglu_limit=0.5,
    num_hidden_layers=3,
)  # fmt: skip
ERNIE4_5 = GROUPED | dict(
    model_type="ernie4_5_moe", intermediate_size=48, moe_intermediate_size=16, moe_num_experts=8, moe_k=2,
    moe_num_shared_experts=2, moe_layer_start_index=1, num_hidden_layers=3, tie_word_embeddings=True,
)  # fmt: skip
YARN = dict(type="yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1)


def random_model(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """A model whose every tensor matters: matrices of std 0.2, norms around 1, balancing biases of both signs."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = AutoConfig.for_model(config["model_type"])
    made = type(kind)(**{key: value for key, value in config.items() if key != "model_type"})
    model: nn.Module = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer))[torch.randperm(len(buffer))])
    return model


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens).logits
    return found


def opened(folder: Path) -> nn.Module:
    """The folder as transformers opens it. Raises AssertionError when it lacks tensors or holds others."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    wrong = {what: keys for what, keys in info.items() if keys}
    assert not wrong, wrong
    return model.eval()  # type: ignore[no-any-return]


def add_mtp(folder: Path, seed: int = 1) -> None:
    """MTP tensors made by hand, in a file of their own beside transformers' one, and an index over both."""
    config = json.loads((folder / "config.json").read_text())
    layer, dim, last = (
        f"model.layers.{config['num_hidden_layers']}.",
        config["hidden_size"],
        config["num_hidden_layers"] - 1,
    )
    from hf_folders import tensors_of

    tensors = tensors_of(folder)
    chance = torch.Generator().manual_seed(seed)
    block = [key for key in tensors if key.startswith(f"model.layers.{last}.")]
    mtp = {layer + key.split(".", 3)[3]: 0.2 * torch.randn(tensors[key].shape, generator=chance) for key in block}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        mtp[f"{layer}{name}.weight"] = torch.rand(dim, generator=chance) + 0.5
    mtp[f"{layer}eh_proj.weight"] = 0.2 * torch.randn(dim, 2 * dim, generator=chance)
    mtp[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    mtp[f"{layer}shared_head.head.weight"] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).clone()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / "model.safetensors").rename(folder / names[0])
    save_file(mtp, folder / names[1], {"format": "pt"})
    places = dict.fromkeys(tensors, names[0]) | dict.fromkeys(mtp, names[1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
