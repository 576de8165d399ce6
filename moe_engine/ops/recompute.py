"""Recomputing in backward what forward need not keep: memory for time.

A *segment* is a part of a forward whose result is cheap to make again. `Segments.run` computes it as usual, but of
everything that autograd would keep from it, only the segment's inputs stay: what its own operations save, and its
outputs wherever a later operation saves them, are replaced by handles. The first time that backward asks for one of
them, the segment is run once more and all its handles are filled; each gives its tensor up as soon as the last
operation that saved it has run its backward.

So nothing about the graph changes. The backward may be whole, split into input and weight gradients, or run phase by
phase, and no executor or schedule knows of recompute. The same operations on the same inputs give the same bits, and
what must not be done twice (routing, its counts, communication) is simply outside every segment. This is why
`torch.utils.checkpoint` is not used: it keeps a region's output where the next operation saves it, so that dropping the
output of a norm would cost the matrix product after it as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from moe_engine.config.schema import RecomputeConfig

BLOCK = "block"  # each of a block's computing phases as a whole


def recomputed_names(config: RecomputeConfig) -> frozenset[str]:
    """The kinds of segments that a configuration recomputes."""
    names = {"none": (), "full": (BLOCK, "norm"), "selective": config.names}
    return frozenset(names[config.mode])


class _Handle:
    """Stands for a tensor that was not kept: one output of a segment, or one tensor saved inside it."""

    __slots__ = ("__weakref__", "segment", "value")

    def __init__(self, segment: _Segment) -> None:
        self.segment: _Segment | None = segment
        self.value: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.value is None:
            assert self.segment is not None
            self.segment.run_again()
            assert self.value is not None, "a recomputed segment saved other tensors than the first time"
        return self.value

    def fill(self, value: Tensor) -> None:
        self.value, self.segment = value.detach(), None


class _View:
    """What a saved tensor was of the storage that a handle stands for."""

    __slots__ = ("geometry", "handle")

    def __init__(self, handle: _Handle, x: Tensor) -> None:
        self.handle, self.geometry = handle, (x.shape, x.stride(), x.storage_offset())

    def tensor(self) -> Tensor:
        return self.handle.tensor().as_strided(*self.geometry)


Kept = Tensor | _View | _Handle  # what autograd holds in place of a saved tensor


class _Segment:
    """One run of a function whose results can be made again from its inputs."""

    def __init__(self, function: Callable[..., Any], inputs: list[tuple[Tensor | _View, bool]]) -> None:
        self.function: Callable[..., Any] | None = function
        self.inputs = inputs  # each with whether it requires a gradient
        self.saved: dict[int, weakref.ref[_Handle]] = {}  # by the order in which autograd saved them
        self.outputs: list[weakref.ref[_Handle] | None] = []

    def run_again(self) -> None:
        """Fill every handle that is still wanted, and let the inputs go."""
        assert self.function is not None, "a segment is run again once"
        inputs = [_tensor(kept).detach().requires_grad_(wanted) for kept, wanted in self.inputs]
        found: list[Tensor] = []

        def take(x: Tensor) -> None:
            found.append(x.detach())  # the graph holds this hook: with its tensors here, it would hold itself

        with torch.enable_grad(), saved_tensors_hooks(take, _not_for_backward):
            outputs = _as_tuple(self.function(*inputs))
        for number, reference in self.saved.items():
            _fill(reference, found[number])
        for reference_or_none, output in zip(self.outputs, outputs, strict=True):
            if reference_or_none is not None and output is not None:
                _fill(reference_or_none, output)
        self.function, self.inputs = None, []


class Segments:
    """The segments of one micro-batch in one block, and which kinds of them are recomputed.

    Forward phases run inside `hooks()`; the parts that may be recomputed go through `segment`.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._made: dict[int, tuple[StorageWeakRef, torch.dtype, _Handle]] = {}  # outputs, by their storages

    def hooks(self) -> AbstractContextManager[Any]:
        """Around forward operations: tensors made by segments are saved as handles."""
        return saved_tensors_hooks(self._keep, _tensor)

    def close(self) -> None:
        """Nothing more will save what these segments made: from here on autograd alone keeps the handles."""
        self._made.clear()

    def run(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """`function(*inputs)`: a tensor or a tuple of tensors (or None), of which backward keeps the inputs alone.

        The function must give the same result when called again, must do nothing else, and must take every tensor that
        needs a gradient, parameters apart, as an input.
        """
        if not torch.is_grad_enabled():
            return function(*inputs)
        segment = _Segment(function, [(self._keep(x), x.requires_grad) for x in inputs])
        raw = {_storage(kept) for kept, _ in segment.inputs if isinstance(kept, Tensor)}
        count = 0

        def keep(x: Tensor) -> Kept:
            nonlocal count
            count += 1
            kept = self._keep(x)
            if isinstance(kept, _View) or _storage(x) in raw or isinstance(x, torch.nn.Parameter):
                return kept
            handle = _Handle(segment)
            segment.saved[count - 1] = weakref.ref(handle)
            return handle

        with saved_tensors_hooks(keep, _tensor):
            result = function(*inputs)
        for x in _as_tuple(result):
            segment.outputs.append(None if x is None or _storage(x) in raw else self._register(segment, x))
        return result

    def _register(self, segment: _Segment, x: Tensor) -> weakref.ref[_Handle] | None:
        """From now on `x` is saved as a handle."""
        if x.untyped_storage().nbytes() == 0:
            return None
        handle = _Handle(segment)
        self._made[_storage(x)] = (StorageWeakRef(x.untyped_storage()), x.dtype, handle)
        return weakref.ref(handle)

    def _keep(self, x: Tensor) -> Tensor | _View:
        """A handle's view for what a segment made, otherwise the tensor itself."""
        made = self._made.get(_storage(x))
        if made is None or made[1] != x.dtype:
            return x
        return _View(made[2], x)


def segment(segments: Segments | None, name: str, function: Callable[..., Any], *inputs: Tensor) -> Any:
    """`function(*inputs)`, recomputed in backward if segments of this name are."""
    if segments is None or name not in segments.names:
        return function(*inputs)
    return segments.run(function, *inputs)


@contextmanager
def closed_segments(names: frozenset[str]) -> Iterator[Segments | None]:
    """Hooks and segments for operations that stand together in one place; None where nothing is recomputed."""
    segments = Segments(names) if names else None
    with hooks(segments):
        yield segments
    if segments is not None:
        segments.close()


def hooks(segments: Segments | None) -> AbstractContextManager[Any]:
    """`segments.hooks()`, or nothing."""
    return nullcontext() if segments is None else segments.hooks()


def _storage(x: Tensor) -> int:
    """What tells storages apart: an address that is not used again while a weak reference to the storage exists."""
    address: int = x.untyped_storage()._cdata
    return address


def _tensor(kept: Kept) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()


def _as_tuple(result: Any) -> tuple[Tensor | None, ...]:
    return result if isinstance(result, tuple) else (result,)


def _fill(reference: weakref.ref[_Handle], value: Tensor) -> None:
    handle = reference()
    if handle is not None:
        handle.fill(value)


def _not_for_backward(_: Any) -> Tensor:
    raise RuntimeError("a recomputed graph has no backward of its own")
