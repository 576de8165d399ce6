"""`out=`: what is in the way is told before anything is computed; a file is written whole or not at all."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from moe_engine.__main__ import main
from moe_engine.cli import out_file
from moe_engine.config.errors import ConfigError

COMMANDS = {
    "schedule": [],
    "plan": ["model=tiny"],
    "place": ["loads=expert_load.safetensors"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_in_the_way_is_told_first(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("expert_load.safetensors").write_bytes(b"")
    Path("there.json").mkdir()
    long = f"{'x' * 300}.json"
    for name, told in [
        ("there.json", "out=there.json: is a folder; use out=there.json/out.json"),
        ("gone/a.json", "out=gone/a.json: there is no folder gone; make it, or use out=a.json"),
        (long, f"out={long[:77]}...: at most 255 bytes a name, as file systems want, for example out="),
    ]:
        assert main([command, *COMMANDS[command], f"out={name}"]) == 2
        out, message = capsys.readouterr()
        assert out == "" and message.startswith(told)
    assert sorted(os.listdir()) == ["expert_load.safetensors", "there.json"]


def test_a_folder_of_results_may_be_there_and_may_be_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert out_file.problems("") == out_file.problems(str(tmp_path), folder=True) == []
    assert out_file.problems(str(tmp_path / "new"), folder=True) == []
    assert out_file.problems(str(tmp_path / "file")) == []  # is replaced
    taken = str(tmp_path / "file")
    told = f"out={taken}: is a file; name a folder, for example out={taken}_new"
    assert out_file.problems(taken, folder=True) == [told]


@pytest.mark.parametrize("benchmark", ["step", "schedule", "comm"])
def test_a_benchmark_does_not_measure_what_it_cannot_write(
    benchmark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    for name, told in [
        (
            "file/results",
            f"out=file/results: {tmp_path}/file is a file; name a folder, for example out={tmp_path}/file_new",
        ),
        ("y" * 300, f"out={'y' * 77}...: at most 255 bytes a name, as file systems want, for example out=bench/"),
    ]:
        assert main(["bench", benchmark, f"out={name}"]) == 2
        out, message = capsys.readouterr()
        assert out == "" and message.startswith(told)
    assert out_file.above_problem("new/folders/for/results") is None
    assert os.listdir() == ["file"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can make files")
def test_a_folder_that_takes_no_files_is_refused_before_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    """Also to a superuser, whom rights alone do not stop."""
    assert main(["bench", "comm", "out=/proc/nothing/here"]) == 2
    out, message = capsys.readouterr()
    assert out == "" and message.startswith("out=/proc/nothing/here: cannot be written (")
    assert out_file.problems("/proc/nothing.json") and out_file.problems("/proc/self", folder=True)


def test_looking_whether_a_folder_can_be_made_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert out_file.above_problem(str(tmp_path / "there/a/b")) is None
    assert os.listdir(tmp_path / "there") == []


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    out = tmp_path / "plan.md"
    out_file.write(str(out), "first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(ConfigError, match=r"plan.md: cannot be written \(File too large\); use another"):
            out_file.write(str(out), "second" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert out.read_text() == "first" and os.listdir(tmp_path) == ["plan.md"]
