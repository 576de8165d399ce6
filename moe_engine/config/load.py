"""From YAML files and `name=value` words to a checked configuration. The one place, with `cli`, that knows Hydra.

`conf/` holds a root file for each command (`train.yaml`, `schedule.yaml`) and a folder for each group of ready
choices (`model/`, `parallel/`, `experiment/` …). Values come from, later ones winning: the dataclasses' defaults,
the root file, the chosen group files, a file named on the command line, the `name=value` words. `model` may also be a
Hugging Face `config.json` or its folder, which then gives the whole section. Hydra composes the groups only;
everything then passes `config.strict`, whatever way it came in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from moe_engine.config import strict
from moe_engine.config.errors import ConfigError, there_are
from moe_engine.config.huggingface import read_model_config
from moe_engine.config.schema import Config

T = TypeVar("T")

_FOR_ONE_COMMAND = {("pipeline", "all"): "schedule"}  # choices that other commands could make nothing of
_YAML_EXAMPLE = "sections with options are expected, for example 'train: {steps: 100}'"
_WORD = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<name>[^=]*)(?P<equals>=)?(?P<value>.*)", re.DOTALL)


@overload
def load(command: str, overrides: Sequence[str]) -> Config: ...


@overload
def load(command: str, overrides: Sequence[str], schema: type[T]) -> T: ...


def load(command: str, overrides: Sequence[str], schema: type = Config) -> Any:
    """The configuration of `command` with the words of the command line applied.

    `overrides` are `group=choice`, `section.option=value`, and paths of YAML files with values (a run's own
    `config.yaml`, say). Raises ConfigError naming every word and value that is wrong, a line each; rules that
    span options are `config.validate`'s.
    """
    words = _read_words(command, overrides, strict.options(schema))
    problems = list(words.problems)
    try:
        config = _compose(command, words.groups)
        for section, options in words.sections.items():
            config[section] = options
        for path in words.files:
            config = _merge(config, _read_yaml(path))
        for name, value in words.values:
            OmegaConf.update(config, name, value, merge=True, force_add=True)
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        raise ConfigError("\n".join([*problems, _named_reason(error, dict(words.values))])) from None
    result: Any = None
    try:
        result = strict.build(schema, _as_mapping(data))
    except ConfigError as error:
        problems += error.lines
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return result


def to_yaml(config: Any) -> str:
    """A configuration (any of the dataclasses) as YAML text that `from_yaml` reads back as equal."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


@overload
def from_yaml(path: Path) -> Config: ...


@overload
def from_yaml(path: Path, schema: type[T]) -> T: ...


def from_yaml(path: Path, schema: type = Config) -> Any:
    """The configuration in a file, as strictly as from the command line. Raises ConfigError naming the file."""
    try:
        return strict.build(schema, _as_mapping(OmegaConf.to_container(_read_yaml(path), resolve=True)))
    except (ConfigError, OmegaConfBaseException) as error:
        lines = error.lines if isinstance(error, ConfigError) else [_reason(error)]
        raise ConfigError("\n".join(line if str(path) in line else f"{path}: {line}" for line in lines)) from None


def conf_folder() -> Path:
    """The folder of YAML files: inside the package where a wheel was installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/ in or beside {package}: the installation is incomplete, install it again")


def choices(group: str, command: str) -> list[str]:
    """The ready choices of a group that a command takes: `experiment` gives `["quickstart", …]`."""
    folder = conf_folder() / group
    found = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    return [choice for choice in found if _FOR_ONE_COMMAND.get((group, choice), command) == command]


def groups(command: str) -> dict[str, str | None]:
    """The groups that a command composes, in order, with the choice it makes by default."""
    root = OmegaConf.to_container(OmegaConf.load(conf_folder() / f"{command}.yaml"))
    found: dict[str, str | None] = {}
    for entry in _as_mapping(root).get("defaults", []):
        if isinstance(entry, Mapping):
            found |= {str(name).removeprefix("optional "): choice for name, choice in entry.items()}
    return found


@dataclass(frozen=True)
class _Words:
    """The command line, read."""

    groups: list[str]  # for Hydra
    sections: dict[str, dict[str, Any]]  # given whole, by a file of another format
    files: list[Path]
    values: list[tuple[str, Any]]
    problems: list[str]


def _read_words(command: str, overrides: Sequence[str], known: Mapping[str, strict.Option]) -> _Words:
    words = _Words([], {}, [], [], [])
    command_groups = groups(command)
    for text in overrides:
        sign, name, equals, value = _WORD.fullmatch(text).group("sign", "name", "equals", "value")  # type: ignore[union-attr]
        if sign == "~":
            words.problems.append(f"{text}: options cannot be removed; set another value, as name=value")
        elif not equals and text.endswith((".yaml", ".yml")):
            rule = strict.unusable(text)
            if rule:
                words.problems.append(f"{text[:80]}: {rule}")
            else:
                words.files.append(Path(text))
        elif not equals or not name:
            words.problems.append(_bare_word(text, command, known))
        elif name in command_groups:
            _read_choice(command, name, value, words)
        elif name in known:
            words.values.append((name, _parse(name, value, known[name])))
            if command == "train" and _several(name, value, known[name]):
                words.problems.append(f"{text}: has several values; for a run with each of them add --multirun")
                words.values.pop()
        elif any(option.startswith(f"{name}.") for option in known):
            words.problems.append(strict.not_a_value(name, value, known))
        else:
            words.problems.append(strict.unknown(name, value, known, also=command_groups))
    return words


def _read_choice(command: str, group: str, value: str, words: _Words) -> None:
    if value == "null" and groups(command)[group] is None:
        return  # nothing chosen, as by default
    if group == "model" and (value.endswith(".json") or "/" in value):
        rule = strict.unusable(value)
        if rule:
            words.problems.append(f"{strict.shown(group, value)}: {rule}")
            return
        try:
            words.sections[group] = asdict(read_model_config(Path(value).expanduser()))
        except ConfigError as error:
            words.problems.extend(f"{group}={line}" for line in error.lines)
        return
    wrong = list(_wrong_choices(command, group, value))
    words.problems.extend(wrong)
    if not wrong:
        words.groups.append(f"{group}='{value}'" if value in ("true", "false") else f"{group}={value}")


def _bare_word(text: str, command: str, known: Mapping[str, strict.Option]) -> str:
    """The line that refuses a word without `=`."""
    rule = f"{text}: options are written name=value, without spaces or dashes"
    found = [f"{group}={text}" for group in groups(command) if text in choices(group, command)]
    if not found:
        close = strict.closest(text.lstrip("-"), known)
        found = [strict.shown(name, known[name].example) for name in close[:1]] or ["train.steps=20"]
        return f"{rule}, for example {found[0]}"
    return f"{rule}; did you mean {' or '.join(found)}?"


def _wrong_choices(command: str, group: str, value: str) -> Iterator[str]:
    """A line for each choice that the group does not have. Several are written in brackets."""
    available = choices(group, command)
    listed = value[1:-1].split(",") if value.startswith("[") and value.endswith("]") else [value]
    for choice in (item.strip() for item in listed):
        if command == "train" and not listed[1:] and "," in choice and set(choice.split(",")) <= set(available):
            yield f"{group}={choice}: has several values; for a run with each of them add --multirun"
        elif choice not in available:
            yield f"{group}={choice}: no such {group}; {there_are(available, strict.closest(choice, available))}"


def _parse(name: str, value: str, option: strict.Option) -> Any:
    """The value in Hydra's grammar (numbers, true, null, lists); for an option of type text, what was typed.

    What is no single value in that grammar stays text, for `strict` to refuse with the option's own rule.
    """
    quoted_or_computed = value.startswith(("'", '"')) or "${" in value
    if option.base_type is str and value != "null" and not quoted_or_computed:
        return value
    try:
        override = OverridesParser.create().parse_override(f"{name}={value}")
    except HydraException:
        return value
    return value if override.is_sweep_override() else override.value()


def _several(name: str, value: str, option: strict.Option) -> bool:
    """Whether a value is a sweep in Hydra's grammar; of lists, brackets were rather forgotten, and texts are none."""
    if option.base_type in (str, list[str]):
        return False
    try:
        return bool(OverridesParser.create().parse_override(f"{name}={value}").is_sweep_override())
    except HydraException:
        return False


def _compose(command: str, group_words: list[str]) -> DictConfig:
    """Hydra's part: the root file with the chosen group files."""
    with initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3", job_name=command):
        config = compose(config_name=command, overrides=group_words)
    OmegaConf.set_struct(config, False)
    return config


def _read_yaml(path: Path) -> DictConfig:
    """A YAML file of values. Raises ConfigError naming it."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; values are written name=value, or in a file like a run's config.yaml")
    try:
        config = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        place = getattr(error, "problem_mark", None)
        where = f", line {place.line + 1}" if place else ""
        raise ConfigError(f"{path}: not readable as YAML{where}: {_reason(error)}; {_YAML_EXAMPLE}") from None
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: {_YAML_EXAMPLE}")
    return config


def _merge(config: DictConfig, other: DictConfig) -> DictConfig:
    merged = OmegaConf.merge(config, other)
    if not isinstance(merged, DictConfig):
        raise TypeError("two mappings merge to a mapping")
    return merged


def _as_mapping(data: Any) -> dict[str, Any]:
    """OmegaConf's containers with their keys as text, which is what they are in a configuration."""
    return {str(key): value for key, value in data.items()}


def _named_reason(error: Exception, values: Mapping[str, Any]) -> str:
    """The reason why values could not be put together; where one of the given `values` is to blame, with it."""
    name = str(getattr(error, "full_key", None))
    if isinstance(error, InterpolationResolutionError) and name in values:
        return (
            f"{strict.shown(name, values[name])}: {_reason(error).removeprefix(f'{name}: ')}; "
            "name an option that a file or the command line sets, or write the value itself"
        )
    return _reason(error)


def _reason(error: Exception) -> str:
    """The first line of a library's error, with the option it is about where it says so."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    option = getattr(error, "full_key", None)
    return f"{option}: {line}" if option else line
