"""Where a training step spends its time: forward and backward of the phases of a block, head and loss, optimizer.

Forwards are timed by wrapping the phases of one step. Backwards run inside autograd, so there the clock is read when
the gradient of a phase's output is complete: from then to the next such moment that phase's backward runs. Borders
are therefore sharp to within one operation; a sum over residual branches, and the router's backward where no rows
travel, count to the neighbour that autograd happens to run beside them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moe_engine.model.block import Block
from moe_engine.moe import dispatch as wire
from moe_engine.trainer import Trainer

TOP_OPS = 15


class _Clock:
    """Seconds by (phase, direction). One backward phase is open at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.open: tuple[str, float] | None = None

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def backward_begins(self, phase: str) -> None:
        self.close_backward()
        self.open = (phase, self.now())

    def close_backward(self) -> None:
        if self.open is not None:
            phase, start = self.open
            self.seconds[phase, "backward"] += self.now() - start
            self.open = None

    def watch(self, phase: str, output: Any) -> None:
        """Notice when the gradient of `output` (a tensor, or the first in a structure) is complete."""
        tensor = _first_tensor(output)
        # With one rank an exchange gives the tensor that it was given: that is its maker's.
        if tensor is not None and tensor.requires_grad and not tensor._backward_hooks:
            tensor.register_hook(lambda grad: self.backward_begins(phase))

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            output = function(*args, **kwargs)
            self.seconds[phase, "forward"] += self.now() - start
            self.watch(phase, output)
            return output

        return timed


def _first_tensor(output: Any) -> Tensor | None:
    """The tensor whose gradient is complete last before this phase's backward begins."""
    if isinstance(output, Tensor):
        return output
    for name in ("normed", "x", "rows", "local"):  # of AttnOut, Rows, MlpOut
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    return _first_tensor(output[0][0]) if isinstance(output, tuple) and output[0] else None


@contextmanager
def _wrapped(trainer: Trainer, clock: _Clock) -> Iterator[None]:
    """The trainer with its phases timed."""
    places: list[tuple[Any, str, str]] = []
    for stage in trainer.stages.values():
        places += [(stage, "_embed", "embedding"), (stage, "_token_losses", "head and loss")]
        for module in stage.modules():
            if isinstance(module, Block):
                places += [(module, f"{phase}_phase", phase) for phase in ("attn", "mlp", "sum")]
    places += [(wire, "dispatch_wait", "dispatch"), (wire, "combine_arrive", "combine")]
    places += [(trainer.optimizer, name, "optimizer") for name in ("zero_grad", "reduce_gradients", "step")]
    # Into the objects' own dicts, where Python finds them before the methods of their classes.
    before = [(vars(owner), name, vars(owner).get(name)) for owner, name, _ in places]
    for owner, name, phase in places:
        vars(owner)[name] = clock.wrap(phase, getattr(owner, name))
    try:
        yield
    finally:
        for names, name, value in before:
            names.pop(name)
            if value is not None:
                names[name] = value


def phase_table(step: Callable[[], Any], trainer: Trainer) -> str:
    """Run one step twice, timed by phases and under torch's profiler; both tables as Markdown."""
    clock = _Clock(trainer.device)
    backward = torch.autograd.backward

    def closing(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        clock.close_backward()

    with _wrapped(trainer, clock):
        torch.autograd.backward = closing
        try:
            start = clock.now()
            step()
            total = clock.now() - start
        finally:
            torch.autograd.backward = backward
    return _phases(clock.seconds, total) + "\n\n" + _operators(step)


def _phases(seconds: dict[tuple[str, str], float], total: float) -> str:
    lines = ["| phase | forward ms | backward ms | share |", "| --- | --- | --- | --- |"]
    for phase in dict.fromkeys(phase for phase, _ in seconds):
        forward, backward = seconds.get((phase, "forward"), 0.0), seconds.get((phase, "backward"), 0.0)
        lines.append(f"| {phase} | {forward * 1e3:.1f} | {backward * 1e3:.1f} | {(forward + backward) / total:.1%} |")
    rest = total - sum(seconds.values())
    lines += [f"| rest | {rest * 1e3:.1f} | | {rest / total:.1%} |", f"| step | {total * 1e3:.1f} | | |"]
    return "\n".join(lines)


def _operators(step: Callable[[], Any]) -> str:
    """The operators that take the most time by themselves."""
    with torch.profiler.profile() as profiler:
        step()
    events = sorted(profiler.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    total = sum(event.self_cpu_time_total for event in events)
    lines = ["| operator | calls | ms | share |", "| --- | --- | --- | --- |"]
    for event in events[:TOP_OPS]:
        time_ms = event.self_cpu_time_total / 1e3
        lines.append(f"| {event.key} | {event.count} | {time_ms:.1f} | {event.self_cpu_time_total / total:.1%} |")
    return "\n".join(lines)
