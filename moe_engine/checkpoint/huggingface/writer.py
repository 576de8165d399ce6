"""Weights into a Hugging Face folder, in the published layout of the model's family: a tensor for each expert, or
(gpt-oss) one for all of a layer.

What a family's layout has no place for (a balancing bias that is not zero in a softmax model, MTP modules outside
DeepSeek-V3) refuses the model by name; nothing is left out in silence.

In fp8 the matrices of attention and MLPs are E4M3 codes, each with a tensor of scales for blocks of 128x128. Values
that came from codes get back the scales they came with, and so the same codes; others the codes that fp8 training
multiplies with: those of the values in bf16, with powers of two as scales.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.checkpoint.huggingface.files import CONFIG, INDEX, SINGLE
from moe_engine.checkpoint.huggingface.names import FAMILIES, Names, Rows, names
from moe_engine.checkpoint.huggingface.reader import FP8_BLOCK, SCALE, dequantise
from moe_engine.checkpoint.stream import Announced, Progress, Value, cut, new_folder, write_file
from moe_engine.checkpoint.weights import BIAS, Weights, not_as_expected
from moe_engine.config.errors import ConfigError, in_one_line
from moe_engine.config.huggingface import huggingface_config
from moe_engine.data.tokens import sync
from moe_engine.ops.fp8 import Fp8

FP8 = torch.float8_e4m3fn
# What fp8 training multiplies in fp8, by our names; MTP's projection stays in bf16 in published folders.
_IN_FP8 = re.compile(r".*\.(attention\.\w+|mlp\.\w+|shared\.\w+)\.weight|.*\.experts\.\d+\.\w+")
_QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}


def write_huggingface(
    weights: Weights, out: Path, dtype: torch.dtype | None, shard_bytes: int, progress: Progress | None = None
) -> dict[str, int]:
    """Make the folder `out`; returns the size in bytes of each of its safetensors files.

    dtype: of all tensors but the balancing biases, which are fp32; None: as they are stored; float8_e4m3fn: the
    matrices of attention and MLPs in fp8 with their scales (of an imported fp8 model: those that were), others as they
    are stored. shard_bytes: the largest file, but for a tensor that is larger. The folder appears when all of it is on
    disk, or not at all.
    Raises ConfigError for a model that no known family's layout can hold, and when `out` exists or cannot be written.
    """
    config = huggingface_config(weights.model)
    family = config["model_type"]
    if dtype == FP8 and FAMILIES[family].fused:
        raise ConfigError(f"dtype=fp8: {family} folders have no such form; use dtype=bfloat16")
    export = _Export(weights, names(weights.model, FAMILIES[family]), dtype)
    config["torch_dtype"] = str(export.common_dtype()).removeprefix("torch.")
    if dtype == FP8:
        config["quantization_config"] = _QUANTIZATION
    return write_folder(out, export.announced(), export.value, config, shard_bytes, progress)


def write_folder(
    out: Path,
    tensors: Iterable[Announced],
    value: Callable[[str], Value],
    config: Mapping[str, Any],
    shard_bytes: int,
    progress: Progress | None = None,
    check: Callable[[Path], None] | None = None,
) -> dict[str, int]:
    """Make the folder `out` of config.json and the announced tensors, each `value(key)`; the size of each file.

    check: called with the folder before it appears; what it raises leaves nothing behind.
    """
    shards = cut(tensors, shard_bytes)
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    progress = progress or Progress()
    progress.begin(total)
    sizes: dict[str, int] = {}
    with new_folder(out, total) as partial:
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
            sizes[file] = write_file(partial / file, shard, value, progress)
            weight_map |= {tensor.key: file for tensor in shard}
        if len(shards) > 1:
            _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(partial / CONFIG, config)
        if check is not None:
            check(partial)
    return sizes


class _Export:
    """The Hugging Face tensors of some weights, made one at a time."""

    def __init__(self, weights: Weights, both: Names, dtype: torch.dtype | None) -> None:
        self.weights, self.both, self.cast_to = weights, both, dtype
        self._last: tuple[str, tuple[Tensor, Tensor]] = "", (torch.empty(0), torch.empty(0))
        wrong = not_as_expected({name: mapped.shape for name, mapped in both.tensors.items()}, weights.shapes)
        wrong += [
            f"{name} is not zero, and a {weights.model.score_function} model has no such bias there; "
            "train one that is to go there with moe.bias_step=0"
            for name, mapped in both.tensors.items()
            if not mapped.forms and name in weights.shapes and bool(weights.read(name).any())
        ]
        if wrong:
            raise ConfigError(f"model={weights.model.name}: cannot be written for Hugging Face: {in_one_line(wrong)}")
        # By key: our name, the first row in it, and rows; of experts that lie in one tensor, for each.
        self._places: dict[str, list[tuple[str, int, Rows]]] = {}
        for key, place in self._find_places():
            self._places.setdefault(key, []).append(place)
        for copy in both.copies:
            if copy.written:
                self._places[copy.key] = self._places[copy.original]

    def announced(self) -> Iterator[Announced]:
        """All tensors, in the order of their names there."""
        for key in sorted(self._places):
            name, _, rows = self._places[key][0]
            if not self._quantised(key):
                yield Announced(key, self._dtype(name), rows.whole_shape)
                continue
            yield Announced(key, FP8, rows.shape)
            yield Announced(key + SCALE, torch.float32, tuple(-(-size // FP8_BLOCK) for size in rows.shape))

    def value(self, key: str) -> Value:
        if key not in self._places:
            return self._codes(key.removesuffix(SCALE))[1]
        if self._quantised(key):
            return self._codes(key)[0]
        places, dtype = self._places[key], self._dtype(self._places[key][0][0])
        if places[0][2].index is None:
            return self._values(places[0], dtype)
        return (self._values(place, dtype)[None] for place in places)

    def _values(self, place: tuple[str, int, Rows], dtype: torch.dtype) -> Tensor:
        name, first, rows = place
        columns = rows.shape[1] if len(rows.shape) > 1 else 1
        flat = self.weights.read(name, first * columns, (first + rows.shape[0]) * columns)
        values = flat.view(rows.shape).to(dtype)
        if rows.turns:
            values = torch.stack(values.chunk(2), dim=1).flatten(0, 1)
        if rows.transposed:
            return values.T
        return torch.cat(values.chunk(2, dim=1)[::-1], dim=1) if rows.swap else values

    def _quantised(self, key: str) -> bool:
        """Whether a tensor is written as codes: in an imported fp8 model what was, else what training multiplies so."""
        if self.cast_to != FP8:
            return False
        if self.weights.scales:
            return key in self.weights.scales
        name, _, rows = self._places[key][0]
        return len(rows.shape) == 2 and bool(_IN_FP8.fullmatch(name))

    def _codes(self, key: str) -> tuple[Tensor, Tensor]:
        """Codes and scales of a matrix; kept, since scales are asked for right after codes."""
        if self._last[0] != key:
            self._last = key, self._quantise(key)
        return self._last[1]

    def _quantise(self, key: str) -> tuple[Tensor, Tensor]:
        values = self._values(self._places[key][0], torch.float32)
        if key in self.weights.scales:
            scale = self.weights.read_scale(key)
            by_row = scale.where(scale != 0, 1).repeat_interleave(FP8_BLOCK, 0)[: values.shape[0]]
            codes = (values / by_row.repeat_interleave(FP8_BLOCK, 1)[:, : values.shape[1]]).clamp(-448, 448).to(FP8)
            if torch.equal(dequantise(codes, scale), values):
                return codes, scale
        made = Fp8().weight(values.bfloat16())
        return made.codes[0], made.scale[0]

    def common_dtype(self) -> torch.dtype:
        """The type of most tensors, which is what readers make of the model when they are not told."""
        count: dict[torch.dtype, int] = {}
        for tensor in self.announced():
            if not self._quantised(tensor.key.removesuffix(SCALE)):
                count[tensor.dtype] = count.get(tensor.dtype, 0) + 1
        return max(count, key=lambda dtype: count[dtype])

    def _dtype(self, name: str) -> torch.dtype:
        if name.endswith(BIAS):
            return torch.float32
        return self.weights.dtype(name) if self.cast_to in (None, FP8) else self.cast_to

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
