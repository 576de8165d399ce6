"""SwiGLU experts on a CPU, a few experts at a time.

Operators over the rows of all experts write each step's result to memory and read it back. Here the rows of a few
experts go through all steps while they are in the cache. What goes to memory is what has to stay: the first
projection, each row's output until a token's are summed, and the weights' gradients; large ones into memory that is
used again (`ops.fresh_memory`). The bits are those of the operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_engine.ops import fresh_memory
from moe_engine.ops.permute import RowMap
from moe_engine.ops.threads import share_out
from moe_kernels import DIM_MULTIPLE, matmul_dtype, product_rows, unpermute
from moe_kernels.reference.wide import swiglu_backward_into, swiglu_into, swiglu_scratch

Counts = Sequence[int] | Tensor  # rows of each expert

CACHED_BYTES = 2 << 20  # of rows in all steps; what a core of a server has to itself
# A wide weight's gradient from few rows is mostly writing. Made 128 of its rows at a time it takes little more than
# half of the time that MKL takes for it whole, with the same bits (docs/design/layer_speed.md).
FEW_ROWS, WIDE, GRADIENT_ROWS = range(33, 97), 512, 128
# Of two numbers, in a forward: 0.4 ms. For fewer, a thread's start (0.1 ms) eats what it saves.
LEAST_PRODUCTS = 1 << 24


class Operands(NamedTuple):
    """Received rows x [R, D], the experts' up [e, 2F, D] and down [e, D, F], and what sorts rows by expert: `rows`, and
    how many each expert has. weights [N]: of the sorted rows. dtype: of products and of what comes out."""

    x: Tensor
    up: Tensor
    down: Tensor
    weights: Tensor
    rows: RowMap
    counts: Counts
    dtype: torch.dtype


class _Expert(NamedTuple):
    """One expert's rows start … stop among those sorted by expert; its products compute start … filled.

    beyond: whether the rows of a result from stop on may be written, to be overwritten by what follows.
    """

    number: int
    start: int
    stop: int
    filled: int
    beyond: bool


@dataclass(frozen=True)
class _Run:
    """Experts whose rows go through all steps together: start … stop."""

    experts: list[_Expert]
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


def walks(x: Tensor, up: Tensor, down: Tensor) -> bool:
    """Whether experts of these shapes are for this file: on a CPU, where products need no filled-up dimensions."""
    return x.device.type == "cpu" and up.shape[2] % DIM_MULTIPLE == 0 and down.shape[2] % DIM_MULTIPLE == 0


def _plan(counts: Sequence[int], most_rows: int, threads: int) -> list[list[_Run]]:
    """For each thread runs of about `most_rows` rows, or one expert; threads get about as many rows."""
    total = sum(counts)
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
    stop = 0
    for index, count in enumerate(counts):
        start, stop = stop, stop + count
        if count:
            shares[(start + stop) * threads // (2 * total)].append((index, start, stop))
    return [list(_runs(_experts(share), most_rows)) for share in shares if share]


def _experts(share: list[tuple[int, int, int]]) -> Iterator[_Expert]:
    """Index, start and stop of experts as `_Expert`."""
    # Behind a share's last row another thread writes: also an expert with few that are not the last must not reach it.
    end = share[-1][2]
    for index, start, stop in share:
        filled = start + product_rows(stop - start)
        yield _Expert(index, start, stop, filled, filled <= end)


def _runs(experts: Iterable[_Expert], most_rows: int) -> Iterator[_Run]:
    taken: list[_Expert] = []
    for expert in experts:
        if taken and expert.stop - taken[0].start > most_rows:
            yield _Run(taken, taken[0].start, taken[-1].stop)
            taken = []
        taken.append(expert)
    yield _Run(taken, taken[0].start, taken[-1].stop)


class _Call:
    """Shapes and formats of a call, its weights matrix by matrix, and who computes what."""

    def __init__(self, operands: Operands) -> None:
        self.dtype, self.compute = operands.dtype, matmul_dtype(operands.dtype, operands.x.device)
        (self.width, self.dim), self.hidden = operands.up.shape[1:], operands.down.shape[2]
        self.source, counts = operands.rows.source, operands.counts
        self.counts = counts.tolist() if isinstance(counts, Tensor) else counts
        row_bytes = self.compute.itemsize * (self.dim + self.width + self.hidden)
        products = sum(map(product_rows, filter(None, self.counts))) * (self.width + self.hidden) * self.dim
        self.short = products < LEAST_PRODUCTS
        threads = 1 if self.short else torch.get_num_threads()
        self.shares = _plan(self.counts, CACHED_BYTES // row_bytes, threads)

    def rows_of_all(self, width: int, dtype: torch.dtype) -> Tensor:
        return fresh_memory.empty((len(self.source), width), dtype, self.source.device)

    def gradient(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for a weight's gradient, 0 for experts without rows."""
        grad = fresh_memory.empty(weight.shape, dtype, weight.device)
        for index, count in enumerate(self.counts):
            if not count:
                grad[index] = 0
        return grad

    def gather(self, x: Tensor, run: _Run, out: Tensor) -> None:
        """The run's rows of x, rounded to the call's format, into the first rows of `out`."""
        index, out = self.source[run.rows], out[: len(run)]
        if x.dtype == self.dtype == out.dtype:
            torch.index_select(x, 0, index, out=out)
        else:
            out.copy_(x.index_select(0, index).to(self.dtype))

    def products(self, a: Tensor, matrices: Sequence[Tensor], run: _Run, out: Tensor, scratch: bool) -> None:
        """Rows of `a`, scratch that begins with the run, times their expert's matrix into `out`: such scratch too, or
        rows of all experts."""
        offset, a = 0 if not scratch else run.start, a.to(self.compute)
        for expert in run.experts:
            rows = a[expert.start - run.start : expert.filled - run.start]
            matrix = matrices[expert.number]
            if matrix.dtype != self.compute:
                matrix = matrix.to(self.compute)
            if out.dtype == self.compute and (scratch or expert.beyond):
                torch.mm(rows, matrix, out=out[expert.start - offset : expert.filled - offset])
            else:
                own = out[expert.start - offset : expert.stop - offset]
                own.copy_(torch.mm(rows, matrix)[: len(own)])

    def weight_gradients(self, d_out: Tensor, rows: Tensor, run: _Run, grads: Sequence[Tensor]) -> None:
        """d_out^T @ rows of each expert, from scratch that begins with the run."""
        d_out, rows = d_out.to(self.compute), rows.to(self.compute)
        for expert in run.experts:
            own = slice(expert.start - run.start, expert.stop - run.start)
            grad = grads[expert.number]
            if grad.dtype != self.compute:
                grad.copy_(d_out[own].T @ rows[own])
            elif expert.stop - expert.start not in FEW_ROWS or grad.shape[1] < WIDE:
                torch.mm(d_out[own].T, rows[own], out=grad)
            else:
                inputs = rows[own]
                for columns, part in zip(d_out[own].split(GRADIENT_ROWS, 1), grad.split(GRADIENT_ROWS), strict=True):
                    torch.mm(columns.T, inputs, out=part)


class _Scratch:
    """One thread's memory for the longest of its runs. Rows behind any run's are 0, or what a run left there."""

    def __init__(self, call: _Call, runs: list[_Run], backward: bool = False) -> None:
        rows, written = max(run.experts[-1].filled - run.start for run in runs), min(map(len, runs))

        def memory(width: int, dtype: torch.dtype) -> Tensor:
            made = torch.empty(rows, width, dtype=dtype, device=call.source.device)
            made[written:] = 0
            return made

        self.rows = memory(call.dim, call.compute)
        self.first = memory(call.width, call.dtype)
        self.hidden = memory(call.hidden, call.dtype)
        self.d_hidden = memory(call.hidden, call.dtype) if backward else self.hidden
        self.activation = swiglu_scratch(self.first, 3 if backward else 1)


def forward(operands: Operands, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The sums [R, D], and the first projection [N, 2F] if it is to be kept."""
    x, up, down, weights, rows, *_ = operands
    call = _Call(operands)
    ups, downs = up.transpose(1, 2).unbind(), down.transpose(1, 2).unbind()
    out = call.rows_of_all(call.dim, call.dtype)
    kept = call.rows_of_all(call.width, call.dtype) if keep else None

    def work(shares: Sequence[list[_Run]]) -> None:
        for runs in shares:
            scratch = _Scratch(call, runs)
            hidden = scratch.hidden
            for run in runs:
                call.gather(x, run, scratch.rows)
                if kept is None:
                    call.products(scratch.rows, ups, run, scratch.first, scratch=True)
                    first = scratch.first[: len(run)]
                else:
                    call.products(scratch.rows, ups, run, kept, scratch=False)
                    first = kept[run.rows]
                swiglu_into(hidden[: len(run)], first, weights[run.rows], scratch.activation)
                call.products(hidden, downs, run, out, scratch=False)

    share_out(work, call.shares, short=call.short)
    return unpermute(out, rows.places), kept


@dataclass(frozen=True)
class Gradients:
    """Of x [R, D], up, down and weights [N]; None where not asked for."""

    x: Tensor | None
    up: Tensor | None
    down: Tensor | None
    weights: Tensor | None


def backward(
    d_out: Tensor,
    operands: Operands,
    gate_up: Tensor,
    needs: Sequence[bool],
    grad_dtypes: Sequence[torch.dtype],
) -> Gradients:
    """From the gradient of the sums, d_out [R, D], and the first projection.

    needs: those of x, up, down; grad_dtypes: of up's and down's.
    """
    x, up, down, weights, rows, *_ = operands
    call = _Call(operands)
    ups, downs = up.unbind(), down.unbind()
    needs_x, needs_up, needs_down = needs
    d_rows = call.rows_of_all(call.dim, call.dtype) if needs_x else None
    d_up = call.gradient(up, grad_dtypes[0]) if needs_up else None
    d_down = call.gradient(down, grad_dtypes[1]) if needs_down else None
    d_weights = torch.zeros_like(weights)
    d_ups, d_downs = (None if grad is None else grad.unbind() for grad in (d_up, d_down))

    def work(shares: Sequence[list[_Run]]) -> None:
        for runs in shares:
            scratch = _Scratch(call, runs, backward=True)
            for run in runs:
                first, own = gate_up[run.rows], weights[run.rows]
                d_hidden, d_first = scratch.d_hidden[: len(run)], scratch.first[: len(run)]
                hidden = scratch.hidden[: len(run)] if d_downs is not None else None
                call.gather(d_out, run, scratch.rows)
                call.products(scratch.rows, downs, run, scratch.d_hidden, scratch=True)
                swiglu_backward_into(
                    d_first, d_weights[run.rows], d_hidden, first, own, scratch.activation, again=hidden
                )
                if d_downs is not None and hidden is not None:
                    call.weight_gradients(scratch.rows, hidden, run, d_downs)
                if d_ups is not None:
                    call.gather(x, run, scratch.rows)
                    call.weight_gradients(d_first, scratch.rows, run, d_ups)
                if d_rows is not None:
                    call.products(scratch.first, ups, run, d_rows, scratch=False)

    share_out(work, call.shares, short=call.short)
    d_x = None if d_rows is None else unpermute(d_rows.to(x.dtype), rows.places)
    return Gradients(d_x, d_up, d_down, d_weights)
