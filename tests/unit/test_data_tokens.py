"""The .bin/.idx files: exact bytes, round trips, damage, and a writer that never leaves half a file."""

from __future__ import annotations

import os
import resource
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.config.errors import ConfigError
from moe_engine.data import tokens
from moe_engine.data.tokens import TokenStream, TokenWriter, token_type

# uint16, sequences of 3, 2 and 4 tokens, documents starting at sequences 0 and 2
REFERENCE_INDEX = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0300000000000000 0300000000000000 030000000200000004000000"
    "000000000000000006000000000000000a00000000000000 000000000000000002000000000000000300000000000000"
)
REFERENCE_TOKENS = [1, 2, 3, 40, 50, 600, 700, 800, 65535]


def write_reference(prefix: Path) -> None:
    with TokenWriter(prefix, np.uint16) as writer:
        writer.add_sequence(REFERENCE_TOKENS[:3])
        writer.add_sequence(REFERENCE_TOKENS[3:5])
        writer.end_document()
        writer.add_document(REFERENCE_TOKENS[5:])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writes_the_reference_index_byte_for_byte(tmp_path: Path) -> None:
    write_reference(tmp_path / "data")
    assert len(REFERENCE_INDEX) == 94
    assert (tmp_path / "data.idx").read_bytes() == REFERENCE_INDEX
    assert (tmp_path / "data.bin").read_bytes() == struct.pack("<9H", *REFERENCE_TOKENS)
    assert names(tmp_path) == ["data.bin", "data.idx"]


def test_reads_the_reference_index(tmp_path: Path) -> None:
    (tmp_path / "data.idx").write_bytes(REFERENCE_INDEX)
    (tmp_path / "data.bin").write_bytes(struct.pack("<9H", *REFERENCE_TOKENS))
    stream = TokenStream(tmp_path / "data")
    assert stream.num_tokens == 9 and stream.num_documents == 2
    assert stream.document_offsets.tolist() == [0, 5, 9]
    assert stream.document(0).tolist() == REFERENCE_TOKENS[:5]
    assert stream.document(1).tolist() == REFERENCE_TOKENS[5:]
    with pytest.raises(IndexError, match="document 2 of 2"):
        stream.document(2)


INTEGER_TYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(INTEGER_TYPES))
def test_round_trip_of_any_documents(data: st.DataObject, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    limits = np.iinfo(name)
    token = st.integers(int(limits.min), int(limits.max))
    documents = data.draw(st.lists(st.lists(st.lists(token, max_size=5), max_size=3), max_size=5))
    prefix = tmp_path_factory.mktemp("tokens") / "corpus.v2"
    with TokenWriter(prefix, name) as writer:
        for sequences in documents:
            for sequence in sequences:
                writer.add_sequence(sequence)
            writer.end_document()
    stream = TokenStream(prefix)
    assert stream.dtype == np.dtype(name)
    flat = [[token for sequence in sequences for token in sequence] for sequences in documents]
    assert [stream.document(i).tolist() for i in range(stream.num_documents)] == flat
    assert stream.tokens.tolist() == [token for document in flat for token in document]


def test_memory_map_is_read_only(tmp_path: Path) -> None:
    write_reference(tmp_path / "data")
    stream = TokenStream(tmp_path / "data")
    assert isinstance(stream.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        stream.tokens[0] = 1


def test_document_longer_than_a_length_can_say_becomes_several_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_LONGEST_SEQUENCE", 4)
    with TokenWriter(tmp_path / "data") as writer:
        writer.add_document(range(10))
        writer.add_document([])
        writer.add_document(range(4))
    sequences = struct.unpack_from("<Q", (tmp_path / "data.idx").read_bytes(), 18)[0]
    stream = TokenStream(tmp_path / "data")
    assert sequences == 5  # 4 + 4 + 2, an empty one, 4
    assert [stream.document(i).tolist() for i in range(3)] == [list(range(10)), [], list(range(4))]


def test_token_type_is_the_smallest_that_holds_the_vocabulary() -> None:
    assert token_type(257) == np.uint16 and token_type(65536) == np.uint16
    assert token_type(65537) == np.int32 and token_type(129280) == np.int32


@pytest.mark.parametrize("bad", [[65536], [-1], [0.5]])
def test_refuses_tokens_that_the_type_cannot_hold_and_leaves_nothing(tmp_path: Path, bad: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit uint16"), TokenWriter(tmp_path / "data") as writer:
        writer.add_document([1, 2])
        writer.add_document(bad)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["float32", "float64", "uint32"])
def test_refuses_types_that_are_no_tokens(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype={name}: .*use one of uint8"):
        TokenWriter(tmp_path / "data", name)
    assert names(tmp_path) == []


def test_refuses_a_document_that_was_not_ended(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="end_document"), TokenWriter(tmp_path / "data") as writer:
        writer.add_sequence([1])
    assert names(tmp_path) == []


def test_an_exception_keeps_the_earlier_files(tmp_path: Path) -> None:
    write_reference(tmp_path / "data")
    with pytest.raises(RuntimeError, match="stop"), TokenWriter(tmp_path / "data") as writer:
        writer.add_document(np.arange(100_000) % 7)
        raise RuntimeError("stop")
    assert names(tmp_path) == ["data.bin", "data.idx"]
    assert TokenStream(tmp_path / "data").tokens.tolist() == REFERENCE_TOKENS


def test_writing_again_replaces_both_files(tmp_path: Path) -> None:
    write_reference(tmp_path / "data")
    with TokenWriter(tmp_path / "data", np.int32) as writer:
        writer.add_document([100_000])
    assert TokenStream(tmp_path / "data").tokens.tolist() == [100_000]
    assert names(tmp_path) == ["data.bin", "data.idx"]


def test_no_files_have_their_names_before_the_commit(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "data")
    writer.add_document(np.arange(50_000) % 100)
    assert all(name.startswith(".") and name.endswith(".partial") for name in names(tmp_path))
    writer.commit()
    assert names(tmp_path) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("documents", [1, 40], ids=["in the buffer's flush", "in a write"])
def test_a_full_disk_names_the_file_and_leaves_nothing_half_written(tmp_path: Path, documents: int) -> None:
    """The limit on file sizes stands in for the disk: a write past it fails in the same way."""
    write_reference(tmp_path / "data")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(OSError) as caught, TokenWriter(tmp_path / "data") as writer:
            for _ in range(documents):
                writer.add_document(np.zeros(1500, dtype=np.uint16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert caught.value.filename == str(tmp_path / "data.bin")
    assert names(tmp_path) == ["data.bin", "data.idx"]
    assert TokenStream(tmp_path / "data").tokens.tolist() == REFERENCE_TOKENS


def test_a_failed_rename_of_the_index_leaves_no_index_beside_new_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_reference(tmp_path / "data")
    replace = os.replace

    def fail_on_index(source: Path, target: Path) -> None:
        if target.suffix == ".idx":
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_on_index)
    with pytest.raises(OSError, match="No space"), TokenWriter(tmp_path / "data") as writer:
        writer.add_document([9, 9, 9, 9, 9, 9, 9, 9, 9])  # as many tokens as before: sizes alone would not tell
    assert names(tmp_path) == ["data.bin"]
    with pytest.raises(ConfigError, match="no such file"):
        TokenStream(tmp_path / "data")


# --- damage: where in the reference index, what is put there, what the message says ---

DAMAGED = {
    "magic": (0, b"XXXX", "found magic bytes 58585858.*expected 4d4d4944"),
    "version": (9, struct.pack("<Q", 2), "found version 2, expected 1"),
    "unknown type": (17, b"\x09", "found token type code 9, expected one of 1 .uint8."),
    "type that is no token": (17, b"\x07", "found token type code 7"),
    "more sequences than bytes": (18, struct.pack("<Q", 4), "found 94 bytes, expected 106"),
    "absurd number of sequences": (18, struct.pack("<Q", 2**63), "found 94 bytes, expected 110680464442257309"),
    "more documents than bytes": (26, struct.pack("<Q", 4), "found 94 bytes, expected 102"),
    "negative length": (38, struct.pack("<i", -2), "found length -2 of sequence 1"),
    "length that offsets deny": (38, struct.pack("<i", 3), "found byte offset 10 of sequence 2, expected 12"),
    "offset": (54, struct.pack("<q", 8), "found byte offset 8 of sequence 1, expected 6"),
    "last length": (42, struct.pack("<i", 5), "bin: found 18 bytes, expected 20"),
    "first document": (70, struct.pack("<q", 1), "found document starts from 1 to 3, expected 0 to 3"),
    "last document": (86, struct.pack("<q", 2), "found document starts from 0 to 2, expected 0 to 3"),
    "falling documents": (78, struct.pack("<q", 4), "found document start 3 after 4"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_index_is_named_with_what_was_found_and_expected(tmp_path: Path, case: str) -> None:
    place, content, message = DAMAGED[case]
    write_reference(tmp_path / "data")
    index = bytearray(REFERENCE_INDEX)
    index[place : place + len(content)] = content
    (tmp_path / "data.idx").write_bytes(index)
    with pytest.raises(ConfigError, match=f"{tmp_path}/data.*{message}"):
        TokenStream(tmp_path / "data")


@pytest.mark.parametrize("size", range(94))
def test_an_index_cut_short_anywhere_is_refused(tmp_path: Path, size: int) -> None:
    write_reference(tmp_path / "data")
    os.truncate(tmp_path / "data.idx", size)
    with pytest.raises(ConfigError, match=f"data.idx: found {size} bytes, expected"):
        TokenStream(tmp_path / "data")


@pytest.mark.parametrize("size", [0, 1, 17, 19, 20])
def test_a_bin_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    write_reference(tmp_path / "data")
    os.truncate(tmp_path / "data.bin", size)
    with pytest.raises(ConfigError, match=f"data.bin: found {size} bytes, expected 18"):
        TokenStream(tmp_path / "data")


@pytest.mark.parametrize("missing", ["data.bin", "data.idx"])
def test_a_missing_half_is_named(tmp_path: Path, missing: str) -> None:
    write_reference(tmp_path / "data")
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=f"{missing}: no such file; token files are a pair"):
        TokenStream(tmp_path / "data")
