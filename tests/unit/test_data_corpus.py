"""Token files of a text: what is in them, when they are made anew, and many processes asking at once."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from moe_engine.config.errors import ConfigError
from moe_engine.data import corpus
from moe_engine.data.corpus import Corpus, prepare_text
from moe_engine.data.text import ByteTokenizer, standard_library
from moe_engine.data.tokens import TokenStream

FORK = multiprocessing.get_context("fork")
FILES = {f"file{number}.txt": f"text of file {number}\n" * 10 for number in range(12)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "text"
    source.mkdir()
    for name, content in FILES.items():
        (source / name).write_text(content)
    return source


def prepare(folder: Path, **options: float) -> Corpus:
    values = {"validation_fraction": 0.3, "max_bytes": 0} | options
    return prepare_text(
        [str(folder)],
        folder.parent / "cache",
        validation_fraction=values["validation_fraction"],
        max_bytes=int(values["max_bytes"]),
    )


def texts(stream: TokenStream) -> list[str]:
    documents = [stream.document(i).tolist() for i in range(stream.num_documents)]
    assert all(document[-1] == ByteTokenizer.eod for document in documents)
    assert all(ByteTokenizer.eod not in document[:-1] for document in documents)
    return [ByteTokenizer().decode(document) for document in documents]


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder.parent / "cache").iterdir())


PATIENCE = 120  # seconds for a process to come to where it is awaited


def count_builds(monkeypatch: pytest.MonkeyPatch, log: Path, pause: float = 0.0, together: int = 1) -> None:
    """Write a line per build to a file, which forked processes share; builds go on when so many have begun."""
    build = corpus._build

    def counted(*args: object) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(pause)
        end = time.monotonic() + PATIENCE
        while len(log.read_text().splitlines()) < together and time.monotonic() < end:
            time.sleep(0.01)
        build(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(corpus, "_build", counted)


def test_every_file_is_one_document_on_one_side(folder: Path) -> None:
    made = prepare(folder)
    train, validation = texts(made.train), texts(made.validation)
    assert train and validation
    assert sorted(train + validation) == sorted(FILES.values())
    about = json.loads((made.folder / "corpus.json").read_text())
    assert [FILES[name] for name in about["validation_documents"]] == validation
    assert made.train.num_tokens == sum(len(document) + 1 for document in train)


def test_the_data_does_not_depend_on_where_the_folder_is(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "renamed"
    other.parent.mkdir()
    first = prepare(folder)
    folder.rename(other)
    second = prepare(other)
    assert second.content_digest == first.content_digest and second.folder != first.folder


def test_a_second_call_reuses_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count_builds(monkeypatch, tmp_path / "log")
    first, second = prepare(folder), prepare(folder)
    assert (tmp_path / "log").read_text() == "built\n"
    assert second.folder == first.folder and second.content_digest == first.content_digest
    assert second.train.tokens.tolist() == first.train.tokens.tolist()
    assert entries(folder) == sorted([first.folder.name, f".{first.folder.name}.lock"])


@pytest.mark.parametrize("change", ["content", "new file", "removed file", "fraction", "limit"])
def test_a_change_makes_other_files(folder: Path, change: str) -> None:
    first = prepare(folder)
    options: dict[str, float] = {}
    if change == "content":
        (folder / "file3.txt").write_text("TEXT of file 3\n" * 10)
        os.utime(folder / "file3.txt", ns=(0, (folder / "file3.txt").stat().st_mtime_ns + 1))
    elif change == "new file":
        (folder / "new.txt").write_text("new")
    elif change == "removed file":
        (folder / "file3.txt").unlink()
    else:
        options = {"validation_fraction": 0.6} if change == "fraction" else {"max_bytes": 1000}
    second = prepare(folder, **options)
    assert second.folder != first.folder
    assert second.content_digest != first.content_digest


def test_max_bytes_limits_the_text(folder: Path) -> None:
    made = prepare(folder, max_bytes=1000)
    assert 500 < sum(len(document) for document in texts(made.train) + texts(made.validation)) <= 1000


def test_without_a_fraction_all_is_for_training(folder: Path) -> None:
    made = prepare(folder, validation_fraction=0.0)
    assert sorted(texts(made.train)) == sorted(FILES.values())
    assert made.validation.num_tokens == 0 and made.validation.num_documents == 0


def test_a_cache_inside_the_text_folder_does_not_feed_on_itself(folder: Path) -> None:
    calls = [prepare_text([str(folder)], folder / "cache", validation_fraction=0.3) for _ in range(2)]
    assert calls[0].folder == calls[1].folder
    assert sorted(texts(calls[1].train) + texts(calls[1].validation)) == sorted(FILES.values())


def test_files_that_are_no_text_are_counted(folder: Path) -> None:
    (folder / "image").write_bytes(b"\x89PNG\xff\x00")
    assert prepare(folder).skipped_files == 1
    assert prepare(folder).skipped_files == 1  # from the cache


def test_the_whole_standard_library(tmp_path: Path) -> None:
    made = prepare_text([], tmp_path, validation_fraction=0.05)
    assert made.train.num_tokens > 4_000_000 and made.validation.num_documents > 5
    assert made.validation.num_tokens > 50_000
    borders = made.train.document_offsets[1:] - 1
    assert (made.train.tokens[borders] == ByteTokenizer.eod).all()
    assert (made.train.tokens == ByteTokenizer.eod).sum() == made.train.num_documents
    listing = json.loads((made.folder / "corpus.json").read_text())["validation_documents"]
    first = (standard_library() / listing[0]).read_bytes()
    assert made.validation.document(0)[:-1].astype("u1").tobytes() == first


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0])
def test_refuses_a_fraction_that_is_none(folder: Path, fraction: float) -> None:
    with pytest.raises(ConfigError, match=f"data.validation_fraction={fraction}: .*for example 0.05"):
        prepare(folder, validation_fraction=fraction)


def test_refuses_a_negative_limit(folder: Path) -> None:
    with pytest.raises(ConfigError, match="data.max_bytes=-1: "):
        prepare(folder, max_bytes=-1)


def test_refuses_a_cache_folder_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data.cache_dir=.*file0.txt: cannot make this folder"):
        prepare_text([str(folder)], folder / "file0.txt", validation_fraction=0.3)


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "validation.bin", "corpus.json"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_cache_is_named_with_what_to_do(folder: Path, name: str, damage: str) -> None:
    made = prepare(folder)
    path = made.folder / name
    if damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    with pytest.raises(ConfigError, match=f"{made.folder.name} are damaged; delete that folder, they are made anew: "):
        prepare(folder)


def test_a_failed_build_leaves_nothing_and_the_next_call_builds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(path: Path) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="data.cache_dir=.*No space"):
        patch.setattr(corpus, "_content_digest", full_disk)
        prepare(folder)
    assert [name for name in entries(folder) if not name.endswith(".lock")] == []
    assert prepare(folder).train.num_tokens > 0


# --- many processes ---


def _ask(folder: Path, results: Path, number: int, start: Event) -> None:
    start.wait(PATIENCE)
    made = prepare(folder)
    (results / str(number)).write_text(f"{made.content_digest} {made.train.num_tokens}")


def ask_at_once(folder: Path, results: Path, count: int) -> set[str]:
    """What several processes got that called at the same moment."""
    results.mkdir()
    start = FORK.Event()
    processes = [FORK.Process(target=_ask, args=(folder, results, number, start)) for number in range(count)]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0] * count
    return {(results / str(number)).read_text() for number in range(count)}


def test_one_process_builds_and_the_others_wait(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count_builds(monkeypatch, tmp_path / "log", pause=0.3)
    answers = ask_at_once(folder, tmp_path / "results", 6)
    assert len(answers) == 1
    assert (tmp_path / "log").read_text() == "built\n"
    made = prepare(folder)
    assert answers == {f"{made.content_digest} {made.train.num_tokens}"}
    assert entries(folder) == sorted([made.folder.name, f".{made.folder.name}.lock"])


def test_without_locks_each_builds_and_the_first_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    count_builds(monkeypatch, tmp_path / "log", together=4)
    assert len(ask_at_once(folder, tmp_path / "results", 4)) == 1
    assert (tmp_path / "log").read_text() == "built\n" * 4
    assert [name for name in entries(folder) if name.endswith(".partial")] == []


def _build_and_hang(folder: Path, halfway: Event) -> None:
    def hang(path: Path) -> str:
        halfway.set()
        time.sleep(1000)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_content_digest", hang)
        prepare(folder)


def test_a_killed_builder_hangs_nobody(folder: Path, tmp_path: Path) -> None:
    halfway = FORK.Event()
    builder = FORK.Process(target=_build_and_hang, args=(folder, halfway), daemon=True)
    builder.start()
    assert halfway.wait(PATIENCE)
    (tmp_path / "results").mkdir()
    start = FORK.Event()
    start.set()
    waiter = FORK.Process(target=_ask, args=(folder, tmp_path / "results", 0, start), daemon=True)
    waiter.start()
    time.sleep(0.3)
    assert waiter.is_alive()  # it waits for the builder …
    assert len([name for name in entries(folder) if name.endswith(".partial")]) == 1
    builder.kill()
    waiter.join(PATIENCE)
    assert waiter.exitcode == 0  # … takes over when it is gone, and clears away what it left
    assert [name for name in entries(folder) if name.endswith(".partial")] == []
    made = prepare(folder)
    assert (tmp_path / "results" / "0").read_text() == f"{made.content_digest} {made.train.num_tokens}"
