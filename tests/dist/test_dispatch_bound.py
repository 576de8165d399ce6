"""A bound on the rows that a rank holds: nothing is dropped, the output has the same bits, memory stays bounded."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moe_engine import MoEConfig, MoELayer
from moe_engine.config.errors import ConfigError
from moe_engine.distributed.collectives import CollectiveLog, Communicator

WORLD, DIM, HIDDEN = 4, 32, 128


class Copies(Communicator):
    """Gloo gets copies of what is exchanged, which are not counted: its threads may hold them when the wait is over."""

    def _all_to_all(
        self, out: Tensor, x: Tensor, recv_splits: list[int] | None = None, send_splits: list[int] | None = None
    ) -> Any:
        with _disable_current_modes():
            copy = torch.empty_like(out)
            return _Arriving(super()._all_to_all(copy, x.clone(), recv_splits, send_splits), copy, out)


class _Arriving(NamedTuple):
    work: Any
    copy: Tensor
    out: Tensor

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.work.wait()
        with _disable_current_modes():
            self.out.copy_(self.copy)


def _layer(
    rank: int, bound: int, log: CollectiveLog, combine: str = "dedup", dtype: torch.dtype = torch.float32
) -> MoELayer:
    """All tokens want the experts of the last rank."""
    ep = Copies("ep", range(WORLD), rank, dist.group.WORLD, log)
    config = MoEConfig(DIM, HIDDEN, 8, 2, combine=combine, max_recv_rows=bound, aux_loss_weight=0.0, init_std=0.1)
    layer = MoELayer(config, ep=ep, dtype=dtype)
    layer.router.expert_bias[-2:] = 10.0
    return layer


def _step(
    rank: int, tokens: int, bounds: list[int], dtype: torch.dtype = torch.float32, watch: bool = True
) -> dict[int, dict[str, Any]]:
    found = {}
    for bound in bounds:
        log = CollectiveLog()
        layer = _layer(rank, bound, log, dtype=dtype)
        x = torch.randn(tokens, DIM, generator=torch.Generator().manual_seed(rank)).to(dtype).requires_grad_()
        memory = LiveBytes()
        with memory if watch else nullcontext():
            out = layer(x)
            out.square().sum().backward()
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found[bound] = {"out": out.detach(), "x": x.grad, "peak": memory.peak, "log": log.records, **grads}
    return found


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_the_bound_changes_no_bit_but_of_weight_gradients_and_bounds_memory(dtype: torch.dtype, near: float) -> None:
    """Weight gradients are a product for each round, here rounded to the format of the weights."""
    tokens, bound, watch = 96, 64, dtype == torch.float32
    results = run_ranks(WORLD, _step, tokens, [0, bound, 10 * WORLD * tokens], dtype, watch)
    for found in results:
        free, bounded, wide = found[0], found[bound], found[10 * WORLD * tokens]
        assert torch.equal(free["out"], bounded["out"]) and torch.equal(free["out"], wide["out"])
        for name, grad in free.items():
            if isinstance(grad, torch.Tensor):
                if name.startswith("experts"):
                    assert float((grad - bounded[name]).norm()) <= near * float(grad.norm()), name
                else:
                    assert torch.equal(grad, bounded[name]), name
                assert torch.equal(grad, wide[name]), name  # a bound that is never reached changes nothing
        assert [record.label for record in free["log"]] == [record.label for record in wide["log"]]
    if not watch:
        return
    received = WORLD * tokens
    hot_free, hot_bounded = (results[-1][each]["peak"] for each in (0, bound))
    row = 2 * (DIM + 2 * HIDDEN + HIDDEN + DIM) * 4  # what the two experts of a row hold, in the middle of them
    assert hot_free > received * row
    weights = 2 * 3 * DIM * HIDDEN * 4  # their gradients: of a round, of those before it, and the sum of both
    assert hot_bounded < 3 * bound * row + 20 * tokens * DIM * 4 + 4 * weights
    assert hot_bounded < hot_free / 2


def test_more_tokens_need_more_rounds_and_not_more_memory_for_rows() -> None:
    bound = 32
    peaks = [run_ranks(WORLD, _step, tokens, [bound])[-1][bound]["peak"] for tokens in (64, 128)]
    assert peaks[1] - peaks[0] < 64 * 20 * DIM * 4


@pytest.mark.parametrize("combine", ["dedup", "exact"])
def test_no_rank_receives_more_rows_than_the_bound_at_once(combine: str) -> None:
    for sizes in run_ranks(WORLD, partial(_received, combine=combine), 50, 24):
        assert sizes and max(sizes) <= 24


def _received(rank: int, tokens: int, bound: int, combine: str) -> list[int]:
    sizes: list[int] = []
    layer = _layer(rank, bound, CollectiveLog(), combine)
    layer.experts.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0].x)))
    layer(torch.randn(tokens, DIM)).sum().backward()
    return sizes


def test_a_bound_below_one_row_for_each_rank_is_refused() -> None:
    run_ranks(2, _refused)


def _refused(rank: int) -> None:
    ep = Communicator("ep", range(2), rank, dist.group.WORLD)
    with pytest.raises(ConfigError, match="max_recv_rows=1: each of 2 ranks needs a share of it; use max_recv_rows=2"):
        MoELayer(MoEConfig(8, 8, 4, 2, max_recv_rows=1), ep=ep)
