"""SwiGLU experts as one operation on a CPU: the bits of the operators one after the other, and memory used again."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_kernels
from moe_engine.ops import expert_mlp, expert_walk, fresh_memory
from moe_engine.ops.expert_walk import Gradients, Operands
from moe_engine.ops.permute import order_by_expert

CPU = torch.device("cpu")
IDS = [[0, 1], [5, 2], [0, -1], [-1, -1], [5, 0], [3, 5], [0, 5], [5, 6]] * 9  # nobody chooses 4; 2 and 3: few rows


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def run(path: Any, dtype: torch.dtype, x_dtype: torch.dtype, needs: tuple[bool, ...] = (True, True, True)) -> Any:
    order = order_by_expert(torch.tensor(IDS, dtype=torch.int32), 7)
    x, d_out = numbers(len(IDS), 24, dtype=x_dtype, seed=0), numbers(len(IDS), 24, dtype=dtype, seed=1)
    up, down = numbers(7, 16, 24, dtype=dtype, seed=2), numbers(7, 24, 8, dtype=dtype, seed=3)
    weights = numbers(len(order.slots), dtype=torch.promote_types(dtype, torch.float32), seed=4)
    forward, backward = path
    operands = Operands(x, up, down, weights, order.rows, order.counts, dtype)
    out, gate_up = forward(operands, True)
    alone, nothing = forward(operands, False)
    assert nothing is None and torch.equal(alone, out)
    grads = backward(d_out, operands, gate_up, needs)
    found = [grads.x, grads.up, grads.down, grads.weights]
    assert [grad is not None for grad in found] == [*needs, True]
    return [out, gate_up, *(grad for grad in found if grad is not None)]


def walk_back(d_out: Tensor, operands: Operands, gate_up: Tensor, needs: tuple[bool, ...]) -> Gradients:
    wide = torch.float32 if operands.dtype == torch.bfloat16 else operands.dtype
    return expert_walk.backward(d_out, operands, gate_up, needs, (wide, operands.dtype))


PARTS = functools.partial(expert_mlp._forward, moe_kernels), functools.partial(expert_mlp._backward, moe_kernels)
WALK = expert_walk.forward, walk_back


@pytest.mark.parametrize("rows_at_once", [1, 20, 1000])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "x_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_a_walk_over_experts_has_the_bits_of_operators_over_all(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int, threads: int, dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    expected = run(PARTS, dtype, x_dtype)
    itemsize = torch.promote_types(dtype, torch.float32).itemsize
    monkeypatch.setattr(expert_walk, "CACHED_BYTES", rows_at_once * itemsize * (24 + 16 + 8))
    monkeypatch.setattr(fresh_memory, "LEAST_BYTES", 1000)  # what is left there is no number that should appear
    monkeypatch.setattr(expert_walk, "LEAST_PRODUCTS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # so many shares, in an order that threads may take
    monkeypatch.setattr(expert_walk, "share_out", lambda work, shares, short: work(shares[::-1]))
    for _ in range(2):  # the second time in memory that holds other numbers
        for mine, theirs in zip(run(WALK, dtype, x_dtype), expected, strict=True):
            assert torch.equal(mine, theirs.to(mine.dtype))
        poison = [fresh_memory.empty((size,), torch.uint8, CPU).fill_(255) for size in (1 << 21,) * 6]
        del poison


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_wide_weights_from_few_rows_have_the_bits_of_one_product(dtype: torch.dtype) -> None:
    wide, hidden, ids = expert_walk.WIDE + 4, 140, [[0, 1], [2, 0], [1, 0]] * 18
    order = order_by_expert(torch.tensor(ids, dtype=torch.int32), 3)
    assert [count in expert_walk.FEW_ROWS for count in order.counts] == [
        True,
        True,
        False,
    ] and hidden % expert_walk.GRADIENT_ROWS
    x, d_out = (numbers(len(ids), wide, dtype=dtype, seed=seed) for seed in (0, 1))
    up, down = numbers(3, 2 * hidden, wide, dtype=dtype, seed=2), numbers(3, wide, hidden, dtype=dtype, seed=3)
    operands = Operands(x, up, down, numbers(len(order.slots), dtype=dtype, seed=4), order.rows, order.counts, dtype)
    _, gate_up = expert_walk.forward(operands, True)
    assert gate_up is not None
    mine = expert_walk.backward(d_out, operands, gate_up, (True, True, True), (dtype, dtype))
    theirs = expert_mlp._backward(moe_kernels, d_out, operands, gate_up, (True, True, True))
    assert mine.up is not None and theirs.up is not None and torch.equal(mine.up, theirs.up)
    assert mine.down is not None and theirs.down is not None and torch.equal(mine.down, theirs.down)


@pytest.mark.parametrize("needs", [(False, True, True), (True, False, True), (True, True, False), (False,) * 3])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(needs: tuple[bool, bool, bool]) -> None:
    whole = run(WALK, torch.float32, torch.float32)
    some = run(WALK, torch.float32, torch.float32, needs)
    kept = [*whole[:2], *(grad for grad, needed in zip(whole[2:], (*needs, True), strict=True) if needed)]
    assert len(some) == len(kept) and all(torch.equal(a, b) for a, b in zip(some, kept, strict=True))


def test_sizes_that_products_fill_up_go_by_the_operators() -> None:
    x, up, down = torch.zeros(3, 24), torch.zeros(2, 16, 24), torch.zeros(2, 24, 8)
    assert expert_walk.walks(x, up, down)
    assert not expert_walk.walks(x, torch.zeros(2, 12, 24), torch.zeros(2, 24, 6))
    assert not expert_walk.walks(x, torch.zeros(2, 16, 22), down)
    assert not expert_walk.walks(x.to("meta"), up, down)


def test_large_memory_is_used_again_when_its_tensor_has_ended_and_not_before() -> None:
    shape = (fresh_memory.LEAST_BYTES // 4 + 3, 1)
    first = fresh_memory.empty(shape, torch.float32, CPU).fill_(1)
    view, place = first[5:], first.data_ptr()
    del first
    other = fresh_memory.empty(shape, torch.float32, CPU).fill_(2)
    assert other.data_ptr() != place and bool((view == 1).all())
    del view
    gc.collect()
    again = fresh_memory.empty(shape, torch.float32, CPU)
    assert again.data_ptr() == place and again.shape == shape and bool((other == 2).all())
    small = fresh_memory.empty((4,), torch.bfloat16, CPU)
    assert small.dtype == torch.bfloat16 and fresh_memory.empty((1 << 30,), torch.uint8, torch.device("meta")).is_meta


def test_memory_kept_for_later_and_memory_in_use_are_never_more_than_was_once_in_use() -> None:
    kept = fresh_memory._Kept()
    both = [kept.take(pages * fresh_memory.HUGE_PAGE) for pages in (2, 1)]
    for memory in both:
        kept.give_back(memory)
    for pages in (1, 2, 1, 2, 3):  # rows of experts differ in number from call to call
        memory = kept.take(pages * fresh_memory.HUGE_PAGE)
        assert len(memory) + sum(map(len, kept.free)) <= 3 * fresh_memory.HUGE_PAGE
        assert pages == 3 or any(memory is each for each in both)
        kept.give_back(memory)
    assert len(memory) == 3 * fresh_memory.HUGE_PAGE and not kept.free


@pytest.mark.parametrize("counts", [[40, 3, 2, 30, 25], [5, 1, 1, 1, 50], [1] * 40, [20, 2, 2, 2, 2, 20]])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_no_product_reaches_rows_of_another_thread(counts: list[int], threads: int) -> None:
    """Also where several experts at the end of a share have few rows, and a product computes more than theirs."""
    for runs in expert_walk._plan(counts, 16, threads):
        for run in runs:
            for expert in run.experts:
                assert (expert.filled if expert.beyond else expert.stop) <= runs[-1].stop


def test_few_rows_are_not_shared_out_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    order = order_by_expert(torch.tensor(IDS, dtype=torch.int32), 7)
    shares = []
    for dim in (24, 4096):
        x, up, down = (torch.empty(1).expand(*shape) for shape in ((len(IDS), dim), (7, 32, dim), (7, dim, 16)))
        call = expert_walk._Call(Operands(x, up, down, torch.empty(0), order.rows, order.counts, torch.float32))
        shares.append((call.short, len(call.shares)))
    assert shares == [(True, 1), (False, 2)]


def test_where_the_system_has_no_memory_torch_says_so_and_nothing_is_counted() -> None:
    kept = fresh_memory._kept()
    before = kept.most_in_use
    with pytest.raises(RuntimeError, match="allocate memory"):
        fresh_memory.empty((1 << 50,), torch.uint8, CPU)
    assert kept.most_in_use == before and not kept.free


def test_nothing_is_kept_for_a_backward_that_cannot_come(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    forward = expert_walk.forward

    def spy(*args: Any) -> Any:
        result = forward(*args)
        kept.append(result[1] is not None)
        return result

    monkeypatch.setattr(expert_walk, "forward", spy)
    order = order_by_expert(torch.tensor([[0], [1]], dtype=torch.int32), 2)
    x, up, down = torch.ones(2, 8), torch.ones(2, 8, 8).requires_grad_(), torch.ones(2, 8, 4)
    with torch.no_grad(), torch.device("meta"):  # what somebody makes by default elsewhere is no concern of rows here
        alone = expert_mlp.expert_mlp(x, up, down, torch.ones(2, device="cpu"), order)
    assert torch.equal(expert_mlp.expert_mlp(x, up, down, torch.ones(2), order), alone)
    assert kept == [False, True]
