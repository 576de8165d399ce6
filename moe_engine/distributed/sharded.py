"""Parameters that somebody else has sharded: FSDP2 leaves DTensors in their place."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def fill(parameter: Tensor, full: Tensor) -> None:
    """Give a parameter the values of `full`, of which a sharded one takes its part. Nothing is sent."""
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
    if mesh is not None:
        # Imported here, since it takes a second and only who shards parameters has paid for it.
        from torch.distributed.tensor import distribute_tensor

        full = distribute_tensor(full, mesh, placements, src_data_rank=None)
    parameter.copy_(full)
