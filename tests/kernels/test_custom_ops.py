"""The ops inside graphs of `torch.compile`: one node each, with the shapes and dtypes that the ops really give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from measures import assert_same_bits, randn
from torch import Tensor

import moe_kernels
from moe_engine.ops.activation import swiglu
from moe_kernels import custom
from moe_kernels.fp8_format import CODE


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()


def arguments() -> dict[str, tuple[Any, ...]]:
    """A call of every op."""
    x, counts = randn(40, 256), torch.tensor([7, 0, 30])
    source, places = torch.arange(39, -1, -1), torch.tensor([[3, -1], [0, 39]])
    codes, scale = moe_kernels.quantize_rows(x)
    w, w_t, w_scale = moe_kernels.quantize_blocks(randn(3, 64, 256))
    columns = moe_kernels.quantize_columns(x, counts)
    weight = randn(40, dtype=torch.float32)
    bias = randn(3, 256)
    return {
        "add_bias": (x, weight, bias, counts),
        "add_bias_backward": (x, weight, bias, counts),
        "grouped_gemm": (x, randn(3, 256, 64), counts, source),
        "grouped_gemm_fp8": (codes, scale, w, w_scale, counts, source, torch.float32),
        "grouped_wgrad": (x, x, counts),
        "grouped_wgrad_fp8": (*columns, *columns, counts),
        "permute": (x, source),
        "permute_fp8": (codes, scale, source),
        "unpermute": (x, places),
        "unpermute_fp8": (codes, scale, places),
        "quantize_rows": (x,),
        "quantize_blocks": (x, 1e-4, False),
        "quantize_columns": (codes, counts, 1e-4, True, scale),
        "quantize_rows_and_columns": (x, counts),
        "route": (randn(9, 16, dtype=torch.float32), torch.zeros(16), 4, 4, 2),
        "swiglu": (x, weight),
        "swiglu_fp8": (x, weight),
        "swiglu_backward": (randn(40, 128), x, weight),
        "swiglu_backward_recompute": (randn(40, 128), x),
        "swiglu_backward_fp8": (randn(40, 128), x, None),
    }


def test_every_op_is_registered() -> None:
    assert set(arguments()) == set(custom._SCHEMAS) and set(arguments()) <= set(moe_kernels.__all__)


@pytest.mark.parametrize("name", sorted(custom._SCHEMAS))
def test_a_graph_with_the_op_gives_its_results(name: str) -> None:
    op, call = getattr(moe_kernels, name), arguments()[name]
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend="aot_eager")
    result, expected = compiled(*call), op(*call)
    if isinstance(expected, Tensor):
        result, expected = (result,), (expected,)
    assert [a is None for a in result] == [b is None for b in expected]
    present = [(a, b) for a, b in zip(result, expected, strict=True) if b is not None]
    assert_same_bits([a for a, _ in present], [b for _, b in present])
    coded = any(isinstance(x, Tensor) and x.dtype == CODE for x in call)
    tests = ("test_faketensor",) if coded else ("test_faketensor", "test_schema")  # the latter cannot compare fp8
    torch.library.opcheck(getattr(torch.ops.moe_kernels, name).default, call, test_utils=tests)


WIDE = [
    "add_bias",
    "add_bias_backward",
    "grouped_gemm",
    "grouped_wgrad",
    "permute",
    "swiglu",
    "swiglu_backward",
    "unpermute",
]


@pytest.mark.parametrize("name", WIDE)
def test_a_graph_knows_the_dtypes_of_fp64_results(name: str) -> None:
    """A wrong one makes a compiled graph read the memory of its results as other numbers."""
    call = [
        x.double() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float32) else x
        for x in arguments()[name]
    ]
    torch.library.opcheck(getattr(torch.ops.moe_kernels, name).default, call, test_utils=("test_faketensor",))


@pytest.mark.parametrize("name", ["grouped_wgrad", "grouped_wgrad_fp8"])
def test_accumulation_in_a_graph(name: str) -> None:
    op, call = getattr(moe_kernels, name), arguments()[name]
    before = torch.ones(3, 256, 256)
    results = []
    for run in (op, torch.compile(lambda *args, **options: op(*args, **options), fullgraph=True, backend="aot_eager")):
        out = before.clone()
        assert run(*call, out, num_sms=3, hopper=True) is out
        results.append([out])
    assert_same_bits(*results)
    assert torch.equal(results[0][0][1], before[1])  # a group without rows


def test_a_model_compiles_in_one_graph_with_its_gradients() -> None:
    class Expert(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(32, 64, bias=False)
            self.down = torch.nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return self.down(swiglu(self.up(x), weight))

    torch.manual_seed(0)
    model, x, weight = Expert(), randn(9, 32, dtype=torch.float32), randn(9, dtype=torch.float32).requires_grad_()
    gradients = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        weight.grad = None
        run(x, weight).square().sum().backward()
        gradients.append([weight.grad.clone(), *(p.grad.clone() for p in model.parameters())])
    assert_same_bits(*gradients)
