"""Weight gradients that wait: the split of a backward into input gradient (I) and weight gradients (W).

Zero-bubble schedules (Qi et al., arXiv 2401.10241) fill pipeline bubbles with weight gradients, which nothing
downstream waits for. Forward cannot know how its backward will be run, so an op asks its queue when its backward
runs: if the queue is deferring, the op leaves a closure there in place of the weight gradient.

Autograd visits a leaf even when an op returns None for it, and then fires the leaf's post-accumulate hooks with
nothing accumulated; a gradient reduction started there would miss the deferred part. So a queued parameter's hooks
are put aside until its weight gradient is run.

Where a parameter has a wide gradient already, as with the engine's optimizer, a product adds to it by itself: what
would be made, read and added otherwise never exists. Both ways of running a backward do that alike, in one order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

Make = Callable[[], Tensor]  # gives a weight gradient
Add = Callable[[Tensor], object]  # adds it to a tensor


class Launch(TypedDict):
    """Options of a grouped product: programs that it starts, None for one on each multiprocessor; whether in its Hopper
    form, where there is one that agrees with the plain form."""

    num_sms: int | None
    hopper: bool


@dataclass(frozen=True)
class _Entry:
    parameter: Tensor
    make: Make
    add: Add | None


class WgradQueue:
    """Closures that make weight gradients, in one batch for each backward that was run without them.

    Owned by the executor: it wraps an I action in `defer(key)`, and the W action is `run(key)`. It reaches every
    product of forward and backward, and so also says how these are launched: on how many of a GPU's multiprocessors
    they may run now, and in which form.
    """

    def __init__(self, hopper: bool = False) -> None:
        self.num_sms: int | None = None
        self.hopper = hopper
        self.gives = False  # gradients are asked for: none is added to what is there
        self._batches: dict[Hashable, deque[_Entry]] = {}
        self._open: deque[_Entry] | None = None
        self._muted: list[tuple[dict[int, Any], dict[int, Any]]] = []  # a parameter's registry of hooks, and the hooks

    @property
    def deferring(self) -> bool:
        """Whether weight gradients of the backward that runs now are to be pushed here."""
        return self._open is not None

    def __len__(self) -> int:
        """Number of queued closures."""
        return sum(len(batch) for batch in self._batches.values())

    @contextmanager
    def defer(self, key: Hashable, deferring: bool = True) -> Iterator[None]:
        """Around a backward: queue its weight gradients as the batch `key`. With deferring=False, does nothing.

        Post-accumulate hooks of the queued parameters stay silent until `run`.

        Raises ValueError inside another `defer`, or when the batch `key` is still queued.
        """
        if not deferring:
            yield
            return
        if self._open is not None or key in self._batches:
            state = "another backward is deferring" if self._open is not None else "this batch is still queued"
            raise ValueError(f"defer({key!r}): {state}")
        self._open = self._batches[key] = deque()
        try:
            yield
        finally:
            self._open = None
            for registry, hooks in self._muted:
                registry.update(hooks)
            self._muted.clear()

    def without_waiting(self) -> WgradQueue:
        """A queue in which nothing waits and whose products give autograd all gradients, launched as this one's."""
        queue = WgradQueue(self.hopper)
        queue.num_sms, queue.gives = self.num_sms, True
        return queue

    def push(self, parameter: Tensor, make: Make, add: Add | None = None) -> None:
        """Queue `make`, which will give a gradient of the leaf `parameter`, or `add`, see `weight_gradient`."""
        if self._open is None:
            raise ValueError("push: the queue is not deferring")
        self._open.append(_Entry(parameter, make, add))
        registry = parameter._post_accumulate_grad_hooks
        if registry:
            self._muted.append((registry, dict(registry)))
            registry.clear()

    @torch.no_grad()
    def run(self, key: Hashable) -> None:
        """Make the weight gradients of the batch `key` first in, first out, and accumulate them.

        A parameter used several times gets one gradient, the sum in the order of the queue, as under ordinary
        autograd, unless its uses add to what is there; its post-accumulate hooks fire once. Raises KeyError when there
        is no such batch.
        """
        batch = self._batches.pop(key)
        uses_left = Counter(id(entry.parameter) for entry in batch)
        sums: dict[int, Tensor] = {}
        while batch:
            entry = batch.popleft()  # out of the queue at once, so that its tensors are freed one by one
            parameter, index = entry.parameter, id(entry.parameter)
            if not _added(parameter, entry.add):
                grad = entry.make().to(gradient_dtype(parameter))
                sums[index] = sums[index] + grad if index in sums else grad
            uses_left[index] -= 1
            if uses_left[index] == 0:
                accumulate(parameter, sums.pop(index, None))


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of `parameter.grad`: `parameter.grad_dtype` where torch has it, else the parameter's own."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype


@torch.no_grad()
def accumulate(parameter: Tensor, grad: Tensor | None) -> None:
    """Do what autograd does at a leaf: add `grad` to `parameter.grad`, then fire the post-accumulate hooks."""
    if parameter.grad is None:
        parameter.grad = None if grad is None else grad.to(gradient_dtype(parameter))
    elif grad is not None:
        parameter.grad += grad
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def weight_gradient(
    queue: WgradQueue | None, parameter: Tensor | None, make: Make, add: Add | None = None
) -> Tensor | None:
    """The weight gradient; or None after leaving it in a deferring queue, or after adding it to the one that is there.

    Only leaves (`parameter`) ever wait, or are added to. add: adds what `make` would give to an fp32 (fp64) tensor.
    """
    if queue is None or parameter is None:
        return make()
    if queue.deferring:
        queue.push(parameter, make, add)
        return None
    return None if not queue.gives and _added(parameter, add) else make()


@torch.no_grad()
def _added(parameter: Tensor, add: Add | None) -> bool:
    """Whether `add` could add to the parameter's gradient."""
    grad = parameter.grad
    if add is None or grad is None or grad.dtype not in (torch.float32, torch.float64):
        return False
    add(grad)
    return True


def waits(queue: WgradQueue | None, parameter: Tensor | None) -> bool:
    """Whether the weight gradient of `parameter` is to be left in the queue."""
    return queue is not None and queue.deferring and parameter is not None


def launch(queue: WgradQueue | None) -> Launch:
    """How a grouped product is launched now; without a queue in its plain form on all multiprocessors."""
    if queue is None:
        return Launch(num_sms=None, hopper=False)
    return Launch(num_sms=queue.num_sms, hopper=queue.hopper)


def leaf(weight: Tensor) -> Tensor | None:
    """`weight` if its gradient ends there. Ops keep it on their context: under recompute the saved weight is a copy."""
    return weight if weight.is_leaf and weight.requires_grad else None
