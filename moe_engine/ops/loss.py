"""Cross entropy of the output head in chunks of rows, so that the logits [T, V] never exist whole, however few rows.

Forward keeps the log-sum-exp [T]; backward makes each chunk's logits again. With 4096 tokens and a vocabulary of
129,280, whole fp32 logits and their gradient would take 4.2 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_engine.ops.autocast import cast_operands, without_autocast
from moe_engine.ops.first_order import first_order
from moe_engine.ops.linear import widened
from moe_kernels import gemm, wgrad

IGNORE = -100  # a label that is no target
# Logits of one chunk: what the passes over it read again is still in a CPU's cache, and on a GPU in its L2 …
CHUNK_ELEMENTS = 1 << 20
MIN_CHUNK_ROWS = 128  # … but each chunk reads the whole head, which fewer rows would not pay for
MAX_CHUNK_ROWS = 1024


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        log_sums = torch.empty(x.shape[0], dtype=wide, device=x.device)
        losses = torch.empty_like(log_sums)
        read = widened(weight)
        for rows in _chunks(x.shape[0], weight.shape[0]):
            logits = gemm(x[rows], read.T).to(wide)
            log_sums[rows] = logits.logsumexp(dim=1)
            valid = labels[rows] != IGNORE
            target = logits.gather(1, labels[rows].where(valid, 0)[:, None])[:, 0]
            losses[rows] = (log_sums[rows] - target).where(valid, 0)
        ctx.save_for_backward(x, weight, labels, log_sums)
        return losses

    @staticmethod
    @without_autocast
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (d_losses,), (x, weight, labels, log_sums) = grads, ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros(weight.shape, dtype=log_sums.dtype, device=x.device)
        read = widened(weight)
        for rows in _chunks(x.shape[0], weight.shape[0]):
            d_logits = gemm(x[rows], read.T).to(log_sums.dtype)
            d_logits.sub_(log_sums[rows, None]).exp_()
            valid = labels[rows] != IGNORE
            target = labels[rows].where(valid, 0)[:, None]
            d_logits.scatter_add_(1, target, -torch.ones_like(target, dtype=d_logits.dtype))
            d_logits = d_logits.mul_(d_losses[rows].where(valid, 0)[:, None]).to(x.dtype)
            d_x[rows] = gemm(d_logits, read)
            if d_weight is not None:
                wgrad(d_logits, x[rows], out=d_weight)
        return d_x, d_weight, None


def _chunks(rows: int, vocab_size: int) -> Iterator[slice]:
    """Blocks of rows: of CHUNK_ELEMENTS logits, within MIN_ and MAX_CHUNK_ROWS, and at most half of all rows."""
    step = min(MAX_CHUNK_ROWS, max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // vocab_size))
    step = max(16, min(step, rows // 2) // 16 * 16)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def cross_entropy(x: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
    """Loss of each token in nats: x [T, D], head_weight [V, D], labels [T] int64 -> [T] fp32 (fp64 for fp64 x).

    0 where the label is IGNORE. Not averaged: whoever knows the number of valid targets divides. Logits are
    rounded to x's dtype and exponentials taken in fp32; the head's gradient is summed over chunks in fp32.
    """
    x, head_weight = cast_operands(x, head_weight)
    out: Tensor = _CrossEntropy.apply(x, head_weight, labels)
    return out
