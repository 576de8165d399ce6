"""Small Hugging Face folders and their logits, on both sides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measures import same_bits
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_engine.checkpoint.huggingface.names import FAMILIES, names
from moe_engine.checkpoint.weights import Weights, fill_stages
from moe_engine.config.huggingface import huggingface_config
from moe_engine.config.huggingface_writers import family_of
from moe_engine.config.schema import ModelConfig, MoESection
from moe_engine.layout import Placement, split_stages
from moe_engine.model.attention import sequence_context
from moe_engine.model.batch import Batch, count_items
from moe_engine.model.block import follow
from moe_engine.model.mtp import MTPModule
from moe_engine.model.transformer import LossRule, Stage
from moe_engine.ops.embedding import embedding


def our_stage(weights: Weights, dtype: torch.dtype = torch.float32) -> Stage:
    """The whole model on one rank, with these weights."""
    specs = split_stages(weights.model, 1)
    stage = Stage(specs[0], weights.model, MoESection(), None, dtype).eval()
    fill_stages(weights, [stage], Placement(tuple(specs), ((0,),)))
    return stage


@torch.no_grad()
def our_logits(weights: Weights, tokens: Tensor) -> Tensor:
    """Logits [B, S, V] of `tokens` [B, S]."""
    stage = our_stage(weights)
    batch = batch_of(tokens)
    out = stage(batch, None, LossRule(count_items([batch]), 0.0))
    return stage.logits(out.x).view(*tokens.shape, -1)


def batch_of(tokens: Tensor) -> Batch:
    places = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return Batch(tokens[None], tokens[None], places, torch.zeros_like(tokens, dtype=torch.int32))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by key."""
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return found


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], files: int = 1) -> Path:
    """A folder with these tensors, dealt out over `files` files (with an index, if several)."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    places = {key: names[i % files] for i, key in enumerate(sorted(tensors))}
    for name in names:
        save_file({key: tensors[key] for key in places if places[key] == name}, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """The same keys, types and bits."""
    return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)


def relative(found: Tensor, right: Tensor) -> float:
    """|found - right| / |right| in the Euclidean norm, in fp64."""
    return float((found.double() - right.double()).norm() / right.double().norm())


V3 = ModelConfig(
    vocab_size=260, dim=32, num_layers=3, num_dense_layers=1, dense_hidden=48, num_heads=2, q_lora_rank=24,
    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, num_experts=8, top_k=2, expert_hidden=16,
    num_shared_experts=1, num_groups=4, top_groups=2, route_scale=2.5, mtp_depth=1, norm_eps=1e-5, max_positions=4096,
)  # fmt: skip

V2 = replace(
    V3, q_lora_rank=0, score_function="softmax", group_score="max", normalize_weights=False, mtp_depth=0,
    num_shared_experts=2,
)  # fmt: skip

MIXTRAL = replace(
    V2, attention="gqa", num_heads=4, num_kv_heads=2, head_dim=8, rope_style="halves", num_dense_layers=0,
    num_shared_experts=0, num_groups=1, top_groups=1, normalize_weights=True, route_scale=1.0,
)  # fmt: skip
QWEN3 = replace(MIXTRAL, qk_norm=True, normalize_weights=False)
QWEN2 = replace(MIXTRAL, attention_bias=True, shared_gate=True, num_shared_experts=2, normalize_weights=False)
OLMOE = replace(QWEN3, qk_norm_whole=True, attention_bias=True, attention_out_bias=True)
GPT_OSS = replace(
    MIXTRAL, attention_bias=True, attention_out_bias=True, attention_sinks=True, sliding_window=16,
    sliding_window_every=2, expert_biases=True, swiglu_limit=7.0,
)  # fmt: skip
ERNIE4_5 = replace(
    MIXTRAL, num_dense_layers=1, num_shared_experts=2, rope_style="interleaved", tied_head=True, dense_hidden=48
)
GLM4 = replace(
    V3, attention="gqa", num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=4, rope_style="halves", qk_norm=True,
    attention_bias=True,
)  # fmt: skip


def random_tensors(
    model: ModelConfig, fused: bool = False, dtype: torch.dtype = torch.float32, std: float = 1.0
) -> dict[str, Tensor]:
    """A value for every tensor of a model's folder, by key; copies are copies, balancing biases are fp32."""
    both = names(model, FAMILIES[family_of(model)])
    chance = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for mapped in both.tensors.values():
        for rows in mapped.forms[-1 if fused else 0] if mapped.forms else ():
            kind = torch.float32 if rows.key.endswith("bias") else dtype
            tensors.setdefault(rows.key, (std * torch.randn(rows.whole_shape, generator=chance)).to(kind))
    for copy in both.copies:
        if copy.written:
            tensors[copy.key] = tensors[copy.original].clone()
    return tensors


def random_folder(folder: Path, model: ModelConfig = V3, files: int = 1, **how: Any) -> Path:
    return write_folder(folder, huggingface_config(model), random_tensors(model, **how), files)


@torch.no_grad()
def our_mtp_states(weights: Weights, hidden: Tensor, tokens: Tensor) -> Tensor:
    """What the head reads of the first MTP module [B, S, D], for a hidden state [B, S, D] and tokens [B, S]."""
    stage, batch = our_stage(weights), batch_of(tokens)
    module = stage.mtp["0"]
    assert isinstance(module, MTPModule) and stage.embedding is not None
    context = sequence_context(batch, weights.model, torch.float32)
    embedded = embedding(tokens.reshape(-1), stage.embedding.weight)
    x, _ = follow(module.walk(hidden.flatten(0, 1), embedded, context))
    return module.norm(x).view(hidden.shape)


def fp8_folder(folder: Path, model: ModelConfig, fused: bool = False) -> tuple[Path, dict[str, Tensor]]:
    """Every matrix of attention and MLPs as codes and scales, scales in other files; the values they stand for."""
    tensors, stored = random_tensors(model, fused), {}
    values = dict(tensors)
    for key, tensor in tensors.items():
        stored[key] = tensor
        if tensor.dim() < 2 or not any(word in key for word in ("self_attn", "mlp.")) or "gate.weight" in key:
            continue
        *stacked, rows, columns = tensor.shape
        codes = tensor.clamp(-400, 400).to(torch.float8_e4m3fn)
        scale = torch.rand(*stacked, -(-rows // 128), -(-columns // 128)) + 0.5
        stored[key], stored[f"{key}_scale_inv"] = codes, scale
        spread = scale.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]
        values[key] = codes.float() * spread
    config = huggingface_config(model) | {
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        }
    }  # fmt: skip
    return write_folder(folder, config, stored, files=3), values
