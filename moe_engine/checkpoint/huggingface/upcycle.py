"""A dense model's Hugging Face folder into that of a Mixture-of-Experts model that computes the same at first.

Sparse upcycling (Komatsuzaki et al., arXiv 2212.05055): every MLP becomes `experts` copies of itself and a new router.
Copies are equal and the chosen ones' weights sum to 1, so whatever the router chooses, the function is the dense one.

The granular form cuts each copy into `granularity` slices of its inner features (virtual groups of He et al., arXiv
2410.07524): experts * granularity experts, of which top_k * granularity are chosen. The slices of a copy start with the
same router row, so that they are chosen together, each with 1 / granularity of the copy's weight: their down
projections are multiplied by granularity, and their sum is the copy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.checkpoint.huggingface.files import CONFIG, TensorFiles
from moe_engine.checkpoint.huggingface.names import FAMILIES, Family
from moe_engine.checkpoint.huggingface.reader import HuggingFaceWeights
from moe_engine.checkpoint.huggingface.writer import write_folder
from moe_engine.checkpoint.stream import Announced, Progress
from moe_engine.config.errors import ConfigError
from moe_engine.config.huggingface import ARCHITECTURES, model_config
from moe_engine.ops.random import normal

_MLP = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Recipe:
    """Copies of each MLP, how many of them a token goes to, slices of each copy, and the seed of the routers."""

    experts: int
    top_k: int = 2
    granularity: int = 1
    seed: int = 0


# The MoE model that a dense one becomes, by model_type: what else the layers compute is the same in both.
BECOMES = {"mistral": "mixtral", "llama": "mixtral", "qwen3": "qwen3_moe"}


def upcycle(
    source: Path,
    out: Path,
    recipe: Recipe,
    dtype: torch.dtype | None,
    shard_bytes: int,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Make the folder `out`; the size in bytes of each of its files. A few tensors are in memory at a time.

    dtype: of all tensors; None: as they are stored. Raises ConfigError for a folder or numbers that cannot be used.
    """
    config = _read_config(source)
    moe_config = _moe_config(config, recipe, source)
    files = TensorFiles(source)
    try:
        family, std = FAMILIES[moe_config["model_type"]], float(config.get("initializer_range") or 0.02)
        made = _Made(files, family, recipe, std, dtype)
        return write_folder(out, made.announced(), made.value, moe_config, shard_bytes, progress, _complete)
    finally:
        files.close()


def _complete(folder: Path) -> None:
    """Raises ConfigError unless every tensor of the new model is there, and no other."""
    HuggingFaceWeights(folder).close()


def _read_config(source: Path) -> dict[str, Any]:
    try:
        config = json.loads((source / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"from={source}: {CONFIG} is needed and cannot be read ({error})") from None
    if not isinstance(config, dict) or config.get("model_type") not in list(BECOMES):
        found = config.get("model_type") if isinstance(config, dict) else None
        raise ConfigError(f"from={source}: model_type={found}: dense models to upcycle are {', '.join(BECOMES)}")
    return config


def _moe_config(config: dict[str, Any], recipe: Recipe, source: Path) -> dict[str, Any]:
    """The new config.json, which the engine reads once, so that what it does not build is refused before all else."""
    E, K, G = recipe.experts, recipe.top_k, recipe.granularity
    width, problems = config.get("intermediate_size"), []
    if E < 2:
        problems.append(f"upcycle={E}: must be 2 or more copies of each MLP, for example upcycle=8")
    if not 1 <= K <= max(E, 1):
        problems.append(f"top_k={K}: must be between 1 and upcycle={E}, for example top_k={min(2, max(E, 1))}")
    if G < 1 or not isinstance(width, int) or width % G:
        problems.append(f"granularity={G}: must divide intermediate_size={width}, for example granularity=1")
    if problems:
        raise ConfigError("\n".join(problems))
    assert isinstance(width, int)
    becomes = BECOMES[config["model_type"]]
    mixtral = becomes == "mixtral"
    biased = config.get("mlp_bias") or (mixtral and config.get("attention_bias"))
    kinds = config.get("layer_types") or []
    if biased or not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ConfigError(f"from={source}: biases and layers of several kinds have no place in {becomes}")
    left_out = ("mlp_bias", "layer_types", *(("attention_bias",) if mixtral else ()))
    new = {key: value for key, value in config.items() if key not in left_out}
    new |= {"model_type": becomes, "architectures": [ARCHITECTURES[becomes]], "num_experts_per_tok": K * G}
    if mixtral:
        new |= {"num_local_experts": E * G, "intermediate_size": width // G}
    else:
        new |= {"num_experts": E * G, "moe_intermediate_size": width // G, "norm_topk_prob": True}
        new |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    try:
        model_config(new)
    except ConfigError as error:
        raise error.about(f"from={source}: ") from None
    return new


class _Made:
    """The tensors of the new model, made one at a time."""

    def __init__(
        self, files: TensorFiles, family: Family, recipe: Recipe, std: float, dtype: torch.dtype | None
    ) -> None:
        self.files, self.family, self.recipe, self.std, self.dtype = files, family, recipe, std, dtype
        codes = [key for key, stored in files.dtypes.items() if stored == torch.float8_e4m3fn]
        if codes:
            raise ConfigError(f"from={files.folder}: {codes[0]} is in fp8; upcycle weights in bf16 or fp32")
        # (key here -> key there, which projection or "" or "router", slice)
        self._plan: dict[str, tuple[str, str, int]] = dict(self._keys())

    def _keys(self) -> Iterator[tuple[str, tuple[str, str, int]]]:
        family, G = self.family, self.recipe.granularity
        for key in self.files.shapes:
            found = _MLP.fullmatch(key)
            if found is None:
                yield key, (key, "", 0)
                continue
            layer, which = f"{found[1]}.{family.moe}", found[2]
            spelling = {"gate": family.gate, "up": family.up, "down": family.down}[which]
            for expert in range(self.recipe.experts * G):
                yield f"{layer}.experts.{expert}.{spelling}.weight", (key, which, expert % G)
            if which == "gate":
                yield f"{layer}.{family.router}.weight", (key, "router", 0)

    def announced(self) -> Iterator[Announced]:
        """All tensors, in the order of their keys."""
        for key in sorted(self._plan):
            source, which, _ = self._plan[key]
            shape, G = self.files.shapes[source], self.recipe.granularity
            if which == "router":
                shape = (self.recipe.experts * G, shape[1])
            elif which:
                shape = (shape[0], shape[1] // G) if which == "down" else (shape[0] // G, shape[1])
            yield Announced(key, self.dtype or self.files.dtypes[source], shape)

    def value(self, key: str) -> Tensor:
        source, which, part = self._plan[key]
        shape, G = self.files.shapes[source], self.recipe.granularity
        dtype = self.dtype or self.files.dtypes[source]
        if which == "router":
            rows = normal((self.recipe.experts, shape[1]), self.std, key, self.recipe.seed, torch.float32)
            return rows.repeat_interleave(G, dim=0).to(dtype)  # the slices of a copy lie side by side
        if which == "down":
            width = shape[1] // G
            down = self.files.read(source, 0, shape[0])[:, part * width : (part + 1) * width]
            return (down.float() * G).to(dtype) if G > 1 else down.to(dtype)
        rows_of = shape[0] // G if which else shape[0]
        return self.files.read(source, part * rows_of, (part + 1) * rows_of).to(dtype)
