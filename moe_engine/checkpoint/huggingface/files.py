"""The safetensors files of a Hugging Face folder: what they hold, and rows out of them.

A folder has one `model.safetensors`, or several files and a `model.safetensors.index.json` that says which tensor is
in which. Opening reads the headers and nothing else; reading takes the rows that are asked for.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_engine.config.errors import ConfigError, in_one_line

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}


class TensorFiles:
    """The tensors of a folder, by key: shapes [key], dtypes [key], and `read`.

    Raises ConfigError naming the folder and what is missing, damaged, in two files, or not as the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        listed = self._listed()
        problems: list[str] = []
        for file in dict.fromkeys(listed.values()) if listed else [SINGLE]:
            problems += self._read_header(file)
        if listed is not None:
            problems += [f"{key} is not in {file}" for key, file in listed.items() if self._file_of.get(key) != file]
            problems += [f"{key} is in {self._file_of[key]} and not in {INDEX}" for key in self.shapes.keys() - listed]
        if problems:
            raise ConfigError(f"{folder}: {in_one_line(problems)}")

    def read(self, key: str, start: int, stop: int, index: int | None = None) -> Tensor:
        """Rows start … stop - 1 of a tensor, or of slice `index` of a tensor of three dimensions; as stored."""
        file = self._file_of[key]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            stored = self._open[file].get_slice(key)
            rows: Tensor = stored[start:stop] if index is None else stored[index, start:stop]
            return rows
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.folder / file}: {key} cannot be read ({error})") from error

    def close(self) -> None:
        """Let go of the files; a later read opens them again."""
        self._open.clear()

    def _listed(self) -> dict[str, str] | None:
        """Key to file by the index, if there is one."""
        path = self.folder / INDEX
        if not path.exists():
            if not (self.folder / SINGLE).exists():
                pickled = any(self.folder.glob("*.bin"))
                why = (
                    "; its .bin files are pickles, which are not read: save the model as safetensors" if pickled else ""
                )
                raise ConfigError(f"{self.folder}: neither {SINGLE} nor {INDEX} is there{why}")
            return None
        listed: dict[str, str] | None = None
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            listed = {str(key): str(file) for key, file in json.loads(path.read_text())["weight_map"].items()}
        if listed is None:
            raise ConfigError(f"{path}: not an index: an object with a weight_map is expected")
        if (self.folder / SINGLE).exists() and SINGLE not in listed.values():
            raise ConfigError(
                f"{self.folder}: holds {SINGLE} and beside it {INDEX} of other files; libraries differ in "
                "which they read; remove one of both"
            )
        outside = [f"{key} in {file}" for key, file in listed.items() if Path(file).name != file]
        if outside:
            raise ConfigError(
                f"{path}: {outside[0]}: the files of an index lie beside it; give names of files without folders"
            )
        return listed

    def _read_header(self, file: str) -> list[str]:
        """Note what a file holds; what is wrong with it, a line each."""
        problems = []
        try:
            with safe_open(self.folder / file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (not a mapping)
                    stored = opened.get_slice(key)
                    if key in self._file_of:
                        problems.append(f"{key} is in {self._file_of[key]} and in {file}")
                    elif stored.get_dtype() not in _DTYPES:
                        problems.append(f"{key} is of type {stored.get_dtype()}; known are {', '.join(_DTYPES)}")
                    else:
                        self._file_of[key], self.shapes[key] = file, tuple(stored.get_shape())
                        self.dtypes[key] = _DTYPES[stored.get_dtype()]
        except (OSError, SafetensorError) as error:
            return [f"{file} is missing or damaged ({error})"]
        return problems
