"""Plain dictionaries to dataclasses, strictly: nothing unknown, nothing of another type, all mistakes at once.

Hydra lets `+key=value` past a structured config and OmegaConf converts what it can, so neither can be the check.
Here every key must be a field of the schema and every value must have the field's type. An integer is taken
for a float, and so is text like "1e-3" (YAML 1.1 reads it as text); nothing else is converted.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypeVar

from moe_engine.config.errors import ConfigError

T = TypeVar("T")

MOST_BYTES_OF_A_NAME = 255  # of a file or folder, on all usual file systems
MOST_BYTES_OF_A_PATH = 4000


@dataclass(frozen=True)
class Option:
    """One option of a schema: its dotted name, its type, and a value that works."""

    name: str
    type: Any
    example: Any

    @property
    def base_type(self) -> Any:
        """The type without `| None`."""
        if typing.get_origin(self.type) in (typing.Union, types.UnionType):
            return next(arm for arm in typing.get_args(self.type) if arm is not type(None))
        return self.type

    @property
    def optional(self) -> bool:
        return self.base_type is not self.type


def options(schema: type, prefix: str = "") -> dict[str, Option]:
    """Every option of a schema by its dotted name, in the order of the fields."""
    hints = typing.get_type_hints(schema)
    found: dict[str, Option] = {}
    for item in fields(schema):
        name, hint = prefix + _option_name(item.name), hints[item.name]
        if is_dataclass(hint):
            found |= options(typing.cast(type, hint), f"{name}.")
        else:
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            found[name] = Option(name, hint, _example(hint) if default in (None, MISSING, [], "") else default)
    return found


def _option_name(field_name: str) -> str:
    """A field that would be a word of Python's, `from_`, is the option `from`."""
    return field_name.removesuffix("_")


def build(schema: type[T], data: Mapping[str, Any]) -> T:
    """The dataclass `schema` with the values of `data` (sections are nested mappings); the rest has its default.

    Raises ConfigError with a line for each unknown key, value of a wrong type, and rule of a `__post_init__`.
    """
    problems: list[str] = []
    result = _build(schema, data, "", options(schema), problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return typing.cast(T, result)


def unknown(name: str, value: Any, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """The line that refuses `name`, with the options of `known` (or other names in `also`) that may be meant."""
    known, section = list(known), name.partition(".")[0]
    # a word without a section is more likely one of the others than an option's last word
    close = ([] if "." in name else closest(name, also)) or closest(name, [*known, *also])
    if close:
        return f"{shown(name, value)}: no such option; did you mean {' or '.join(close)}?"
    inside = [option.removeprefix(f"{section}.") for option in known if option.startswith(f"{section}.")]
    if inside:
        return f"{shown(name, value)}: no such option; {section} has {', '.join(inside)}"
    first_words = dict.fromkeys(option.partition(".")[0] for option in known)
    return f"{shown(name, value)}: no such option; there are {', '.join(first_words)}"


def not_a_value(name: str, value: Any, known: Mapping[str, Option]) -> str:
    """The line that refuses a value for a whole section."""
    inside = next(option for option in known.values() if option.name.startswith(f"{name}."))
    return (
        f"{shown(name, value)}: {name} is a section; set its options, for example {shown(inside.name, inside.example)}"
    )


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three `known` names that `name` may stand for, by their last words: the same word, else near ones."""
    known = list(known)
    section, _, word = name.rpartition(".")
    groups = [] if section else _nearest(word, [other for other in known if "." not in other])
    if groups:
        return groups  # a word without a section is rather a group than an option of some section
    section = section.lower()
    by_word: dict[str, list[str]] = {}
    for other in known:
        by_word.setdefault(other.rpartition(".")[2], []).append(other)
    word = word if word in by_word else word.lower()
    words = [word] if word in by_word else _nearest(word, by_word)
    found = [other for close in words for other in by_word[close]]
    same_section = [other for other in found if section and other.rpartition(".")[0] == section]
    return (same_section or found)[:3]


def _nearest(word: str, words: Iterable[str]) -> list[str]:
    """The words as near to `word` as the nearest is, if that is near at all."""

    def likeness(other: str) -> float:
        return difflib.SequenceMatcher(None, word, other).ratio()

    close = difflib.get_close_matches(word, words, n=3, cutoff=0.7)
    return [other for other in close if likeness(other) > likeness(close[0]) - 0.05]


def shown(name: str, value: Any) -> str:
    """`name=value` as one writes it on the command line; long values are cut."""
    text = _text(value)
    return f"{name}={text if len(text) <= 80 else text[:77] + '...'}"


def _build(schema: type, data: Mapping[str, Any], prefix: str, known: Mapping[str, Option], problems: list[str]) -> Any:
    """One section. Returns None if something in it is wrong."""
    hints = typing.get_type_hints(schema)
    field_of = {_option_name(item.name): item.name for item in fields(schema)}
    count = len(problems)
    values: dict[str, Any] = {}
    for key, value in data.items():
        name, field_name = f"{prefix}{key}", field_of.get(key, "")
        if not field_name:
            # The whole schema is searched, so that `train.lr` finds `optim.lr`.
            problems += [unknown(leaf, given, known) for leaf, given in _leaves(name, value)]
        elif not is_dataclass(hints[field_name]):
            values[field_name] = _convert(known[name], value, problems)
        elif isinstance(value, Mapping):
            values[field_name] = _build(typing.cast(type, hints[field_name]), value, f"{name}.", known, problems)
        else:
            problems.append(not_a_value(name, value, known))
    for item in fields(schema):
        option_name = _option_name(item.name)
        if option_name not in data and item.default is MISSING and item.default_factory is MISSING:
            option = known[prefix + option_name]
            problems.append(f"{option.name}: a value is needed, for example {shown(option.name, option.example)}")
    if len(problems) > count:
        return None
    try:
        return schema(**values)
    except ConfigError as error:  # a rule of the section's own
        problems += error.lines
        return None


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """The dotted names and values inside a mapping; a value that is none is its own leaf."""
    if isinstance(value, Mapping) and value:
        return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]
    return [(name, value)]


def _convert(option: Option, value: Any, problems: list[str]) -> Any:
    """The value in the option's type; what cannot be is added to `problems`."""
    if value is None and option.optional:
        return None
    converted, rule = _CONVERTERS[option.base_type](value)
    if rule is not None:
        example = _fitting(option, value)
        problems.append(f"{shown(option.name, value)}: {rule}, for example {shown(option.name, example)}")
    return converted


def _fitting(option: Option, value: Any) -> Any:
    """A value that works, as near as can be to the one given."""
    if option.base_type is int and isinstance(value, float) and math.isfinite(value):
        return round(value)
    if option.base_type == list[str] and isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return option.example


def _int(value: Any) -> tuple[Any, str | None]:
    good = isinstance(value, int) and not isinstance(value, bool)
    if good and not -(2**63) <= value < 2**63:
        return value, "a whole number of 64 bits is expected"
    return value, None if good else "a whole number is expected"


def _float(value: Any) -> tuple[Any, str | None]:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value, "a number is expected"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value, "a number is expected"
    return float(value), None if math.isfinite(value) else "a finite number is expected"


def _bool(value: Any) -> tuple[Any, str | None]:
    return value, None if isinstance(value, bool) else "true or false is expected"


def _str(value: Any) -> tuple[Any, str | None]:
    if not isinstance(value, str):
        return value, "text is expected (numbers in quotes)"
    return value, unusable(value)


def _str_list(value: Any) -> tuple[Any, str | None]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return value, "a list of texts is expected (numbers in quotes)"
    return value, next(filter(None, map(unusable, value)), None)


def unusable(text: str) -> str | None:
    """Why a text can be no option: all texts name files, or choices that are shorter. None where it can."""
    try:
        parts = text.encode().split(b"/")
    except UnicodeEncodeError:  # other bytes of a command line arrive as surrogates
        return "text in UTF-8 is expected"
    if max(map(len, parts)) > MOST_BYTES_OF_A_NAME or sum(map(len, parts)) > MOST_BYTES_OF_A_PATH:
        return f"at most {MOST_BYTES_OF_A_NAME} bytes a name, as file systems want"
    return None


def _int_list(value: Any) -> tuple[Any, str | None]:
    good = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    return value, None if good else "a list of whole numbers is expected"


_CONVERTERS: Mapping[Any, Any] = types.MappingProxyType(
    {int: _int, float: _float, bool: _bool, str: _str, list[str]: _str_list, list[int]: _int_list}
)


def _example(hint: Any) -> Any:
    """A value of a type, where the schema's default says nothing."""
    examples = {int: 1, float: 1.0, bool: True, str: "text", list[str]: ["first", "second"], list[int]: [1, 2]}
    return examples[Option("", hint, None).base_type]


def _text(value: Any) -> str:
    """A value as YAML and the command line write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    return str(value)
