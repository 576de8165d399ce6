"""How the ranks of a job start, and how their failures come back to the person at the terminal.

Ranks are given (torchrun sets RANK and WORLD_SIZE, Slurm's srun sets SLURM_PROCID and its kin) or started here, on
this machine, through torch's elastic launcher. Of ranks started here only rank 0 writes to the terminal; the others
write to log files. A rank that fails leaves a record in a folder that the launcher names, so that the first failure
is printed once and the echoes of the others ("connection closed by peer") are not. A failure ends all ranks.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_engine.config.errors import ConfigError
from moe_engine.config.threads import thread_variables

FAILURES = "MOE_ENGINE_FAILURES"  # environment: the folder for records of failure, set for ranks started here
LAUNCHER = "MOE_ENGINE_LAUNCHER"  # environment: the process that started this rank
PARENT_DEATH_SIGNAL = 1  # Linux's PR_SET_PDEATHSIG: which signal comes when the process that started this one ends
CONSEQUENCES = (signal.SIGTERM, signal.SIGABRT)  # the launcher ends ranks so; a communicator that lost a peer aborts
LOG_LINES = 20  # of a rank that died without a record
ECHO_S = 2.0  # for rank 0 to tell of a mistake that all ranks find; launchers end all ranks as soon as one fails


@dataclass(frozen=True)
class Failure:
    """Why a rank ended."""

    rank: int
    time: float  # seconds since the epoch
    mistake: bool  # the user's, not a fault: exit code 2
    text: str
    timed_out: bool = False  # it waited for a rank that stood still, which only the launcher then killed


def given_ranks(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The variables that a rank needs (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), if ranks were given.

    None where this process is the only one. Raises ConfigError if half of them are there.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _torchrun_ranks(environment)
    # In a batch script outside srun there is a SLURM_NTASKS, but no step: one process, which must not wait for others.
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
        if tasks != "1":
            return _slurm_ranks(environment, tasks)
    return None


def _torchrun_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environment]
    if missing:
        there = " ".join(f"{name}={environment[name]}" for name in needed if name in environment)
        raise ConfigError(
            f"{there}: the environment names a rank but not {', '.join(missing)}; start with torchrun or srun, "
            "which set all of them, or unset these and let moe-engine start its own ranks"
        )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not environment[name].isdecimal():
            raise ConfigError(f"{name}={environment[name]}: a whole number is expected in this environment variable")
    return {name: environment[name] for name in needed}


def _slurm_ranks(environment: Mapping[str, str], tasks: str) -> dict[str, str]:
    """Slurm's names for the same things; the first node of the step is where ranks meet."""
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    port = 20000 + (int(job) * 16 + int(step)) % 10000  # other jobs on the node meet elsewhere
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(nodes)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: `gpu[003-007,9],login` gives `gpu003`."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^\[,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def started_here(environment: Mapping[str, str]) -> bool:
    """Whether this rank was started by `start_local_ranks`, after everything had been checked."""
    return FAILURES in environment


def lone_rank() -> dict[str, str]:
    """The variables of a world of one, which opens no port."""
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def start_local_ranks(command: Sequence[str], world: int, threads: int) -> int:
    """Run `command` as `world` ranks on this machine; returns the exit code once all of them have ended."""
    with interrupt_ends_at_once():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Its reports of failed children would stand beside ours.
    elastic_logger = logging.getLogger("torch.distributed.elastic")
    elastic_logger.addHandler(logging.NullHandler())
    elastic_logger.propagate = False

    folder = Path(tempfile.mkdtemp(prefix="moe-engine-ranks-"))
    os.environ.update({FAILURES: str(folder), LAUNCHER: str(os.getpid()), **thread_variables(threads)})
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(folder), redirects={rank: Std.NONE if rank == 0 else Std.ALL for rank in range(world)}
        ),
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return _explain(folder, exits)
    except SignalException as error:
        print("interrupted: all ranks have ended", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        return 128 + int(error.sigval)
    finally:
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # the progress bar of a rank that was killed has left the cursor hidden
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _explain(folder: Path, exits: Mapping[int, int]) -> int:
    """Print why the ranks failed; returns the exit code. The log files of a mistake are of no use and go."""
    records = [Failure(**json.loads(path.read_text())) for path in folder.glob("failure_*.json")]
    killed = sorted(rank for rank, code in exits.items() if code < 0 and -code not in CONSEQUENCES)
    first = min(records, key=lambda failure: failure.time, default=None)
    if first is None or (killed and not first.timed_out):
        # What the others then told, of connections that closed, would only mislead.
        ended_by_launcher = {rank for rank, code in exits.items() if code == -signal.SIGTERM}
        for rank in killed or sorted(exits.keys() - ended_by_launcher or ended_by_launcher):
            print(f"rank {rank} {_cause(exits[rank])}\n{_log_tail(folder, rank)}", file=sys.stderr)
    elif first.mistake:
        print(first.text, file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        return 2
    else:
        print(f"rank {first.rank} failed first:\n{first.text}", file=sys.stderr)
    print(f"all ranks have ended; what the ranks printed is in {folder}", file=sys.stderr)
    return 1


def _cause(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    hint = ": often because memory ran out" if exitcode == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exitcode).name}{hint}"


def _log_tail(folder: Path, rank: int) -> str:
    """The last lines of a rank's stderr (rank 0's went to the terminal)."""
    lines = [
        line for log in folder.rglob(f"{rank}/stderr.log") for line in log.read_text(errors="replace").splitlines()
    ]
    return "\n".join(lines[-LOG_LINES:])


@contextmanager
def interrupt_ends_at_once() -> Iterator[None]:
    """For the import of torch, parts of which swallow the KeyboardInterrupt of a Ctrl-C and go on."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def prepare_rank() -> None:
    """In a rank started here: an interrupt ends it at once (it may be waiting in a collective), without a traceback.

    So does, on Linux, the end of the launcher, also by SIGKILL: ranks left alone would train on and write checkpoints
    beside those of the run that is started again.
    """
    if not started_here(os.environ):
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != int(os.environ[LAUNCHER]):  # it ended before this process could ask for the signal
            os._exit(1)


def report(error: Exception) -> int:
    """Tell of a failure, here or through the launcher; returns the exit code: 2 for a mistake of the user, else 1."""
    mistake = isinstance(error, ConfigError)
    text = str(error) if mistake else "".join(traceback.format_exception(error)).rstrip()
    code = 2 if mistake else 1
    rank = int(os.environ.get("RANK", "0"))
    if started_here(os.environ):
        record = Failure(rank, time.time(), mistake, text, getattr(error, "timed_out", False))
        path = Path(os.environ[FAILURES]) / f"failure_{rank}.json"
        path.with_suffix(".part").write_text(json.dumps(asdict(record)))
        path.with_suffix(".part").rename(path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the communicators' threads must not keep a failed rank alive
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if mistake and rank != 0:
        time.sleep(ECHO_S)
    print(text if alone or (mistake and rank == 0) else f"rank {rank}: {text}", file=sys.stderr)
    return code
