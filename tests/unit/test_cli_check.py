"""`run.check=true`: a job of any size is checked and described without a rank, a device or torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_engine.__main__ import main
from moe_engine.cli.check import describe
from moe_engine.cli.train import checked
from moe_engine.config.load import from_yaml, load
from moe_engine.planner.flops import parameter_count

ON_2048 = [
    "model=mini_v3", "parallel.pp=2", "parallel.ep=16", "run.ranks=2048",
    "train.global_batch=8192", "train.eval_sequences=1024", "run.check=true",
]  # fmt: skip


def test_a_job_of_2048_ranks_is_described_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from moe_engine.__main__ import main; code = main(sys.argv[1:]);"
        "print('# torch' if 'torch' in sys.modules else '# none'); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train", *ON_2048], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "# layout: 2048 ranks = pp 2 x dp 1024" in done.stdout
    assert "# stage 0 on ranks 0-1023: embedding, layers 0-2\n" in done.stdout
    assert "# stage 1 on ranks 1024-2047: embedding, layers 3, head, MTP 0\n" in done.stdout
    assert done.stdout.endswith("# none\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pipeline", ["1f1b", "dualpipe", "zbv", "interleaved_1f1b"])
def test_the_parameters_of_all_ranks_are_the_models(pipeline: str) -> None:
    """Those of the ranks of one data-parallel replica, less what a second holder has again."""
    words = ["model=mini_v3", "parallel.pp=2", "parallel.ep=4", "model.num_layers=9"]
    words += ["train.global_batch=64", f"pipeline={pipeline}"]
    config = checked(load("train", words), None)
    text = describe(config)
    held = re.findall(r"([\d,]+) dense parameters, ([\d,]+) of experts", text)
    dense, experts = (sum(int(pair[i].replace(",", "")) for pair in held) for i in (0, 1))
    counts = parameter_count(config.model)
    table = config.model.vocab_size * config.model.dim
    holders = 2 if pipeline == "dualpipe" else 1  # both ranks hold every stage
    assert len(held) == 2
    assert experts * 4 == counts.by_part["experts"] * holders
    again = 0 if pipeline == "dualpipe" or pipeline == "zbv" else table  # the embedding, at both ends; ZBV folds them
    assert dense == (counts.total - counts.by_part["experts"]) * holders + again


def test_what_it_prints_is_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *ON_2048]) == 0
    file = tmp_path / "resolved.yaml"
    file.write_text(capsys.readouterr().out)
    config = from_yaml(file)
    assert (config.parallel.dp, config.pipeline.micro_batches) == (1024, 2)
    assert main(["train", str(file)]) == 0  # also as a file on the command line
    assert "# layout: 2048 ranks" in capsys.readouterr().out


def test_what_would_not_fit_the_cluster_is_refused_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *ON_2048, "parallel.dp=512"]) == 2
    assert capsys.readouterr().err == (
        "parallel.dp=512: with pp=2 x cp=1 x tp=1 needs 1024 ranks, and 2048 are given; start 1024, "
        "or use parallel.dp=1024\n"
    )


def test_rows_put_by_gpus_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A laptop checks such a job and does not start it: no run folder is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", "moe.dispatch=nvshmem", "run.check=true"]) == 0
    assert main(["train", "moe.dispatch=nvshmem"]) == 2
    assert "GPUs put the rows, and there is none here; use moe.dispatch=all_to_all" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
