"""Loading: what the command line and files say arrives, and nothing else does."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from moe_engine.config.errors import ConfigError
from moe_engine.config.load import choices, conf_folder, from_yaml, groups, load, to_yaml
from moe_engine.config.schema import Config


def problems(*words: str) -> list[str]:
    """The lines of the error that these words of a `train` command give."""
    with pytest.raises(ConfigError) as caught:
        load("train", words)
    return str(caught.value).splitlines()


def test_nothing_said_gives_the_root_file_over_the_schema() -> None:
    config = load("train", [])
    assert config.model.name == "tiny"
    assert config.model.dim == 64  # conf/model/tiny.yaml
    assert config.train == Config().train  # not in any file: the schema's
    assert config.parallel.dp is None and config.pipeline.micro_batches is None


def test_groups_files_and_values_win_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("train: {steps: 7, seed: 7}\nmodel: {dim: 48}\n")
    config = load("train", ["train.seed=9", "experiment=quickstart", str(file)])
    assert config.run.name == "quickstart"  # of the experiment, over the root file
    assert config.train.steps == 7  # of the file, over the experiment
    assert config.train.seed == 9  # of the command line, over the file
    assert config.model.dim == 48 and config.model.num_experts == 16


@pytest.mark.parametrize("name", choices("experiment", "train"))
def test_every_experiment_loads(name: str) -> None:
    load("train", [f"experiment={name}"])


@pytest.mark.parametrize("group", [group for group in groups("train") if group != "experiment"])
def test_every_choice_of_every_group_loads(group: str) -> None:
    assert choices(group, "train")
    for choice in choices(group, "train"):
        load("train", [f"{group}={choice}"])


def test_values_have_the_types_of_the_schema() -> None:
    words = [
        "optim.lr=3",
        "optim.eps=1e-9",
        "optim.clip='1e-3'",
        "run.resume=true",
        "parallel.dp=null",
        "train.seed=1_000",
    ]
    config = load("train", words)
    assert (config.optim.lr, config.optim.eps, config.optim.clip) == (3.0, 1e-9, 1e-3)
    assert isinstance(config.optim.lr, float)
    assert config.run.resume is True and config.parallel.dp is None and config.train.seed == 1000


@pytest.mark.parametrize(
    ("typed", "arrives"),
    [
        ("2024_01", "2024_01"),
        ("007", "007"),
        ("1e3", "1e3"),
        ("true", "true"),
        ("a=b (c), d", "a=b (c), d"),
        ("'x'", "x"),
    ],
)
def test_text_options_hold_what_was_typed(typed: str, arrives: str) -> None:
    assert load("train", [f"run.name={typed}"]).run.name == arrives


def test_plus_signs_of_hydra_change_nothing() -> None:
    assert load("train", ["+train.steps=3", "++train.seed=4"]).train.steps == 3
    assert problems("+train.stepz=3") == ["train.stepz=3: no such option; did you mean train.steps?"]


def test_a_resolved_configuration_survives_yaml(tmp_path: Path) -> None:
    config = load(
        "train", ["experiment=quickstart", "run.name=1e3", "data.text_paths=['a b', 'null', '1']", "optim.eps=1e-12"]
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert from_yaml(path) == config
    assert load("train", [str(path)]) == config


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("train: {steps: many, stepz: 3}\n")
    with pytest.raises(ConfigError) as caught:
        from_yaml(path)
    assert str(caught.value).splitlines() == [
        f"{path}: train.steps=many: a whole number is expected, for example train.steps=100",
        f"{path}: train.stepz=3: no such option; did you mean train.steps?",
    ]
    for text, reason in [("train: [", "not readable as YAML"), ("- a\n", "sections with options are expected")]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=reason) as caught:
            from_yaml(path)
        assert str(path) in str(caught.value)
    assert problems("missing.yaml") == [
        "missing.yaml: no such file; values are written name=value, or in a file like a run's config.yaml"
    ]


MISTAKES = {
    # unknown options
    "model.num_expertss=3": "no such option; did you mean model.num_experts?",
    "train.lr=3": "no such option; did you mean optim.lr?",
    "trian.stepz=3": "no such option; did you mean train.steps?",
    "runs.name=3": "no such option; did you mean model.name or precision.name or run.name?",
    "optimizer=adamw": "no such option; did you mean optim?",
    "lr=3": "no such option; did you mean optim.lr?",
    "steps=3": "no such option; did you mean train.steps?",
    "model.numheads=3": "no such option; did you mean model.num_heads?",
    "parallel.replicas=2": "no such option; parallel has pp, dp, cp, ep, tp, ranks_per_node, zero",
    "bench.rounds=2": "no such option; there are model, moe, parallel, pipeline, precision, ",
    "hydra.run.dir=x": "no such option; did you mean run.dir?",
    "modle=tiny": "no such option; did you mean model?",
    "experimnt=quickstart": "no such option; did you mean experiment?",
    "model.dim.x=3": "no such option",
    # words that are no name=value
    "quickstart": "options are written name=value, without spaces or dashes; did you mean experiment=quickstart?",
    "--steps": "options are written name=value, without spaces or dashes, for example train.steps=100",
    "--train.steps=5": "no such option; did you mean train.steps?",
    "train.steps": "options are written name=value, without spaces or dashes, for example train.steps=100",
    "=": "options are written name=value",
    "~train.steps": "options cannot be removed; set another value, as name=value",
    # choices of groups
    "model=tinny": "no such model; did you mean tiny? There are deepseek_v2, ",
    "experiment=big": "no such experiment; there are ",
    "experiment=": "no such experiment; there are ",
    "precision=fp4": "no such precision; did you mean fp64? There are bf16, fp32, fp64, fp8",
    "precision=FP32": "no such precision; did you mean fp32? There are bf16, fp32, fp64, fp8",
    "pipeline=1f2b": "no such pipeline; did you mean 1f1b? There are 1f1b, ",
    "pipeline=all": "no such pipeline; there are 1f1b, dualpipe, ",  # of `moe-engine schedule`
    "optim=adam": "no such optim; did you mean adamw? There are adamw",
    "model=null": "no such model; there are ",
    "parallel=/tmp/x": "no such parallel; there are ",
    # types
    "train.steps=1e3": "a whole number is expected, for example train.steps=1000",
    "train.steps=10.6": "a whole number is expected, for example train.steps=11",
    "train.steps=ten": "a whole number is expected, for example train.steps=100",
    "train.steps=true": "a whole number is expected",
    "train.steps=null": "a whole number is expected",
    "train.steps=": "a whole number is expected",
    "train.steps=(3": "a whole number is expected",
    "train.steps=1,2": "has several values; for a run with each of them add --multirun",
    "train.steps=[1]": "a whole number is expected",
    "train.steps={a: 1}": "a whole number is expected",
    "parallel.dp=two": "a whole number is expected, for example parallel.dp=1",
    "optim.lr=fast": "a number is expected, for example optim.lr=0.003",
    "optim.lr=true": "a number is expected",
    "optim.lr=nan": "a finite number is expected",
    "optim.lr=inf": "a finite number is expected",
    "run.resume=yes": "true or false is expected, for example run.resume=false",
    "run.resume=1": "true or false is expected",
    "run.name=null": "text is expected",
    "data.text_paths=/a": "a list of texts is expected (numbers in quotes), for example data.text_paths=[/a]",
    "data.text_paths=/a,/b": "for example data.text_paths=[/a, /b]",
    "data.text_paths=[1, a]": "a list of texts is expected",
    "train=5": "train is a section; set its options, for example train.steps=100",
    "train={steps: 3}": "train is a section; set its options, for example train.steps=100",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_is_one_line_with_the_word_the_rule_and_what_works(word: str) -> None:
    lines = problems(word)
    assert len(lines) == 1
    assert lines[0].startswith(word if word != "train.steps=1e3" else "train.steps=1000.0")  # a float is shown as one
    assert MISTAKES[word] in lines[0]


def test_all_mistakes_are_told_at_once() -> None:
    assert [
        line.partition(":")[0] for line in problems("train.lr=3", "model=x", "train.steps=a", "word", "run.resume=2")
    ] == [
        "train.lr=3",
        "model=x",
        "word",
        "train.steps=a",
        "run.resume=2",
    ]


def test_unknown_keys_of_a_file_are_refused_with_their_whole_name(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("extra: {a: {b: 1}, c: 2}\noptim: {beta: 0.9}\n")
    sections = ", ".join(field.name for field in fields(Config))
    assert sorted(problems(str(file))) == [
        f"extra.a.b=1: no such option; there are {sections}",
        f"extra.c=2: no such option; there are {sections}",
        "optim.beta=0.9: no such option; did you mean optim.beta2 or optim.beta1?",
    ]


def test_interpolations_work_and_broken_ones_are_named() -> None:
    assert load("train", ["run.name=${model.name}-a"]).run.name == "tiny-a"
    assert problems("run.name=${model.nam}") == [
        "run.name=${model.nam}: Interpolation key 'model.nam' not found; name an option that a file or the command "
        "line sets, or write the value itself"
    ]


def test_conf_lies_beside_the_package_in_a_checkout() -> None:
    assert (conf_folder() / "train.yaml").is_file()
    assert conf_folder() == Path(__file__).resolve().parents[2] / "conf"


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("train", "data.text_paths=['{}']"),
        ("train", "train.init_from={}"),
        ("train", "moe.routing=replay:{}"),
        ("train", "run.dir={}"),
        ("train", "model=./{}"),
        ("train", "{}.yaml"),
        ("train", "run.name={}"),
    ],
)
@pytest.mark.parametrize(
    ("name", "rule"), [("a" * 300, "at most 255 bytes a name"), ("\udcff", "in UTF-8 (is|are) expected")]
)
def test_names_that_no_file_system_takes(command: str, word: str, name: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        load(command, [word.format(name)])


def test_many_files_may_be_longer_together_than_one_name() -> None:
    names = [f"text_{number}.txt" for number in range(100)]
    assert load("train", [f"data.text_paths=[{','.join(names)}]"]).data.text_paths == names


def test_several_models_are_a_sweep() -> None:
    with pytest.raises(ConfigError, match="model=tiny,mini_v3: has several values; .* add --multirun"):
        load("train", ["model=tiny,mini_v3"])
