"""The learning rate as a pure function of the step: linear warm-up, then a cosine down to a fraction of the peak."""

from __future__ import annotations

import math

from moe_engine.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """The rate of the update that follows `step` finished ones, in a run of `steps`.

    Update n (from 1) uses lr * n / warmup_steps during warm-up, the peak lr at its end, and lr * min_lr_ratio at
    n = steps and after.
    """
    update = step + 1
    if update <= optim.warmup_steps:
        return optim.lr * update / optim.warmup_steps
    progress = min(1.0, (update - optim.warmup_steps) / max(1, steps - optim.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * cosine)
