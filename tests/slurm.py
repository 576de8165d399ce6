"""A Slurm cluster of one node on this machine's loopback device, for as long as a `with` block lasts.

Munge (who signs what the daemons say), slurmctld and slurmd run as this user with their own keys, sockets, ports and
folders, so that they touch no cluster that the machine may belong to. Needs root, and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "squeue")

CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
# the node has as many CPUs as this file says, whatever the machine has
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why this machine cannot have a cluster; empty if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "not root"


@contextmanager
def cluster(folder: Path, cpus: int) -> Iterator[dict[str, str]]:
    """The environment in which sbatch, srun and squeue know the cluster, once its node is ready for `cpus` tasks."""
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    config = folder / "slurm.conf"
    controller_port, node_port = _free_ports(2)
    values = {"host": host, "folder": folder, "cpus": cpus}
    config.write_text(CONFIG.format(controller_port=controller_port, node_port=node_port, **values))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    environment["SLURM_CONF"] = str(config)
    with ExitStack() as daemons:
        daemons.enter_context(_daemon(_munge(folder), environment, folder / "munge.log"))
        daemons.enter_context(_daemon(["slurmctld", "-D", "-i"], environment, folder / "slurmctld.log"))
        daemons.enter_context(_daemon(["slurmd", "-D"], environment, folder / "slurmd.log"))
        _wait_until_idle(environment, folder)
        yield environment


def _munge(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    files |= {"log-file": folder / "munge-own.log", "seed-file": folder / "munge.seed"}
    return ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())]


@contextmanager
def _daemon(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        shown = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True).stdout
        if shown.strip() == "idle":
            return
        time.sleep(0.2)
    logs = "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(folder.glob("*.log")))
    raise AssertionError(f"the node is not ready after 120 s\n{logs}")


def _free_ports(count: int) -> list[int]:
    """Below those that systems give to connections, one of which might take a port before its daemon does."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(10000, 32768), 1000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"{found}: no {count} of 1000 ports are free")
