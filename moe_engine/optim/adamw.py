"""AdamW on flat tensors.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2. Every operation is
elementwise, so the update of an element does not depend on which shard it lies in, as long as shards begin and end at
multiples of a vector. It is torch's fused kernel, one pass over memory, with the bits of torch.optim.AdamW(fused=True).
"""

from __future__ import annotations

import torch
from torch import Tensor


def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update `master` and both moments in place; `gradient` is only read. All are flat and of one dtype.

    `step` counts from 1: it is the number of this update, for the bias corrections.
    """
    torch._fused_adamw_(
        [master],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(step), device=master.device)],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
