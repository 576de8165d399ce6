"""Before ranks start: the folder of a run, and what may be removed from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_engine.cli import run_folder
from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import Config, RunConfig
from moe_engine.metrics import RunFolder
from moe_engine.one_writer import is_held


@pytest.mark.parametrize("source", ["first", "first/checkpoints/step_3", "other/../first"])
def test_a_run_that_weights_come_from_is_not_removed(source: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "first" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    (tmp_path / "other").mkdir()
    config = Config()
    config.run.dir, config.run.name, config.run.overwrite = str(tmp_path), "first", True
    config.data.cache_dir = str(tmp_path / "cache")
    config.train.init_from = str(tmp_path / source)
    with pytest.raises(ConfigError, match=r"which run.overwrite=true would remove; use run.name=first_2"):
        run_folder.prepare(config)
    assert checkpoint.is_dir()
    config.train.init_from = str(tmp_path / "other")
    run_folder.prepare(config)
    assert not checkpoint.exists()


@pytest.mark.parametrize("ways", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_that_another_run_writes_is_left_alone(ways: dict[str, bool], tmp_path: Path) -> None:
    checkpoint = tmp_path / "runs" / "first" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    config = Config()
    config.run = RunConfig(dir=str(tmp_path / "runs"), name="first", **ways)
    config.data.cache_dir = str(tmp_path / "cache")
    writer = RunFolder(tmp_path / "runs" / "first")
    writer.hold()
    with pytest.raises(ConfigError, match=r"run.name=first: another run is writing .*first; .* run.name=first_2"):
        run_folder.prepare(config)
    with pytest.raises(ConfigError, match=r"run.name=first: another run is writing .*; use .* run.name=first_2"):
        RunFolder(tmp_path / "runs" / "first").hold()  # both were started at once: the ranks find out
    assert checkpoint.is_dir()
    writer.release()
    if ways:
        run_folder.prepare(config)


def test_a_killed_run_holds_its_folder_no_longer(tmp_path: Path) -> None:
    program = "import sys, time; from pathlib import Path; from moe_engine.one_writer import hold; "
    program += "print(hold(Path(sys.argv[1])), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline().strip().isdigit()
        assert is_held(tmp_path)
        writer.kill()
    assert not is_held(tmp_path) and not is_held(tmp_path / "nothing")
