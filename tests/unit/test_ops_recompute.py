"""Segments: the same bits, run again once, only when asked, and gone as soon as nobody needs them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from torch import Tensor

from moe_engine.config.schema import RecomputeConfig
from moe_engine.ops.activation import swiglu
from moe_engine.ops.linear import linear
from moe_engine.ops.norm import rms_norm
from moe_engine.ops.recompute import BLOCK, Segments, closed_segments, recomputed_names, segment
from moe_engine.ops.wgrad_queue import WgradQueue

T, D = 32, 64


@pytest.fixture(autouse=True, scope="module")
def no_collector() -> Iterator[None]:
    """What is held in a circle would look freed if the collector happened to run.

    (torch itself leaves such circles at a process's first backward, so that one comes before.)
    """
    with LiveBytes():
        gradients(frozenset(), split=False)
    gc.disable()
    yield
    gc.enable()


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    calls = [0]

    def inner(*inputs: Tensor) -> Any:
        calls[0] += 1
        return function(*inputs)

    return inner, calls


def parameters() -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    shapes = ((D,), (2 * D, D), (D, D))
    return tuple(torch.randn(shape, generator=chance).requires_grad_() for shape in shapes)  # type: ignore[return-value]


def network(
    x: Tensor, weights: tuple[Tensor, ...], segments: Segments | None, queue: WgradQueue | None = None
) -> Tensor:
    """norm, linear, swiglu, linear; norm and swiglu in segments."""
    scale, up, down = weights
    normed = segment(segments, "norm", lambda x: rms_norm(x, scale, 1e-6), x)
    hidden = segment(segments, "swiglu", swiglu, linear(normed, up, queue))
    return linear(hidden, down, queue)


def gradients(names: frozenset[str], split: bool) -> list[Tensor]:
    weights, queue = parameters(), WgradQueue()
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with closed_segments(names) as segments:
        y = network(x, weights, segments, queue)
    with queue.defer("", split):
        y.square().sum().backward()
    if split:
        queue.run("")
    return [y, *(p.grad for p in (x, *weights) if p.grad is not None)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("names", [{"norm"}, {"swiglu"}, {"norm", "swiglu"}])
def test_same_bits(names: set[str], split: bool) -> None:
    plain, again = gradients(frozenset(), split), gradients(frozenset(names), split)
    assert len(plain) == 5
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_what_a_segment_made_is_not_kept() -> None:
    held = {}
    for names in (frozenset[str](), frozenset({"norm"}), frozenset({"norm", "swiglu"})):
        weights = parameters()
        x = torch.randn(T, D, requires_grad=True)
        with LiveBytes() as live:
            with closed_segments(names) as segments:
                y = network(x, weights, segments)
            held[len(names)] = live.bytes()
            y.backward(torch.ones_like(y))
            del y
            assert live.bytes() == 4 * (T * D + D + 2 * D * D + D * D)  # the gradients alone
    assert held[0] - held[1] == 4 * T * D + 4 * T  # the norm's output, and 1/rms inside it
    assert held[1] - held[2] == 4 * T * D  # swiglu's output


def test_a_segment_is_run_again_once_and_only_for_a_backward() -> None:
    function, calls = counted(lambda x: (x.exp(), x.sin()))
    x = torch.randn(8, requires_grad=True)
    segments = Segments(frozenset({"norm"}))
    with segments.hooks():
        a, b = segments.run(function, x)
        y = (a * b).sum() + (a * a).sum()
    segments.close()
    assert calls == [1]
    y.backward()
    assert calls == [2]
    expected = x.detach().requires_grad_()
    a, b = expected.exp(), expected.sin()
    ((a * b).sum() + (a * a).sum()).backward()
    assert x.grad is not None and expected.grad is not None and torch.equal(x.grad, expected.grad)
    with torch.no_grad(), segments.hooks():
        segments.run(function, x)
    assert calls == [3] and segments._made == {}


def test_segments_may_follow_one_another_and_return_views() -> None:
    """The second segment's inputs are views of the first one's output, saved in other shapes and orders."""

    def run(names: frozenset[str]) -> list[Tensor]:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
        first, _ = counted(lambda x: x.tanh().view(6, 2, 4).split(1, dim=1))
        with LiveBytes() as live:
            with closed_segments(names) as segments:
                a, b = segment(segments, "norm", first, x)
                c = segment(segments, "attention", lambda a, b: (a.transpose(0, 1) * b.transpose(0, 1)).exp(), a, b)
                y = (c * a.transpose(0, 1)).sum()
            del a, b, c
            held = live.bytes()
        y.backward()
        assert x.grad is not None
        return [torch.tensor(held), y.detach(), x.grad]

    (held, *plain), (held_again, *again) = run(frozenset()), run(frozenset({"norm", "attention"}))
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert held_again < held and held_again == 4  # the scalar alone


def test_an_output_that_is_an_input_stays() -> None:
    x = torch.randn(8, requires_grad=True)
    doubled = x * 2
    segments = Segments(frozenset({"norm"}))
    with segments.hooks():
        same, other = segments.run(lambda x: (x.view(2, 4), None), doubled)
        y = (same * same).sum()
    y.backward()
    assert other is None and x.grad is not None and torch.equal(x.grad, 8 * x.detach())


def test_empty_tensors_pass() -> None:
    x = torch.randn(0, 2 * D, requires_grad=True)
    with closed_segments(frozenset({"swiglu"})) as segments:
        y = segment(segments, "swiglu", swiglu, x)
        (y * y).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 2 * D)


def test_each_tensor_goes_when_its_last_user_has_run() -> None:
    """A chain of ten: backward holds one recomputed link at a time, not ten."""
    x = torch.randn(1000, requires_grad=True)
    peak = 0
    with LiveBytes() as live:

        class Watch(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                nonlocal peak
                peak = max(peak, live.bytes())
                return grads[0]

        y: Tensor = x
        with closed_segments(frozenset({"norm"})) as segments:
            for _ in range(10):
                y = Watch.apply(segment(segments, "norm", lambda x: x.sigmoid() * 2, y))
                y = y * y  # saves the segment's output, and is the next one's input
        y.sum().backward()
    assert peak <= 4000 * (10 + 6)  # the ten inputs, and a few of one link


def test_names_of_the_modes() -> None:
    assert recomputed_names(RecomputeConfig()) == frozenset()
    assert recomputed_names(RecomputeConfig("selective")) == {"norm", "mla_up", "swiglu"}
    assert recomputed_names(RecomputeConfig("selective", ["attention"])) == {"attention"}
    assert recomputed_names(RecomputeConfig("full", ["attention"])) == {BLOCK, "norm"}
