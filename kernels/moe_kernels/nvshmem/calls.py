"""Device functions of NVSHMEM, as Triton kernels call them; linked from its bitcode.

Addresses are 64-bit integers. An address that names memory of another rank (PE) is this rank's own of the same
object: symmetric memory lies at the same place in every rank's heap.
"""

from __future__ import annotations

from typing import Any

from triton.language import core

_ADD, _GREATER_EQUAL = 10, 5  # NVSHMEM_SIGNAL_ADD, NVSHMEM_CMP_GE of its headers
_I32, _I64 = core.dtype("int32"), core.dtype("int64")


def _call(name: str, types: list[Any], result: Any, arguments: list[Any], semantic: Any) -> Any:
    arguments = [
        semantic.cast(semantic.to_tensor(argument), want) for argument, want in zip(arguments, types, strict=True)
    ]
    symbols = {tuple(types): (name, result)}
    return core.extern_elementwise("", "", arguments, symbols, is_pure=False, _semantic=semantic)


@core.extern
def put_signal(target, source, size, signal, value, pe, _semantic=None):
    """Start copying `size` bytes from `source` here to `target` of rank `pe`; once they are there, add `value` to its
    `signal` (64 bits). All threads of the program call it together. `source` must stay unchanged until the signal has
    come. Nothing is said of the order of two puts.
    """
    types = [_I64, _I64, _I64, _I64, _I64, _I32, _I32]
    arguments = [target, source, size, signal, value, _ADD, pe]
    return _call("nvshmemx_putmem_signal_nbi_block", types, _I32, arguments, _semantic)


@core.extern
def wait_signal(signal, value, _semantic=None):
    """Stand still until this rank's `signal` is at least `value`; what was put before it is then visible."""
    return _call("nvshmem_signal_wait_until", [_I64, _I32, _I64], _I64, [signal, _GREATER_EQUAL, value], _semantic)
