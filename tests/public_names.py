"""The public names of the package with their signatures, as the text that docs/public_names.txt holds.

`python tests/public_names.py > docs/public_names.txt` announces a change; CHANGELOG.md says why.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

PACKAGES = ["moe_engine", "moe_engine.integrations.megablocks", "moe_engine.integrations.transformers"]
# Of a module, what its user calls. The other methods of MoELayer are the phases that the engine's blocks run.
METHODS = ("__init__", "forward", "reset_parameters", "update_balance", "update_balance_after")


def _signature(value: Any) -> str:
    return str(inspect.signature(value)).replace("'", "")


def _default(item: Any) -> str:
    if item.default_factory is not dataclasses.MISSING:
        return f" = {item.default_factory.__name__}()"
    return "" if item.default is dataclasses.MISSING else f" = {item.default!r}"


def _described(name: str, value: Any) -> Iterator[str]:
    """A line for a function; for a class one for each field of a dataclass, else for each public method."""
    if dataclasses.is_dataclass(value):
        yield f"class {name}"
        for item in dataclasses.fields(value):
            yield f"    {item.name}: {item.type}{_default(item)}"
    elif inspect.isclass(value):
        yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
        yield from (f"    {method}{_signature(vars(value)[method])}" for method in METHODS if method in vars(value))
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name} = {value!r}"


def text() -> str:
    lines: list[str] = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            if not name.startswith("__"):
                lines += _described(f"{package}.{name}", getattr(module, name))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(text(), end="")
