"""Text: where it is found, how it is cut in documents, which side a document is on, and bytes as tokens.

A document is a text file. It goes to training or validation by a hash of the file's path relative to the folder
that was asked for, so that its side depends on neither the order nor the number of the other files; the order of
the documents is another hash of that path. A single file is cut at line breaks into sections, and those are then
its documents: there is always something to validate on.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moe_engine.config.errors import ConfigError

# Tests are installed by some distributions only, and the data would differ with them; packages are not the library.
_LIBRARY_SKIPS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_SECTION_BYTES = 16384  # a single file is cut in sections of about this size …
_SECTIONS = 20  # … or of a size that makes about this many of them


class ByteTokenizer:
    """Every byte of UTF-8 text is a token, 0 … 255; token 256 ends a document."""

    name = "bytes"
    eod = 256
    vocab_size = 257

    def encode(self, text: str | bytes) -> npt.NDArray[np.uint16]:
        """Text -> tokens [bytes], without an end-of-document token."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Iterable[int]) -> str:
        """Tokens -> text. End-of-document tokens vanish; bytes that are not UTF-8 become U+FFFD.

        Raises `ValueError` for a token outside the vocabulary.
        """
        values = [int(token) for token in tokens]
        for value in values:
            if not 0 <= value < self.vocab_size:
                raise ValueError(f"token {value} is outside the vocabulary of {self.vocab_size}")
        return bytes(value for value in values if value != self.eod).decode(errors="replace")


@dataclass(frozen=True)
class TextFile:
    """A file that may be text; it has not been read yet."""

    name: str  # path relative to the folder that was asked for, with "/"; of a single file its own name
    path: Path
    size: int  # bytes
    mtime_ns: int
    given: bool  # asked for by its own path: then it must be text


@dataclass(frozen=True)
class Document:
    """Bytes start … stop - 1 of a file, UTF-8 text."""

    name: str
    path: Path
    start: int
    stop: int

    def read(self) -> bytes:
        """The bytes. Raises `ConfigError` if the file is not what it was when the document was chosen."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        if len(data) != self.stop - self.start or _not_text(data):
            raise ConfigError(f"data.text_paths=[{self.path}]: the file changed while it was being read; run again")
        return data


# --- files ---


def find_files(text_paths: Sequence[str], *, exclude: Path | None = None) -> list[TextFile]:
    """The non-empty files at some paths, each once, in the order of the paths and then of their names.

    A file stands for itself. A folder stands for every file below it but hidden ones (".git") and those below
    `exclude`, a resolved folder; links to folders are not followed. No path at all stands for the interpreter's
    standard library: its .py files without tests and installed packages. Raises `ConfigError` for a path that
    does not exist or cannot be read, and when nothing is found.
    """
    try:
        if text_paths:
            found = [file for path in text_paths for file in _files_at(path, exclude)]
        else:
            found = list(_walk(standard_library(), lambda name: name in _LIBRARY_SKIPS, suffix=".py"))
    except PermissionError as error:
        raise ConfigError(
            f"data.text_paths=[{error.filename}]: cannot be reached ({error.strerror}); make it readable"
        ) from error
    files = _each_once(found)
    if not files:
        asked = ", ".join(text_paths) or standard_library()
        raise ConfigError(
            f"data.text_paths=[{asked}]: no file with text in it; give files or folders that hold UTF-8 text"
        )
    return files


def standard_library() -> Path:
    """The folder of the running interpreter's standard library. Raises `ConfigError` if it is not a folder."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not folder.is_dir():
        raise ConfigError(
            f"data.text_paths=[]: this interpreter's standard library is not a folder ({folder}); "
            "give text of your own, for example data.text_paths=[/path/to/text]"
        )
    return folder


def _files_at(asked: str, exclude: Path | None) -> Iterator[TextFile]:
    path = Path(asked).expanduser()
    if not path.exists():
        raise ConfigError(
            f"data.text_paths=[{asked}]: no such file or folder; "
            "give one that exists, or data.text_paths=[] for the standard library's sources"
        )
    if path.is_dir():
        if path.resolve() == exclude:
            raise ConfigError(f"data.text_paths=[{asked}]: is data.cache_dir itself; use another data.cache_dir")
        yield from _walk(path, lambda name: name.startswith("."), exclude=exclude)
    elif (file := _text_file(path, path.name, given=True)) is not None:
        yield file
    elif not path.is_file():
        raise ConfigError(f"data.text_paths=[{asked}]: neither a file nor a folder; give a file or a folder")


def _walk(
    root: Path, skip: Callable[[str], bool], *, suffix: str = "", exclude: Path | None = None
) -> Iterator[TextFile]:
    for folder, folders, names in os.walk(root, onerror=_refuse_folder):
        # in place: this is how os.walk is told where not to go, and in which order
        folders[:] = sorted(name for name in folders if not skip(name) and Path(folder, name).resolve() != exclude)
        for name in sorted(names):
            if name.endswith(suffix) and not skip(name):
                path = Path(folder, name)
                file = _text_file(path, path.relative_to(root).as_posix(), given=False)
                if file is not None:
                    yield file


def _each_once(found: Iterable[TextFile]) -> list[TextFile]:
    """Every real file once, under a name of its own: of files with one name, the second is "name@2", and so on."""
    files: dict[str, TextFile] = {}
    uses: Counter[str] = Counter()
    for file in found:
        real = os.path.realpath(file.path)
        if real not in files:
            uses[file.name] += 1
            name = file.name if uses[file.name] == 1 else f"{file.name}@{uses[file.name]}"
            files[real] = replace(file, name=name)
    return list(files.values())


def _refuse_folder(error: OSError) -> None:
    raise ConfigError(
        f"data.text_paths=[{error.filename}]: cannot be listed ({error.strerror}); make it readable, or name the "
        "folders beside it in data.text_paths"
    ) from error


def _text_file(path: Path, name: str, *, given: bool) -> TextFile | None:
    """None for an empty file, a dangling link, a pipe."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return None
    return TextFile(name, path, status.st_size, status.st_mtime_ns, given)


# --- documents ---


def choose_documents(files: Sequence[TextFile], max_bytes: int = 0, *, least: int = 2) -> tuple[list[Document], int]:
    """The documents of some files, in their final order, and how many of the files were passed over as no text.

    At most `max_bytes` (0: no limit): documents are taken in a hashed order, and one that no longer fits is passed
    over. Raises `ConfigError` when fewer than `least` documents can be had, or a file given by its path is not text.
    """
    whole, skipped = _whole_files(files, max_bytes) if len(files) > 1 else ([], 0)
    if len(whole) > 1:
        return whole, skipped
    if not whole and len(files) > 1:
        raise _nothing_taken(files, skipped, max_bytes)
    only = next(file for file in files if not whole or file.path == whole[0].path)
    data = _read_text(only)
    if data is None:
        raise _nothing_taken(files, 1, max_bytes)
    sections = _take(_sections(only, data), max_bytes)
    if len(sections) < least:
        limit, remedy = (f" within data.max_bytes={max_bytes}", " or a larger max_bytes") if max_bytes else ("", "")
        raise ConfigError(
            f"data.text_paths=[{only.path}]: the only text file{limit}, and its line breaks do not cut it in "
            f"{least} documents, as training and validation need; give two files or more in data.text_paths{remedy}"
        )
    return sections, skipped


def split_documents(documents: Sequence[Document], validation_fraction: float) -> tuple[list[Document], list[Document]]:
    """Documents -> (train, validation), each in the given order.

    A document is for validation if the hash of its name, as a number in [0, 1), is below the fraction. Where that
    leaves a side empty, the document with the nearest hash goes there; only with a fraction of 0 is there no
    validation. Raises `ValueError` for fewer than two documents with any other fraction.
    """
    if validation_fraction == 0:
        return list(documents), []
    if len(documents) < 2:
        raise ValueError(f"{len(documents)} documents cannot be split in two")
    hashes = [_hash(document.name, b"split") for document in documents]
    border = min(max(validation_fraction, math.nextafter(min(hashes), 1.0)), max(hashes))
    train = [document for document, value in zip(documents, hashes, strict=True) if value >= border]
    validation = [document for document, value in zip(documents, hashes, strict=True) if value < border]
    return train, validation


def _whole_files(files: Sequence[TextFile], max_bytes: int) -> tuple[list[Document], int]:
    room = max_bytes or sum(file.size for file in files)
    documents, skipped = [], 0
    for file in sorted(files, key=lambda file: _hash(file.name, b"order")):
        if file.size > room:
            continue
        if _read_text(file) is None:
            skipped += 1
            continue
        documents.append(Document(file.name, file.path, 0, file.size))
        room -= file.size
    return documents, skipped


def _take(documents: Sequence[Document], max_bytes: int) -> list[Document]:
    room = max_bytes or sum(document.stop - document.start for document in documents)
    taken = []
    for document in sorted(documents, key=lambda document: _hash(document.name, b"order")):
        if document.stop - document.start <= room:
            taken.append(document)
            room -= document.stop - document.start
    return taken


def _sections(file: TextFile, data: bytes) -> list[Document]:
    """Cut a file after the first line break at or past every so many bytes."""
    length = max(1, min(_SECTION_BYTES, len(data) // _SECTIONS))
    sections: list[Document] = []
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start + length - 1) + 1 or len(data)
        sections.append(Document(f"{file.name}#{len(sections)}", file.path, start, stop))
        start = stop
    return sections


def _read_text(file: TextFile) -> bytes | None:
    """The bytes of a file, or None if it is not text. Raises `ConfigError` if it has to be, or cannot be read."""
    try:
        data = file.path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.text_paths=[{file.path}]: cannot be read ({error.strerror}); make it readable or move it away"
        ) from error
    reason = _not_text(data)
    if reason and file.given:
        raise ConfigError(f"data.text_paths=[{file.path}]: {reason}; give UTF-8 text")
    return None if reason else data


def _not_text(data: bytes) -> str:
    """Why some bytes are not text; empty if they are."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    # a zero is legal UTF-8, but stands in no text: images and token files full of zeros would pass otherwise
    return "" if (zero := data.find(0)) < 0 else f"byte {zero} is a zero, as in binary files"


def _nothing_taken(files: Sequence[TextFile], skipped: int, max_bytes: int) -> ConfigError:
    if skipped == len(files) or not max_bytes:
        return ConfigError(
            f"data.text_paths=[{files[0].path}, …]: none of the {len(files)} files is UTF-8 text; "
            "give files or folders that hold text"
        )
    smallest = min(file.size for file in files)
    return ConfigError(
        f"data.max_bytes={max_bytes}: every text file is larger than this (the smallest file has {smallest} bytes); "
        "use a larger value, or 0 for no limit"
    )


def _hash(name: str, purpose: bytes) -> float:
    """A number in [0, 1) that depends on the name alone; independent for every purpose."""
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=6, person=purpose).digest()
    return int.from_bytes(digest, "big") / 2**48
