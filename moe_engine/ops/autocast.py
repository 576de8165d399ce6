"""What our ops do under `torch.autocast`, so that an imported layer works in a plain mixed-precision loop.

Autocast acts on torch's own operators, also those inside an autograd function. Ours decide for themselves:
`cast_operands` gives a matrix product its operands in autocast's dtype, and inside an op autocast is off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moe_engine.config.errors import ConfigError

PRECISIONS = ("bf16", "fp8", "native")


def _enabled(device: str) -> bool:
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def check_precision(precision: str | None) -> None:
    """Raises ConfigError for a name that `products_in` does not know."""
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(f"precision={precision}: no such choice; there are {', '.join(PRECISIONS)} and None")


def products_in(precision: str | None, device: str) -> AbstractContextManager[Any]:
    """Around operations: bf16 has matrix products computed in it, native in their operands' own format; fp8 has what
    is around fp8 products in bf16.

    None leaves that to autocast.
    """
    if precision is None:
        return nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16, enabled=precision != "native")


def cast_operands(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands in autocast's dtype where it is on; else, and in fp64, the operands themselves."""
    device = operands[0].device.type
    if not _enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in operands)


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for `forward` and `backward` of an autograd function: runs it with autocast off."""

    @functools.wraps(function)
    def inner(ctx: Any, *args: Any) -> Any:
        device = args[0].device.type
        if not _enabled(device):
            return function(ctx, *args)
        with torch.autocast(device, enabled=False):
            return function(ctx, *args)

    return inner
