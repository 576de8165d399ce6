"""Finding text, cutting it in documents, splitting it by file, bytes as tokens."""

from __future__ import annotations

import errno
import os
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.config.errors import ConfigError
from moe_engine.data.text import ByteTokenizer, Document, choose_documents, find_files, split_documents

Tree = Callable[[Mapping[str, str | bytes]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Make files below a folder from a dict of names and contents."""

    def make(files: Mapping[str, str | bytes]) -> Path:
        for name, content in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path / "root"

    return make


def found(*paths: Path, exclude: Path | None = None) -> list[str]:
    return [file.name for file in find_files([str(path) for path in paths], exclude=exclude)]


def documents_of(names: list[str]) -> list[Document]:
    return [Document(name, Path(name), 0, 1) for name in names]


# --- tokenizer ---


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_survives_tokens(written: str) -> None:
    try:
        data = written.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no text file holds
        return
    tokens = ByteTokenizer().encode(written)
    assert tokens.tolist() == list(data)
    assert ByteTokenizer().decode(tokens.tolist()) == written


def test_tokens_are_bytes_and_one_end_of_document() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("aé\n")
    assert tokens.dtype == np.uint16 and tokens.tolist() == [97, 0xC3, 0xA9, 10]
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([97, 256, 98]) == "ab"
    assert tokenizer.decode([0xC3, 97]) == "\ufffda"  # a model may write half a character


@pytest.mark.parametrize("token", [-1, 257])
def test_decoding_refuses_what_is_no_token(token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 257"):
        ByteTokenizer().decode([97, token])


# --- files ---


def test_a_folder_gives_all_files_below_it_but_hidden_and_empty_ones(tree: Tree) -> None:
    root = tree({"b.txt": "b", "a/x.md": "x", "a/deep/y": "y", "empty.txt": "", ".git/config": "g", "a/.hidden": "h"})
    (root / "loop").symlink_to(root)
    (root / "dangling").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe")
    assert found(root) == ["b.txt", "a/x.md", "a/deep/y"]


def test_sizes_and_times_come_along(tree: Tree) -> None:
    root = tree({"a.txt": "12345"})
    (file,) = find_files([str(root)])
    assert (file.size, file.mtime_ns) == (5, (root / "a.txt").stat().st_mtime_ns)
    assert not file.given
    (file,) = find_files([str(root / "a.txt")])
    assert file.given and file.name == "a.txt"


def test_a_file_asked_for_twice_is_there_once(tree: Tree) -> None:
    root = tree({"a.txt": "a", "sub/b.txt": "b"})
    (root / "link.txt").symlink_to(root / "a.txt")
    assert found(root, root / "a.txt", root / "sub") == ["a.txt", "sub/b.txt"]


def test_files_of_one_name_keep_names_of_their_own(tree: Tree) -> None:
    root = tree({"one/text": "1", "two/text": "2", "three/text": "3"})
    assert found(root / "one", root / "two", root / "three") == ["text", "text@2", "text@3"]
    train, validation = split_documents(choose_documents(find_files([str(root / "one"), str(root / "two")]))[0], 0.5)
    assert len(train) == len(validation) == 1


def test_the_cache_folder_is_not_text(tree: Tree) -> None:
    root = tree({"a.txt": "a", "cache/key/corpus.json": "{}", "z.txt": "z"})
    assert found(root, exclude=(root / "cache").resolve()) == ["a.txt", "z.txt"]
    with pytest.raises(ConfigError, match="is data.cache_dir itself; use another"):
        found(root, exclude=root.resolve())


def test_a_missing_path_is_named_with_what_would_work(tree: Tree) -> None:
    root = tree({"a.txt": "a"})
    with pytest.raises(ConfigError, match=r"data.text_paths=\[.*/nowhere\]: no such file or folder; .*text_paths=\[\]"):
        found(root, root / "nowhere")


def test_a_pipe_given_by_name_is_refused_not_waited_for(tree: Tree) -> None:
    root = tree({"a.txt": "a"})
    os.mkfifo(root / "pipe")
    with pytest.raises(ConfigError, match=r"pipe\]: neither a file nor a folder"):
        found(root / "pipe")


def test_an_empty_folder_and_an_empty_file_are_refused(tree: Tree) -> None:
    root = tree({"empty.txt": ""})
    with pytest.raises(ConfigError, match="no file with text in it"):
        found(root)
    with pytest.raises(ConfigError, match="no file with text in it"):
        found(root / "empty.txt")


def test_what_cannot_be_read_is_named(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by the calls themselves, since file modes do not bind an administrator."""
    root = tree({"a.txt": "a", "b.txt": "b", "closed/b.txt": "b"})
    list_folder, read_file = os.scandir, Path.read_bytes

    def scandir(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return list_folder(path)

    def read_bytes(path: Path) -> bytes:
        if path.name == "b.txt":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_file(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(ConfigError, match=r"b.txt\]: cannot be read .Permission denied"):
        choose_documents(find_files([str(root)]))
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigError, match="closed\\]: cannot be listed .Permission denied"):
        found(root)


def test_no_path_means_the_standard_library_without_tests_and_packages() -> None:
    files = find_files([])
    names = {file.name for file in files}
    assert {"os.py", "json/decoder.py", "collections/__init__.py"} <= names
    assert all(name.endswith(".py") for name in names)
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert not any(skipped & set(name.split("/")) for name in names)
    assert sum(file.size for file in files) > 5_000_000


def test_a_packed_standard_library_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": "/nowhere/python311.zip"})
    with pytest.raises(ConfigError, match=r"data.text_paths=\[\].*python311.zip.*text of your own"):
        find_files([])


# --- documents ---


def test_binary_files_of_a_folder_are_passed_over_and_counted(tree: Tree) -> None:
    root = tree(
        {"a.txt": "a", "b.txt": "é", "image": b"\x89PNG\xff", "zeros": b"ab\x00", "latin": "é".encode("latin1")}
    )
    documents, skipped = choose_documents(find_files([str(root)]))
    assert sorted(document.name for document in documents) == ["a.txt", "b.txt"]
    assert skipped == 3


@pytest.mark.parametrize(("content", "reason"), [(b"abc\xff", "byte 3 is not UTF-8"), (b"ab\x00c", "byte 2 is a zero")])
def test_a_file_asked_for_by_name_must_be_text(tree: Tree, content: bytes, reason: str) -> None:
    root = tree({"bad": content, "good": "text"})
    with pytest.raises(ConfigError, match=rf"bad\]: {reason}.*give UTF-8 text"):
        choose_documents(find_files([str(root / "bad"), str(root / "good")]))


@pytest.mark.parametrize("files", [{"a": b"\xff"}, {"a": b"\xff", "b": b"\xfe"}])
def test_a_folder_without_any_text_is_refused(tree: Tree, files: dict[str, str | bytes]) -> None:
    with pytest.raises(ConfigError, match=f"none of the {len(files)} files is UTF-8 text"):
        choose_documents(find_files([str(tree(files))]))


def test_the_order_of_documents_is_hashed_and_not_that_of_the_listing(tree: Tree) -> None:
    root = tree({f"{number:02}.txt": "text" for number in range(20)})
    files = find_files([str(root)])
    names = [document.name for document in choose_documents(files)[0]]
    assert names == [document.name for document in choose_documents(files[::-1])[0]]
    assert names != sorted(names) and sorted(names) == [file.name for file in files]


def test_max_bytes_is_never_exceeded_and_takes_the_head_of_the_order(tree: Tree) -> None:
    root = tree({f"{number:02}.txt": "x" * 10 for number in range(20)})
    files = find_files([str(root)])
    everything = choose_documents(files)[0]
    assert choose_documents(files, 10_000)[0] == everything
    assert choose_documents(files, 59)[0] == everything[:5]
    assert choose_documents(files, 60)[0] == everything[:6]


def test_a_document_that_does_not_fit_makes_room_for_others(tree: Tree) -> None:
    root = tree({"large.txt": "x" * 1000} | {f"{number}.txt": "x" * 10 for number in range(8)})
    documents, _ = choose_documents(find_files([str(root)]), 500)
    assert sorted(document.name for document in documents) == [f"{number}.txt" for number in range(8)]


def test_max_bytes_below_every_file_is_refused(tree: Tree) -> None:
    root = tree({"a.txt": "x" * 30, "b.txt": "x" * 20})
    with pytest.raises(ConfigError, match="data.max_bytes=10: .*smallest file has 20 bytes.*or 0 for no limit"):
        choose_documents(find_files([str(root)]), 10)


def test_a_single_file_is_cut_after_line_breaks(tree: Tree) -> None:
    lines = [f"line {number} é\n" for number in range(4000)]
    path = tree({"book.txt": "".join(lines)}) / "book.txt"
    documents, _ = choose_documents(find_files([str(path)]))
    by_place = sorted(documents, key=lambda document: document.start)
    assert [document.name for document in by_place] == [f"book.txt#{i}" for i in range(len(by_place))]
    assert documents != by_place
    assert b"".join(document.read() for document in by_place) == path.read_bytes()
    assert all(document.read().endswith(b"\n") for document in by_place)
    assert 18 <= len(by_place) <= 20


def test_a_long_single_file_is_cut_in_sections_of_16_kib(tree: Tree) -> None:
    path = tree({"book.txt": ("x" * 63 + "\n") * 16384}) / "book.txt"  # 1 MiB
    documents, _ = choose_documents(find_files([str(path)]))
    assert [document.stop - document.start for document in documents] == [16384] * 64


def test_a_folder_with_a_single_text_file_is_cut_too(tree: Tree) -> None:
    root = tree({"only.txt": "some text\n" * 100, "image": b"\xff\xff"})
    documents, skipped = choose_documents(find_files([str(root)]))
    assert len(documents) > 10 and skipped == 1
    assert all(document.path == root / "only.txt" for document in documents)


def test_max_bytes_holds_for_a_single_file(tree: Tree) -> None:
    path = tree({"book.txt": ("x" * 9 + "\n") * 1000}) / "book.txt"
    documents, _ = choose_documents(find_files([str(path)]), 3000)
    assert 2000 < sum(document.stop - document.start for document in documents) <= 3000


def test_a_single_file_of_one_line_cannot_be_split(tree: Tree) -> None:
    path = tree({"line.txt": "no line break here"}) / "line.txt"
    files = find_files([str(path)])
    with pytest.raises(ConfigError, match=r"line.txt\]: the only text file, .*give two files or more"):
        choose_documents(files)
    with pytest.raises(ConfigError, match=r"within data.max_bytes=5.*or a larger max_bytes"):
        choose_documents(files, 5)
    assert [document.read() for document in choose_documents(files, least=1)[0]] == [b"no line break here"]


def test_a_file_that_changes_under_the_reader_is_an_error(tree: Tree) -> None:
    root = tree({"a.txt": "long enough", "b.txt": "text"})
    documents, _ = choose_documents(find_files([str(root)]))
    (root / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match=r"a.txt\]: the file changed"):
        for document in documents:
            document.read()


# --- split ---


@settings(max_examples=50, deadline=None)
@given(
    names=st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=30, unique=True),
    fraction=st.floats(0.001, 0.999),
    random=st.randoms(use_true_random=False),
)
def test_the_side_of_a_file_does_not_depend_on_the_order(names: list[str], fraction: float, random: object) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    train, validation = split_documents(documents_of(names), fraction)
    again_train, again_validation = split_documents(documents_of(shuffled), fraction)
    assert set(train) == set(again_train) and set(validation) == set(again_validation)
    assert set(train) | set(validation) == set(documents_of(names))
    assert train and validation and not set(train) & set(validation)


def test_more_files_move_no_file_to_the_other_side() -> None:
    names = [f"{number}.txt" for number in range(400)]
    few, many = split_documents(documents_of(names[:200]), 0.1), split_documents(documents_of(names), 0.1)
    assert set(few[0]) < set(many[0]) and set(few[1]) < set(many[1])


def test_about_the_fraction_is_for_validation_in_the_given_order() -> None:
    documents = documents_of([f"{number}.txt" for number in range(2000)])
    train, validation = split_documents(documents, 0.05)
    assert 70 < len(validation) < 130
    assert train == sorted(train, key=documents.index)
    assert validation == sorted(validation, key=documents.index)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_two_files_always_make_two_sides(fraction: float) -> None:
    for number in range(50):
        train, validation = split_documents(documents_of([f"a{number}", f"b{number}"]), fraction)
        assert len(train) == len(validation) == 1


def test_a_fraction_of_zero_means_no_validation() -> None:
    documents = documents_of(["a", "b"])
    assert split_documents(documents, 0.0) == (documents, [])


def test_one_document_has_no_two_sides() -> None:
    with pytest.raises(ValueError, match="1 documents cannot be split"):
        split_documents(documents_of(["a"]), 0.1)
