"""AdamW on flat tensors.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2. Torch's fused kernel:
one pass over parameter, moments and gradient, and the bits of torch.optim.AdamW(fused=True). The update of an element
does not depend on which shard it lies in, as long as shards are whole multiples of `layout.ALIGNMENT` elements: on a
CPU the kernel rounds what is left at the end of a tensor differently.
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
    step: int | Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update `master` and both moments in place; `gradient` is only read. All are flat and of one dtype.

    `step` counts from 1: it is the number of this update, for the bias corrections; as a tensor (fp32, no dimension) it
    is made once for many calls.
    """
    torch._fused_adamw_(
        [master],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.as_tensor(step, dtype=torch.float32, device=master.device)],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
