"""Two "hosts" on one Linux machine, joined by a wire whose rate is known.

Two network namespaces hold the two ends of a veth pair; a token bucket (tc-tbf) on each end limits what leaves it.
Processes started with `TwoHosts.run` see their own loopback and the wire, nothing else, so that two torchrun agents
have to meet as two machines would, and communication takes the time the wire gives it: overlap with computation can
be measured for real. Needs root and iproute2.

    with TwoHosts(rate_mbit=200) as hosts:
        ranks = [hosts.run(host, ["torchrun", …, "--master-addr", hosts.addresses[0], …]) for host in (0, 1)]
        codes = [rank.wait() for rank in ranks]
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from moe_engine.config.errors import ConfigError

DEVICE = "link0"  # the wire's end in each namespace
_PREFIX = "moe-engine"  # names are <prefix>-<maker's pid>-<its start time>-<pair>-<host>
_GRACE_S = 5.0  # for killed processes to go


class TwoHosts:
    """A context manager: the namespaces are there inside the `with` block, and gone after it with all that ran there.

    `rate_mbit`: what the wire carries each way, in 10^6 bits a second; None: as fast as the kernel copies.
    `latency_ms`: the longest that a packet waits in the token bucket's queue, tc-tbf's `latency`: the queue's length.
    `burst_kb`: KiB that may leave at once after a pause, tc-tbf's `burst`.

    What an earlier process left, because it was killed inside its `with` block, is removed first.
    Raises ConfigError where the machine cannot do it (not Linux, not root, no iproute2, a kernel without veth or tbf).
    """

    addresses = ("198.18.0.1", "198.18.0.2")  # from the range for benchmarks of networks (RFC 2544)

    def __init__(self, rate_mbit: float | None = None, latency_ms: float = 400.0, burst_kb: int = 256) -> None:
        if rate_mbit is not None and rate_mbit <= 0:
            raise ConfigError(f"rate_mbit={rate_mbit}: must be larger than 0, for example rate_mbit=200")
        self.rate_mbit, self.latency_ms, self.burst_kb = rate_mbit, latency_ms, burst_kb
        owner = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(4)}"
        self.names = (f"{owner}-a", f"{owner}-b")

    def __enter__(self) -> TwoHosts:
        require()
        remove_left_over()
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name in self.names:
            _remove(name)

    def environment(self) -> dict[str, str]:
        """The variables that keep Gloo, NCCL and torch's RPC on the wire."""
        return {name: DEVICE for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")}

    def run(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start `command` on host 0 or 1, in a session of its own.

        `env` is added to this process's environment and `environment()`; `options` are Popen's (stdout, cwd, text …).
        """
        variables = {**os.environ, **self.environment(), **(env or {})}
        words = ["ip", "netns", "exec", self.names[host], *command]
        return subprocess.Popen(words, env=variables, start_new_session=True, **options)

    def _make(self) -> None:
        first, second = self.names
        for name in self.names:
            _tool("ip", "netns", "add", name)
        # Both ends are made inside the namespaces, so their names cannot clash with the machine's own devices.
        _tool("ip", "link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            # No IPv6 address: Gloo would take a link-local one, which means nothing on the other host.
            _tool("ip", "-n", name, "link", "set", DEVICE, "addrgenmode", "none")
            _tool("ip", "-n", name, "address", "add", f"{address}/30", "dev", DEVICE)
            _tool("ip", "-n", name, "link", "set", "lo", "up")
            _tool("ip", "-n", name, "link", "set", DEVICE, "up")
            if self.rate_mbit is not None:
                limit = ["rate", f"{self.rate_mbit}mbit", "burst", f"{self.burst_kb}kb"]
                limit += ["latency", f"{self.latency_ms}ms"]
                _tool("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)


def require() -> None:
    """Raises ConfigError if this machine and user cannot make network namespaces."""
    if sys.platform != "linux":
        raise ConfigError(f"platform={sys.platform}: network namespaces are Linux's; run this on Linux")
    if os.geteuid() != 0:
        raise ConfigError(f"user={os.geteuid()}: making network namespaces needs root; run as root, with sudo say")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)}: not found on PATH; install iproute2 (Debian: apt install iproute2)"
        )


def remove_left_over() -> None:
    """Remove the namespaces whose maker no longer runs, with what still runs in them."""
    for line in _tool("ip", "netns", "list").splitlines():
        name = line.split()[0] if line else ""
        parts = name.removeprefix(f"{_PREFIX}-").split("-")
        if name.startswith(f"{_PREFIX}-") and len(parts) == 4 and _start_time(int(parts[0])) != parts[1]:
            _remove(name)


def _start_time(pid: int) -> str:
    """When a process started, in ticks since boot: with the pid, what tells it from a later one. Empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _remove(name: str) -> None:
    """Kill what runs in a namespace and delete it; the wire goes with either end. Harmless if there is none."""
    if not Path("/run/netns", name).exists():
        return
    end = time.monotonic() + _GRACE_S
    while (pids := _tool("ip", "netns", "pids", name).split()) and time.monotonic() < end:
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    try:
        _tool("ip", "netns", "delete", name)
    except ConfigError:
        if Path("/run/netns", name).exists():  # else another process has cleaned up at the same time
            raise


def _tool(*command: str) -> str:
    """What the command prints. Raises ConfigError with its complaint if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
