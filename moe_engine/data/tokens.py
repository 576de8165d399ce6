"""Token files: one .bin with the tokens back to back and one .idx that says where each document lies.

The layout is Megatron-LM's (`IndexedDataset`), so that files written by either are read by both. All numbers
are little-endian. The .idx is: 9 magic bytes, uint64 version 1, uint8 code of the token type, uint64 S = number
of sequences, uint64 D = number of documents + 1, int32 lengths[S] in tokens, int64 byte offsets[S] into the
.bin, int64 documents[D] = the first sequence of each document, and S at the end. A document is one sequence or
several; here it is one, unless it is longer than an int32 can say.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from moe_engine.config.errors import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, documents + 1
_TYPE_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_TYPE_CODES = {name: code for code, name in _TYPE_NAMES.items()}
_LONGEST_SEQUENCE = 2**31 - 1  # lengths are int32

IntArray = npt.NDArray[np.integer]


def token_type(vocab_size: int) -> np.dtype[np.integer]:
    """The smaller of uint16 and int32 that holds every token of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<i4")


class TokenWriter:
    """Writes `<prefix>.bin` and `<prefix>.idx`, a document at a time; memory is one document.

    Use it as a context manager: leaving the block normally commits, an exception throws everything away. The
    tokens go to a hidden temporary file beside the target and are renamed at the end, the .idx last, so that a
    full disk or a kill never leaves an .idx that describes half a .bin. Earlier files of the prefix are replaced.

    Raises `ConfigError` for a type that is not an integer type of the format, `ValueError` for a token that the
    type cannot hold, `OSError` with the file's name when the disk is full.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike = np.uint16) -> None:
        name = np.dtype(dtype).name
        if name not in _TYPE_CODES or "float" in name:
            known = ", ".join(name for name in _TYPE_CODES if "float" not in name)
            raise ConfigError(f"dtype={name}: not a token type of .bin/.idx files; use one of {known}")
        self.dtype: np.dtype[np.integer] = np.dtype(name).newbyteorder("<")
        self.bin_path, self.idx_path = _paths(prefix)
        mark = f"{os.getpid()}-{secrets.token_hex(4)}.partial"
        self._bin_partial = self.bin_path.with_name(f".{self.bin_path.name}.{mark}")
        self._idx_partial = self.idx_path.with_name(f".{self.idx_path.name}.{mark}")
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._file: BinaryIO = open(self._bin_partial, "xb")  # noqa: SIM115 (closed by commit or abort)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def add_document(self, tokens: Sequence[int] | IntArray) -> None:
        """Append one document, tokens [n]. Nothing is added to it: an end-of-document token is the caller's."""
        tokens = np.asarray(tokens)
        for start in range(0, max(len(tokens), 1), _LONGEST_SEQUENCE):
            self.add_sequence(tokens[start : start + _LONGEST_SEQUENCE])
        self.end_document()

    def add_sequence(self, tokens: Sequence[int] | IntArray) -> None:
        """Append one sequence, tokens [n], to the document that is open until `end_document`."""
        tokens = np.asarray(tokens)
        if tokens.size:
            limits = np.iinfo(self.dtype)
            smallest, largest = int(tokens.min()), int(tokens.max())
            if tokens.dtype.kind not in "ui" or smallest < limits.min or largest > limits.max:
                raise ValueError(
                    f"tokens of type {tokens.dtype} from {smallest} to {largest} do not fit {self.dtype.name} "
                    f"({limits.min} to {limits.max})"
                )
        try:
            self._file.write(tokens.astype(self.dtype, copy=False).tobytes())
        except OSError as error:
            raise _named(error, self.bin_path) from error
        self._lengths.append(len(tokens))

    def end_document(self) -> None:
        """Close the open document; without sequences it is an empty document."""
        self._documents.append(len(self._lengths))

    def commit(self) -> None:
        """Write the index and give both files their names; after an error there is no new index."""
        try:
            if self._documents[-1] != len(self._lengths):
                raise ValueError(f"{self.bin_path}: sequences were added after the last end_document()")
            _flush_to_disk(self._file, self.bin_path)
            with open(self._idx_partial, "xb") as file:
                self._write_index(file)
                _flush_to_disk(file, self.idx_path)
            self.idx_path.unlink(missing_ok=True)  # never an old index beside new tokens
            os.replace(self._bin_partial, self.bin_path)
            os.replace(self._idx_partial, self.idx_path)
            sync(self.idx_path.parent)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Throw away what was written; files of an earlier commit stay as they were."""
        with contextlib.suppress(OSError):  # closing writes out what is buffered, which fails again on a full disk
            self._file.close()
        self._bin_partial.unlink(missing_ok=True)
        self._idx_partial.unlink(missing_ok=True)

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        offsets = _starts(lengths)[:-1] * self.dtype.itemsize
        header = _HEADER.pack(_MAGIC, _VERSION, _TYPE_CODES[self.dtype.name], len(self._lengths), len(self._documents))
        try:
            file.write(header)
            file.write(lengths.astype("<i4").tobytes())
            file.write(offsets.astype("<i8").tobytes())
            file.write(np.frombuffer(self._documents, dtype=np.int64).astype("<i8").tobytes())
        except OSError as error:
            raise _named(error, self.idx_path) from error


class TokenStream:
    """The tokens of `<prefix>.bin`, memory-mapped, with the borders of their documents.

    tokens            [N] read-only memory map of the file's own type
    document_offsets  [documents + 1] int64: document d is tokens[document_offsets[d] : document_offsets[d + 1]]

    Opening reads the index and compares it with itself and with the size of the .bin; token values are not read.
    Memory is 8 bytes per document. Raises `ConfigError`, naming the file, what was found and what was expected.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        bin_path, idx_path = _paths(prefix)
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise ConfigError(f"{path}: no such file; token files are a pair, {bin_path.name} and {idx_path.name}")
        self.dtype, lengths, documents = _read_index(idx_path)
        starts = _starts(lengths)
        self.num_tokens = int(starts[-1])
        self.document_offsets: npt.NDArray[np.int64] = starts[documents]
        found, expected = bin_path.stat().st_size, self.num_tokens * self.dtype.itemsize
        if found != expected:
            raise ConfigError(
                f"{bin_path}: found {found} bytes, expected {expected} ({self.num_tokens} tokens of "
                f"{self.dtype.name} by {idx_path.name}): the file is cut short or belongs to another index"
            )
        self.tokens: IntArray = (
            np.memmap(bin_path, dtype=self.dtype, mode="r") if self.num_tokens else np.empty(0, self.dtype)
        )

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.document_offsets) - 1

    def document(self, index: int) -> IntArray:
        """The tokens [n] of document `index`, a view of the memory map."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents} in {self.prefix}")
        return self.tokens[self.document_offsets[index] : self.document_offsets[index + 1]]


def _read_index(path: Path) -> tuple[np.dtype[np.integer], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The token type, the sequence lengths [S] and the document starts [D] (in sequences) of an .idx file."""
    size = path.stat().st_size
    if size < _HEADER.size:
        raise ConfigError(f"{path}: found {size} bytes, expected at least the {_HEADER.size} of an .idx header")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    magic, version, code, num_sequences, num_starts = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if magic != _MAGIC:
        raise ConfigError(f"{path}: found magic bytes {magic.hex()}, expected {_MAGIC.hex()} of an .idx file")
    if version != _VERSION:
        raise ConfigError(f"{path}: found version {version}, expected {_VERSION}")
    if code not in _TYPE_NAMES or "float" in _TYPE_NAMES[code]:
        known = ", ".join(f"{number} ({name})" for number, name in _TYPE_NAMES.items() if "float" not in name)
        raise ConfigError(f"{path}: found token type code {code}, expected one of {known}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_starts
    if size != expected:
        raise ConfigError(
            f"{path}: found {size} bytes, expected {expected} for {num_sequences} sequences and "
            f"{num_starts} document starts: the file is cut short or damaged"
        )
    lengths = np.frombuffer(raw, "<i4", num_sequences, _HEADER.size).astype(np.int32)
    offsets = np.frombuffer(raw, "<i8", num_sequences, _HEADER.size + 4 * num_sequences)
    documents = np.frombuffer(raw, "<i8", num_starts, _HEADER.size + 12 * num_sequences).astype(np.int64)
    dtype: np.dtype[np.integer] = np.dtype(_TYPE_NAMES[code]).newbyteorder("<")
    _check_sequences(path, lengths, offsets, dtype.itemsize)
    _check_documents(path, documents, num_sequences)
    return dtype, lengths, documents


def _check_sequences(path: Path, lengths: IntArray, offsets: IntArray, itemsize: int) -> None:
    negative = np.flatnonzero(lengths < 0)
    if negative.size:
        first = negative[0]
        raise ConfigError(f"{path}: found length {lengths[first]} of sequence {first}, expected 0 or more")
    expected = _starts(lengths)[:-1] * itemsize
    wrong = np.flatnonzero(offsets != expected)
    if wrong.size:
        first = wrong[0]
        raise ConfigError(
            f"{path}: found byte offset {offsets[first]} of sequence {first}, expected {expected[first]} "
            "(sequences lie back to back)"
        )


def _check_documents(path: Path, documents: npt.NDArray[np.int64], num_sequences: int) -> None:
    if len(documents) == 0:
        raise ConfigError(f"{path}: found no document starts, expected at least 1")
    if documents[0] != 0 or documents[-1] != num_sequences:
        raise ConfigError(
            f"{path}: found document starts from {documents[0]} to {documents[-1]}, expected 0 to {num_sequences}"
        )
    falling = np.flatnonzero(np.diff(documents) < 0)
    if falling.size:
        first = falling[0]
        raise ConfigError(
            f"{path}: found document start {documents[first + 1]} after {documents[first]}, expected rising starts"
        )


def _starts(lengths: IntArray) -> npt.NDArray[np.int64]:
    """Lengths [S] -> where each sequence starts, and the total at the end, [S + 1]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _paths(prefix: str | Path) -> tuple[Path, Path]:
    # not with_suffix, which would cut a prefix such as "corpus.v2"
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def _named(error: OSError, path: Path) -> OSError:
    """The same error with the file's name, which a failed write does not carry."""
    return OSError(error.errno, error.strerror, str(path))


def _flush_to_disk(file: BinaryIO, path: Path) -> None:
    try:
        file.flush()
        os.fsync(file.fileno())
        file.close()
    except OSError as error:
        raise _named(error, path) from error


def sync(path: Path) -> None:
    """Wait until a file, or a folder with the renames inside it, is on the disk: it then lasts through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
