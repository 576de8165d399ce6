"""Symmetric memory of `moe.dispatch=nvshmem`, by arithmetic: what every rank sets aside before the first step.

Kernels put rows into memory that all ranks have at the same addresses, and the host never learns how many come. So
there is room for the most rows there could be, or for as many as `moe.recv_capacity` says; all layers share it. Every
part has two halves, for exchanges of even and of odd number (docs/design/nvshmem.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.schema import MoEConfig
from moe_engine.planner.strategy import coded_row_bytes

ALIGNMENT = 128  # bytes
NOTE_BYTES = 16


def window_bytes(half: int, ranks: int) -> int:
    """Symmetric memory of a window with room for `half` bytes: staging and buffer, notes to and from each rank and a
    signal of each, all in two halves."""
    return 2 * (2 * _aligned(half) + 2 * ranks * NOTE_BYTES + ranks * 8)


@dataclass(frozen=True)
class WindowSizes:
    """What the windows of one expert-parallel group have room for.

    sent: rows that leave a rank; most_rows, most_choices: rows and (token, expert) pairs that one takes in one exchange
    at most: so many there are in every exchange, since only the device knows which of them are real. rows, counts:
    bytes of one half of a window's staging, and of its buffer: of rows and of their numbers. ranks: of the group.
    """

    ranks: int
    sent: int
    most_rows: int
    most_choices: int
    rows: int
    counts: int

    @property
    def by_use(self) -> dict[str, int]:
        """Bytes of symmetric memory of one rank."""
        return {
            "symmetric rows": window_bytes(self.rows, self.ranks),
            "symmetric counts": window_bytes(self.counts, self.ranks),
        }


def window_sizes(config: MoEConfig, ranks: int, tokens: int, number: int, capacity: int = 0) -> WindowSizes:
    """Room for layers of `config` on `ranks` ranks with up to `tokens` tokens each; `number`: bytes of a number.

    capacity: the most (token, expert) pairs that a rank takes at once; 0: as many as there can be.
    """
    at_one = min(config.top_k, config.num_experts // ranks)  # choices of a token that can be at one rank
    exact = config.combine == "exact"
    most_choices = capacity or ranks * tokens * at_one
    most_rows = min(most_choices, ranks * tokens * (at_one if exact else 1))
    sent = tokens * (config.top_k if exact else min(config.top_k, ranks))
    slots = (1 if exact else at_one) * (4 + max(4, number))  # an id and a weight each
    row = max(config.dim * number, coded_row_bytes(config.dim), slots)
    bulk = _aligned(max(most_rows, sent) * row)
    return WindowSizes(ranks, sent, most_rows, most_choices, bulk, _aligned(ranks**2 * 8))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
