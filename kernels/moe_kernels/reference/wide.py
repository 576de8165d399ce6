"""Matrix products, permutation and SwiGLU in bf16, fp32 and fp64.

Two promises hold for all of them. Batch invariance: a row's result has the same bits whatever other rows are
beside it. Fixed order: sums over several rows are taken in a stated order, in fp32 (fp64 for fp64 input).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# torch's CPU matrix products take the last (rows mod 4) rows, and blocks of very few rows, by another path with
# another order of sums, so row blocks are filled up to these numbers. In fp32 and fp64 they also treat a row by its
# place in the block when a matrix dimension is not a multiple of 4; in bf16 they do not.
ROW_MULTIPLE = 4
MIN_ROWS = 16
DIM_MULTIPLE = 4
# Elementwise work goes over blocks of about this many elements, so that fp32 intermediates stay in cache.
BLOCK_ELEMENTS = 1 << 16
# SwiGLU calls so many operators a block that larger ones pay: a tenth to a third less time.
SWIGLU_ELEMENTS = {torch.float32: 1 << 18, torch.float64: 1 << 17, torch.bfloat16: 1 << 17, torch.float16: 1 << 17}


# Whether the CPU has tile instructions for a 16-bit format: asked here, as a compiled graph cannot ask.
_HAS_TILES = {torch.bfloat16: torch.cpu._is_amx_tile_supported(), torch.float16: torch.cpu._is_amx_fp16_supported()}


def product_rows(rows: int) -> int:
    """With how many rows a CPU computes a product of so many rows, so that their bits do not depend on the number."""
    return max(MIN_ROWS, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def matmul_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which matrix products of `dtype` tensors are computed on `device`.

    A CPU multiplies 16-bit matrices faster than fp32 ones only where it has tile instructions for them (Intel's AMX).
    Without, bf16 runs at half of the fp32 rate with AVX-512 BF16 (80 against 155 GFLOP/s a core measured) and at a
    tenth or less with AVX2: there 16-bit operands are widened, multiplied in fp32 and rounded once.
    """
    if device.type == "cpu" and not _HAS_TILES.get(dtype, True):
        return torch.float32
    return dtype


def _fill_dims(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a [..., in] and b [..., in, out], filled up with zeros where a dimension needs it."""
    if matmul_dtype(a.dtype, a.device) not in (torch.float32, torch.float64):
        return a, b
    fill_in, fill_out = -b.shape[-2] % DIM_MULTIPLE, -b.shape[-1] % DIM_MULTIPLE
    if fill_in:
        a = F.pad(a, (0, fill_in))
    if fill_in or fill_out:
        b = F.pad(b, (0, fill_out, 0, fill_in))
    return a, b


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product a @ b with batch-invariant rows: a [R, in], b [in, out] (any strides) -> [R, out]."""
    rows, columns, dtype = a.shape[0], b.shape[1], a.dtype
    compute = matmul_dtype(dtype, a.device)
    a, b = _fill_dims(a, b)
    if rows and product_rows(rows) != rows:
        a = F.pad(a, (0, 0, 0, product_rows(rows) - rows))
    out = (a.to(compute) @ b.to(compute)).to(dtype)
    return out if out.shape == (rows, columns) else out[:rows, :columns].contiguous()


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    counts: Sequence[int] | Tensor,
    source: Tensor | None = None,
    num_sms: int | None = None,
    hopper: bool = False,
) -> Tensor:
    """Each group of rows times its own matrix, with batch-invariant rows.

    a [N, in]: rows sorted by group; or, with `source` [N] int64, row n is row source[n] of a [R, in]. b [e, in, out];
    counts [e]: rows of each group, summing to at most N. Returns [N, out]; rows after the last group are zero.
    num_sms: on a GPU, how many multiprocessors to use; no effect here. hopper: on sm_90, without `source`, use the form
    whose warps have roles, if it gives the other form's results there.
    """
    if source is not None:
        a = a.index_select(0, source)
    counts = as_list(counts)
    total, columns, dtype = a.shape[0], b.shape[2], a.dtype
    a, b = _fill_dims(a, b)
    a = a.to(matmul_dtype(dtype, a.device))
    out = a.new_empty(total, b.shape[2])
    start = 0
    for matrix, count in zip(b, counts, strict=True):
        stop, padded_stop = start + count, start + product_rows(count)
        if count and padded_stop <= total:
            # Fill the block up with the rows that follow: what this writes there, later groups overwrite.
            torch.mm(a[start:padded_stop], matrix.to(a.dtype), out=out[start:padded_stop])
        elif count:
            out[start:stop] = gemm(a[start:stop], matrix.to(a.dtype))
        start = stop
    out[start:] = 0
    return out.to(dtype) if out.shape[1] == columns else out[:, :columns].to(dtype).contiguous()


def wgrad(d_out: Tensor, a: Tensor, out: Tensor | None = None) -> Tensor:
    """Weight gradient of a linear layer: d_out [R, out], a [R, in] -> d_out^T @ a [out, in].

    In fp32 where that costs no more than the inputs' own dtype (GPUs, and CPUs without 16-bit products). With `out`
    [out, in], fp32 (fp64), adds to it and returns it.
    """
    compute = matmul_dtype(a.dtype, a.device)
    if a.device.type == "cuda" and compute in (torch.bfloat16, torch.float16):
        grad = torch.mm(d_out.T, a, out_dtype=torch.float32)
    elif out is not None and out.dtype == compute:
        return out.addmm_(d_out.T.to(compute), a.to(compute))
    else:
        grad = d_out.T.to(compute) @ a.to(compute)
    return grad if out is None else out.add_(grad)


def as_list(counts: Sequence[int] | Tensor) -> Sequence[int]:
    """Group sizes on the host."""
    return counts.tolist() if isinstance(counts, Tensor) else counts


def grouped_wgrad(
    d_out: Tensor,
    a: Tensor,
    counts: Sequence[int] | Tensor,
    out: Tensor | None = None,
    num_sms: int | None = None,
    hopper: bool = False,
) -> Tensor:
    """Weight gradient of each group: d_out [N, out], a [N, in] -> d_out_g^T @ a_g, [e, out, in].

    A group without rows has gradient zero. In fp32 where 16-bit products are computed in it (`matmul_dtype`), and on
    GPUs. With `out` [e, out, in], fp32, adds to it and returns it. num_sms, hopper: see `grouped_gemm`.
    """
    counts = as_list(counts)
    compute = matmul_dtype(a.dtype, a.device)
    d_out, a = d_out.to(compute), a.to(compute)
    adds = out is not None and out.dtype == compute
    grad = out if out is not None and adds else a.new_empty(len(counts), d_out.shape[1], a.shape[1])
    start = 0
    for group, count in enumerate(counts):
        stop = start + count
        if count:
            torch.addmm(grad[group], d_out[start:stop].T, a[start:stop], beta=1 if adds else 0, out=grad[group])
        elif not adds:
            grad[group] = 0
        start = stop
    return grad if out is None or adds else out.add_(grad)


def permute(x: Tensor, source: Tensor) -> Tensor:
    """Row n of the result is row source[n] of `x` [R, D]; source [N] int64 -> [N, D]."""
    return x.index_select(0, source)


def unpermute(rows: Tensor, places: Tensor) -> Tensor:
    """Sum of each output row's input rows, in the order of the columns of `places`.

    rows [N, D]; places [R, k] int64, -1 for none -> [R, D], summed in fp32 and rounded once to rows' dtype.
    """
    present = places >= 0
    all_present = present.all(dim=0).tolist()
    if all_present == [True]:
        return rows.index_select(0, places[:, 0])
    if rows.dtype == _wide(rows.dtype):  # of 16-bit rows this would round each partial sum
        if all(all_present):
            return F.embedding_bag(places, rows, mode="sum")
        counts = present.sum(dim=1)
        return F.embedding_bag(places[present], rows, counts.cumsum(0) - counts, mode="sum")
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=_wide(rows.dtype), device=rows.device)
    if all(all_present):
        _add_rows(total, rows, places)
        return total.to(rows.dtype)
    for present_everywhere, column in zip(all_present, places.unbind(1), strict=True):
        if present_everywhere:
            total += rows.index_select(0, column)
        else:
            some = (column >= 0).nonzero()[:, 0]
            total.index_add_(0, some, rows.index_select(0, column[some]).to(total.dtype))
    return total.to(rows.dtype)


def _add_rows(total: Tensor, rows: Tensor, places: Tensor) -> None:
    """Add the rows at each column of `places`, block by block, so that a block's sums stay in cache."""
    columns = places.T.contiguous()
    taken = rows.new_empty(block_rows(total, 2 * BLOCK_ELEMENTS), rows.shape[1])
    for block in row_blocks(total, 2 * BLOCK_ELEMENTS):
        sums = total[block]
        for column in columns:
            sums += torch.index_select(rows, 0, column[block], out=taken[: len(sums)])


def swiglu(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
    """silu(gate) * up, times the row's weight if given, in fp32 and rounded once.

    gate_up [N, 2F] (gate first), weight [N] -> [N, F]. silu is written from exp, whose CPU code gives an element
    the same bits wherever it stands (torch's own silu does not).
    """
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    return swiglu_into(out, gate_up, weight, swiglu_scratch(gate_up, 1))


def swiglu_into(out: Tensor, gate_up: Tensor, weight: Tensor | None, scratch: Tensor) -> Tensor:
    """`swiglu` into `out` [N, F], in gate_up's dtype or wider; scratch: `swiglu_scratch` of as many rows or more."""
    wide, blocks = scratch.dtype, scratch.shape[1]
    for start in range(0, gate_up.shape[0], blocks):
        rows = slice(start, start + blocks)
        gate, up = gate_up[rows].to(wide).chunk(2, dim=1)
        below = torch.neg(gate, out=scratch[0, : len(gate)]).exp_().add_(1)
        act = torch.div(gate, below, out=out[rows] if out.dtype == wide else below).mul_(up)
        if weight is not None:
            act *= weight[rows, None]
        if out.dtype != wide:
            out[rows] = act
    return out


def swiglu_scratch(gate_up: Tensor, tensors: int) -> Tensor:
    """Memory for `tensors` intermediate results of a block of rows: [tensors, rows, F] in fp32 (fp64 for fp64)."""
    elements = SWIGLU_ELEMENTS.get(gate_up.dtype, BLOCK_ELEMENTS)
    return gate_up.new_empty(tensors, block_rows(gate_up, elements), gate_up.shape[1] // 2, dtype=_wide(gate_up.dtype))


def swiglu_backward(d_out: Tensor, gate_up: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Gradients of `swiglu`: d_out [N, F] -> (d_gate_up [N, 2F] in gate_up's dtype, d_weight [N] or None)."""
    d_gate_up = torch.empty_like(gate_up)
    d_weight = None if weight is None else torch.empty_like(weight)
    swiglu_backward_into(d_gate_up, d_weight, d_out, gate_up, weight, swiglu_scratch(gate_up, 3))
    return d_gate_up, d_weight


def swiglu_backward_into(
    d_gate_up: Tensor,
    d_weight: Tensor | None,
    d_out: Tensor,
    gate_up: Tensor,
    weight: Tensor | None,
    scratch: Tensor,
    again: Tensor | None = None,
) -> None:
    """`swiglu_backward` into tensors that exist; scratch: three of `swiglu_scratch`, of as many rows or more.

    again [N, F]: for the result of `swiglu`, which shares its exponentials.
    """
    wide, blocks, one = scratch.dtype, scratch.shape[1], scratch.new_ones(())
    for start in range(0, gate_up.shape[0], blocks):
        rows = slice(start, start + blocks)
        gate, up = gate_up[rows].to(wide).chunk(2, dim=1)
        d_gate, d_up = d_gate_up[rows].chunk(2, dim=1)
        in_place = d_gate_up.dtype == wide
        sigmoid, spare, d_act = scratch[:, : len(gate)]
        torch.neg(gate, out=sigmoid).exp_().add_(1)
        if again is not None:
            act = torch.div(gate, sigmoid, out=again[rows] if again.dtype == wide else spare).mul_(up)
            if weight is not None:
                act *= weight[rows, None]
            if again.dtype != wide:
                again[rows] = act
        silu = torch.mul(gate, sigmoid.reciprocal_(), out=d_up if in_place else spare)
        given = d_out[rows].to(wide)
        if weight is None or d_weight is None:
            d_act = given
        else:
            d_weight[rows] = torch.mul(given, silu, out=d_act).mul_(up).sum(dim=1)
            torch.mul(given, weight[rows, None], out=d_act)
        silu *= d_act
        if not in_place:
            d_up.copy_(silu)
        slope = torch.sub(one, sigmoid, out=d_gate if in_place else spare)  # of silu, times up, in the end
        slope.mul_(gate).add_(1).mul_(sigmoid).mul_(up).mul_(d_act)
        if not in_place:
            d_gate.copy_(slope)


def row_blocks(x: Tensor, elements: int = BLOCK_ELEMENTS) -> Iterator[slice]:
    """Slices of x's rows with about `elements` numbers each."""
    step = block_rows(x, elements)
    for start in range(0, x.shape[0], step):
        yield slice(start, min(start + step, x.shape[0]))


def block_rows(x: Tensor, elements: int = BLOCK_ELEMENTS) -> int:
    """Rows of a slice of `row_blocks`."""
    return min(x.shape[0], max(1, elements // max(1, x.shape[1]))) or 1
