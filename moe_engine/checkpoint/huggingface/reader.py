"""Weights out of a Hugging Face folder, by our names, any range of them, each source tensor used exactly once.

Opening a folder compares the headers of its files with the model that its `config.json` describes: a missing tensor,
one that nothing would use, another shape, or fp8 codes without their scales refuse the folder by name before any value
is read. Copies (an MTP module's own embedding and head, a tied head) must be what they repeat, which reading checks.
"""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.checkpoint.huggingface.files import CONFIG, TensorFiles
from moe_engine.checkpoint.huggingface.mxfp4 import BLOCKS, SCALES, unpack
from moe_engine.checkpoint.huggingface.names import FAMILIES, Copy, Mapped, Rows, mtp_prefix, names
from moe_engine.config.errors import ConfigError, in_one_line
from moe_engine.config.huggingface import model_config
from moe_engine.config.model_rules import check_architecture
from moe_engine.config.routing_rules import check_routing
from moe_engine.config.rules import Rules
from moe_engine.config.schema import Config, ModelConfig
from moe_engine.planner.flops import parameter_count

SCALE = "_scale_inv"  # of the codes in `<key>`: despite its name what they are multiplied by
FP8_BLOCK = 128  # a scale is for a block of 128 x 128 codes
MOST_MISSING = 16  # times as many parameters as there are numbers: from there on no names are told
COMPARED = 1 << 26  # elements of two copies that are compared at a time

_RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # in old files: follows from the configuration


class HuggingFaceWeights:
    """A folder as `weights.Weights`. `notes` says what about it a person should know.

    Raises ConfigError for a folder that is not complete, not of a known family, or not what its config.json says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        config = _read_config(folder)
        self.family = FAMILIES[str(config["model_type"])]
        self.files = TensorFiles(folder)
        try:
            described = model_config(config)
            _check_model(described)
        except ConfigError as error:
            raise error.about(f"{folder / CONFIG}: ") from None
        self._refuse_another_size(described)
        self.model = self._without_missing_mtp(described)
        both = names(self.model, self.family)
        self._forms = self._match(both.tensors, both.copies)
        self.shapes = {name: mapped.shape for name, mapped in both.tensors.items()}
        self.copies = tuple(copy for copy in both.copies if copy.key in self.files.shapes)
        # Of matrices in the form that is written: in another one (experts fused) blocks may lie across the border.
        self.scales = {
            rows.key: self.files.shapes[rows.key + SCALE]
            for name, mapped in both.tensors.items()
            for rows in self._forms[name]
            if self._forms[name] == mapped.forms[0] and rows.key + SCALE in self.files.shapes
        }

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a tensor is stored; fp8 codes become fp32, MXFP4 bf16. Tensors that the family lacks are
        fp32 zeros.
        """
        kinds = [self.files.dtypes[rows.key] for rows in self._forms[name]] or [torch.float32]
        kinds = [torch.bfloat16 if kind == torch.uint8 else kind for kind in kinds]
        return functools.reduce(torch.promote_types, (kind if kind.itemsize > 1 else torch.float32 for kind in kinds))

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Elements [start, end) of the flattened tensor `name`; only the rows that hold them are read."""
        shape = self.shapes[name]
        columns = shape[1] if len(shape) > 1 else 1
        end = shape[0] * columns if end is None else end
        if start == end or not self._forms[name]:
            return torch.zeros(end - start, dtype=self.dtype(name))
        first, last = start // columns, -(-end // columns)
        pieces, row = [], 0
        for rows in self._forms[name]:
            a, b = max(first - row, 0), min(last - row, rows.shape[0])
            if a < b:
                pieces.append(self._rows(rows, a, b).to(self.dtype(name)))
            row += rows.shape[0]
        flat = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).reshape(-1)
        return flat[start - first * columns : end - first * columns]

    def read_scale(self, key: str) -> Tensor:
        """The scales of the fp8 matrix that the file calls `key`, fp32, as they are stored."""
        return self.files.read(key + SCALE, 0, self.scales[key][0]).float()

    def check_copies(self) -> None:
        """Compare tensors that repeat others with what they repeat. Raises ConfigError naming each that differs."""
        problems = [
            f"{copy.key} differs from {copy.original}; this engine has one table for both"
            for copy in self.copies
            if not self._equal(copy.key, copy.original)
        ]
        if problems:
            raise ConfigError(f"{self.folder}: {'; '.join(problems)}")

    def close(self) -> None:
        self.files.close()

    def _without_missing_mtp(self, model: ModelConfig) -> ModelConfig:
        """transformers writes `num_nextn_predict_layers` into every config.json, MTP tensors into no file."""
        prefixes = tuple(f"{mtp_prefix(model, k)}." for k in range(model.mtp_depth))
        if not prefixes or any(key.startswith(prefixes) for key in self.files.shapes):
            return model
        self.notes.append(
            f"{self.folder / CONFIG} has num_nextn_predict_layers={model.mtp_depth}, and the files hold no MTP layer: "
            "the model is taken as one without MTP (model.mtp_depth=0)"
        )
        return replace(model, mtp_depth=0)

    def _refuse_another_size(self, model: ModelConfig) -> None:
        """Raises ConfigError for a model far larger than the files: all of its names would take long to make."""
        described, held = parameter_count(model).total, sum(math.prod(shape) for shape in self.files.shapes.values())
        if described > MOST_MISSING * held:
            raise ConfigError(
                f"{self.folder}: its {CONFIG} describes a model of {described:,} parameters in {model.num_layers:,} "
                f"layers, and its files hold {held:,} numbers; give the {CONFIG} that belongs to them"
            )

    def _match(self, tensors: dict[str, Mapped], copies: tuple[Copy, ...]) -> dict[str, tuple[Rows, ...]]:
        """The form in which the folder holds each tensor. Raises ConfigError unless all fits and nothing is left."""
        shapes, problems = self.files.shapes, []
        forms: dict[str, tuple[Rows, ...]] = {}
        expected: dict[str, tuple[int, ...]] = {}
        for name, mapped in tensors.items():
            there = [form for form in mapped.forms if all(rows.key in shapes for rows in form)]
            # Where no form is complete, the first one says what is missing.
            forms[name] = (there or list(mapped.forms) or [()])[0]
            expected |= {rows.key: rows.whole_shape for rows in forms[name]}
        expected |= {copy.key: expected[copy.original] for copy in copies if copy.key in shapes}
        problems += [f"{key} is missing" for key in expected if key not in shapes]
        problems += [
            f"{key} has shape {list(shapes[key])} where the model of {CONFIG} has {list(shape)}"
            for key, shape in expected.items()
            if key in shapes and shapes[key] != shape
        ]
        scales = self._scales(expected, problems)
        left = [key for key in shapes if key not in expected and key not in scales and not _RECOMPUTED.fullmatch(key)]
        skipped = [key for key in left if self.family.skipped and key.startswith(self.family.skipped)]
        problems += [f"{key} is used by nothing in the model" for key in left if key not in skipped]
        if problems:
            raise ConfigError(f"{self.folder}: does not hold the model of its {CONFIG}: {in_one_line(problems)}")
        if skipped:
            self.notes.append(
                f"{self.folder} holds MTP modules of a kind that is not built here, {skipped[0]} and "
                f"{len(skipped) - 1} more tensors: the model is taken as one without MTP, as transformers takes it"
            )
        return forms

    def _scales(self, expected: dict[str, tuple[int, ...]], problems: list[str]) -> set[str]:
        """The keys of the scales of all fp8 tensors; what is wrong with them is added to `problems`."""
        scales = set()
        for key in expected.keys() & self.files.shapes.keys():
            if self.files.dtypes[key].itemsize > 1:
                continue
            if (self.files.dtypes[key] == torch.uint8) != key.endswith(BLOCKS):
                problems.append(f"{key} is of type {self.files.dtypes[key]}, which is not that of such a tensor")
                continue
            if key.endswith(BLOCKS):
                scales.add(self._exponents(key, problems))
                continue
            *stacked, rows, columns = self.files.shapes[key]
            shape = (*stacked, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
            found = self.files.shapes.get(key + SCALE)
            if found is None:
                problems.append(f"{key} is fp8 and {key + SCALE} is missing")
            elif found != shape:
                problems.append(f"{key + SCALE} has shape {list(found)} where {key} needs {list(shape)}")
            elif not self.files.dtypes[key + SCALE].is_floating_point:
                problems.append(
                    f"{key + SCALE} is of type {self.files.dtypes[key + SCALE]}, scales are numbers like 0.5"
                )
            scales.add(key + SCALE)
        return scales

    def _exponents(self, key: str, problems: list[str]) -> str:
        """The key of the exponents of MXFP4 blocks; what is wrong with them is added to `problems`."""
        name = key.removesuffix(BLOCKS) + SCALES
        found, shape = self.files.shapes.get(name), self.files.shapes[key][:-1]
        if found != shape:
            what = "is missing" if found is None else f"has shape {list(found)}"
            problems.append(f"{name} {what} where {key} needs {list(shape)}")
        elif self.files.dtypes[name] != torch.uint8:
            problems.append(f"{name} is of type {self.files.dtypes[name]}, exponents are bytes")
        return name

    def _rows(self, rows: Rows, start: int, stop: int) -> Tensor:
        """Rows start … stop - 1 of a part, in our order of columns."""
        if rows.transposed or rows.turns:
            values = self._stored(rows, 0, rows.stored_shape[0])
            values = values.T if rows.transposed else values
            return (torch.cat((values[::2], values[1::2])) if rows.turns else values)[start:stop]
        values = self._stored(rows, start, stop)
        return torch.cat(values.chunk(2, dim=1)[::-1], dim=1) if rows.swap else values

    def _stored(self, rows: Rows, start: int, stop: int) -> Tensor:
        """Rows start … stop - 1 as they lie in the file; fp8 codes as the fp32 numbers they stand for."""
        values = self.files.read(rows.key, start, stop, rows.index)
        if rows.packed:
            return unpack(values, self.files.read(rows.key.removesuffix(BLOCKS) + SCALES, start, stop, rows.index))
        if values.dtype.itemsize > 1:
            return values
        first, last = start // FP8_BLOCK, -(-stop // FP8_BLOCK)
        scale = self.files.read(rows.key + SCALE, first, last, rows.index).float()
        if not bool(scale.isfinite().all()):
            raise ConfigError(
                f"{self.folder}: {rows.key + SCALE} has scales that are not finite (the first of them "
                f"{scale[~scale.isfinite()][0]:.0f}); its weights would be no numbers"
            )
        return dequantise(values, scale, start - first * FP8_BLOCK)

    def _equal(self, key: str, other: str) -> bool:
        rows, columns = self.files.shapes[key]
        step = max(COMPARED // columns, 1)
        return all(
            torch.equal(
                self._stored(Rows(key, (rows, columns)), start, min(start + step, rows)),
                self._stored(Rows(other, (rows, columns)), start, min(start + step, rows)),
            )
            for start in range(0, rows, step)
        )


def dequantise(codes: Tensor, scale: Tensor, skip: int = 0) -> Tensor:
    """fp8 codes [R, C] times their block's scale -> fp32 [R, C].

    scale [ceil((skip + R) / 128), ceil(C / 128)] fp32; the first row is row `skip` of the first block.
    """
    row_blocks = (torch.arange(codes.shape[0]) + skip) // FP8_BLOCK
    column_blocks = torch.arange(codes.shape[1]) // FP8_BLOCK
    return codes.float() * scale[row_blocks][:, column_blocks]


def _read_config(folder: Path) -> dict[str, Any]:
    """`config.json`, without what says how the numbers are stored: the files themselves tell."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a Hugging Face folder has one beside its safetensors") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from None
    found = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(config, dict) or found not in list(FAMILIES):
        raise ConfigError(f"{path}: model_type={found}: weights of {', '.join(FAMILIES)} can be converted")
    _check_quantization(path, config.pop("quantization_config", None))
    return config


def _check_model(model: ModelConfig) -> None:
    """Raises ConfigError for sizes that are those of no model, and for attention that is not built."""
    rules = Rules(Config(model=model))
    rules.at_least(1, "model.vocab_size")
    check_architecture(rules)
    check_routing(rules, "model.", "moe.")
    rules.finish()


def _check_quantization(path: Path, quantization: Any) -> None:
    """Raises ConfigError for anything but DeepSeek's fp8 blocks and gpt-oss's MXFP4."""
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise ConfigError(f"{path}: quantization_config={quantization}: must be an object, or null")
    if quantization.get("quant_method") == "mxfp4":
        return
    known = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    for name, value in known.items():
        if quantization.get(name, value) != value:
            raise ConfigError(
                f"{path}: quantization_config.{name}={quantization[name]}: "
                f"only {name}={value} can be read; convert the model to bf16 first"
            )
