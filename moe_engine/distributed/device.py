"""The device of a rank, and what follows from which it is."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import Config

HOPPER = (9, 0)  # compute capability


def device_of_rank() -> torch.device:
    """The GPU of this local rank, or the CPU where there is none. Raises ConfigError for more ranks than GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count == 1 and "SLURM_PROCID" in os.environ:  # Slurm can show each task its own GPU alone
        return torch.device("cuda", 0)
    if local >= count:
        raise ConfigError(
            f"LOCAL_RANK={local}: each rank needs a GPU of its own, and this node has {count}; start {count} ranks on "
            "it, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return torch.device("cuda", local)


def check_device(config: Config, device: torch.device) -> None:
    """Raises ConfigError for all that this device cannot do."""
    problems = []
    if config.moe.dispatch == "nvshmem" and device.type != "cuda":
        problems.append(
            "moe.dispatch=nvshmem: GPUs put the rows, and there is none here; use moe.dispatch=all_to_all "
            "(run.check=true checks a job of another machine)"
        )
    if config.train.kernels == "hopper" and (found := _compute_capability(device)) != HOPPER:
        here = "there is no GPU here" if found is None else "this one has {}.{}".format(*found)
        problems.append(
            f"train.kernels=hopper: these kernels need compute capability {HOPPER[0]}.{HOPPER[1]} (H100, H200, H800), "
            f"and {here}; use train.kernels=auto (run.check=true checks a job of another machine)"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _compute_capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def pair_sms(device: torch.device, exchange_sms: int) -> int | None:
    """Multiprocessors that products of a woven pair use: all but those for exchanges. None on a CPU, which has none."""
    if device.type != "cuda":
        return None
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count - exchange_sms)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """What a trace calls at each mark so that the device's work before it is done."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
