"""Which ranks are given, and how failures of ranks are told. Starting them for real: tests/dist/test_start.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from moe_engine.__main__ import main
from moe_engine.cli import launch
from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import Config
from moe_engine.config.threads import thread_variables

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2000"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


class FakeJob(types.ModuleType):
    """Stands in for moe_engine.job: remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__("moe_engine.job")
        self.configs: list[Config] = []

    def train(self, config: Config) -> None:
        self.configs.append(config)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> FakeJob:
    fake = FakeJob()
    monkeypatch.setitem(sys.modules, "moe_engine.job", fake)
    return fake


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The process's environment, empty of ranks, to be filled by a test."""
    fresh: dict[str, str] = {}
    monkeypatch.setattr("os.environ", fresh)
    return fresh


def test_torchruns_variables_are_taken_as_they_are() -> None:
    assert launch.given_ranks(TORCHRUN | SRUN) == TORCHRUN


def test_half_of_torchruns_variables_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="^RANK=1 LOCAL_RANK=1 .* not WORLD_SIZE, MASTER_PORT; start with torchrun"):
        launch.given_ranks({name: TORCHRUN[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR")})
    with pytest.raises(ConfigError, match="^WORLD_SIZE=two: a whole number"):
        launch.given_ranks(TORCHRUN | {"WORLD_SIZE": "two"})


def test_sruns_variables_are_translated() -> None:
    ranks = launch.given_ranks(SRUN)
    assert ranks is not None
    port = ranks.pop("MASTER_PORT")
    assert ranks == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu003"}
    assert 1024 < int(port) < 32768
    other = launch.given_ranks(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert other is not None and other["MASTER_PORT"] == port  # all ranks of a step meet at one port …
    later = launch.given_ranks(SRUN | {"SLURM_STEP_ID": "1"})
    assert later is not None and later["MASTER_PORT"] != port  # … which the job's next step does not share
    named = launch.given_ranks(SRUN | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"})
    assert named is not None and (named["MASTER_ADDR"], named["MASTER_PORT"]) == ("10.0.0.9", "4000")


def test_no_ranks_are_given_outside_of_torchrun_and_srun() -> None:
    assert launch.given_ranks({"PATH": "/bin"}) is None
    batch_script = {name: value for name, value in SRUN.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
    assert launch.given_ranks(batch_script) is None
    assert launch.given_ranks(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a1,b2", "a1"),
        ("gpu[003-007,9],login", "gpu003"),
        ("gpu[12]", "gpu12"),
        ("n[1,3]-ib,x", "n1-ib"),
        ("dgx-a.cluster.example", "dgx-a.cluster.example"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert launch.first_host(nodes) == first


def test_one_rank_trains_in_this_process(
    job: FakeJob, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert main(["train", "train.steps=3", "train.threads=2"]) == 0
    (config,) = job.configs
    assert config.train.steps == 3 and config.parallel.dp == 1 and config.pipeline.micro_batches == 4
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("0", "1", "0")
    assert environment["OMP_NUM_THREADS"] == "2" and int(environment["GOMP_SPINCOUNT"]) > 0


@pytest.mark.parametrize(
    ("said", "threads", "spins"),
    [({}, 1, None), ({"GOMP_SPINCOUNT": "7"}, 2, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, 2, None)],
)
def test_how_long_threads_wait_is_left_to_whoever_says_it(
    said: dict[str, str], threads: int, spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert thread_variables(threads).get("GOMP_SPINCOUNT") == spins


def test_more_threads_than_cores_are_refused(
    job: FakeJob, environment: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a job of other machines that is only checked here."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    words = ["train", "train.threads=3000", "train.steps=0"]
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("train.steps=0: ")
    assert told[1:] == ["train.threads=3000: of each rank, and this machine has 8 cores; use train.threads=8 or less"]
    assert main(["train", "train.threads=96", "run.check=true"]) == 2
    assert main(["train", "train.threads=96", "run.check=true", "run.ranks=4"]) == 0
    assert job.configs == []


def test_a_given_rank_trains_in_this_process(job: FakeJob, environment: dict[str, str]) -> None:
    environment.update(SRUN)
    assert main(["train", "train.global_batch=32"]) == 0
    assert job.configs[0].parallel.dp == 8  # all ranks given
    assert environment["RANK"] == "5" and environment["MASTER_ADDR"] == "gpu003"


def test_given_ranks_that_do_not_fit_are_refused_by_rank_0_first(
    job: FakeJob, environment: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    environment.update(TORCHRUN)
    assert main(["train", "experiment=quickstart"]) == 2
    assert len(slept) == 1  # rank 1 leaves rank 0 the time to speak; launchers then end it
    assert capsys.readouterr().err.startswith("rank 1: parallel.dp=2: with pp=2 x cp=1 x tp=1 needs 4 ranks")
    environment["RANK"] = "0"
    assert main(["train", "experiment=quickstart"]) == 2
    assert capsys.readouterr().err.startswith("parallel.dp=2: with pp=2 x cp=1 x tp=1 needs 4 ranks, and 2 are")
    assert job.configs == [] and len(slept) == 1


def test_more_ranks_are_started_with_the_same_words(
    job: FakeJob, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where no run of that name is
    started: list[tuple[list[str], int, int]] = []

    def start(command: list[str], world: int, threads: int) -> int:
        started.append((command, world, threads))
        return 7

    monkeypatch.setattr(launch, "start_local_ranks", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    words = ["train", "experiment=quickstart", "train.threads=3"]
    assert main(words) == 7
    assert started == [([sys.executable, "-m", "moe_engine", *words], 4, 3)]
    assert job.configs == []


def test_the_failures_of_a_lone_process_are_told_with_a_code(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.report(ConfigError("a=1: the rule; use a=2")) == 2
    assert capsys.readouterr().err == "a=1: the rule; use a=2\n"
    try:
        raise KeyError("lost")
    except KeyError as error:
        assert launch.report(error) == 1
    text = capsys.readouterr().err
    assert text.startswith("Traceback") and text.endswith("KeyError: 'lost'\n")


def record(folder: Path, rank: int, when: float, mistake: bool, text: str) -> None:
    content = {"rank": rank, "time": when, "mistake": mistake, "text": text}
    (folder / f"failure_{rank}.json").write_text(json.dumps(content))


def test_the_first_failure_is_told_and_its_echoes_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 0, 2.0, False, "connection closed by peer")
    record(tmp_path, 3, 1.0, False, "Traceback …\nZeroDivisionError: first")
    assert launch._explain(tmp_path, {0: 1, 3: 1}) == 1
    assert capsys.readouterr().err.splitlines() == [
        "rank 3 failed first:",
        "Traceback …",
        "ZeroDivisionError: first",
        f"all ranks have ended; what the ranks printed is in {tmp_path}",
    ]


def test_a_mistake_found_by_ranks_is_told_once_and_leaves_no_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for rank in (1, 0):
        record(folder, rank, 5.0 + rank, True, "run.resume=true: nothing to go on from")
    assert launch._explain(folder, {0: 2, 1: 2}) == 2
    assert capsys.readouterr().err == "run.resume=true: nothing to go on from\n"
    assert not folder.exists()


def test_a_rank_that_was_killed_is_told_with_its_last_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run" / "attempt_0" / "2" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(50)))
    assert launch._explain(tmp_path, {0: -15, 1: -15, 2: -9}) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rank 2 was killed by SIGKILL: often because memory ran out"
    assert lines[1:-1] == [f"line {number}" for number in range(50 - launch.LOG_LINES, 50)]


def test_a_rank_that_stood_still_until_it_was_killed_is_told_by_who_waited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failure_0.json").write_text(
        json.dumps(asdict(launch.Failure(0, 1.0, False, "rank 1 no longer answers", timed_out=True)))
    )
    assert launch._explain(tmp_path, {0: 1, 1: -9}) == 1
    assert capsys.readouterr().err.splitlines()[:2] == ["rank 0 failed first:", "rank 1 no longer answers"]


def test_a_rank_that_was_killed_comes_before_those_that_lost_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, 0, 1.0, False, "connection closed by peer")
    assert launch._explain(tmp_path, {0: 1, 1: -6, 2: -9}) == 1
    err = capsys.readouterr().err
    assert err.startswith("rank 2 was killed by SIGKILL") and "rank 0" not in err and "rank 1" not in err


LAUNCHER_OF_ONE = """
import os, subprocess, sys
from moe_engine.cli import launch
os.environ.update({launch.FAILURES: "none", launch.LAUNCHER: sys.argv[1] or str(os.getpid())})
rank = "import time; from moe_engine.cli import launch; launch.prepare_rank(); print('ready', flush=True)"
rank += "; time.sleep(5); print('alone')"
raise SystemExit(subprocess.run([sys.executable, "-c", rank]).returncode)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
def test_ranks_end_with_their_launcher() -> None:
    """Also where it is killed, or was gone before a rank had begun: such a rank's parent is another process."""
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True)
    with start([sys.executable, "-c", LAUNCHER_OF_ONE, ""]) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
        launcher.kill()
        assert launcher.stdout.read() == ""
    with start([sys.executable, "-c", LAUNCHER_OF_ONE, "1"]) as late:
        assert late.communicate()[0] == "" and late.returncode == 1
