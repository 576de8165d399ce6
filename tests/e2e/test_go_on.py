"""Going on from what was trained before: the same run with other options, and a new run from converted weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from forked import run_command
from run_folder import metrics

from moe_engine.__main__ import main

CORPUS = Path(__file__).parents[1] / "corpus"
SMALL = [
    "model=mini_v3", "model.dim=64", "model.dense_hidden=96", "model.expert_hidden=32", "model.num_layers=2",
    "train.seq_len=64", "train.global_batch=8", "train.micro_batch=2", "train.eval_sequences=0",
    "train.sample_tokens=0", "optim.warmup_steps=2", "data.validation_fraction=0.3",
]  # fmt: skip
STEPS = 8  # of the run that the others go on from


def moe_engine(folder: Path, command: str, *words: str) -> str:
    code, output = run_command(folder, command, *words)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    moe_engine(folder, "train", *SMALL, f"data.text_paths=[{CORPUS}]", f"train.steps={STEPS}", "run.name=first")
    return folder


def test_run_goes_on_with_other_options(trained: Path) -> None:
    """Learning rate, batch, text, steps, layout and the format of moments may change; other text or format is said."""
    other = f"data.text_paths=[{CORPUS / 'counting.txt'},{CORPUS / 'license.txt'}]"
    words = [f"train.steps={STEPS + 2}", "train.global_batch=4", "optim.lr=1e-4", "parallel.pp=2"]
    words += ["train.micro_batch=1", "run.name=first", "run.resume=true", other, "precision.moments=bfloat16"]
    out = moe_engine(trained, "train", *SMALL, *words)
    assert "the data are not those of the checkpoint" in out
    assert "the checkpoint's moments are float32 and this run's bfloat16: they are converted" in out
    lines = metrics(trained / "runs" / "first")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 3))
    assert lines[STEPS]["lr"] < 1e-4 < lines[STEPS - 1]["lr"]
    assert lines[STEPS]["tokens_seen"] == lines[STEPS - 1]["tokens_seen"] + lines[STEPS]["tokens"]
    assert lines[STEPS]["tokens"] < lines[STEPS - 1]["tokens"]
    assert lines[STEPS]["loss"] < lines[0]["loss"] - 0.5, "weights were not kept"


def test_another_number_of_ranks_reads_the_same_text(trained: Path) -> None:
    """The steps after a resume on two ranks are those after a resume on one."""
    runs = {}
    for name, words in (("on_one", []), ("on_two", ["parallel.dp=2", "parallel.ep=2", "train.micro_batch=1"])):
        folder = trained / "runs" / name
        shutil.copytree(trained / "runs" / "first", folder)
        for checkpoint in (folder / "checkpoints").iterdir():
            if checkpoint.name != f"step_{STEPS}":
                shutil.rmtree(checkpoint)
        words = [*words, f"run.name={name}", "run.resume=true", f"train.steps={STEPS + 3}", "precision=fp32"]
        moe_engine(trained, "train", *SMALL, f"data.text_paths=[{CORPUS}]", *words)
        runs[name] = metrics(trained / "runs" / name)[STEPS:]
    assert [line["tokens"] for line in runs["on_one"]] == [line["tokens"] for line in runs["on_two"]]
    for one, two in zip(runs["on_one"], runs["on_two"], strict=True):
        for figure in ("loss", "mtp_loss", "grad_norm", "tokens_seen"):
            assert two[figure] == pytest.approx(one[figure], rel=1e-4), figure


def test_new_run_starts_from_converted_weights(trained: Path) -> None:
    source, exported = trained / "runs" / "first" / "checkpoints" / f"step_{STEPS}", trained / "exported"
    assert main(["convert", f"from={source}", f"to={exported}", "dtype=bfloat16"]) == 0
    words = [f"data.text_paths=[{CORPUS}]", "train.steps=1", "run.name=second", f"init_from={exported}"]
    assert "starting from the weights in" in moe_engine(trained, "train", *SMALL, *words)
    first, second = (metrics(trained / "runs" / name)[0] for name in ("first", "second"))
    assert second["step"] == 1 and second["tokens_seen"] == second["tokens"]
    assert second["loss"] < first["loss"] - 0.5  # the first batch of the same text, by trained weights
