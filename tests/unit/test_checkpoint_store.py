"""Checkpoints on disk by one rank: round trip, damage, kills, a full disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from moe_engine.checkpoint import files, store
from moe_engine.config.errors import ConfigError
from moe_engine.distributed.collectives import Communicator
from moe_engine.optim.zero import Shard

WORLD = Communicator.alone()
META = {"tokens_seen": 12345678901, "optimizer_steps": 3, "config": "model:\n  dim: 8\n", "ratio": 0.1}


def shards(
    fill: float | None = None, names: tuple[str, ...] = ("a", "b.weight"), shape: tuple[int, ...] = (3, 5)
) -> list[Shard]:
    """Two parameters with three states each: random by name, or all `fill`."""
    numel, made = torch.Size(shape).numel(), []
    for i, name in enumerate(names):
        chance = torch.Generator().manual_seed(i)
        states = {kind: torch.randn(numel, generator=chance) for kind in ("master", "exp_avg", "exp_avg_sq")}
        if fill is not None:
            states = {kind: torch.full((numel,), fill) for kind in states}
        made.append(Shard(name, 0, numel, torch.Size(shape), states))
    return made


def extras(fill: float = 0.5) -> dict[str, Tensor]:
    return {"layers.1.moe.router.expert_bias": torch.full((4,), fill)}


def save(folder: Path, step: int, fill: float | None = None) -> Path:
    return store.save(folder, step, shards(fill), extras(float(step)), META, WORLD)


def load(path: Path) -> tuple[dict[str, Any], list[Shard], dict[str, Tensor]]:
    into, into_extras = shards(-7.0), extras(-7.0)
    return store.load(path, into, into_extras, WORLD), into, into_extras


def assert_loads(path: Path, step: int, fill: float | None = None) -> None:
    meta, into, into_extras = load(path)
    assert meta == {**META, "step": step}
    assert torch.equal(into_extras["layers.1.moe.router.expert_bias"], torch.full((4,), float(step)))
    for found, right in zip(into, shards(fill), strict=True):
        for kind, values in right.states.items():
            assert torch.equal(found.states[kind], values), (found.name, kind)


def test_everything_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 7)
    assert path == tmp_path / "checkpoints" / "step_7"
    assert_loads(path, 7)


def test_folder_holds_safetensors_and_json_only_keyed_by_global_names(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert sorted(each.name for each in path.iterdir()) == ["index.json", "rank_0.safetensors"]
    assert [each.name for each in tmp_path.iterdir()] == ["step_7"]
    index = json.loads((path / "index.json").read_text())
    assert index["version"] == 1 and index["step"] == 7 and index["meta"] == META
    assert index["tensors"]["exp_avg_sq/b.weight"]["shape"] == [3, 5]
    with safe_open(path / "rank_0.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(index["tensors"])
        assert torch.equal(file.get_tensor("master/a"), shards()[0].states["master"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_values_of_any_dtype_keep_their_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(1e3).to(dtype)
    path = store.save(tmp_path, 0, [], {"x": values}, {}, WORLD)
    found = torch.zeros_like(values)
    store.load(path, [], {"x": found}, WORLD)
    assert torch.equal(found, values)


def test_nan_and_signed_zero_keep_their_bits(tmp_path: Path) -> None:
    values = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 1e-45])
    path = store.save(tmp_path, 0, [], {"x": values}, {}, WORLD)
    found = torch.ones(5)
    store.load(path, [], {"x": found}, WORLD)
    assert torch.equal(found.view(torch.int32), values.view(torch.int32))


def test_change_right_after_the_call_does_not_reach_the_file(tmp_path: Path) -> None:
    own = shards()
    path = store.save(tmp_path, 1, own, extras(1.0), META, WORLD)
    for shard in own:
        for values in shard.states.values():
            values.add_(1.0)
    assert_loads(path, 1)


def test_newest_is_the_highest_step_as_a_number(tmp_path: Path) -> None:
    assert store.newest(tmp_path / "absent") is None
    assert store.newest(tmp_path) is None
    for step in (9, 100, 20):
        save(tmp_path, step)
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_200.txt").write_text("")
    assert store.newest(tmp_path) == tmp_path / "step_100"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, fill=1.0)
    save(tmp_path, 5, fill=2.0)
    assert [each.name for each in tmp_path.iterdir()] == ["step_5"]
    assert_loads(tmp_path / "step_5", 5, fill=2.0)


# What does not fit


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(ConfigError, match="master/c is missing"):
        store.load(path, shards(names=("a", "b.weight", "c")), extras(), WORLD)
    with pytest.raises(ConfigError, match=r"lacks: exp_avg/b\.weight; exp_avg_sq/b\.weight; master/b\.weight"):
        store.load(path, shards(names=("a",)), extras(), WORLD)
    with pytest.raises(ConfigError, match=r"master/a has shape \[3, 5\] where the model has \[5, 3\]"):
        store.load(path, shards(shape=(5, 3)), extras(), WORLD)
    with pytest.raises(ConfigError, match="buffer/layers.1.moe.router.expert_bias"):
        store.load(path, shards(), {}, WORLD)
    store.load(path, shards(names=("a",)), {}, world=None)  # a reader that wants a part only


def test_other_format_version_is_refused_and_not_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(files, "VERSION", 2)
    path = save(tmp_path, 2)
    monkeypatch.undo()
    assert store.newest(tmp_path) == path
    with pytest.raises(ConfigError, match="version 2; this engine reads .* version 1"):
        load(path)


def test_meta_that_json_does_not_know_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not JSON serializable"):
        store.save(tmp_path, 1, shards(), {}, {"bad": object()}, WORLD)
    assert list(tmp_path.iterdir()) == []


# Damage


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [-1, -100, 3, 20], ids=["last value", "a value", "header length", "header"])
def test_flipped_bit_is_found_and_the_file_named(tmp_path: Path, place: int) -> None:
    path = save(tmp_path, 1)
    _flip(path / "rank_0.safetensors", place)
    with pytest.raises(ConfigError, match=r"step_1/rank_0\.safetensors: damaged"):
        load(path)


def test_index_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    """As somebody could write it, with a right checksum."""
    save(tmp_path, 1).rename(tmp_path / "other")
    path = save(tmp_path, 1)
    whole = files.read_index(path)
    entries = {
        key: replace(entry, ranges=tuple(replace(each, file="../other/rank_0.safetensors") for each in entry.ranges))
        for key, entry in whole.tensors.items()
    }
    files.write_index(path, replace(whole, tensors=entries))
    with pytest.raises(ConfigError, match=r"damaged, \.\./other/rank_0.safetensors is not among its files"):
        load(path)
    sizes = {"../other/rank_0.safetensors": whole.files["rank_0.safetensors"]}
    files.write_index(path, replace(whole, tensors=entries, files=sizes))
    with pytest.raises(ConfigError, match=r"names \.\./other/rank_0.safetensors, which is not in its folder"):
        load(path)


@pytest.mark.parametrize("place", [10, 200, -10])
def test_flipped_bit_in_the_index_is_found(tmp_path: Path, place: int) -> None:
    path = save(tmp_path, 1)
    _flip(path / "index.json", place)
    with pytest.raises(ConfigError, match=r"step_1/index\.json: damaged"):
        load(path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "file cut": (
        lambda path: os.truncate(path / "rank_0.safetensors", 300),
        r"rank_0\.safetensors: damaged, 300 bytes",
    ),
    "file empty": (lambda path: os.truncate(path / "rank_0.safetensors", 0), r"rank_0\.safetensors: damaged, 0 bytes"),
    "file missing": (lambda path: (path / "rank_0.safetensors").unlink(), r"rank_0\.safetensors: missing"),
    "index cut": (lambda path: os.truncate(path / "index.json", 300), r"index\.json: damaged"),
    "index missing": (lambda path: (path / "index.json").unlink(), r"not complete, index\.json is missing"),
    "folder empty": (lambda path: [each.unlink() for each in path.iterdir()], r"not complete, index\.json is missing"),
    "index of another kind": (lambda path: (path / "index.json").write_text("[]"), r"index\.json: damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_incomplete_checkpoint_is_named_by_load_and_passed_by_with_a_warning(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    do, message = DAMAGES[damage]
    do(path)
    with pytest.raises(ConfigError, match=message):
        load(path)
    with pytest.warns(UserWarning, match=message):
        assert store.newest(tmp_path) == tmp_path / "step_10"
    save(tmp_path, 20)  # the run reaches the step again
    assert store.newest(tmp_path) == path
    assert_loads(path, 20)


# Kills


def _exit_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int = 1, half: bool = False) -> None:
    """Die, as by SIGKILL, at the given call of a function (`half`: after a part of it was written)."""
    real, calls = getattr(owner, name), [0]

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] < call:
            return real(*args, **kwargs)
        if half:
            Path(args[-1]).write_bytes(b"half")
        os._exit(9)

    monkeypatch.setattr(owner, name, dying)


KILLS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the first file": lambda patch: _exit_before(patch, files, "save_file"),
    "within the first file": lambda patch: _exit_before(patch, files, "save_file", half=True),
    "before the index": lambda patch: _exit_before(patch, files, "write_index"),
    "before the index is on disk": lambda patch: _exit_before(patch, files, "sync", call=2),
    "before the commit": lambda patch: _exit_before(patch, files, "commit"),
    "before the rename": lambda patch: _exit_before(patch, Path, "rename"),
}


def _killed_save(kill: Callable[[pytest.MonkeyPatch], None], folder: Path, step: int) -> None:
    def child() -> None:
        kill(pytest.MonkeyPatch())
        save(folder, step, fill=2.0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode == 9


@pytest.mark.parametrize("kill", KILLS)
def test_kill_leaves_the_previous_checkpoint_and_nothing_that_is_loaded(tmp_path: Path, kill: str) -> None:
    save(tmp_path, 10, fill=1.0)
    _killed_save(KILLS[kill], tmp_path, 20)
    assert store.newest(tmp_path) == tmp_path / "step_10"
    assert not (tmp_path / "step_20").exists()
    assert_loads(tmp_path / "step_10", 10, fill=1.0)
    save(tmp_path, 30, fill=3.0)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step_10", "step_30"]  # the rest is cleaned up
    assert store.newest(tmp_path) == tmp_path / "step_30"


def test_kill_while_a_step_is_replaced_leaves_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 10, fill=1.0)
    _killed_save(lambda patch: _exit_before(patch, Path, "rename", call=2), tmp_path, 10)
    found = store.newest(tmp_path)
    assert found is not None
    assert_loads(found, 10, fill=1.0)
    save(tmp_path, 20, fill=2.0)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step_10", "step_20"]
    assert_loads(tmp_path / "step_10", 10, fill=1.0)


def test_kill_after_the_rename_leaves_the_new_one(tmp_path: Path) -> None:
    save(tmp_path, 10, fill=1.0)
    _killed_save(lambda patch: _exit_before(patch, shutil, "rmtree"), tmp_path, 10)
    found = store.newest(tmp_path)
    assert found == tmp_path / "step_10"
    assert_loads(found, 10, fill=2.0)


# No room


def test_too_little_room_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=100))
    with pytest.raises(ConfigError, match=r"376 bytes are needed and 100 are free; .*run\.dir"):
        save(tmp_path, 20)
    assert [each.name for each in tmp_path.iterdir()] == ["step_10"]


def test_disk_that_fills_up_while_writing_leaves_nothing_half_written(tmp_path: Path) -> None:
    save(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(ConfigError, match=r"rank_0\.safetensors: cannot be written .*free some space"):
            save(tmp_path, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.name for each in tmp_path.iterdir()] == ["step_10"]
    assert store.newest(tmp_path) == tmp_path / "step_10"


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"checkpoint=.*file/step_1: .*; set run\.dir to a folder"):
        save(tmp_path / "file", 1)


def test_tensor_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        store.save(tmp_path, 1, [*shards(), *shards()], {}, META, WORLD)
    assert list(tmp_path.iterdir()) == []
