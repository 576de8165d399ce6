"""Tensors without data: what runs the engine's own code at the size of a cluster on a laptop.

Inside `TensorsWithoutData` floating-point numbers have shapes but no values (they live on torch's meta device), and
integers are real: they are few, and the engine needs them on the host, to split messages and to group rows. What an
operation makes of both has no values; an integer or a flag that floating-point numbers decide is 0 or False. So
nothing above knows of a dry run: it asks for tensors on the device `meta` and goes its way.

`LiveBytes` counts, below all that, the bytes of every storage from the operation that made it until nobody holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
CPU = torch.device("cpu")


class LiveBytes:
    """Bytes of the storages that are alive, and the most that there were at once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}  # by the address of the storage, which is not used again while it lives

    def hold(self, x: Tensor) -> None:
        """Count the storage of `x` from now on until it is freed; once, however many tensors share it."""
        storage = x.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return
        size = storage.nbytes()
        self._known[address] = weakref.ref(storage, lambda _: self._free(address, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, address: int, size: int) -> None:
        del self._known[address]
        self.now -= size


class TensorsWithoutData(TorchDispatchMode):
    """See the module. `live` counts what is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self._forms = LiveBytes(), Forms()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; else torch wraps every call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(func, args, kwargs or {})
        for x in _tensors_in((result,)):
            self.live.hold(x)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The results of an operation, by the rule of the module."""
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        if not tensors:
            return self._make(func, args, kwargs)
        some_real = not all(x.is_meta for x in tensors)
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(*args) if some_real else 0
        if some_real and not any(x.is_meta for x in tensors):
            if "device" in kwargs:
                kwargs = {**kwargs, "device": CPU}
            return _each(func(*args, **kwargs), lambda x: _like(x) if _is_data(x) and not _in(x, tensors) else x)
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == CPU:  # read on the host
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if some_real and func._schema.is_mutable and isinstance(args[0], Tensor) and not args[0].is_meta:
            return args[0]  # an integer would take what has no value
        if func.overloadpacket in _INDEXING:  # these take real indices beside tensors without data
            result = func(*args, **kwargs)
        else:
            if some_real:
                args = _each(args, lambda x: x if x.is_meta else _like(x))
            result = self._forms.run(func, args, kwargs)
        if func.overloadpacket in _SORTING:
            return _each(result, lambda x: x if _is_data(x) else _order(x, args, kwargs))
        return _each(result, lambda x: x if _is_data(x) or _in(x, tensors) else _zeros(x))

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A tensor out of nothing: without data if it is of floating-point numbers, else real."""
        if "device" not in kwargs:
            return func(*args, **kwargs)
        made = self._forms.run(func, args, {**kwargs, "device": META})
        return made if _is_data(made) else func(*args, **{**kwargs, "device": CPU})


class Forms:
    """Operations on tensors without data by the forms of their arguments: most of a step repeats what came before.

    Torch works out sizes in Python for many of them, ten times as long as making a tensor of known sizes takes.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What `func` gives: the first of its form by torch, the next as that one was."""
        effect = _effect(func)
        if effect == VIEWS:
            return func(*args, **kwargs)
        key = (func, _form(args), _form(tuple(kwargs.items())))
        if key not in self._known:
            result = func(*args, **kwargs)
            self._known[key] = _each(result, _like) if effect == MAKES else None
            return result
        return _each(self._known[key], _like) if effect == MAKES else args[0]


MAKES, FILLS, VIEWS = "makes", "fills", "views"


@cache
def _effect(func: Any) -> str:
    """Whether an operation makes new tensors alone, or only fills its first argument (and has nothing to do where
    there is no data), or gives or changes views."""
    arguments, returns = func._schema.arguments, func._schema.returns
    if all(each.alias_info is None for each in (*arguments, *returns)):
        return MAKES
    first, *others = arguments
    aliases = [each.alias_info for each in (first, *returns)]
    fills = len(aliases) == 2 and all(alias is not None and alias.is_write for alias in aliases)
    fills = fills and all(each.alias_info is None for each in others)
    return FILLS if fills and torch.Tag.inplace_view not in func.tags else VIEWS


def _form(value: Any) -> Any:
    """What a result's sizes depend on: of tensors size, layout and format, of anything else itself."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_form(each) for each in value])
    return type(value), value


_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_)
_SORTING = (torch.ops.aten.sort, torch.ops.aten.argsort)  # of numbers without values, all alike: as they are
REAL = 1 << 14  # elements up to which zeros made by floating-point numbers are memory of their own


def _is_data(x: Tensor) -> bool:
    """Whether these are numbers that a dry run leaves out; bytes are such numbers on their way."""
    return x.is_floating_point() or x.is_complex() or x.dtype == torch.uint8


def _in(x: Tensor, tensors: list[Tensor]) -> bool:
    return any(x is each for each in tensors)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_each(each, change) for each in value])
    return value


def _like(x: Tensor) -> Tensor:
    """Without data, laid out as `x`."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)


def _order(x: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The places of numbers that are all alike, sorted along the last dimension or that of the arguments."""
    dims = [each for each in (*args[1:], kwargs.get("dim")) if type(each) is int]
    shape = [1] * x.dim()
    shape[dims[0] if dims else -1] = -1
    return torch.arange(x.shape[dims[0] if dims else -1]).view(shape).expand(x.shape).contiguous()


def _zeros(x: Tensor) -> Tensor:
    if x.numel() > REAL:
        return torch.zeros((), dtype=x.dtype).expand(x.shape)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_()
