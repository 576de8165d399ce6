"""Before ranks start: the folder of a run, and what may be removed from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_engine.cli import run_folder
from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import Config


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
