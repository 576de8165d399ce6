"""Symmetric memory of a dry run: its bytes, and exchanges without anybody at the other end.

The engine's own code lays out the rows and says from where to where they go. As with `distributed.silent`, every other
rank is taken to send here what this rank sends to itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.distributed.collectives import Communicator, Pending
from moe_engine.ops.window import Runtime, Way, Window
from moe_engine.planner.symmetric import window_bytes


class SilentWindow(Window):
    """See the module. `held`: as many bytes as the window has of symmetric memory."""

    def __init__(
        self, name: str, group: Communicator, _: Runtime | None, num_bytes: int, num_sms: int, device: torch.device
    ) -> None:
        self._of_group(name, group, num_sms, device)
        self.held = torch.empty(window_bytes(num_bytes, group.size), dtype=torch.uint8, device=device)

    def wait(self) -> None:
        """Nothing is under way."""

    def exchange(self, x: Tensor, way: Way, out_rows: int, label: str, id_words: int = 0) -> Pending:
        self._log(x, label)
        out = x.new_empty(out_rows, *x.shape[1:])
        if x.is_meta or x.is_floating_point():
            return Pending(out)
        out.zero_()[:, :id_words] = -1
        me = self.group.rank
        (count, first), (counts, starts) = way.sent[:2, me].tolist(), way.arrived[:2].tolist()
        for rows, start in zip(counts, starts, strict=True):
            if rows != count:
                raise ValueError(f"{self.name}: {rows} rows are awaited, and this rank would send {count}")
            out[start : start + rows] = x[first : first + count]
        return Pending(out)
