"""Which form of a product to run: the plain one, or on sm_90, where asked for, the one in Gluon (see `hopper`)."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def hopper_form(name: str, device: torch.device, plain: Callable[..., Tensor]) -> Any:
    """The module `hopper_<name>` where the device is a Hopper on which it gives the results of `plain`, else None.

    The two are compared once a device, by the module's `compare(device, plain)`: the square of the difference of small
    results over that of the results themselves.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    form = importlib.import_module(f"moe_kernels.device.hopper_{name}")
    agrees = _agrees(torch.cuda.current_device() if device.index is None else device.index, plain, form.compare)
    return form if agrees else None


@functools.cache
def _agrees(
    index: int, plain: Callable[..., Tensor], compare: Callable[[torch.device, Callable[..., Tensor]], float]
) -> bool:
    error = compare(torch.device("cuda", index), plain)
    if error < 1e-12:
        return True
    warnings.warn(
        f"the Hopper form of {plain.__name__} differs from the plain one ({error:.2e}): not used", stacklevel=2
    )
    return False
