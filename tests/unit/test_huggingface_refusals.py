"""Hugging Face folders that are not as they should be: refused by name, and nothing half-written."""

from __future__ import annotations

import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_folders import (
    ERNIE4_5,
    GPT_OSS,
    V2,
    V3,
    fp8_folder,
    random_folder,
    random_tensors,
    tensors_of,
    write_folder,
)

from moe_engine.checkpoint.huggingface.reader import HuggingFaceWeights
from moe_engine.checkpoint.huggingface.writer import write_huggingface
from moe_engine.checkpoint.weights import CheckpointWeights, open_weights, write_checkpoint
from moe_engine.config.errors import ConfigError
from moe_engine.config.huggingface import huggingface_config
from moe_engine.config.schema import ModelConfig

SMALL_SHARD = 20_000  # bytes: several files


def changed(folder: Path, change: object, model: ModelConfig = V3) -> Path:
    tensors = random_tensors(model)
    change(tensors)  # type: ignore[operator]
    return write_folder(folder, huggingface_config(model), tensors)


DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(DOWN), f"{DOWN} is missing"),
        (lambda t: t.pop("model.layers.3.enorm.weight"), "layers.3.enorm.weight is missing"),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "model.extra.weight is used by nothing"),
        (lambda t: t.update({DOWN: t[DOWN].T.contiguous()}), r"has shape \[16, 32\] where .* has \[32, 16\]"),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.down_proj": torch.ones(8, 32, 16)}),
            "experts.down_proj is used by nothing",  # beside a tensor for each expert
        ),
        (
            lambda t: t.update({"model.layers.4.hnorm.weight": torch.ones(32)}),
            "layers.4.hnorm.weight is used by nothing",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int64)}), "norm.weight is of type I64"),
    ],
)
def test_folder_that_does_not_hold_the_model_is_refused_by_name(change: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        open_weights(changed(tmp_path / "source", change))


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["more"] = tensors.pop(DOWN)
        for e in range(8):
            tensors.pop(f"model.layers.2.mlp.experts.{e}.up_proj.weight")

    with pytest.raises(ConfigError, match=rf"{DOWN} is missing; .*experts.6.up_proj.weight is missing; and 2 more"):
        open_weights(changed(tmp_path / "source", change))


def test_tables_of_mtp_must_be_those_of_the_model(tmp_path: Path) -> None:
    key = "model.layers.3.shared_head.head.weight"
    weights = open_weights(changed(tmp_path / "source", lambda tensors: tensors[key][0].add_(1)))
    with pytest.raises(ConfigError, match=f"{key} differs from lm_head.weight"):
        weights.check_copies()
    without = changed(tmp_path / "without", lambda tensors: tensors.pop(key))  # some leave them out
    open_weights(without).check_copies()


def test_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    model = replace(V3, tied_head=True)
    same = changed(
        tmp_path / "same", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}), model
    )
    open_weights(same).check_copies()
    other = changed(tmp_path / "other", lambda t: t.update({"lm_head.weight": torch.ones(260, 32)}), model)
    with pytest.raises(ConfigError, match="lm_head.weight differs from model.embed_tokens.weight"):
        open_weights(other).check_copies()


def test_config_that_promises_mtp_and_has_none_is_said(tmp_path: Path) -> None:
    """transformers writes num_nextn_predict_layers=1 for any DeepSeek-V3, and no MTP tensors."""
    tensors = random_tensors(replace(V3, mtp_depth=0))
    weights = open_weights(write_folder(tmp_path / "source", huggingface_config(V3), tensors))
    assert weights.model.mtp_depth == 0 and "num_nextn_predict_layers=1" in weights.notes[0]


def test_mtp_modules_of_another_kind_are_left_away_and_that_is_said(tmp_path: Path) -> None:
    tensors = random_tensors(ERNIE4_5) | {f"model.mtp_{name}.0.weight": torch.ones(32) for name in ("norm", "proj")}
    weights = open_weights(write_folder(tmp_path / "source", huggingface_config(ERNIE4_5), tensors))
    assert weights.model.mtp_depth == 0 and "model.mtp_norm.0.weight and 1 more tensors" in weights.notes[0]
    with pytest.raises(ConfigError, match=r"model\.mtp_norm\.0\.weight is used by nothing in the model"):
        open_weights(changed(tmp_path / "v3", lambda t: t.update({"model.mtp_norm.0.weight": torch.ones(32)})))


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_fp8_scales_that_are_not_finite_are_refused(scale: float, tmp_path: Path) -> None:
    source, _ = fp8_folder(tmp_path / "source", V3)
    tensors = tensors_of(source)
    tensors["model.layers.2.mlp.experts.3.up_proj.weight_scale_inv"][0, 0] = scale
    config = json.loads((source / "config.json").read_text())
    weights = open_weights(write_folder(tmp_path / "changed", config, tensors))
    with pytest.raises(ConfigError, match=r"experts\.3\.up_proj\.weight_scale_inv has scales that are not finite"):
        write_checkpoint(weights, tmp_path / "checkpoint", None, SMALL_SHARD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed", "source"]


def test_old_rotary_buffers_are_passed_by(tmp_path: Path) -> None:
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    open_weights(changed(tmp_path / "source", lambda tensors: tensors.update({key: torch.ones(2)})))


def test_index_that_lies_is_refused(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source", files=2)
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    left_out = next(key for key in index["weight_map"] if key.endswith("norm.weight"))
    del index["weight_map"][left_out]
    index["weight_map"]["not.there"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"not.there is not in model-00001.*; {left_out} is in .* and not in model"):
        open_weights(source)
    index["weight_map"] |= {f"nor.this.{i}": "model-00001-of-00002.safetensors" for i in range(7)}
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"nor.this.6 is not in model-00001.*; and 1 more$"):
        open_weights(source)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="not an index"):
        open_weights(source)


@pytest.mark.parametrize("place", ["../other/model-00001-of-00002.safetensors", "/tmp/a.safetensors"])
def test_index_that_points_outside_its_folder_is_refused(place: str, tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source", files=2)
    shutil.copytree(source, tmp_path / "other")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = place
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"model.norm.weight in {place}: the files of an index lie beside it"):
        open_weights(source)


def test_an_index_beside_a_single_file_that_it_does_not_list_is_refused(tmp_path: Path) -> None:
    """transformers reads the single file then, others the index: the weights would depend on who reads."""
    source = random_folder(tmp_path / "source", files=2)
    shutil.copy(random_folder(tmp_path / "other") / "model.safetensors", source)
    with pytest.raises(ConfigError, match=r"holds model.safetensors and beside it .*index.json of other files"):
        open_weights(source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 99}, "model.top_k=99: a token cannot use more experts than there are"),
        ({"n_group": 3}, "model.num_groups=3: must divide model.num_experts=8"),
        ({"rms_norm_eps": -1.0}, "model.norm_eps=-1.0: must be larger than 0"),
        ({"hidden_size": 0}, "model.dim=0: must be 1 or more"),
        ({"attention_bias": True}, "model.attention_bias=true: latent attention is built without it"),
        ({"quantization_config": "fp8"}, "quantization_config=fp8: must be an object, or null"),
    ],
)
def test_config_of_no_model_is_refused_by_name(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        open_weights(source)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_file_of_brackets_alone_is_refused(file: str, tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source", files=2)
    (source / file).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=f"{file}: not "):
        open_weights(source)


@pytest.mark.parametrize(
    ("key", "number"),
    [("num_hidden_layers", 9_999), ("n_routed_experts", 10**12), ("num_nextn_predict_layers", 9_999)],
)
def test_config_of_a_far_larger_model_is_refused_at_once(key: str, number: int, tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {key: number}))
    with pytest.raises(
        ConfigError, match="describes a model of .* parameters in .* layers, and its files hold .* numbers"
    ):
        open_weights(source)


def test_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source", files=2)
    file = source / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="model-00002-of-00002.safetensors is missing or damaged"):
        open_weights(source)
    file.unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002.safetensors is missing or damaged"):
        open_weights(source)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        open_weights(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"neither config\.json nor index\.json"):
        open_weights(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="model_type=llama: weights of deepseek_v3,"):
        open_weights(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ["llama"]}')
    with pytest.raises(ConfigError, match=r"model_type=\['llama'\]: weights of"):
        open_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(huggingface_config(V3)))
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(ConfigError, match="pickles"):
        open_weights(tmp_path)


def test_other_quantisation_is_refused(tmp_path: Path) -> None:
    config = huggingface_config(V3) | {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(ConfigError, match=r"quantization_config.quant_method=gptq: only quant_method=fp8"):
        open_weights(write_folder(tmp_path / "source", config, random_tensors(V3)))


def test_what_the_layout_has_no_place_for_is_refused(tmp_path: Path) -> None:
    write_checkpoint(open_weights(random_folder(tmp_path / "source", V2)), tmp_path / "checkpoint", None, 10**9)
    weights = CheckpointWeights(tmp_path / "checkpoint")
    read = weights.read
    bias = "layers.1.moe.router.expert_bias"
    weights.read = lambda name, *rest: read(name, *rest) + (name == bias)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=f"{bias} is not zero"):
        write_huggingface(weights, tmp_path / "out", None, 10**9)
    assert not (tmp_path / "out").exists()


def test_softmax_model_has_zero_biases(tmp_path: Path) -> None:
    weights = HuggingFaceWeights(random_folder(tmp_path / "source", V2))
    assert torch.equal(weights.read("layers.1.moe.router.expert_bias"), torch.zeros(8))


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    weights = open_weights(random_folder(tmp_path / "source"))
    read, calls = weights.read, []

    def failing(name: str, *rest: int) -> torch.Tensor:
        calls.append(name)
        if len(calls) == 30:
            raise ConfigError("damaged")
        return read(name, *rest)

    weights.read = failing  # type: ignore[method-assign]
    for write in (write_checkpoint, write_huggingface):
        calls.clear()
        with pytest.raises(ConfigError, match="damaged"):
            write(weights, tmp_path / "out", None, SMALL_SHARD)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    weights = open_weights(random_folder(tmp_path / "source"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_SHARD // 2, hard))
    try:
        for write in (write_checkpoint, write_huggingface):
            with pytest.raises(ConfigError, match="cannot be written .*free some space or choose another folder"):
                write(weights, tmp_path / "out", None, SMALL_SHARD)
            assert [path.name for path in tmp_path.iterdir()] == ["source"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_disk_without_room_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = open_weights(random_folder(tmp_path / "source"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=100))
    with pytest.raises(ConfigError, match="and 100 are free; free some space or give another to"):
        write_huggingface(weights, tmp_path / "out", None, SMALL_SHARD)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    weights = open_weights(random_folder(tmp_path / "source"))
    left = tmp_path / ".out.partial"
    left.mkdir()
    (left / "weights_0.safetensors").write_text("half")
    write_checkpoint(weights, tmp_path / "out", None, SMALL_SHARD)
    assert not left.exists() and open_weights(tmp_path / "out").shapes == weights.shapes


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "source")
    for write in (write_checkpoint, write_huggingface):
        with pytest.raises(ConfigError, match="is already there"):
            write(open_weights(source), source, None, 10**9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale_inv"), "up_proj.weight is fp8 and .*_inv is missing"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 1)}),
            r"up_proj.weight_scale_inv has shape \[2, 1\] where .* needs \[1, 1\]",
        ),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.full((1, 1), 120, dtype=torch.uint8)}
            ),
            r"up_proj.weight_scale_inv is of type torch.uint8, scales are numbers like 0.5",
        ),
        (
            lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)}),
            "norm.weight_scale_inv is used by nothing",
        ),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(change: object, message: str, tmp_path: Path) -> None:
    source, _ = fp8_folder(tmp_path / "source", V3)
    tensors = tensors_of(source)
    change(tensors)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        open_weights(write_folder(tmp_path / "changed", huggingface_config(V3), tensors))


BLOCKS, EXPONENTS = (f"model.layers.1.mlp.experts.gate_up_proj_{word}" for word in ("blocks", "scales"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPONENTS), f"{EXPONENTS} is missing where {BLOCKS} needs"),
        (
            lambda t: t.update({EXPONENTS: t[EXPONENTS][:, :-1].clone()}),
            f"{EXPONENTS} has shape .* where {BLOCKS} needs",
        ),
        (lambda t: t.update({EXPONENTS: t[EXPONENTS].float()}), f"{EXPONENTS} is of type torch.float32"),
        (lambda t: t.update({BLOCKS: t[BLOCKS].to(torch.float8_e4m3fn)}), f"{BLOCKS} is of type torch.float8_e4m3fn"),
        (lambda t: t.update({BLOCKS: t[BLOCKS][..., :8].clone()}), f"{BLOCKS} has shape"),
        (lambda t: t.update({"model.norm.weight": t[BLOCKS][0, 0, 0].repeat(2)}), "norm.weight is of type torch.uint8"),
    ],
)
def test_mxfp4_blocks_without_their_exponents_are_refused(change: object, message: str, tmp_path: Path) -> None:
    tensors = random_tensors(GPT_OSS)
    weight = tensors.pop(BLOCKS.removesuffix("_blocks"))  # [experts, columns, rows]
    shape = (weight.shape[0], weight.shape[2], weight.shape[1] // 32)
    tensors |= {BLOCKS: torch.ones(*shape, 16, dtype=torch.uint8), EXPONENTS: torch.ones(shape, dtype=torch.uint8)}
    HuggingFaceWeights(write_folder(tmp_path / "whole", huggingface_config(GPT_OSS), tensors)).close()
    change(tensors)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        HuggingFaceWeights(write_folder(tmp_path / "source", huggingface_config(GPT_OSS), tensors))
