"""Routed experts of one rank, stacked in two tensors, and the shared expert that every token visits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_engine.moe.dispatch import Rows
from moe_engine.ops.activation import swiglu
from moe_engine.ops.grouped_linear import grouped_linear
from moe_engine.ops.permute import order_by_expert, permute, take, unpermute
from moe_engine.ops.recompute import Segments, segment
from moe_engine.ops.wgrad_queue import WgradQueue


class Experts(nn.Module):
    """SwiGLU experts with these global ids, ascending: gate_up [e, 2F, D] (gate rows first), down [e, D, F]."""

    def __init__(
        self,
        ids: Sequence[int],
        dim: int,
        hidden: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.ids = tuple(ids)
        num_local = len(self.ids)
        self.gate_up = nn.Parameter(torch.empty(num_local, 2 * hidden, dim, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(num_local, dim, hidden, dtype=dtype, device=device))

    def expert_names(self, prefix: str, name: str) -> list[str]:
        """Global names of the slices of parameter `name`, for a module that sits at `prefix`."""
        return [f"{prefix}.{expert}.{name}" for expert in self.ids]

    def forward(self, rows: Rows, queue: WgradQueue | None = None, segments: Segments | None = None) -> Tensor:
        """Each row through the experts in its slots, weighted and summed in expert order: [R, D].

        The weight multiplies inside SwiGLU, before the down projection.
        """
        order = order_by_expert(rows.local_ids, len(self.ids))
        weights = take(rows.weights, order.slots, order.rows.places)
        x = permute(rows.x, order.rows)  # [N, D]
        gate_up = grouped_linear(x, self.gate_up, order.counts, queue)  # [N, 2F]
        hidden = segment(segments, "swiglu", swiglu, gate_up, weights)  # [N, F]
        return unpermute(grouped_linear(hidden, self.down, order.counts, queue), order.rows)
