"""Mistakes that only the machine can tell: wrong files, full disks, damaged checkpoints, ranks that cannot meet.

All real: files are cut and flipped, the full disk is a small tmpfs (as root), the port is taken.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked import run_command

from moe_engine.__main__ import main
from moe_engine.config.errors import ConfigError
from moe_engine.distributed.device import device_of_rank

CORPUS = Path(__file__).parents[1] / "corpus"
SMALL = [
    "model=tiny", "train.steps=2", "train.seq_len=32", "train.global_batch=4", "train.micro_batch=2",
    "train.eval_sequences=4", "train.sample_tokens=0", "data.validation_fraction=0.3",
]  # fmt: skip

Refused = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to be in, with text beside the tests; the variables that a run sets are taken back."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CORPUS, tmp_path / "corpus")
    before = dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs `train`, in this process, which must refuse in one line and leave the folder as it was; gives that line."""

    def run(*words: str) -> str:
        before = listing(here)
        code = main(["train", *SMALL, "data.text_paths=[corpus]", *words])
        message = capsys.readouterr().err
        assert code == 2, message
        assert "Traceback" not in message
        assert listing(here) == before, "nothing is left half-written"
        lines = message.splitlines()
        assert len(lines) == 1, message
        return message.rstrip("\n")

    return run


def listing(folder: Path) -> list[tuple[str, int]]:
    """All files and folders that are there, files with their sizes.

    But for what may stay in a cache: text that was read to its end, and the empty files that processes lock.
    """
    found = []
    for path in folder.rglob("*"):
        in_cache = "data_cache" in path.parts and ".partial" not in str(path)
        if not in_cache and path.suffix != ".lock":
            found.append((str(path.relative_to(folder)), path.stat().st_size if path.is_file() else 0))
    return sorted(found)


FILES: dict[str, tuple[bytes, str, str]] = {
    "latin.txt": ("déjà vu\n".encode("latin1") * 500, "byte 1 is not UTF-8", "give UTF-8 text"),
    "image.txt": (b"\x89PNG"[1:] + b"\0" * 500, "byte 3 is a zero, as in binary files", "give UTF-8 text"),
    "empty.txt": (b"", "no file with text in it", "give files or folders that hold UTF-8 text"),
    "line.txt": (b"hello", "the only text file", "give two files or more"),
}


@pytest.mark.parametrize("name", FILES)
def test_text_that_is_none(name: str, here: Path, refused: Refused) -> None:
    content, rule, remedy = FILES[name]
    (here / name).write_bytes(content)
    message = refused(f"data.text_paths=[{name}]")
    assert message.startswith(f"data.text_paths=[{name}]: {rule}") and remedy in message


def test_paths_that_hold_no_text(here: Path, refused: Refused) -> None:
    (here / "folder").mkdir()
    (here / "loop").symlink_to("loop")
    assert refused("data.text_paths=[corpus,gone]").startswith("data.text_paths=[gone]: no such file or folder; leave")
    assert refused("data.text_paths=[loop]").startswith("data.text_paths=[loop]: no such file or folder")
    assert refused("data.text_paths=[folder]").startswith("data.text_paths=[folder]: no file with text in it; give")
    assert refused("data.text_paths=[/dev/null]").startswith("data.text_paths=[/dev/null]: neither a file nor a folder")


def test_too_little_text(refused: Refused, here: Path) -> None:
    assert (
        main(["train", *SMALL, "data.text_paths=[corpus]", "train.steps=1", "run.name=first"]) == 0
    )  # fills the cache
    message = refused("train.seq_len=100000")
    assert message.startswith("train.seq_len=100000: the train text has ") and "use train.seq_len=" in message
    message = refused("train.eval_sequences=4000")
    assert "train.eval_sequences=" in message


def test_yaml_files(here: Path, refused: Refused) -> None:
    for name, content, rule in [
        ("cut.yaml", b"train: {steps: [1\n", "not readable as YAML, line 2: while parsing"),
        ("list.yaml", b"- 1\n", "sections with options are expected, for example 'train: {steps: 100}'"),
        ("latin.yaml", b"run: {name: d\xe9j\xe0}\n", "not readable as YAML: 'utf-8' codec can't decode"),
    ]:
        (here / name).write_bytes(content)
        message = refused(name)
        assert message.startswith(f"{name}: {rule}") and "for example 'train: {steps: 100}'" in message
    (here / "unknown.yaml").write_text("train: {stepz: 3}\n")
    assert refused("unknown.yaml") == "train.stepz=3: no such option; did you mean train.steps?"


def test_folders_that_are_none(here: Path, refused: Refused) -> None:
    (here / "file").write_text("")
    assert refused("run.dir=file").startswith(f"run.dir=file: {here}/file is not a folder; use another, for example")
    assert refused("data.cache_dir=file/x").startswith(f"data.cache_dir=file/x: {here}/file is not a folder; use an")
    assert refused("run.dir=.", "run.name=file") == (
        "run.name=file: file is not a folder; use another name, for example run.name=file_2"
    )


@pytest.fixture
def small_disk(here: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = here / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_and_read_only_disks(small_disk: Path, refused: Refused) -> None:
    message = refused("run.dir=disk")
    assert message.startswith("run.dir=disk: a checkpoint takes 1,597,440 bytes, and 65,536 are free there; free some")
    (small_disk / "cache").mkdir()
    filling = small_disk / "filling"
    filling.write_bytes(b"x" * 40000)
    message = refused("data.cache_dir=disk/cache")
    assert message.startswith("data.cache_dir=disk/cache: cannot write ") and "No space left on device" in message
    assert "or use another folder, for example data.cache_dir=" in message
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for option in ("run.dir=disk/runs", "data.cache_dir=disk/cache"):
        message = refused(option)
        assert message.startswith(f"{option}: {small_disk}") and "cannot be written; use another folder" in message


def test_a_disk_that_fills_up_during_the_run(small_disk: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run folder itself, from where the metrics go."""
    from moe_engine.metrics import RunFolder

    folder = RunFolder(small_disk / "run")
    (small_disk / "filling").write_bytes(b"x" * 65536)
    with pytest.raises(ConfigError, match=r"^run.dir=.*disk: cannot write .*run.* \(No space left on device\)"):
        folder.begin("text: " + "x" * 5000, 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, called `first`, beside its cache."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(CORPUS, folder / "corpus")
    words = [*SMALL, "data.text_paths=[corpus]", "run.name=first"]
    code, output = run_command(folder, "train", *words)
    assert code == 0, output
    return folder


@pytest.fixture
def again(here: Path, trained: Path) -> Path:
    """The finished run, copied to where the test is."""
    shutil.copytree(trained / "runs", here / "runs")
    return here / "runs" / "first"


def test_a_folder_that_holds_a_run(again: Path, refused: Refused) -> None:
    message = refused("run.name=first")
    assert message == (
        "run.name=first: runs/first holds a run, with step_2; use run.resume=true to go on with it, "
        "run.name=first_2 to keep it, or run.overwrite=true to remove it"
    )
    (again / "notes.txt").write_text("mine")
    old = (again / "checkpoints" / "step_2").stat().st_ctime_ns
    assert main(["train", *SMALL, "data.text_paths=[corpus]", "run.name=first", "run.overwrite=true"]) == 0
    assert (again / "checkpoints" / "step_2").stat().st_ctime_ns > old
    assert (again / "notes.txt").exists(), "what a run has not written stays"


def test_going_on_from_nothing_or_from_something_damaged(again: Path, refused: Refused) -> None:
    message = refused("run.name=other", "run.resume=true")
    assert message.startswith("run.resume=true: ") and "runs/other" in message and "run.resume=false" in message
    message = refused("run.name=first", "run.resume=true", "train.steps=1")
    assert message.startswith(
        "train.steps=1: counts all steps of the run, and runs/first/checkpoints/step_2 is after 2; "
    )
    assert message.endswith("use train.steps=3 or more")
    checkpoint = again / "checkpoints" / "step_2"
    tensors, index = checkpoint / "rank_0.safetensors", checkpoint / "index.json"
    whole = tensors.read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    go_on = ["run.name=first", "run.resume=true", "train.steps=3"]
    tensors.write_bytes(flipped)
    assert "rank_0.safetensors: damaged" in refused(*go_on)
    for damage, told in [
        (lambda: tensors.write_bytes(whole[:-10]), "rank_0.safetensors: damaged, 1,6"),
        (lambda: tensors.unlink(), "rank_0.safetensors: missing"),
        (lambda: index.write_text("{"), "index.json: damaged"),
        (lambda: index.unlink(), "not complete, index.json is missing"),
    ]:
        damage()
        message = refused(*go_on)
        assert message.startswith("run.resume=true: no complete checkpoint in runs/first/checkpoints (")
        assert told in message and message.endswith("; start with run.resume=false run.overwrite=true")


def test_token_files_that_are_damaged(here: Path, refused: Refused, trained: Path) -> None:
    shutil.copytree(trained / "data_cache", here / "cache")
    (folder,) = (path for path in (here / "cache").iterdir() if path.is_dir())
    # The key of a cache holds the paths of its text: this one is asked for by the folder that it was made from.
    asked = [f"data.text_paths=[{trained}/corpus]", "data.cache_dir=cache", "run.name=x"]
    for name, damage, told in [
        ("train.idx", lambda content: content[:20], "train.idx: found 20 bytes, expected at least the 34"),
        ("train.idx", lambda content: b"x" * len(content), "train.idx: found magic bytes 7878"),
        ("train.bin", lambda content: content[:-2], "the file is cut short or belongs to another index"),
        ("corpus.json", lambda content: content[:5], "anew: "),
    ]:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(damage(content))
        message = refused(*asked)
        assert message.startswith(f"data.cache_dir={here}/cache: the token files in {folder} are damaged; delete that")
        assert told in message
        (folder / name).write_bytes(content)


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_ranks_that_do_not_fit_the_layout(refused: Refused) -> None:
    os.environ.update(TORCHRUN)
    assert refused("parallel.dp=4", "train.global_batch=8") == (
        "parallel.dp=4: with pp=1 x cp=1 x tp=1 needs 4 ranks, and 2 are given; start 4, or use parallel.dp=2"
    )
    assert refused("run.ranks=8") == "run.ranks=8: 2 ranks are given; leave it out, or use run.ranks=2"
    del os.environ["MASTER_PORT"]
    assert refused().endswith("start with torchrun or srun, which set all of them, or unset these and let moe-engine "
                              "start its own ranks")  # fmt: skip
    os.environ.update(TORCHRUN | {"WORLD_SIZE": "many"})
    assert refused() == "WORLD_SIZE=many: a whole number is expected in this environment variable"


def test_a_port_that_is_taken(here: Path) -> None:
    """In a process of its own: torch keeps a store that failed."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "moe_engine", "train", *SMALL, "data.text_paths=[corpus]"],
            env=os.environ | TORCHRUN | {"MASTER_PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: the ranks cannot meet there (")
    assert "a free port there, for example MASTER_PORT=" in line and "Traceback" not in done.stderr
    assert not (here / "runs").exists()


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of four GPUs, as torch would tell of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device_of_rank() == torch.device("cuda", 3)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(
        ConfigError, match="^LOCAL_RANK=4: each rank needs a GPU of its own, and this node has 4; start 4"
    ):
        device_of_rank()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_PROCID", "12")  # Slurm shows each task its own
    assert device_of_rank() == torch.device("cuda", 0)
