"""The rules between options: each is told by `name=value`, the rule and a value that works, all at once."""

from __future__ import annotations

import re
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import yaml
from broken_rules import RULES

from moe_engine.config.errors import ConfigError
from moe_engine.config.load import choices, load
from moe_engine.config.schema import Config, MoEConfig, moe_layer_config
from moe_engine.config.validate import resolve, validate, validate_moe


def make(**options: Any) -> Config:
    """The schema's defaults with options by their dotted name (`__` for the dot)."""
    config = Config()
    for name, value in options.items():
        section: Any = config
        *sections, option = name.split("__")
        for each in sections:
            section = getattr(section, each)
        assert hasattr(section, option)
        setattr(section, option, value)
    return config


def problems(config: Config, world: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(config, world)
    return str(caught.value).splitlines()


def test_the_defaults_and_the_quickstart_are_valid() -> None:
    validate(Config())
    validate(load("train", []))
    validate(load("train", ["experiment=quickstart"]))
    validate(load("train", ["experiment=quickstart"]), world=4)


@pytest.mark.parametrize("name", choices("model", "train"))
def test_presets_are_valid(name: str) -> None:
    validate(load("train", [f"model={name}", "train.seq_len=4096"]))


def test_options_without_effect_are_not_checked() -> None:
    validate(make(model__num_kv_heads=3, model__head_dim=7))  # of the other attention
    validate(make(model__attention="gqa", model__kv_lora_rank=0, model__qk_rope_head_dim=3))
    validate(make(model__rope_factor=0.0))
    validate(make(model__max_positions=256))  # as long as the sequences


@pytest.mark.parametrize(("options", "message"), RULES, ids=[message.partition(":")[0] for _, message in RULES])
def test_a_broken_rule_is_one_line(options: dict[str, Any], message: str) -> None:
    lines = problems(make(**options))
    assert len(lines) == 1
    assert lines[0].startswith(message)


@pytest.mark.parametrize(("options", "message"), RULES, ids=[message.partition(":")[0] for _, message in RULES])
def test_the_value_that_a_message_offers_works(options: dict[str, Any], message: str) -> None:
    """Every `section.option=value` after "use" or "for example" in a message mends the configuration by itself."""
    config = make(**options)
    line = problems(config)[0]
    offer = re.search(r"(?:use|for example) (\w+(?:\.\w+)*)\.(\w+)=(\[[^]]*\]|[^\s,;]+)", line)
    if offer is None:  # a choice from a list, or a whole recipe (precision=fp32)
        assert "There are" in line or "there are" in line or "did you mean" in line or "use precision=" in line
        return
    section, option, text = offer.groups()
    old = attrgetter(section)(Config())
    kind = type(getattr(old, option)) if getattr(old, option) is not None else int
    setattr(attrgetter(section)(config), option, yaml.safe_load(text) if kind in (list, bool) else kind(text))
    validate(config)


def test_a_run_has_a_name_that_file_systems_take() -> None:
    validate(make(run__name="é" * 127))
    (line,) = problems(make(run__name="é" * 128))
    assert line.startswith("run.name=éé") and line.endswith(
        "...: at most 255 bytes a name, as file systems want, for example run.name=default"
    )


def test_ranks_given_from_outside_must_fit() -> None:
    assert problems(make(parallel__dp=2), world=3) == [
        "parallel.dp=2: with pp=1 x cp=1 x tp=1 needs 2 ranks, and 3 are given; start 2, or use parallel.dp=3"
    ]
    assert problems(make(parallel__pp=2), world=3) == [
        "parallel.pp=2: pp=2 x cp=1 x tp=1 does not divide the 3 ranks given; start a multiple of 2 ranks"
    ]
    assert problems(make(parallel__pp=2, parallel__dp=1), world=3) == [
        "parallel.dp=1: with pp=2 x cp=1 x tp=1 needs 2 ranks, and 3 are given; start 2"
    ]
    assert problems(make(parallel__ep=4), world=2)[0].startswith(
        "parallel.ep=4: must divide parallel.dp * parallel.cp = 2"
    )
    validate(make(parallel__pp=2), world=4)


def test_failures_of_all_sections_are_told_at_once() -> None:
    lines = problems(
        make(model__dim=0, moe__combine="x", optim__lr=-1.0, train__seq_len=0, parallel__tp=2, run__name="")
    )
    named = [line.partition("=")[0] for line in lines]
    assert named == ["model.dim", "moe.combine", "optim.lr", "train.seq_len", "run.name", "parallel.tp"]


def test_a_rule_that_needs_a_refused_value_is_not_told_on_top() -> None:
    lines = problems(make(train__micro_batch=0, model__num_experts=0, parallel__ep=0))
    assert [line.partition(":")[0] for line in lines] == ["model.num_experts=0", "train.micro_batch=0", "parallel.ep=0"]


def test_what_follows_from_the_rest_is_filled_in() -> None:
    config = make(parallel__pp=2, parallel__ep=2, train__micro_batch=1)
    alone = resolve(config)
    assert (alone.parallel.dp, alone.pipeline.micro_batches) == (2, 16 // 2)  # as few replicas as ep needs
    given = resolve(config, world=8)
    assert (given.parallel.dp, given.pipeline.micro_batches) == (4, 16 // 4)
    fixed = resolve(make(parallel__dp=1))
    assert (fixed.parallel.dp, fixed.pipeline.micro_batches) == (1, 4)
    assert config.parallel.dp is None and config.pipeline.micro_batches is None
    validate(given, world=8)  # and agrees with the rules


def layer(**options: Any) -> MoEConfig:
    return replace(MoEConfig(dim=32, expert_hidden=16, num_experts=8, top_k=2), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim=0: must be 1 or more"),
        ({"dim": "32"}, "dim=32: a whole number is expected"),
        ({"expert_hidden": -3}, "expert_hidden=-3: must be 1 or more"),
        ({"top_k": 9}, "top_k=9: a token cannot use more experts than there are; use top_k=8 or less"),
        ({"num_groups": 5}, "num_groups=5: must divide num_experts=8; use num_groups=4"),
        ({"num_groups": 4, "top_groups": 0}, "top_groups=0: must be 1 or more"),
        (
            {"num_groups": 8, "top_groups": 2},
            "group_score=sum_top2: the sum of the best two needs at least 2 experts a group",
        ),
        ({"score_function": "relu"}, "score_function=relu: no such choice; there are sigmoid, softmax"),
        ({"combine": "sum"}, "combine=sum: no such choice"),
        ({"aux_loss_weight": -1.0}, "aux_loss_weight=-1.0: must be 0 or more"),
        ({"route_scale": 0.0}, "route_scale=0.0: must be larger than 0"),
    ],
)
def test_a_layer_that_stands_alone_keeps_the_same_rules(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_moe(layer(**options))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_valid_layers_pass() -> None:
    validate_moe(layer())
    validate_moe(layer(num_groups=4, top_groups=1))
    validate_moe(layer(num_groups=8, top_groups=2, group_score="max"))
    validate_moe(moe_layer_config(Config().model, Config().moe))
