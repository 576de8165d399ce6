"""The token files of some text: made once, kept in a folder, opened by every rank.

They lie in `<cache_dir>/<key>/` as train.bin/.idx, validation.bin/.idx and corpus.json, where the key says what went
in and how, and are used again as long as the same files are asked for in the same way. The folder appears by one
rename when all of it is on disk. A lock file keeps the ranks of a machine from doing the same work; the operating
system frees it when its holder dies, and nothing breaks where a file system has no locks: then each builds its own
copy, and the first rename counts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_engine.config.errors import ConfigError
from moe_engine.data.text import ByteTokenizer, Document, TextFile, choose_documents, find_files, split_documents
from moe_engine.data.tokens import TokenStream, TokenWriter, sync, token_type

_FORMAT = 1  # part of the key: raise it when the same files would give other tokens
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True)
class Corpus:
    """What `prepare_text` made or found."""

    folder: Path
    train: TokenStream
    validation: TokenStream
    tokenizer: ByteTokenizer
    content_digest: str  # of the tokens and document borders of both streams: equal digests, equal data
    skipped_files: int  # found in a folder, but not UTF-8 text


def prepare_text(
    text_paths: Sequence[str], cache_dir: str | Path, *, validation_fraction: float, max_bytes: int = 0
) -> Corpus:
    """The train and validation tokens of some text, from the cache if they are there.

    text_paths           files or folders (see `text.find_files`); empty: the interpreter's standard library
    validation_fraction  of the documents, 0 <= f < 1; both sides get at least one, but for 0: no validation
    max_bytes            never take more text than this (see `text.choose_documents`); 0: no limit

    Every document ends with the end-of-document token. Any number of processes may call this at once: one builds
    and the others wait for it; if it dies, the next one builds. Raises `ConfigError` for a path that does not
    exist, for text that is missing or cannot be split, and for a damaged cache.
    """
    if not 0.0 <= validation_fraction < 1.0:
        raise ConfigError(
            f"data.validation_fraction={validation_fraction}: must be at least 0 and less than 1, for example 0.05"
        )
    if max_bytes < 0:
        raise ConfigError(f"data.max_bytes={max_bytes}: must be 0 (no limit) or a number of bytes, for example 1000000")
    cache = _cache_folder(cache_dir)
    files = find_files(text_paths, exclude=cache)
    key = _key(files, validation_fraction, max_bytes)
    folder = cache / key
    if not folder.exists():
        try:
            _build_once(folder, files, validation_fraction, max_bytes)
        except OSError as error:
            raise ConfigError(
                f"data.cache_dir={cache_dir}: cannot write {error.filename or folder} ({error.strerror}); free some "
                "space there, or use another folder, for example data.cache_dir=/tmp/data_cache"
            ) from error
    return _open(folder)


def _cache_folder(cache_dir: str | Path) -> Path:
    folder = Path(cache_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={cache_dir}: cannot make this folder ({error.strerror}); "
            "give one that can be written, for example data.cache_dir=data_cache"
        ) from error
    return folder.resolve()


def _key(files: Sequence[TextFile], validation_fraction: float, max_bytes: int) -> str:
    """A file counts by path, size and time of change: enough to see that it changed, and nothing is read."""
    listed = [[file.name, os.path.realpath(file.path), file.size, file.mtime_ns, file.given] for file in files]
    asked = [_FORMAT, ByteTokenizer.name, validation_fraction, max_bytes, listed]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=12).hexdigest()


@contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Hold a lock file, waiting for it as long as its holder lives; False where the file system has no locks."""
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield False
        else:
            yield True  # closing the file frees the lock


def _build_once(folder: Path, files: Sequence[TextFile], validation_fraction: float, max_bytes: int) -> None:
    """Build what nobody else has built or is building."""
    with _exclusive(folder.with_name(f".{folder.name}.lock")) as alone:
        if not folder.exists():
            if alone:
                _remove_leftovers(folder.parent, folder.name)
            _build(folder, files, validation_fraction, max_bytes)


def _build(folder: Path, files: Sequence[TextFile], validation_fraction: float, max_bytes: int) -> None:
    documents, skipped = choose_documents(files, max_bytes, least=2 if validation_fraction > 0 else 1)
    train, validation = split_documents(documents, validation_fraction)
    partial = folder.with_name(f"{_partial_prefix(folder.name)}{os.getpid()}-{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        _write_tokens(partial / "train", train)
        _write_tokens(partial / "validation", validation)
        about = {
            "content_digest": _content_digest(partial),
            "skipped_files": skipped,
            "tokenizer": ByteTokenizer.name,
            "validation_documents": [document.name for document in validation],
        }
        (partial / "corpus.json").write_text(json.dumps(about, indent=1))
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after a success there is none


def _write_tokens(prefix: Path, documents: Sequence[Document]) -> None:
    tokenizer = ByteTokenizer()
    end = np.array([tokenizer.eod], dtype=np.uint16)
    with TokenWriter(prefix, token_type(tokenizer.vocab_size)) as writer:
        for document in documents:
            writer.add_document(np.concatenate([tokenizer.encode(document.read()), end]))


def _publish(partial: Path, folder: Path) -> None:
    try:
        os.rename(partial, folder)
    except OSError:
        if not folder.exists():  # otherwise another process was first, with the same content
            raise
    sync(folder.parent)


def _content_digest(folder: Path) -> str:
    total = hashlib.blake2b(digest_size=16)
    for name in ("train.idx", "train.bin", "validation.idx", "validation.bin"):
        with open(folder / name, "rb") as file:
            total.update(hashlib.file_digest(file, "blake2b").digest())
    return total.hexdigest()


def _partial_prefix(key: str) -> str:
    return f".{key}.{socket.gethostname()}."


def _remove_leftovers(cache: Path, key: str) -> None:
    """Unfinished folders of builders that were killed; of this machine only, as locks may not reach further."""
    for entry in cache.iterdir():
        if entry.name.startswith(_partial_prefix(key)) and entry.name.endswith(".partial"):
            shutil.rmtree(entry, ignore_errors=True)


def _open(folder: Path) -> Corpus:
    try:
        about = json.loads((folder / "corpus.json").read_text())
        digest, skipped = str(about["content_digest"]), int(about["skipped_files"])
        return Corpus(
            folder, TokenStream(folder / "train"), TokenStream(folder / "validation"), ByteTokenizer(), digest, skipped
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"data.cache_dir={folder.parent}: the token files in {folder} are damaged; delete that folder, "
            f"they are made anew: {error}"
        ) from error
