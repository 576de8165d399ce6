"""Wrong options of every kind: each is refused before anything starts, by name, with its rule and what would work.

What a message offers is tried: in place of the mistake it must be accepted. Wrong files, disks and ranks are in
test_mistakes_of_place.py.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_engine.__main__ import main


@dataclass(frozen=True)
class Mistake:
    """A word that is wrong beside other words that are right."""

    word: str
    rule: str  # in the message
    offer: str  # in the message: a value, or a name, that works
    beside: str = ""
    works: str = ""  # the offer as words, where it is no word itself
    shown: str = ""  # the beginning of the message, where it is not the word

    def __str__(self) -> str:
        return f"{self.word} {self.beside}".strip()


FOUR = "parallel.dp=4"
KEYS = [
    Mistake("train.stepz=3", "no such option", "train.steps", works="train.steps=3"),
    Mistake("TRAIN.STEPS=3", "no such option", "train.steps", works="train.steps=3"),
    Mistake("train..steps=3", "no such option", "train.steps", works="train.steps=3"),
    Mistake("steps=3", "no such option", "train.steps", works="train.steps=3"),
    Mistake("train.lr=1e-3", "no such option", "optim.lr", works="optim.lr=1e-3"),
    Mistake("+train.foo=1", "no such option", "steps", works="train.steps=1", shown="train.foo=1"),
    Mistake("++optim.lrr=1", "no such option", "optim.lr", works="optim.lr=1", shown="optim.lrr=1"),
    Mistake("~train.steps", "options cannot be removed", "name=value", works="train.steps=3"),
    Mistake("train=3", "train is a section", "train.steps=100"),
    Mistake("--steps", "written name=value, without spaces or dashes", "train.steps=100"),
    Mistake("-v", "written name=value", "train.steps=20"),
    Mistake("=3", "written name=value", "train.steps=20"),
    Mistake("quickstart", "written name=value", "experiment=quickstart"),
    Mistake("missing.yaml", "no such file", "name=value", works="train.steps=3"),
]
CHOICES = [
    Mistake("experiment=quickstrat", "no such experiment", "quickstart", works="experiment=quickstart"),
    Mistake("experiment=", "no such experiment", "quickstart", works="experiment=quickstart"),
    Mistake("model=tinny", "no such model", "tiny", works="model=tiny"),
    Mistake("model=", "no such model", "tiny", works="model=tiny"),
    Mistake("pipeline=1f1", "no such pipeline", "1f1b", works="pipeline=1f1b"),
    Mistake("parallel=singel", "no such parallel", "single", works="parallel=single"),
    Mistake("precision=FP32", "no such precision", "fp32", works="precision=fp32"),
    Mistake("optim=sgd", "no such optim", "adamw", works="optim=adamw"),
    Mistake("data=wiki", "no such data", "stdlib", works="data=stdlib"),
    Mistake("model=[tiny,x]", "no such model", "tiny", works="model=[tiny]", shown="model=x"),
]
TYPES = [
    Mistake("train.steps=abc", "a whole number is expected", "train.steps=100"),
    Mistake("train.steps=1.5", "a whole number is expected", "train.steps=2"),
    Mistake("train.seed=1e3", "a whole number is expected", "train.seed=1000", shown="train.seed=1000.0"),
    Mistake("train.steps=null", "a whole number is expected", "train.steps=100"),
    Mistake("train.steps=true", "a whole number is expected", "train.steps=100"),
    Mistake("train.steps=", "a whole number is expected", "train.steps=100"),
    Mistake("train.steps=[3", "a whole number is expected", "train.steps=100"),
    Mistake("model.dim=64GB", "a whole number is expected", "model.dim=256"),
    Mistake("optim.lr=fast", "a number is expected", "optim.lr=0.003"),
    Mistake("optim.lr=[1]", "a number is expected", "optim.lr=0.003"),
    Mistake("optim.lr=nan", "a finite number is expected", "optim.lr=0.003"),
    Mistake("data.mask_documents=maybe", "true or false is expected", "data.mask_documents=true"),
    Mistake("run.resume=yes", "true or false is expected", "run.resume=false"),
    Mistake("data.text_paths=.", "a list of texts is expected", "data.text_paths=[.]"),
    Mistake("run.name=null", "text is expected", "run.name=default"),
    Mistake("run.name=${model.nam}", "Interpolation key 'model.nam' not found", "write the value", works="run.name=a"),
]
RANGES = [
    Mistake("train.steps=0", "must be 1 or more", "train.steps=1"),
    Mistake("train.seq_len=-1", "must be 1 or more", "train.seq_len=1"),
    Mistake("train.threads=0", "must be 1 or more", "train.threads=1"),
    Mistake("train.seed=-1", "must be 0 or more", "train.seed=0"),
    Mistake("train.sample_tokens=-1", "must be 0 or more", "train.sample_tokens=0"),
    Mistake("optim.lr=0", "must be larger than 0", "optim.lr=0.003", shown="optim.lr=0.0"),
    Mistake("optim.beta2=1", "at least 0 and less than 1", "optim.beta2=0.9", shown="optim.beta2=1.0"),
    Mistake("optim.min_lr_ratio=2", "must be from 0 to 1", "optim.min_lr_ratio=0.1", shown="optim.min_lr_ratio=2.0"),
    Mistake("data.max_bytes=-5", "must be 0 or more", "data.max_bytes=0"),
    Mistake("data.cache_dir=", "a folder is needed", "data.cache_dir=data_cache"),
    Mistake("run.dir=", "a folder is needed", "run.dir=runs"),
    Mistake("run.name=a/b", "the name of one folder", "run.name=first"),
    Mistake("moe.routing=skewed:x", "skewed takes a number", "skewed:2", works="moe.routing=skewed:2"),
    Mistake("moe.routing=replay:", "no such choice", "balanced", works="moe.routing=balanced"),
    Mistake("run.ranks=0", "must be 1 or more", "run.ranks=1"),
    Mistake("run.exchange_limit_s=0.5", "must be 1 or more", "run.exchange_limit_s=1"),
    Mistake("run.exchange_limit_s=1e+20", "must be 604800 or less", "run.exchange_limit_s=604800"),
    Mistake(
        "data.validation_fraction=0", "needs text to validate on", "data.validation_fraction=0.05",
        shown="data.validation_fraction=0.0",
    ),
    Mistake("model.vocab_size=100", "the byte tokenizer has 257 tokens", "model.vocab_size=257"),
    Mistake("model.qk_rope_head_dim=7", "must be even", "model.qk_rope_head_dim=8"),
    Mistake("model.top_k=99", "more experts than there are", "model.top_k=8"),
    Mistake("model.num_groups=3", "must divide model.num_experts=8", "model.num_groups=2"),
    Mistake("model.num_dense_layers=5", "the model has model.num_layers=2", "model.num_dense_layers=2"),
    Mistake(
        "model.dense_layers=[1,2]", "the model has model.num_layers=2", "model.dense_layers=[1]",
        shown="model.dense_layers=[1, 2]",
    ),
    Mistake("model.score_function=relu", "no such choice", "sigmoid", works="model.score_function=sigmoid"),
    Mistake("moe.combine=fast", "no such choice", "exact", works="moe.combine=exact"),
    Mistake("precision.compute=float16", "no such choice", "bfloat16", works="precision.compute=bfloat16"),
    Mistake("precision.compute=float32", "recipe bf16 computes in bfloat16", "precision=fp32"),
    Mistake("precision.moments=bf16", "no such choice", "bfloat16", works="precision.moments=bfloat16"),
    Mistake("optim.beta2=0.999", "it would never fall", "optim.beta2=0.95", beside="precision.moments=bfloat16"),
]  # fmt: skip
LAYOUTS = [
    Mistake("parallel.pp=9", "the model has blocks for 2 stages", "parallel.pp=2"),
    Mistake("parallel.dp=0", "must be 1 or more", "parallel.dp=1"),
    Mistake("parallel.ep=3", "must divide model.num_experts=8", "parallel.ep=2"),
    Mistake("parallel.ep=4", "must divide parallel.dp * parallel.cp = 2", "parallel.ep=2", beside="parallel.dp=2"),
    Mistake("parallel.zero=5", "", "parallel.zero=1"),
    Mistake("parallel.dp=3", "needs 3 ranks, and 4 are given", "parallel.dp=4", beside="run.ranks=4"),
    Mistake(
        "parallel.pp=2", "does not divide the 3 ranks given", "a multiple of 2", beside="run.ranks=3",
        works="run.ranks=4 parallel.pp=2",
    ),
    Mistake("train.global_batch=10", "must be a multiple of", "train.global_batch=8"),
    Mistake("train.global_batch=2", "must be a multiple of", "train.global_batch=16", beside=FOUR),
    Mistake("train.eval_sequences=63", "must be a multiple of", "train.eval_sequences=60", beside=FOUR),
    Mistake(
        "pipeline.micro_batches=3", "train.global_batch / (parallel.dp * train.micro_batch) = 4", "leave it out",
        works="train.steps=3",
    ),
    Mistake("pipeline.schedule=dualpip", "no such schedule", "dualpipe", works="pipeline.schedule=1f1b"),
    Mistake("pipeline.virtual_stages=2", "1f1b fixes the stages", "use 1", works="pipeline.virtual_stages=1"),
    Mistake("parallel.pp=1", "an even number of ranks", "pipeline.schedule=dualpipev", beside="pipeline=dualpipe"),
    Mistake(
        "train.global_batch=4", "at least 2 * parallel.pp = 4", "train.global_batch=16",
        beside="pipeline=dualpipe parallel.pp=2",
    ),
]  # fmt: skip
MISTAKES = [*KEYS, *CHOICES, *TYPES, *RANGES, *LAYOUTS]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_told_with_what_works_and_leaves_nothing(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    beside = shlex.split(mistake.beside)
    assert main(["train", *beside, mistake.word]) == 2
    out, message = capsys.readouterr()
    assert out == "" and "Traceback" not in message
    lines = message.splitlines()
    assert len(lines) == 1, "one mistake, one line"
    assert lines[0].startswith(f"{mistake.shown or mistake.word}: ")
    assert mistake.rule in lines[0] and mistake.offer in lines[0]
    assert os.listdir(tmp_path) == [], "nothing is written"
    works = shlex.split(mistake.works or mistake.offer)
    assert main(["train", *beside, *works, "run.check=true"]) == 0, capsys.readouterr().err


def test_there_are_enough_of_them() -> None:
    assert len({mistake.word for mistake in MISTAKES}) >= 60


def test_mistakes_of_all_kinds_are_told_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 43: all at once, before start-up. Names and types are told first, then the rules of values that exist."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "train.stepz=3", "model=tinny", "optim.lr=fast", "-v"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert sorted(line.partition(":")[0] for line in told) == ["-v", "model=tinny", "optim.lr=fast", "train.stepz=3"]
    assert main(["train", "train.steps=0", "parallel.ep=3", "pipeline.schedule=x", "data.text_paths=[nowhere]"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.partition("=")[0] for line in told] == [
        "train.steps", "parallel.ep", "pipeline.schedule", "data.text_paths",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "start", "offer"),
    [
        (["trian"], "trian: no such command", "train"),
        (["schedule", "cost.f=-1"], "cost.f=-1.0: a time is not negative", "use 0 or more"),
        (["schedule", "out=picture.png"], "out=picture.png: ", "out=picture.svg"),
        (["schedule", "out=no/folder.svg"], "out=no/folder.svg: there is no folder no", "out=folder.svg"),
        (["schedule", "out=.svg/.."], "out=.svg/..: ", "out="),
        (
            ["schedule", "pipeline.stages=[embedding+2L,head]"],
            "pipeline.stages=[embedding+2L, head]: is for",
            "leave it",
        ),
        (["train", "model=/dev/zero"], "model=/dev/zero", ""),
        (["schedule", "pipeline.micro_batches=0"], "pipeline.micro_batches=0: must be at least 1", "use 1 or more"),
        (["schedule", "parallel.pp=0"], "parallel.pp=0: must be at least 1", "use 1 or more"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_other_commands(
    words: list[str],
    start: str,
    offer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith(start) and offer in message and "Traceback" not in message
    assert os.listdir(tmp_path) == []
