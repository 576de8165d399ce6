"""Hugging Face folders read and written: every bit and every range comes through, fp8 codes as numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_folders import (
    GPT_OSS,
    MIXTRAL,
    QWEN3,
    V2,
    V3,
    equal,
    fp8_folder,
    our_logits,
    random_folder,
    random_tensors,
    tensors_of,
    write_folder,
)
from layout_cases import Case, config_of
from layouts import rank_batches
from measures import same_bits
from torch import Tensor

import moe_kernels
from moe_engine.checkpoint.huggingface.reader import dequantise
from moe_engine.checkpoint.huggingface.writer import write_huggingface
from moe_engine.checkpoint.stream import Announced, Progress, write_file
from moe_engine.checkpoint.weights import CheckpointWeights, Weights, open_weights, write_checkpoint
from moe_engine.config.errors import ConfigError
from moe_engine.config.huggingface import huggingface_config
from moe_engine.config.schema import ModelConfig
from moe_engine.trainer import Trainer

SMALL_SHARD = 20_000  # bytes: several files


def there_and_back(folder: Path, out: Path, dtype: torch.dtype | None = None) -> tuple[Weights, Weights]:
    """The folder as a checkpoint and as a folder again."""
    write_checkpoint(open_weights(folder), out / "checkpoint", dtype, SMALL_SHARD)
    checkpoint = open_weights(out / "checkpoint")
    write_huggingface(checkpoint, out / "folder", None, SMALL_SHARD)
    return checkpoint, open_weights(out / "folder")


MODELS = {
    "v3": V3,
    "v3, two MTP modules, tied": replace(V3, mtp_depth=2, tied_head=True),
    "v3, square matrices": replace(V3, dense_hidden=32, expert_hidden=32, kv_lora_rank=32, q_lora_rank=32),
    "v2": V2,
    "mixtral": MIXTRAL,
    "qwen3": QWEN3,
}


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_there_and_back_keeps_every_bit(model: ModelConfig, files: int, tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source", model, files, dtype=torch.bfloat16)
    checkpoint, folder = there_and_back(source, tmp_path)
    assert checkpoint.model == folder.model == open_weights(source).model
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) > 1
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 1
    assert equal(tensors_of(tmp_path / "folder"), tensors_of(source))


def test_fused_experts_are_the_same_weights(tmp_path: Path) -> None:
    plain, fused = random_tensors(V3), random_tensors(V3, fused=True)
    for key in [key for key in plain if ".experts." in key and key.endswith("gate_proj.weight")]:
        layer, e = key.split(".experts.")[0], int(key.split(".")[-3])
        up, down = key.replace("gate_proj", "up_proj"), key.replace("gate_proj", "down_proj")
        fused[f"{layer}.experts.gate_up_proj"][e] = torch.cat([plain.pop(key), plain.pop(up)])
        fused[f"{layer}.experts.down_proj"][e] = plain.pop(down)
    fused |= plain
    source = write_folder(tmp_path / "fused", huggingface_config(V3), fused, files=2)
    there_and_back(source, tmp_path)
    assert equal(tensors_of(tmp_path / "folder"), random_tensors(V3))


def test_index_and_files_agree(tmp_path: Path) -> None:
    there_and_back(random_folder(tmp_path / "source"), tmp_path)
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    found = tensors_of(tmp_path / "folder")
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    files = sorted(path.name for path in (tmp_path / "folder").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and files[0].startswith(f"model-00001-of-{len(files):05}")


def test_tensor_larger_than_a_file_has_a_file_of_its_own(tmp_path: Path) -> None:
    sizes = write_checkpoint(open_weights(random_folder(tmp_path / "source")), tmp_path / "out", None, 1)
    assert len(sizes) == len(CheckpointWeights(tmp_path / "out").shapes)


def test_dtype_casts_all_but_the_balancing_biases(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source")
    there_and_back(source, tmp_path, dtype=torch.bfloat16)
    kinds = {key: tensor.dtype for key, tensor in tensors_of(tmp_path / "folder").items()}
    assert {kind for key, kind in kinds.items() if key.endswith("bias")} == {torch.float32}
    assert {kind for key, kind in kinds.items() if not key.endswith("bias")} == {torch.bfloat16}
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_any_range_is_that_of_the_whole(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source", fused=False)
    weights = open_weights(source)
    write_checkpoint(weights, tmp_path / "out", None, SMALL_SHARD)
    chance = torch.Generator().manual_seed(0)
    for each in (weights, open_weights(tmp_path / "out")):
        for name, shape in each.shapes.items():
            whole, numel = each.read(name), torch.Size(shape).numel()
            assert whole.shape == (numel,)
            for _ in range(4):
                start, end = sorted(torch.randint(0, numel + 1, (2,), generator=chance).tolist())
                assert torch.equal(each.read(name, start, end), whole[start:end]), (name, start, end)


def test_halves_of_the_mtp_projection_change_places(tmp_path: Path) -> None:
    """Published: [embedding; hidden]. Here: [hidden; embedding]."""
    source = random_folder(tmp_path / "source")
    there = tensors_of(source)["model.layers.3.eh_proj.weight"]
    here = open_weights(source).read("mtp.0.proj.weight").view(32, 64)
    assert torch.equal(here[:, :32], there[:, 32:]) and torch.equal(here[:, 32:], there[:, :32])


def test_model_computes_the_same_from_both(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source")
    checkpoint, folder = there_and_back(source, tmp_path)
    tokens = torch.arange(24).view(2, 12)
    logits = [our_logits(each, tokens) for each in (open_weights(source), checkpoint, folder)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    config = huggingface_config(V3) | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    source = write_folder(tmp_path / "source", config, random_tensors(V3), files=2)
    there_and_back(source, tmp_path)
    assert equal(tensors_of(tmp_path / "folder"), tensors_of(source))


# fp8


def test_fp8_codes_become_the_numbers_they_stand_for(tmp_path: Path) -> None:
    """Sizes of one block, of several, and of blocks that are cut, as kv_a_proj_with_mqa's 576 rows are."""
    model = replace(V3, dim=200, kv_lora_rank=140, dense_hidden=384, expert_hidden=130)
    source, values = fp8_folder(tmp_path / "source", model)
    weights = open_weights(source)
    assert weights.dtype("layers.0.attention.kv_down.weight") == torch.float32
    whole = weights.read("layers.0.attention.kv_down.weight")
    assert torch.equal(weights.read("layers.0.attention.kv_down.weight", 130 * 200 + 7, 143 * 200), whole[26007:28600])
    there_and_back(source, tmp_path)
    assert equal(tensors_of(tmp_path / "folder"), values)


def in_fp8(source: Path, out: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint written for Hugging Face in fp8."""
    write_huggingface(open_weights(source), out, torch.float8_e4m3fn, SMALL_SHARD)
    return tensors_of(out)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_codes_and_scales_come_back_as_they_were(tmp_path: Path, power_of_two: bool) -> None:
    """Through fp32 master weights; with scales of any size, blocks that are cut, and codes that fill no range."""
    model = replace(V3, dim=200, kv_lora_rank=140, dense_hidden=384, expert_hidden=130, mtp_depth=1)
    source, _ = fp8_folder(tmp_path / "source", model)
    stored = tensors_of(source)
    for key in [key for key in stored if key.endswith("_scale_inv")]:
        stored[key] = stored[key].log2().round().exp2() if power_of_two else stored[key] * 10 ** torch.rand(()) * 1e-4
    config = json.loads((source / "config.json").read_text())
    source = write_folder(tmp_path / "scaled", config, stored, files=4)
    write_checkpoint(open_weights(source), tmp_path / "checkpoint", None, SMALL_SHARD)
    back = in_fp8(tmp_path / "checkpoint", tmp_path / "back")
    assert equal(back, stored)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["quantization_config"] == config["quantization_config"]
    assert written["torch_dtype"] == "float32"
    again, whole = open_weights(tmp_path / "back"), open_weights(source)
    assert all(torch.equal(again.read(name), whole.read(name)) for name in whole.shapes)


def test_moved_weights_get_codes_of_their_own(tmp_path: Path) -> None:
    """Scales that a checkpoint kept are used only where they still give its values."""
    source, _ = fp8_folder(tmp_path / "source", V3)
    write_checkpoint(open_weights(source), tmp_path / "checkpoint", torch.bfloat16, SMALL_SHARD)
    back, stored, values = in_fp8(tmp_path / "checkpoint", tmp_path / "back"), tensors_of(source), 0
    assert back.keys() == stored.keys()
    for key in [key for key in stored if f"{key}_scale_inv" in stored]:
        rounded = dequantise(stored[key], stored[f"{key}_scale_inv"]).bfloat16()
        codes, _, scale = moe_kernels.quantize_blocks(rounded)
        values += not same_bits(back[key], stored[key])
        assert same_bits(back[key], codes) and same_bits(back[f"{key}_scale_inv"], scale), key
    assert values > 10


def test_a_trained_model_is_written_with_the_codes_it_was_trained_with(tmp_path: Path) -> None:
    case = Case(precision="fp8", micro_batch=8, layers=2)
    trainer = Trainer(config_of(case), 0, torch.device("cpu"))
    trainer.step(rank_batches(trainer, case, 0))
    back = in_fp8(trainer.save(tmp_path), tmp_path / "back")
    assert trainer.fp8 is not None
    block = trainer.stages[0].layers["1"]
    experts = trainer.fp8.weight(block.moe.experts.down)
    for e in range(8):
        key = f"model.layers.1.mlp.experts.{e}.down_proj.weight"
        assert same_bits(back[key], experts.codes[e]) and same_bits(back[f"{key}_scale_inv"], experts.scale[e])
    out = trainer.fp8.weight(block.attention.out.weight)
    assert same_bits(back["model.layers.1.self_attn.o_proj.weight"], out.codes[0])
    for key in ("lm_head.weight", "model.layers.1.mlp.gate.weight", "model.layers.2.eh_proj.weight"):
        assert back[key].dtype == torch.float32 and f"{key}_scale_inv" not in back


def test_fused_fp8_experts_have_scales_of_their_own(tmp_path: Path) -> None:
    source, values = fp8_folder(tmp_path / "source", replace(V3, dim=136, expert_hidden=72), fused=True)
    weights = open_weights(source)
    for e in range(8):
        expert = "layers.2.moe.experts"
        assert torch.equal(
            weights.read(f"{expert}.{e}.gate_up").view(144, 136), values["model.layers.2.mlp.experts.gate_up_proj"][e]
        )
        assert torch.equal(
            weights.read(f"{expert}.{e}.down").view(136, 72), values["model.layers.2.mlp.experts.down_proj"][e]
        )


@pytest.mark.parametrize("rows", [1, 3])
def test_parts_of_a_tensor_are_what_was_announced(rows: int, tmp_path: Path) -> None:
    parts = (torch.full((1, 2), float(i)) for i in range(rows))
    with pytest.raises(ValueError, match=f"key: {rows} rows are not what was announced"):
        write_file(tmp_path / "file", [Announced("key", torch.float32, (2, 2))], lambda _: parts, Progress())


def test_experts_in_one_tensor_have_no_fp8_form(tmp_path: Path) -> None:
    weights = open_weights(random_folder(tmp_path / "source", GPT_OSS))
    with pytest.raises(ConfigError, match="dtype=fp8: gpt_oss folders have no such form; use dtype=bfloat16"):
        write_huggingface(weights, tmp_path / "out", torch.float8_e4m3fn, 10**9)
