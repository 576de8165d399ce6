"""Weights into a Hugging Face folder, in the published layout of the model's family: a tensor for each expert.

What a family's layout has no place for (a balancing bias that is not zero in a softmax model, MTP modules outside
DeepSeek-V3) refuses the model by name; nothing is left out in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.checkpoint.huggingface.files import CONFIG, INDEX, SINGLE
from moe_engine.checkpoint.huggingface.names import FAMILIES, Names, Rows, names
from moe_engine.checkpoint.stream import Announced, Progress, cut, new_folder, write_file
from moe_engine.checkpoint.weights import BIAS, Weights, not_as_expected
from moe_engine.config.errors import ConfigError
from moe_engine.config.huggingface import huggingface_config
from moe_engine.data.tokens import sync


def write_huggingface(
    weights: Weights, out: Path, dtype: torch.dtype | None, shard_bytes: int, progress: Progress | None = None
) -> dict[str, int]:
    """Make the folder `out`; returns the size in bytes of each of its safetensors files.

    dtype: of all tensors but the balancing biases, which are fp32; None: as they are stored. shard_bytes: the largest
    file, but for a tensor that is larger. The folder appears when all of it is on disk, or not at all.
    Raises ConfigError for a model that no known family's layout can hold, and when `out` exists or cannot be written.
    """
    config = huggingface_config(weights.model)
    export = _Export(weights, names(weights.model, FAMILIES[config["model_type"]]), dtype)
    config["torch_dtype"] = str(export.common_dtype()).removeprefix("torch.")
    shards = cut(export.announced(), shard_bytes)
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    progress = progress or Progress()
    progress.begin(total)
    sizes: dict[str, int] = {}
    with new_folder(out, total) as partial:
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
            sizes[file] = write_file(partial / file, shard, export.value, progress)
            weight_map |= {tensor.key: file for tensor in shard}
        if len(shards) > 1:
            _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(partial / CONFIG, config)
    return sizes


class _Export:
    """The Hugging Face tensors of some weights, made one at a time."""

    def __init__(self, weights: Weights, both: Names, dtype: torch.dtype | None) -> None:
        self.weights, self.both, self.cast_to = weights, both, dtype
        wrong = not_as_expected({name: mapped.shape for name, mapped in both.tensors.items()}, weights.shapes)
        wrong += [
            f"{name} is not zero, and a {weights.model.score_function} model has no such bias there"
            for name, mapped in both.tensors.items()
            if not mapped.forms and name in weights.shapes and bool(weights.read(name).any())
        ]
        if wrong:
            raise ConfigError(f"model={weights.model.name}: cannot be written for Hugging Face: {'; '.join(wrong[:8])}")
        self._places = dict(self._find_places())
        for copy in both.copies:
            if copy.written:
                self._places[copy.key] = self._places[copy.original]

    def announced(self) -> Iterator[Announced]:
        """All tensors, in the order of their names there."""
        for key in sorted(self._places):
            name, _, rows = self._places[key]
            yield Announced(key, self._dtype(name), rows.shape)

    def value(self, key: str) -> Tensor:
        name, first, rows = self._places[key]
        columns = rows.shape[1] if len(rows.shape) > 1 else 1
        flat = self.weights.read(name, first * columns, (first + rows.shape[0]) * columns)
        values = flat.view(rows.shape).to(self._dtype(name))
        return torch.cat(values.chunk(2, dim=1)[::-1], dim=1) if rows.swap else values

    def common_dtype(self) -> torch.dtype:
        """The type of most tensors, which is what readers make of the model when they are not told."""
        count: dict[torch.dtype, int] = {}
        for tensor in self.announced():
            count[tensor.dtype] = count.get(tensor.dtype, 0) + 1
        return max(count, key=lambda dtype: count[dtype])

    def _dtype(self, name: str) -> torch.dtype:
        if name.endswith(BIAS):
            return torch.float32
        return self.cast_to or self.weights.dtype(name)

    def _find_places(self) -> Iterator[tuple[str, tuple[str, int, Rows]]]:
        """(key there, (our name, first row in it, rows)) of every tensor that is written."""
        for name, mapped in self.both.tensors.items():
            first = 0
            for rows in mapped.forms[0] if mapped.forms else ():
                yield rows.key, (name, first, rows)
                first += rows.shape[0]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
    sync(path)
