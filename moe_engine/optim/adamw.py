"""AdamW on flat tensors.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2. Torch's fused kernel:
one pass over parameter, moments and gradient, and the bits of torch.optim.AdamW(fused=True). The update of an element
does not depend on which shard it lies in, as long as shards are whole multiples of `layout.ALIGNMENT` elements: on a
CPU the kernel rounds what is left at the end of a tensor differently.

Moments may be kept in fewer bits than master weights (DeepSeek-V3, arXiv 2412.19437, section 3.3): they are widened,
updated, used as they are, and only then rounded, to the nearest, for the next step.
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
    """Update `master` and both moments in place; `gradient` is only read. All are flat, and of one dtype but for the
    moments, which may have a narrower one: give few elements at a time then, for two wide copies are made.

    `step` counts from 1: it is the number of this update, for the bias corrections; as a tensor (fp32, no dimension) it
    is made once for many calls.
    """
    wide = [moment.to(master.dtype) for moment in (exp_avg, exp_avg_sq)]  # themselves where they are as wide
    torch._fused_adamw_(
        [master],
        [gradient],
        wide[:1],
        wide[1:],
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
    if exp_avg.dtype != master.dtype:
        exp_avg.copy_(wide[0])
        exp_avg_sq.copy_(wide[1])
