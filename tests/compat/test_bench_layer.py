"""`moe-engine bench layer`: what it refuses, and that every peer is checked, its memory counted, and timed."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_engine.__main__ import main
from moe_engine.bench import layer, layer_peers, machine, record

SMALL = layer.Shape(32, 32, 8, 2)
CPU = torch.device("cpu")


def test_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = [
        "shapes=[gpt2]",
        "dtypes=[fp16]",
        "tokens=0",
        "rounds=0",
        "seconds=0",
        "scale=-1",
        "threads=3000",
        "gradients=lost",
        f"out={tmp_path}/file",
    ]
    assert main(["bench", "layer", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "Traceback" not in output.err
    for part in (
        "shapes=[gpt2]",
        "mixtral_8x7b",
        "dtypes=[fp16]",
        "tokens=0",
        "rounds=0",
        "seconds=0",
        "scale=-1",
        "threads=3000: this machine has",
        "gradients=lost: they are dropped or kept",
        "is a file",
    ):
        assert part in output.err
    assert main(["bench", "layer", "shapes=[]"]) == 2


def test_every_case_is_checked_counted_timed_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = {"cpu": "", "cores": 1, "cpu_capability": "", "torch": "", "platform": "", "gpu": ""}
    rates = {"matrix_flops": {}, "copy_bytes": {}, "send_bytes": 1.0}
    monkeypatch.setattr(machine, "describe", lambda threads: known | {"ceilings": rates})
    monkeypatch.setattr(layer, "run_ranks", lambda world, threads, function, *args: [function(0, CPU, *args)])
    words = ["shapes=[mixtral_8x7b]", "scale=128", "tokens=24", "rounds=5", "seconds=1e-9", f"out={tmp_path}/b"]
    assert main(["bench", "layer", *words]) == 0
    results = record.read(tmp_path / "b")
    assert {r.candidate for r in results} >= {
        "moe_engine", "torch_grouped_mm", "transformers_eager", "transformers_moe_engine"
    }  # fmt: skip
    for result in results:
        assert result.verdict.passed and len(result.samples) == 2 and result.figures["tokens_per_s"] > 0
        assert result.figures["cpu_ms"] > 0 and result.figures.keys() >= layer.SPENT.keys()
        assert ("saved_mb" in result.figures) == result.case.startswith("both")
    report = (tmp_path / "b" / "report.md").read_text()
    assert "x as fast as" in report and "of what eager experts keep" in report and "* megablocks: not " in report
    assert "as experts_implementation=moe_engine" in report
    assert (tmp_path / "b" / "plot.svg").exists()


@pytest.mark.parametrize("taken", [2, 3, 7, 15])
def test_a_slow_candidate_takes_part_in_fewer_rounds_evenly_spread(taken: int) -> None:
    rounds = [index for index in range(15) if layer._takes_part(index, taken, 15)]
    gaps = [b - a for a, b in zip(rounds, rounds[1:], strict=False)]
    assert len(rounds) == taken and max(gaps) - min(gaps) <= 1


def test_gradients_are_dropped_or_added_to() -> None:
    inputs, d_out = layer.make_inputs(SMALL, 20, torch.float32, CPU)
    layer._time_both(layer_peers.ours, inputs, d_out, keep=False)
    assert all(leaf.grad is None for leaf in inputs.leaves())
    for _ in range(2):
        layer._time_both(layer_peers.ours, inputs, d_out, keep=True)
    for leaf, once in zip(inputs.leaves(), layer.outcome(layer_peers.ours, inputs, d_out)[1:], strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, 2 * once)


def test_pages_and_processor_time_of_a_call_are_those_it_took() -> None:
    inputs, _ = layer.make_inputs(SMALL, 4, torch.float32, CPU)
    memory: list[Tensor] = []
    spent = layer._spent(inputs, lambda: memory.append(torch.zeros(64 << 20, dtype=torch.uint8)))
    assert spent["page_faults"] >= 32 and spent["seconds"] > 0  # huge pages, if the system gives them unasked
    assert layer._spent(inputs, lambda: time.sleep(0.05))["cpu_ms"] < 50


def test_who_was_timed_less_often_is_said() -> None:
    right = record.Verdict(True, "")
    fast, slow = (record.Result("layer", "both", name, "", [1.0] * n, right) for name, n in (("a", 9), ("b", 2)))
    assert layer._fewer([fast, slow]) == ["* both: timed calls fewer than 9, for they are slow: b 2"]
    assert layer._fewer([fast, fast]) == []


def test_a_wrong_peer_fails_whether_in_its_output_or_a_gradient() -> None:
    inputs, d_out = layer.make_inputs(SMALL, 20, torch.float32, CPU)
    truth = layer.outcome(layer_peers.dense_loop, layer._wide(inputs), d_out.double())

    def detached(inputs: layer_peers.Inputs) -> Tensor:
        return layer_peers.ours(inputs) + 0 * inputs.weights.sum() - inputs.down.sum() + inputs.down.detach().sum()

    bound = layer.BOUNDS["fp32"]
    assert layer.verdict("right", layer_peers.ours, inputs, d_out, truth, bound).passed
    assert not layer.verdict("twice", lambda i: 2 * layer_peers.ours(i), inputs, d_out, truth, bound).passed
    assert not layer.verdict("gradient", detached, inputs, d_out, truth, bound).passed


def test_memory_is_that_of_what_forward_keeps() -> None:
    inputs, d_out = layer.make_inputs(layer.Shape(64, 64, 8, 2), 100, torch.float32, CPU)

    def two_copies(inputs: layer_peers.Inputs) -> Tensor:
        return (inputs.x * 2).exp() * 3  # exp keeps its output, the products nothing

    kept = layer.count_memory(lambda i: two_copies(i) + 0 * sum(leaf.sum() for leaf in i.leaves()), inputs, d_out)
    assert kept["saved_mb"] == pytest.approx(100 * 64 * 4 / 1e6)
    ours = layer.count_memory(layer_peers.ours, inputs, d_out)
    assert ours["peak_mb"] > ours["saved_mb"] + inputs.gate_up.nbytes / 1e6


def test_sizes_are_scaled_to_the_device() -> None:
    assert layer.SHAPES["deepseek_v3"].scaled(8) == layer.Shape(896, 256, 64, 8)
    assert layer.SHAPES["mixtral_8x7b"].scaled(8) == layer.Shape(512, 1792, 8, 2)
    assert layer.SHAPES["olmoe"].scaled(1) is layer.SHAPES["olmoe"]
    assert layer.SHAPES["olmoe"].scaled(1000) == layer.Shape(32, 32, 16, 8)


def test_absent_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name in ("scattermoe", "megablocks") else None
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, missing = layer_peers.candidates(layer.make_inputs(SMALL, 4, torch.float32, CPU)[0])
    assert list(found) == ["moe_engine", "torch_grouped_mm"]
    assert missing["scattermoe"].startswith("not run") and missing["transformers_eager"] == "not installed"
    assert missing["megablocks"].startswith("not run: backend=megablocks: its kernels need CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "bf16 alone" in layer_peers.candidates(layer.make_inputs(SMALL, 4, torch.float32, CPU)[0])[1]["megablocks"]
    assert "megablocks" in layer_peers.candidates(layer.make_inputs(SMALL, 4, torch.bfloat16, CPU)[0])[0]
    monkeypatch.undo()
    monkeypatch.setattr(layer_peers, "LARGEST_COPY", 1)
    _, missing = layer_peers.candidates(layer.make_inputs(SMALL, 4, torch.float32, CPU)[0])
    assert missing["transformers_batched_mm"].startswith("not run: copies")
