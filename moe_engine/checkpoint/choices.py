"""The routing of a step in a folder, `runs/<name>/routing/step_<n>`, and back: any layout to any layout.

It is a checkpoint in small: of each MoE layer one tensor, the experts of all tokens of the global batch in its order,
[sequences * length, K] int32, of which each rank writes and reads its own rows. Ranks that share sequences bring theirs
together first and write a part each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.checkpoint import files, store
from moe_engine.config.errors import ConfigError
from moe_engine.config.huggingface_keys import dense_values
from moe_engine.config.schema import Config
from moe_engine.distributed.collectives import Communicator
from moe_engine.distributed.groups import Groups
from moe_engine.layout import shard_chunks
from moe_engine.optim.zero import Shard

KIND = "choices"


def sizes_of(config: Config) -> dict[str, Any]:
    """What a recorded step and the one that replays it must have in common, by option."""
    model, train = config.model, config.train
    return {
        "model.num_layers": model.num_layers,
        **{f"model.{name}": value for name, value in dense_values(model.all_dense_layers()).items()},
        "model.mtp_depth": model.mtp_depth,
        "model.num_experts": model.num_experts,
        "model.top_k": model.top_k,
        "train.global_batch": train.global_batch,
        "train.seq_len": train.seq_len,
    }


def save_choices(
    folder: Path,
    step: int,
    choices: Mapping[str, Mapping[int, Tensor]],
    config: Config,
    first_row: int,
    groups: Groups,
    device: torch.device,
) -> Path:
    """Write `folder/step_<step>`. All ranks call this together; each gives the micro-batches that its layers routed.

    choices: by layer and number of the micro-batch, [T, K] int32; their numbers have no gap (a stage that two ranks
    hold sends one half of them to each). first_row: of this rank's part of the global batch. device: of collectives.
    """
    shards, cp = [], groups.cp
    for name, by_micro_batch in choices.items():
        numbers = sorted(by_micro_batch)
        ids = torch.cat([by_micro_batch[m] for m in numbers])
        if cp.size > 1:
            ids = _whole_rows(ids.to(device), config, cp).cpu()
        first, values = first_row + numbers[0] * config.train.micro_batch, ids.reshape(-1)
        size = values.numel() // cp.size
        own = values[cp.rank * size : (cp.rank + 1) * size]
        shards.append(_shard(name, own, config, first, cp.rank * size))
    return store.save(folder, step, shards, {}, {"sizes": sizes_of(config)}, groups.world)


def _whole_rows(ids: Tensor, config: Config, cp: Communicator) -> Tensor:
    """From the choices for this rank's tokens of some rows, [rows * S / cp, K], those for all: [rows * S, K]."""
    length, top_k = config.train.seq_len, config.model.top_k
    by_shard = cp.all_gather(ids, "recorded choices").view(cp.size, -1, length // cp.size, top_k)
    whole = by_shard.new_empty(by_shard.shape[1], length, top_k)
    for rank, part in enumerate(by_shard):
        whole[:, _places(length, cp.size, rank)] = part
    return whole.flatten(0, 1)


def _places(length: int, size: int, rank: int) -> Tensor:
    """Where in a sequence the tokens of a shard stand, [length / size]."""
    return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in shard_chunks(length, size, rank)])


def load_choices(
    path: Path, layers: Sequence[str], config: Config, first_row: int, rows: int, groups: Groups
) -> dict[str, list[Tensor]]:
    """By layer, this rank's micro-batches [T, K] int64 of the recorded step. All ranks call this together.

    rows: sequences of this rank's part of the global batch, of which it may hold some tokens.

    Raises ConfigError on all ranks where it was recorded in other sizes or is damaged.
    """
    check_choices(path, config)
    top_k, length, cp = config.model.top_k, config.train.seq_len, groups.cp
    found = {name: torch.empty(rows * length * top_k, dtype=torch.int32) for name in layers}
    store.load(path, [_shard(name, values, config, first_row) for name, values in found.items()], {}, groups.world)
    wrong = [name for name, ids in found.items() if not bool(((ids >= 0) & (ids < config.model.num_experts)).all())]
    if wrong:
        raise ConfigError(f"moe.routing=replay:{path}: {wrong[0]} names experts that there are not; record it anew")
    own = _places(length, cp.size, cp.rank) if cp.size > 1 else slice(None)
    size = config.train.micro_batch * length // cp.size
    return {
        name: list(ids.long().view(rows, length, top_k)[:, own].flatten(0, 1).split(size))
        for name, ids in found.items()
    }


def check_choices(path: Path, config: Config) -> None:
    """Raise ConfigError, with a line for each option, where `path` holds no recorded step or one of other sizes."""
    if not (path / files.INDEX).is_file():
        raise ConfigError(
            f"moe.routing=replay:{path}: no recorded step is there; record one with moe.record_routing=1 and give "
            "runs/<name>/routing/step_1"
        )
    recorded: Mapping[str, Any] = files.read_index(path).meta.get("sizes", {})
    if not sizes_of(config).keys() <= recorded.keys():
        raise ConfigError(
            f"moe.routing=replay:{path}: an older version recorded it and did not note all sizes; record it anew with "
            "moe.record_routing=1"
        )
    problems = [
        f"{name}={size}: {path} was recorded with {name}={recorded[name]}; use {name}={recorded[name]}"
        for name, size in sizes_of(config).items()
        if recorded[name] != size
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _shard(name: str, values: Tensor, config: Config, first_row: int, skipped: int = 0) -> Shard:
    """A flat part of a layer's choices, beginning so many numbers behind a row of the global batch."""
    train, top_k = config.train, config.model.top_k
    start = first_row * train.seq_len * top_k + skipped
    shape = torch.Size((train.global_batch * train.seq_len, top_k))
    return Shard(name, start, start + values.numel(), shape, {KIND: values})
