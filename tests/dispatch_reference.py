"""What dispatch and combine must give, by their definition: every rank gathers everything and loops over tokens.

The experts here are simple enough to be written twice: expert e multiplies a row by e + 1. A row's coefficient is the
sum over its slots of weight times (e + 1); what comes back is row times coefficient, rounded to the row's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_engine.ops.fp8 import dequantize, quantize


@dataclass(frozen=True)
class Blocks:
    """`num_experts` experts in blocks as equal as possible: a placement that also takes numbers that do not divide."""

    num_experts: int
    ranks: int

    @property
    def num_local(self) -> int:
        """The most that a rank has."""
        return -(-self.num_experts // self.ranks)

    def rank_of(self, expert_ids: Tensor) -> Tensor:
        return expert_ids * self.ranks // self.num_experts

    def local_id(self, expert_ids: Tensor) -> Tensor:
        rank = self.rank_of(expert_ids)
        first = (rank * self.num_experts + self.ranks - 1) // self.ranks
        return torch.where(expert_ids >= 0, expert_ids - first, -1)

    def global_ids(self, local_ids: Tensor, rank: int) -> Tensor:
        """-1 stays -1."""
        first = (rank * self.num_experts + self.ranks - 1) // self.ranks
        return torch.where(local_ids >= 0, local_ids + first, -1)


def coefficients(expert_ids: Tensor, weights: Tensor) -> Tensor:
    """[R, k] each -> [R], slot by slot."""
    total = torch.zeros(len(weights), dtype=weights.dtype)
    for k in range(weights.shape[1]):
        total = total + weights[:, k] * torch.where(expert_ids[:, k] >= 0, expert_ids[:, k] + 1, 0)
    return total


def experts(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """The simple experts over rows x [R, D]."""
    return (x.to(weights.dtype) * coefficients(expert_ids, weights)[:, None]).to(x.dtype)


def rounded(x: Tensor, fp8: bool, gradient: bool = False) -> Tensor:
    """What arrives of rows that travel to experts."""
    return dequantize(quantize(x.float(), gradient), x.dtype) if fp8 else x


@dataclass
class Expected:
    """Of one rank: rows that arrive (of which token of which rank, their experts), the output, d_x and d_weights."""

    arrived: list[tuple[int, int, list[int]]]
    out: Tensor
    d_x: Tensor
    d_weights: Tensor


def gathered(x: Tensor) -> list[Tensor]:
    """Every rank's tensor, of any length, by an all-gather of equal ones."""
    if not dist.is_initialized():
        return [x]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(x)]))
    longest = int(max(lengths))
    padded = torch.cat((x, x.new_zeros(longest - len(x), *x.shape[1:])))
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]


def expected(
    x: Tensor, ids: Tensor, weights: Tensor, d_out: Tensor, placement: Blocks, on_node: int, exact: bool, fp8: bool
) -> Expected:
    """Ranks of `on_node` to a node sum there what goes back to another one (1: nothing is summed on the way)."""
    rank, all_ids = dist.get_rank() if dist.is_initialized() else 0, gathered(ids)
    arrived = []
    for source, choices in enumerate(all_ids):
        for t, row in enumerate(choices.tolist()):
            mine = [e for e in row if e >= 0 and int(placement.rank_of(torch.tensor(e))) == rank]
            arrived += [(source, t, [e]) for e in mine] if exact else [(source, t, mine)] if mine else []
    sent, d_row = rounded(x, fp8), rounded(d_out, fp8, gradient=True)
    out, d_x, d_weights = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
    for t, row in enumerate(ids.tolist()):
        columns = [c for c, e in enumerate(row) if e >= 0]
        ranks = {c: int(placement.rank_of(torch.tensor(row[c]))) for c in columns}
        rows = [[c] for c in columns] if exact else [[c for c in columns if ranks[c] == r] for r in range(8)]
        groups: dict[int, list[list[int]]] = {}
        for number, slots in enumerate(rows):
            if slots:
                groups.setdefault(number if exact else ranks[slots[0]] // on_node, []).append(slots)
        for c in columns:
            d_weights[t, c] = (row[c] + 1) * (d_row[t].to(weights.dtype) * sent[t].to(weights.dtype)).sum()
        for total, value in ((out, sent), (d_x, d_row)):
            total[t] = _sum([_sum([_row(value[t], row, weights[t], s) for s in group]) for group in groups.values()], x)
    return Expected(arrived, out, d_x, d_weights)


def _row(x: Tensor, row: list[int], weights: Tensor, slots: list[int]) -> Tensor:
    return experts(x[None], torch.tensor([[row[c] for c in slots]]), weights[slots][None])[0]


def _sum(rows: list[Tensor], like: Tensor | None = None) -> Tensor:
    """In order, in fp32 at least, rounded once."""
    if not rows:
        assert like is not None
        return torch.zeros_like(like[0])
    wide = torch.promote_types(rows[0].dtype, torch.float32)
    total = torch.zeros_like(rows[0], dtype=wide)
    for row in rows:
        total = total + row.to(wide)
    return total.to(rows[0].dtype)
