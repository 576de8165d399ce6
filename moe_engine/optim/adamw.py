"""AdamW on flat tensors.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2. Every operation is
elementwise, so the update of an element does not depend on which shard it lies in. Operations and their order are
those of torch.optim.AdamW's single-tensor path, so that fp32 results have its bits.
"""

from __future__ import annotations

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
    if weight_decay != 0:
        master.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    step_size = lr / (1 - beta1**step)
    denominator = (exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
    master.addcdiv_(exp_avg, denominator, value=-step_size)
