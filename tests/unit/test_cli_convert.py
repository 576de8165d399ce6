"""`moe-engine convert` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hf_folders import V3, equal, fp8_folder, random_folder, random_tensors, tensors_of, write_folder

from moe_engine.__main__ import main
from moe_engine.config.huggingface import huggingface_config
from moe_engine.config.huggingface_families import READERS


def convert(*words: str) -> int:
    return main(["convert", *words])


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = random_folder(tmp_path / "source", files=2)
    assert convert(f"from={source}", f"to={tmp_path / 'checkpoint'}") == 0
    assert "checkpoint" in capsys.readouterr().out
    assert convert(f"from={tmp_path / 'checkpoint'}", f"to={tmp_path / 'back'}", "max_shard_gb=1e-4") == 0
    assert "Hugging Face folder" in capsys.readouterr().out
    assert equal(tensors_of(tmp_path / "back"), tensors_of(source))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "checkpoint", "source"]


def test_fp8_is_for_hugging_face_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = fp8_folder(tmp_path / "source", V3)
    assert convert(f"from={source}", f"to={tmp_path / 'checkpoint'}", "dtype=fp8") == 2
    assert "dtype=fp8: a checkpoint has master weights; use dtype=keep" in capsys.readouterr().err
    assert convert(f"from={source}", f"to={tmp_path / 'checkpoint'}") == 0
    assert convert(f"from={tmp_path / 'checkpoint'}", f"to={tmp_path / 'back'}", "dtype=fp8", "max_shard_gb=1e-4") == 0
    assert equal(tensors_of(tmp_path / "back"), tensors_of(source))


def test_all_mistakes_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = convert(f"from={tmp_path / 'nowhere'}", f"to={tmp_path}", "dtype=float8", "max_shard_gb=0")
    error = capsys.readouterr().err
    assert code == 2 and "Traceback" not in error
    for part in (
        "nowhere: no such folder",
        "is already there",
        "dtype=float8: no such choice",
        "max_shard_gb=0: must be",
    ):
        assert part in error


def test_options_without_effect_and_files_beyond_numbers_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "to").symlink_to(tmp_path / "nowhere")
    words = "max_shard_gb=1e300", "top_k=3", "granularity=2", "seed=1"
    assert convert(f"from={random_folder(tmp_path / 'source')}", f"to={tmp_path / 'to'}", *words) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and "to: is already there" in error and "at most 1e+09" in error
    for word in words[1:]:
        assert f"{word}: is for upcycle= alone; leave it out, or give upcycle=8" in error


def test_a_name_too_long_and_a_key_of_another_type_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random_folder(tmp_path / "source")
    long = "z" * 300
    assert convert("from=source", f"to={long}") == 2
    assert capsys.readouterr().err.startswith(f"to={long[:77]}...: at most 255 bytes a name, as file systems want")
    config = tmp_path / "source" / "config.json"
    whole = json.loads(config.read_text())
    for key, value, told in [
        ("model_type", ["mixtral"], "source/config.json: model_type=['mixtral']: weights of deepseek_v3,"),
        ("n_routed_experts", "8", "source/config.json: n_routed_experts=8: must be a whole number"),
    ]:
        config.write_text(json.dumps(whole | {key: value}))
        assert convert("from=source", "to=out") == 2
        assert capsys.readouterr().err.startswith(told)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_nothing_given_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert() == 2
    error = capsys.readouterr().err
    assert "from=: a folder is needed" in error and "to=: a folder to make is needed" in error
    assert convert("form=x") == 2
    assert "did you mean from?" in capsys.readouterr().err


def test_folder_that_lacks_a_tensor_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = random_tensors(V3)
    del tensors["model.layers.2.mlp.gate.weight"]
    source = write_folder(tmp_path / "source", huggingface_config(V3), tensors)
    assert convert(f"from={source}", f"to={tmp_path / 'out'}") == 2
    assert "model.layers.2.mlp.gate.weight is missing" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_help_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("--help") == 0
    text = capsys.readouterr().out
    assert "moe-engine convert from=FOLDER to=FOLDER" in text
    assert all(family in text for family in READERS)
