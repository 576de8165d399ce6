"""The run folder and what a person sees of a run: metrics, TensorBoard, the loss picture, the progress bar.

    runs/<name>/config.yaml        the resolved configuration
                environment.json   versions, machine, commit
                metrics.jsonl      one object per step
                trace.json, trace.svg   one step as it happened, with trace.enabled (see pipeline.trace)
                tb/                TensorBoard
                loss.png           loss over steps
                expert_load.png    tokens by MoE layer and expert over steps; expert_load.safetensors: its numbers
                checkpoints/       see checkpoint.store

MFU is model FLOPs (causal half of attention counted, recompute not) over the matrix rate that this machine
reached in a short measurement at start: no peak is taken from a table.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe_engine import one_writer
from moe_engine.config.errors import ConfigError
from moe_engine.distributed.collectives import Communicator
from moe_engine.expert_load import LoadFigures, LoadHistory

PROBE_SECONDS = 0.5
PROBE_SIZE = 512


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this rank has held: what tensors took on a GPU, on a CPU the whole process, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Losses in nats per valid target; rates are those of the whole job.

    step: from 1, so that step n is what led to the checkpoint `step_n`; its loss is that of the weights before.
    tokens: valid main targets of this step; mfu: fraction of the measured matrix rate; model_tflops: TFLOP/s.
    Of the MoE layer where they are worst: expert_load_max_over_mean, rank_load_max_over_mean and expert_load_entropy;
    dead_experts: over all layers; expert_load_by_layer: these figures of each layer, see `expert_load.LoadFigures`.
    dropped_share: of all choices of experts, those that moe.capacity_factor dropped, where it is set. Only in steps
    after which experts moved: experts_moved; rank_load_before and rank_load_after, the predicted max/mean in the layer
    where it is largest; placement_s, what it took. Only with trace.enabled: pipeline_s, the pass over all actions;
    bubble_per_rank, each rank's idle fraction of it; exposed_communication_s_per_rank, see pipeline.trace.
    """

    step: int
    loss: float
    mtp_loss: float
    aux_loss: float
    z_loss: float
    total_loss: float
    tokens: int
    tokens_seen: int
    lr: float
    grad_norm: float
    skipped: bool
    expert_load_max_over_mean: float
    rank_load_max_over_mean: float
    expert_load_entropy: float
    dead_experts: int
    expert_load_by_layer: dict[str, LoadFigures]
    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_rank: float
    model_tflops: float
    mfu: float
    dropped_share: float | None = None
    experts_moved: int | None = None
    rank_load_before: float | None = None
    rank_load_after: float | None = None
    placement_s: float | None = None
    pipeline_s: float | None = None
    bubble_per_rank: list[float] | None = None
    exposed_communication_s_per_rank: list[float] | None = None


def measure_matrix_rate(world: Communicator, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of square matrix products by all ranks at the same time, summed over the ranks.

    Ranks that share a machine compete here as they do in training, so the sum is that machine's rate. It is the
    better of `dtype` and fp32: a CPU without 16-bit products computes bf16 matrices in fp32.
    """
    rates = torch.tensor([_own_rate(world, each, device) for each in dict.fromkeys((dtype, torch.float32))])
    return float(world.all_reduce_sum(rates.double().to(device), "matrix rate").max())


def _own_rate(world: Communicator, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.randn(PROBE_SIZE, PROBE_SIZE, device=device).to(dtype)
    b = torch.randn(PROBE_SIZE, PROBE_SIZE, device=device).to(dtype)

    def product() -> None:
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    product()
    world.barrier()
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < PROBE_SECONDS:
        product()
        count += 1
    return count * 2.0 * PROBE_SIZE**3 / elapsed


class RunFolder:
    """Writes one run's results; made on the one rank that reports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        with self._writing():
            path.mkdir(parents=True, exist_ok=True)
        self._tensorboard: Any = None
        self._first_step = 1
        self._held: int | None = None

    def hold(self) -> None:
        """Let no other run write here until this one has ended. Raises ConfigError where another does."""
        self._held = one_writer.hold(self.path)
        if self._held is None:
            name = self.path.name
            raise ConfigError(
                f"run.name={name}: another run is writing {self.path}; use another name, for example run.name={name}_2"
            )

    def release(self) -> None:
        """Others may write here now."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def begin(self, config_yaml: str, steps_done: int) -> None:
        """Record what runs and where. Lines of steps after `steps_done`, left by an earlier try, are dropped."""
        self._first_step = steps_done + 1
        kept = [line for line in self._from_1(self.history()) if line["step"] <= steps_done]
        temporary = self.metrics_path.with_suffix(".tmp")
        with self._writing():
            (self.path / "config.yaml").write_text(config_yaml)
            (self.path / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
            temporary.replace(self.metrics_path)

    @staticmethod
    def _from_1(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The lines with steps counted from 1; an older version counted from 0."""
        older = any(line["step"] == 0 for line in lines)
        return [line | {"step": line["step"] + older} for line in lines]

    def history(self) -> list[dict[str, Any]]:
        """The metrics so far; a last line cut short by a kill is left out."""
        if not self.metrics_path.exists():
            return []
        found = []
        for line in self.metrics_path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return found

    def write(self, metrics: StepMetrics) -> None:
        values = {name: value for name, value in asdict(metrics).items() if value is not None}
        with self._writing(), self.metrics_path.open("a") as file:
            file.write(json.dumps(values) + "\n")
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and not needed by other ranks

            self._tensorboard = SummaryWriter(str(self.path / "tb"), purge_step=self._first_step)
        for name, value in _scalars(values):
            if name != "step":
                self._tensorboard.add_scalar(name, value, metrics.step)

    def save_loads(self, loads: LoadHistory) -> None:
        """Keep the loads so far beside a checkpoint, for a resumed run to go on with."""
        with self._writing():
            loads.save()

    def finish(self, summary: dict[str, Any], loads: LoadHistory) -> None:
        """Close TensorBoard, draw loss.png and expert_load.png, and write summary.json."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        with self._writing():
            (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            draw_losses(self.history(), summary, self.path / "loss.png")
            loads.draw(self.path / "expert_load.png")
        self.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A disk that cannot be written is no fault of the program: told by its option."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"run.dir={self.path.parent}: cannot write {error.filename or self.path} ({error.strerror}); free some "
                "space there, or use another folder, for example run.dir=/tmp/runs"
            ) from error


def _scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics: a list by its mean, what is inside others with a path of names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", sum(value) / len(value) if isinstance(value, list) else value


def draw_losses(history: list[dict[str, Any]], summary: dict[str, Any], path: Path) -> None:
    """Training loss over steps; horizontal lines for the validation loss and the bigram baseline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([line["step"] for line in history], [line["loss"] for line in history], label="training")
    for name, style in (("validation_loss", "--"), ("bigram_loss", ":")):
        if summary.get(name) is not None:
            axes.axhline(summary[name], linestyle=style, color="grey", label=name.replace("_", " "))
    axes.set(xlabel="step", ylabel="nats per target")
    axes.legend()
    figure.savefig(path, dpi=120)


def environment() -> dict[str, Any]:
    """Versions and machine, for whoever reads the run folder later."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(Path(__file__)),
    }


def _commit(source: Path) -> str | None:
    """Of the checkout that a file is from; None for an installed copy, which may lie inside another repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=source.parent, capture_output=True, text=True).stdout.strip()

    try:
        return (git("ls-files", source.name) and git("rev-parse", "--verify", "--quiet", "HEAD")) or None
    except OSError:  # no git here
        return None


@contextmanager
def progress(console: Console, total: int, done: int) -> Iterator[Progress]:
    """A bar with loss, tokens/s, MFU and expert load; plain lines where the output is no terminal."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        bar.add_task("train", total=total, completed=done, shown="")
        yield bar


def shown(metrics: StepMetrics) -> str:
    """The figures of a step as one short line."""
    parts = [
        f"loss {metrics.loss:.4f}",
        f"{metrics.tokens_per_s:,.0f} tokens/s",
        f"MFU {metrics.mfu:.1%}",
        f"expert load max/mean {metrics.expert_load_max_over_mean:.2f}, of ranks {metrics.rank_load_max_over_mean:.2f}",
    ]
    if metrics.dropped_share is not None:
        parts.append(f"choices dropped {metrics.dropped_share:.1%}")
    if metrics.skipped:
        parts.append(f"skipped: gradient norm {metrics.grad_norm}")
    return "  ".join(parts)
