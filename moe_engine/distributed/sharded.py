"""What other libraries keep in DTensors: parameters that FSDP2 has sharded, rows that ranks share.

DTensor is imported where it is used, since that takes a second, which only who uses it has paid for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def fill(parameter: Tensor, full: Tensor) -> None:
    """Give a parameter the values of `full`, of which a sharded one takes its part. Nothing is sent."""
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
    if mesh is not None:
        from torch.distributed.tensor import distribute_tensor

        full = distribute_tensor(full, mesh, placements, src_data_rank=None)
    parameter.copy_(full)


def split_rows(mesh: Any, *tensors: Tensor) -> list[Tensor]:
    """This rank's part of the rows of tensors that all ranks of a one-dimensional mesh hold. Backward joins them."""
    if mesh.size() == 1:
        return list(tensors)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = [DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in tensors]
    return [x.redistribute(mesh, [Shard(0)]).to_local() for x in whole]


def join_rows(mesh: Any, x: Tensor, rows: int) -> Tensor:
    """The whole [rows, D] on every rank, of the parts that `split_rows` made. Backward splits."""
    if mesh.size() == 1:
        return x
    from torch.distributed.tensor import DTensor, Shard

    shape, stride = torch.Size((rows, x.shape[1])), (x.shape[1], 1)
    return DTensor.from_local(x.contiguous(), mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()
