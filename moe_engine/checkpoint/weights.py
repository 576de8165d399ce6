"""Weights by global name, wherever they come from: a checkpoint of this engine or a Hugging Face folder.

    weights = open_weights(Path("DeepSeek-V2-Lite"))
    weights.model                                   # ModelConfig
    weights.read("layers.1.moe.experts.7.down")     # flat; or any range of it
    fill_stages(weights, stages, placement)         # the parameters of a rank's stages

Opening reads headers only. A rank asks for the ranges that its shards need, so that no rank ever has a whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moe_engine.checkpoint import files, stream
from moe_engine.checkpoint.files import Index
from moe_engine.checkpoint.huggingface.files import CONFIG
from moe_engine.checkpoint.huggingface.reader import HuggingFaceWeights
from moe_engine.checkpoint.reshard import EXTRA, Entry, Part, Range, plan
from moe_engine.config import strict
from moe_engine.config.errors import ConfigError
from moe_engine.config.huggingface import effective
from moe_engine.config.schema import ModelConfig
from moe_engine.layout import Placement
from moe_engine.model.names import named_parameters
from moe_engine.model.transformer import Stage

FP8_SCALE = "fp8_scale"  # the kind of those that scale an imported model's fp8 codes; see `Weights.scales`
MASTER = "master"  # the kind of a checkpoint's tensors that are parameters
BIAS = ".expert_bias"  # how names of balancing biases end; all other tensors are parameters


class Weights(Protocol):
    """Parameters and balancing biases of a whole model, by global name."""

    folder: Path
    model: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    notes: list[str]  # what a person should know, a line each
    # Where values came from fp8 codes: the shapes of their scales, by the matrices' Hugging Face names.
    scales: dict[str, tuple[int, ...]]

    def dtype(self, name: str) -> torch.dtype:
        """The type that holds the stored values exactly."""
        ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Elements [start, end) of the flattened tensor. Raises ConfigError naming a damaged file."""
        ...

    def read_scale(self, key: str) -> Tensor:
        """Scales [ceil(rows/128), ceil(columns/128)] fp32 of the matrix `key` of `scales`."""
        ...

    def check_copies(self) -> None:
        """Raise ConfigError where a tensor that must repeat another one does not."""
        ...

    def close(self) -> None:
        """Let go of open files."""
        ...


class CheckpointWeights:
    """The weights of a checkpoint folder of this engine (`step_<n>`, or one made by `moe-engine convert`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        index = files.read_index(folder)
        self.model = model_of(index.meta, folder)
        self._entries: dict[str, tuple[str, Entry]] = {}
        self._scales: dict[str, tuple[str, Entry]] = {}
        for key, entry in index.tensors.items():
            kind, _, name = key.partition("/")
            if kind in (MASTER, EXTRA):
                self._entries[name] = key, entry
            elif kind == FP8_SCALE:
                self._scales[name] = key, entry
        self.scales = {name: entry.shape for name, (_, entry) in self._scales.items()}
        self.shapes = {name: entry.shape for name, (_, entry) in self._entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, self._entry(name)[1].dtype)
        return found

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        key, entry = self._entry(name)
        return self._read(key, entry, start, entry.numel if end is None else end)

    def read_scale(self, key: str) -> Tensor:
        stored, entry = self._scales[key]
        return self._read(stored, entry, 0, entry.numel).view(entry.shape)

    def _read(self, key: str, entry: Entry, start: int, end: int) -> Tensor:
        part = Part(key, entry.shape, start, end, torch.empty(end - start, dtype=getattr(torch, entry.dtype)))
        for file, copies in plan({key: entry}, [part]).items():
            files.read_tensors(self.folder / file, copies)
        return part.values

    def _entry(self, name: str) -> tuple[str, Entry]:
        if name not in self._entries:
            raise ConfigError(f"checkpoint={self.folder}: {name} is missing")
        return self._entries[name]

    def check_copies(self) -> None:
        """A checkpoint has each tensor once."""

    def close(self) -> None:
        """Nothing stays open between reads."""


def open_weights(path: Path) -> Weights:
    """The weights in a Hugging Face folder, a checkpoint folder, or the newest checkpoint of a run folder.

    Raises ConfigError naming what is missing, damaged or not understood; values are not read yet.
    """
    if (path / CONFIG).is_file():
        return HuggingFaceWeights(path)
    if (path / files.INDEX).is_file():
        return CheckpointWeights(path)
    for folder in (path, path / "checkpoints"):
        for found in files.committed(folder):
            return CheckpointWeights(found)
    what = "no such folder" if not path.exists() else f"neither {CONFIG} nor {files.INDEX} is in it"
    raise ConfigError(
        f"{path}: {what}; give a Hugging Face folder (config.json and safetensors), a checkpoint "
        "(runs/<name>/checkpoints/step_<n>), or a run folder"
    )


def write_checkpoint(
    weights: Weights, out: Path, dtype: torch.dtype | None, shard_bytes: int, progress: stream.Progress | None = None
) -> dict[str, int]:
    """Make the checkpoint folder `out`, of step 0 and without optimizer states; returns the size of each file in bytes.

    dtype: of the parameters, None: as they are stored; balancing biases are fp32. Scales of values that came from fp8
    are kept beside them. It appears whole or not at all.
    Raises ConfigError when `out` exists or cannot be written.
    """
    name_of = {f"{EXTRA if name.endswith(BIAS) else MASTER}/{name}": name for name in weights.shapes}
    announced = [
        stream.Announced(
            key,
            torch.float32 if key.startswith(EXTRA) else dtype or weights.dtype(name),
            (torch.Size(weights.shapes[name]).numel(),),
        )
        for key, name in name_of.items()
    ]
    shapes = {key: tuple(weights.shapes[name]) for key, name in name_of.items()}
    for name, shape in weights.scales.items():
        key = f"{FP8_SCALE}/{name}"
        shapes[key] = shape
        announced.append(stream.Announced(key, torch.float32, (torch.Size(shape).numel(),)))
    type_of = {tensor.key: tensor.dtype for tensor in announced}
    entries: dict[str, Entry] = {}
    sizes: dict[str, int] = {}
    progress = progress or stream.Progress()
    progress.begin(sum(tensor.nbytes for tensor in announced))
    with stream.new_folder(out, progress.total) as partial:
        for i, shard in enumerate(stream.cut(announced, shard_bytes)):
            file = f"weights_{i}.safetensors"

            def value(key: str, file: str = file) -> Tensor:
                is_scale = key.startswith(f"{FP8_SCALE}/")
                values = weights.read_scale(key.partition("/")[2]).flatten() if is_scale else weights.read(name_of[key])
                values = values.to(type_of[key])
                stored = Range(file, 0, values.numel(), files.checksum(values))
                kind = str(values.dtype).removeprefix("torch.")
                entries[key] = Entry(shapes[key], kind, (stored,))
                return values

            sizes[file] = stream.write_file(partial / file, shard, value, progress)
        files.write_index(partial, Index(0, model_meta(weights.model), sizes, dict(sorted(entries.items()))))
    return sizes


def not_as_expected(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names that are missing, unexpected or of another shape, a line each."""
    lines = [f"{name} is missing" for name in expected if name not in found]
    lines += [f"{name} is not part of the model" for name in found if name not in expected]
    lines += [
        f"{name} has shape {list(found[name])} where the model has {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    return lines


def model_of(meta: Mapping[str, object], path: Path) -> ModelConfig:
    """The architecture that a checkpoint's meta holds. Raises ConfigError where there is none."""
    found = meta.get("model")
    if not isinstance(found, dict):
        raise ConfigError(f"checkpoint={path}: does not say what model it is of; save it anew with this version")
    return strict.build(ModelConfig, found)


def model_meta(model: ModelConfig) -> dict[str, object]:
    """The part of a checkpoint's meta that `model_of` reads."""
    return {"model": json.loads(json.dumps(asdict(model)))}


def require_model(stored: ModelConfig, wanted: ModelConfig, path: Path) -> None:
    """Raise ConfigError with a line for each option that makes `wanted` another model than the `stored` one at `path`.

    What changes no function of the weights may differ: the name, the values that a fresh model would start from.
    """
    problems = []
    stored, wanted = effective(stored), effective(wanted)
    for item in fields(ModelConfig):
        there, here = getattr(stored, item.name), getattr(wanted, item.name)
        if item.name != "init_std" and there != here:
            name = f"model.{item.name}"
            right = strict.shown(name, there)
            problems.append(f"{strict.shown(name, here)}: {path} has weights of a model with {right}; use {right}")
    if problems:
        raise ConfigError("\n".join(problems))


@torch.no_grad()
def fill_stages(weights: Weights, stages: Iterable[Stage], placement: Placement) -> None:
    """Set the parameters and balancing biases of one rank's stages, whatever placement they are of.

    Values are cast to the parameters' types. Raises ConfigError when the weights are of another model.
    """
    stages = list(stages)
    for stage in stages:
        require_model(weights.model, stage.model, weights.folder)
        for name, layer in stage.moe_layers().items():
            layer.router.expert_bias.copy_(weights.read(f"{name}.router{BIAS}"))
    for each in named_parameters(stages, placement):
        for name, piece in each.pieces():
            piece.copy_(weights.read(name).view(piece.shape))
