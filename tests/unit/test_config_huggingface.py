"""config.json in and out: published files give the presets, nothing is ignored in silence, nothing is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.errors import ConfigError
from moe_engine.config.huggingface import effective, huggingface_config, model_config, read_model_config
from moe_engine.config.load import choices, load
from moe_engine.config.schema import ModelConfig
from moe_engine.config.strict import shown
from moe_engine.planner.flops import parameter_count

PUBLISHED = Path(__file__).resolve().parents[1] / "facts" / "huggingface"
NAMES = sorted(path.stem for path in PUBLISHED.glob("*.json"))
FAMILIES = ["deepseek_v3", "deepseek_v2_lite", "mixtral_8x7b", "qwen3_30b_a3b", "gpt_oss_20b"]  # one file of each


def published(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads((PUBLISHED / f"{name}.json").read_text()) | changes


def preset(name: str) -> ModelConfig:
    return load("train", [f"model={name}"]).model


def refusal(hf: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        model_config(hf)
    return str(error.value).splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_published_files_give_the_presets(name: str) -> None:
    found, expected = model_config(published(name)), preset(name)
    # How a training starts is the file's 0.02 there, and the report's in some presets.
    assert found == replace(expected, name=found.name, init_std=0.02)


@pytest.mark.parametrize("name", [name for name in choices("model", "train") if not name.startswith("llama")])
def test_every_preset_survives_the_way_out_and_back(name: str) -> None:
    """But the dense ones, which no config.json of a family with experts can say."""
    model = preset(name)
    back = model_config(huggingface_config(model, context_length=512))
    expected = replace(model, name=back.name, max_positions=model.max_positions or 512)
    if model.top_groups == model.num_groups:
        back = replace(back, group_score=model.group_score)
    assert back == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_no_key_is_ignored_in_silence(name: str) -> None:
    assert refusal(published(name, clip_qkv=8.0)) == [
        "clip_qkv=8.0: unknown key, which may change the model; remove it if it does not"
    ]
    assert model_config(published(name, clip_qkv=None)) == model_config(published(name))
    hf = published(name)
    del hf["hidden_size"]
    assert "hidden_size: a value is needed, a whole number such as 1" in refusal(hf)


@pytest.mark.parametrize(("name", "changes", "rule"), [
    ("deepseek_v3", {"hidden_act": "gelu"}, 'the engine\'s MLPs are SwiGLU; use hidden_act=silu'),
    ("deepseek_v3", {"attention_dropout": 0.1}, "the engine has no dropout; use attention_dropout=0.0"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "after the dense layers every layer has experts; use moe_layer_freq=1"),
    ("deepseek_v3", {"num_key_value_heads": 8},
     "latent attention has as many heads of keys as of queries; use num_key_value_heads=128"),
    ("deepseek_v3", {"rope_interleave": False},
     "the rotary numbers of latent attention are interleaved pairs; use rope_interleave=true"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "DeepSeek-V3 scores by sigmoid; use scoring_func=sigmoid"),
    ("deepseek_v3", {"n_routed_experts": "many"}, "must be a whole number such as 1"),
    ("deepseek_v3", {"n_routed_experts": True}, "must be a whole number such as 1"),
    ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "not built here; use default or yarn"),
    ("deepseek_v3", {"rope_parameters": "yarn"}, "must be an object such as {}"),
    ("deepseek_v2_lite", {"norm_topk_prob": True},
     "libraries differ in what DeepSeek-V2 does with normalised weights; use norm_topk_prob=false"),
    ("deepseek_v2_lite", {"topk_method": "noaux_tc"},
     "DeepSeek-V2 chooses otherwise; use greedy or group_limited_greedy"),
    ("mixtral_8x7b", {"router_jitter_noise": 0.1}, "the router's input is taken as it is; use router_jitter_noise=0.0"),
    ("mixtral_8x7b", {"partial_rotary_factor": 0.5},
     "unknown key, which may change the model; remove it if it does not"),
    ("qwen3_30b_a3b", {"num_hidden_layers": 10**12}, "must be 10000 or less"),
    ("qwen3_30b_a3b", {"decoder_sparse_step": 0}, "the last of so many layers has experts; use 1 or more"),
    *[("qwen3_30b_a3b", {"mlp_only_layers": layers},
       "layers are counted from 0 and there are num_hidden_layers=48; use those, as in [0, 1]")
      for layers in ([3, 48], [-1], ["3"], [None])],
    ("qwen1_5_moe_a2_7b", {"use_sliding_window": True},
     "windows that alternate from the first layer on are not built here; use use_sliding_window=false"),
    ("qwen1_5_moe_a2_7b", {"layer_types": ["sliding_attention"]},
     "every layer sees all that came before; use full_attention for each"),
    ("qwen1_5_moe_a2_7b", {"shared_expert_intermediate_size": 1000},
     "the shared expert is as wide as whole experts, moe_intermediate_size=1408"),
    ("olmoe_1b_7b", {"clip_qkv": 8.0}, "queries, keys and values are not clipped; use clip_qkv=null"),
    ("glm4_5_air", {"scoring_func": "softmax"}, "GLM-4-MoE scores by sigmoid; use scoring_func=sigmoid"),
    ("qwen1_5_moe_a2_7b", {"layer_types": [{}]},
     "every layer sees all that came before; use full_attention for each"),
    ("glm4_5_air", {"partial_rotary_factor": 0.0}, "pairs turn: above 0 to 1, and an even number of 128"),
    ("glm4_5_air", {"partial_rotary_factor": 0.01}, "pairs turn: above 0 to 1, and an even number of 128"),
    ("glm4_5_air", {"partial_rotary_factor": 1.5}, "pairs turn: above 0 to 1, and an even number of 128"),
    ("glm4_5_air", {"partial_rotary_factor": float("nan")}, "pairs turn: above 0 to 1, and an even number of 128"),
    ("gpt_oss_20b", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
     "one for each of 24 layers; windows are on all, on none, or on every other one from the first"),
    ("gpt_oss_20b", {"layer_types": ["sliding_attention"]},
     "one for each of 24 layers; windows are on all, on none, or on every other one from the first"),
    ("gpt_oss_20b", {"sliding_window": -1}, "so many keys are seen; use 1 or more, or null"),
    ("gpt_oss_20b", {"swiglu_limit": 0.0}, "gates and ups are clamped to it; use a number above 0 such as 7.0"),
])  # fmt: skip
def test_what_the_engine_cannot_follow_is_refused_by_name(name: str, changes: dict[str, Any], rule: str) -> None:
    ((key, value),) = changes.items()
    line = f"{shown(key, value)}: {rule}"
    if key == "rope_scaling":
        line = f"rope_parameters.rope_type=linear: {rule}"
    elif key == "partial_rotary_factor" and name == "glm4_5_air":
        line = f"rope_parameters.{line}"
    assert refusal(published(name, **changes)) == [line]


@pytest.mark.parametrize(("name", "key"), [
    ("deepseek_v3", "q_lora_rank"), ("deepseek_v3", "n_group"), ("deepseek_v3", "routed_scaling_factor"),
    ("deepseek_v2_lite", "n_shared_experts"), ("glm4_5_air", "topk_group"),
    ("gpt_oss_20b", "head_dim"),
])  # fmt: skip
def test_keys_whose_absence_means_a_size_must_be_there(name: str, key: str) -> None:
    hf = published(name)
    del hf[key]
    assert refusal(hf) == [f"{key}: must be in the file, if only as null, since its absence means a value of its own"]


def yarn(**changes: Any) -> dict[str, Any]:
    rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096} | changes
    return published("deepseek_v3", rope_scaling=rope)


@pytest.mark.parametrize(("changes", "rule"), [
    ({"mscale": 0.7}, "libraries differ in what one of mscale and mscale_all_dim means; give both or none"),
    ({"mscale_all_dim": 1.0}, "libraries differ in what one of mscale and mscale_all_dim means; give both or none"),
    ({"attention_factor": 2.0}, "here it follows from the other values; leave it out, or use 1.368888"),
    ({"short_factor": [1.0]}, "unknown key, which may change the model; remove it if it does not"),
    ({"partial_rotary_factor": 0.5}, "the whole head turns; use rope_parameters.partial_rotary_factor=1.0"),
    ({"original_max_position_embeddings": None}, "a value is needed, a whole number such as 1"),
])  # fmt: skip
def test_yarn_is_read_strictly(changes: dict[str, Any], rule: str) -> None:
    ((key, value),) = changes.items()
    name = f"rope_parameters.{key}"
    assert refusal(yarn(**changes)) == [f"{name if value is None else shown(name, value)}: {rule}"]


def test_rotary_options_are_the_same_in_both_spellings() -> None:
    old = published("deepseek_v3")
    scaling = old["rope_scaling"]
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": 10000.0}
    assert model_config(new) == model_config(old)
    assert model_config(yarn(factor=None)).rope_factor == 40.0  # the longest context over the original one
    assert model_config(published("mixtral_8x7b", rope_theta=None)).rope_theta == 1e6  # the family's default


def test_two_spellings_that_differ_are_refused() -> None:
    same = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
    assert model_config(yarn() | {"rope_parameters": same}).rope_scaling == "yarn"
    for other in ({"rope_type": "default"}, same | {"factor": 20}):
        with pytest.raises(ConfigError, match=r"rope_scaling=.*: rope_parameters says something else"):
            model_config(yarn() | {"rope_parameters": other})


def test_more_dense_layers_than_layers_are_all_layers() -> None:
    dense = model_config(published("deepseek_v3", first_k_dense_replace=99))
    assert dense.num_dense_layers == dense.num_layers == 61


def test_all_mistakes_are_shown_at_once() -> None:
    lines = refusal(published("mixtral_8x7b", hidden_act="relu", attention_dropout=0.5, whatever=1))
    assert [line.partition("=")[0] for line in lines] == ["hidden_act", "attention_dropout", "whatever"]


def test_unknown_families_are_refused() -> None:
    assert refusal({"model_type": "deepseek_v4"})[0].startswith(
        "model_type=deepseek_v4: the engine does not know it; did you mean deepseek_v"
    )
    assert refusal({})[0].endswith(
        "there are deepseek_v3, deepseek_v2, kimi_k2, mixtral, qwen3_moe, qwen2_moe, olmoe, glm4_moe, gpt_oss, "
        "ernie4_5_moe"
    )


@pytest.mark.parametrize(("name", "changes", "lost"), [
    ("deepseek_v3", {"latent_norm_eps": 1e-5}, "a deepseek_v3 config.json cannot say this; it would mean 1e-06"),
    ("deepseek_v3", {"group_score": "max"}, "a deepseek_v3 config.json cannot say this; it would mean sum_top2"),
    ("deepseek_v3", {"num_shared_experts": 0}, "a deepseek_v3 config.json needs a shared expert; use 1 or more"),
    ("glm4_5_air", {"num_shared_experts": 0}, "a glm4_moe config.json needs a shared expert; use 1 or more"),
    ("deepseek_v2_lite", {"mtp_depth": 1}, "a deepseek_v2 config.json cannot say this; it would mean 0"),
    ("mixtral_8x7b", {"normalize_weights": False}, "a mixtral config.json cannot say this; it would mean true"),
    ("mixtral_8x7b", {"num_dense_layers": 1}, "a mixtral config.json cannot say this; it would mean 0"),
    ("deepseek_v3", {"dense_layers": [5]}, "a deepseek_v3 config.json cannot say this; it would mean []"),
    ("qwen3_30b_a3b", {"num_shared_experts": 1}, "a qwen3_moe config.json cannot say this; it would mean 0"),
    ("olmoe_1b_7b", {"head_dim": 64}, "a olmoe config.json cannot say this; it would mean 128"),
    ("olmoe_1b_7b", {"attention_out_bias": True}, "a olmoe config.json cannot say this; it would mean false"),
    ("qwen3_30b_a3b", {"rope_style": "interleaved"}, "a qwen3_moe config.json cannot say this; it would mean halves"),
])  # fmt: skip
def test_what_no_file_can_say_is_not_written(name: str, changes: dict[str, Any], lost: str) -> None:
    with pytest.raises(ConfigError) as error:
        huggingface_config(replace(preset(name), **changes))
    ((key, value),) = changes.items()
    back = lost.replace("would mean ", f"would mean model.{key}=")
    assert f"{shown(f'model.{key}', value)}: {back}" in str(error.value).splitlines()


def test_what_is_said_in_another_way_is_written() -> None:
    """Windows nowhere; of one layer; and shares of a head that a division rounds down."""
    gpt_oss, glm4 = preset("gpt_oss_20b"), preset("glm4_5_air")
    for model in (
        replace(gpt_oss, sliding_window=0),
        replace(gpt_oss, num_layers=1),
        *(replace(glm4, head_dim=44, rotary_dim=turned) for turned in range(2, 44, 2)),
    ):
        back = model_config(huggingface_config(model))
        assert effective(back) == effective(model)
    nowhere = huggingface_config(replace(gpt_oss, sliding_window=0))
    assert nowhere["layer_types"] == ["full_attention"] * 24


@pytest.mark.parametrize(("keys", "dense"), [
    ({"mlp_only_layers": [0, 1]}, [0, 1]), ({"mlp_only_layers": [3, 1]}, [1, 3]),
    ({"decoder_sparse_step": 2}, [0, 2, 4]), ({"mlp_only_layers": [1], "decoder_sparse_step": 3}, [0, 1, 3, 4]),
    ({"decoder_sparse_step": 7}, list(range(6))), ({"mlp_only_layers": None}, []),
])  # fmt: skip
def test_dense_layers_may_be_anywhere(keys: dict[str, Any], dense: list[int]) -> None:
    """As transformers' Qwen3MoeDecoderLayer reads the two keys; one of them is enough to write any pattern."""
    model = model_config(published("qwen3_30b_a3b", num_hidden_layers=6, **keys))
    assert model.all_dense_layers() == dense
    back = huggingface_config(model)
    assert (back["mlp_only_layers"], back["decoder_sparse_step"]) == (dense, 1)
    assert model_config(back) == model


def ernie(**changes: Any) -> dict[str, Any]:
    """The sizes of ERNIE-4.5-21B-A3B, as transformers' configuration class has them."""
    return {
        "model_type": "ernie4_5_moe", "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288,
        "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "use_bias": False, "moe_num_experts": 64, "moe_k": 6,
        "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "num_nextn_predict_layers": 1,
    } | changes  # fmt: skip


@pytest.mark.parametrize(("keys", "dense"), [
    ({}, [0]), ({"moe_layer_start_index": 0}, []), ({"moe_layer_interval": 3}, [0, 1, 3, 4]),
    ({"moe_layer_interval": 2, "moe_layer_start_index": 2}, [0, 1, 2, 4]),
    ({"moe_layer_end_index": 3}, [0, 4, 5]), ({"moe_layer_start_index": 4, "moe_layer_end_index": 4}, [0, 1, 2, 3, 5]),
    ({"moe_layer_start_index": 6}, [0, 1, 2, 3, 4, 5]),
])  # fmt: skip
def test_layers_with_experts_between_a_first_and_a_last(keys: dict[str, Any], dense: list[int]) -> None:
    """As transformers' Ernie4_5_MoeDecoderLayer reads the three keys."""
    model = model_config(ernie(num_hidden_layers=6, **keys))
    assert model.all_dense_layers() == dense and model.mtp_depth == 0 and model.tied_head
    assert model_config(huggingface_config(model)) == model


def test_the_size_of_ernie() -> None:
    count = parameter_count(model_config(ernie()))
    assert (round(count.total / 1e9, 1), round(count.active / 1e9)) == (21.8, 3)


@pytest.mark.parametrize(("changes", "rule"), [
    ({"use_bias": True}, "no projection has a bias here; use use_bias=false"),
    ({"moe_norm_min": 0.1}, "the sum that weights are divided by is above it; use moe_norm_min=1e-12"),
    ({"moe_gate": "top2"}, "the best experts are chosen; use moe_gate=topk"),
    ({"moe_layer_interval": 0}, "the last of so many layers has experts; use 1 or more"),
    ({"moe_num_experts": [64, 64]}, "must be a whole number such as 1"),
])  # fmt: skip
def test_what_of_ernie_is_not_built_is_refused(changes: dict[str, Any], rule: str) -> None:
    ((key, value),) = changes.items()
    assert refusal(ernie(**changes)) == [f"{shown(key, value)}: {rule}"]


@pytest.mark.parametrize("dense", [[1, 2], [0, 3], [0, 2, 4]])
def test_a_pattern_that_ernie_cannot_say_is_not_written(dense: list[int]) -> None:
    model = replace(model_config(ernie(num_hidden_layers=7)), num_dense_layers=0, dense_layers=dense)
    with pytest.raises(ConfigError, match=r"^model.dense_layers=\[.*\]: an ernie4_5_moe config.json has experts in ev"):
        huggingface_config(model)


def test_the_same_dense_layers_said_otherwise_are_the_same_model() -> None:
    v3 = preset("deepseek_v3")
    assert effective(replace(v3, num_dense_layers=1, dense_layers=[2, 1])) == effective(v3)
    assert huggingface_config(replace(v3, num_dense_layers=1, dense_layers=[2, 1])) == huggingface_config(v3)


def test_files_and_folders_are_read_and_errors_name_them(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(
        ConfigError, match=r"config\.json: no such file; name a Hugging Face config\.json or the folder"
    ):
        read_model_config(tmp_path)
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not readable as JSON: "):
        read_model_config(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: an object with keys is expected"):
        read_model_config(file)
    file.write_text(json.dumps(published("mixtral_8x7b", hidden_act="relu")))
    with pytest.raises(ConfigError, match=r"config\.json: hidden_act=relu: "):
        read_model_config(file)
    file.write_text(json.dumps(published("mixtral_8x7b")))
    assert read_model_config(file) == read_model_config(tmp_path) == model_config(published("mixtral_8x7b"))


def test_the_command_line_takes_a_file_for_a_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published("qwen3_30b_a3b")))
    for place in (file, f"{tmp_path}/"):
        config = load("train", ["experiment=quickstart", f"model={place}", "model.num_layers=2"])
        assert config.model == replace(model_config(published("qwen3_30b_a3b")), num_layers=2)
        assert config.run.name == "quickstart"
    file.write_text(json.dumps(published("qwen3_30b_a3b", hidden_act="relu")))
    with pytest.raises(ConfigError) as error:
        load("train", [f"model={file}", "train.stps=3"])
    first, second = str(error.value).splitlines()
    assert first.startswith(f"model={file}: hidden_act=relu: ") and second.startswith("train.stps=3: ")
