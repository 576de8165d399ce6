"""Two network namespaces as two hosts: they reach each other and nothing else, and nothing of them is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from forked import gone
from run_folder import without_times

from moe_engine.bench import namespaces
from moe_engine.bench.namespaces import DEVICE, TwoHosts
from moe_engine.config.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "corpus"
PORT = 29500  # of a namespace: nobody else's


@pytest.fixture
def possible() -> None:
    """Skips where the machine or the user may not make namespaces."""
    try:
        namespaces.require()
    except ConfigError as error:
        pytest.skip(str(error))


def python(hosts: TwoHosts, host: int, program: str, *words: str) -> subprocess.Popen[str]:
    return hosts.run(host, [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True)


def existing() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 29500)) as server:
    connection, peer = server.accept()
    print(peer[0], connection.recv(100).decode())
"""
CALL = """
import socket, sys, time
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 29500))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
connection.sendall(b"hello")
print([name for _, name in socket.if_nameindex()])
"""


def test_two_hosts_reach_each_other_and_leave_nothing(possible: None) -> None:
    with TwoHosts(rate_mbit=100, burst_kb=64) as hosts:
        assert set(hosts.names) <= existing()
        listener = python(hosts, 0, LISTEN, hosts.addresses[0])
        caller = python(hosts, 1, CALL, hosts.addresses[0])
        assert listener.communicate(timeout=240)[0] == f"{hosts.addresses[1]} hello\n"
        assert eval(caller.communicate(timeout=240)[0]) == ["lo", DEVICE]
        for name in hosts.names:
            show = ["tc", "-n", name, "qdisc", "show", "dev", DEVICE]
            shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
            assert re.search(r"tbf .*rate 100Mbit burst 64Kb lat 400ms", shown)
        forgotten = hosts.run(0, ["sleep", "1000"])
        show, shown = ["ip", "netns", "pids", hosts.names[0]], ""
        while not shown:  # it takes a moment to get there
            shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert not existing().intersection(hosts.names)
    assert forgotten.wait(120) == -9 and forgotten.pid == int(shown)


def test_what_a_killed_process_left_is_removed_by_the_next(possible: None) -> None:
    program = (
        "import os, subprocess; from moe_engine.bench.namespaces import TwoHosts\n"
        "with TwoHosts() as hosts:\n"
        "    sleeper = hosts.run(1, ['sleep', '1000'], stdout=subprocess.DEVNULL)\n"
        "    print(*hosts.names, sleeper.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=240)
    first, second, pid = killed.stdout.split()
    assert {first, second} <= existing()
    with TwoHosts() as hosts:
        assert not existing().intersection((first, second))
        with TwoHosts() as others:  # those of a process that runs stay
            assert {*hosts.names, *others.names} <= existing()
    assert gone(int(pid))


def test_what_cannot_be_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="rate_mbit=0: must be larger than 0, for example rate_mbit=200"):
        TwoHosts(rate_mbit=0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="user=1000: making network namespaces needs root"):
        TwoHosts().__enter__()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="ip and tc: not found on PATH; install iproute2"):
        TwoHosts().__enter__()


WORDS = [
    "experiment=quickstart", "precision=fp32", "train.steps=3", "train.seq_len=64", "train.eval_sequences=8",
    "train.sample_tokens=0", "data.validation_fraction=0.3", f"data.text_paths=[{CORPUS}]", "run.name=run",
]  # fmt: skip


def torchrun(node: int, master: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    return [*launcher, f"--node-rank={node}", f"--master-addr={master}", f"--master-port={PORT}", "-m", "moe_engine"]


def pod(node: int, master: str, options: list[str]) -> tuple[list[str], dict[str, str]]:
    """What a pod of launch/kubernetes.yaml runs, with the variables that it would have."""
    _, job = yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert environment["NODES"] == "2"
    changed = {"RANKS_PER_NODE": "2", "MASTER": master, "OPTIONS": " ".join(options), "JOB_COMPLETION_INDEX": str(node)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return [*container["command"], *container["args"]], environment | changed | {"PATH": path}


@pytest.mark.slow
def test_two_nodes_train_what_one_node_trains(possible: None, tmp_path: Path) -> None:
    """Two namespaces, each with its own torchrun agent of two ranks, that meet over the wire; then as two pods."""
    words = [*WORDS, f"data.cache_dir={tmp_path}/cache"]
    alone = [sys.executable, "-m", "moe_engine", "train", *words, f"run.dir={tmp_path}/one"]
    subprocess.run(alone, check=True, timeout=240, stdout=subprocess.DEVNULL)
    for way in ("torchrun", "pods"):
        with TwoHosts() as hosts:
            agents = []
            for node in (0, 1):
                options = [*words, f"run.dir={tmp_path}/{way}"]
                command, variables = [*torchrun(node, hosts.addresses[0]), "train", *options], {"OMP_NUM_THREADS": "1"}
                if way == "pods":
                    command, variables = pod(node, hosts.addresses[0], options)
                agents.append(
                    hosts.run(
                        node, command, variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                    )
                )
            outputs = [agent.communicate(timeout=240)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
        assert "4 ranks" in outputs[0]
        expected, found = (without_times(tmp_path / name / "run") for name in ("one", way))
        assert len(expected) == 3 and found == expected
