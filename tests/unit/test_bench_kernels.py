"""`moe-engine bench kernels` on a CPU: what it refuses, and that every op is checked, timed and recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_engine.__main__ import main
from moe_engine.bench import kernels, machine, record
from moe_engine.bench.kernel_ops import OPS, OURS


def test_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ["ops=[fprop]", "shapes=[4x1x100x128,3x4]", "rounds=0", "device=tpu", f"out={tmp_path}/file"]
    assert main(["bench", "kernels", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "Traceback" not in output.err
    for part in ("ops=[fprop]", "shapes=[4x1x100x128]", "shapes=[3x4]", "rounds=0", "device=tpu", "is a file"):
        assert part in output.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 2
    assert "there is no CUDA device here; device=cpu" in capsys.readouterr().err


def test_every_op_is_checked_timed_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = {"cpu": "", "cores": 1, "cpu_capability": "", "torch": "", "platform": "", "gpu": ""}
    rates = {"matrix_flops": {}, "copy_bytes": {}, "send_bytes": 1.0}
    monkeypatch.setattr(machine, "describe", lambda threads: known | {"ceilings": rates})
    monkeypatch.setattr(kernels, "_ceilings", lambda device: {"bf16": 1e11, "fp8": 1e11, "copy": 1e10})
    words = ["device=cpu", "shapes=[3x17x256x128]", "balanced=false", "rounds=2", "warmup=1", f"out={tmp_path}/b"]
    assert main(["bench", "kernels", *words]) == 0
    results = record.read(tmp_path / "b")
    ours = [result for result in results if result.candidate == OURS]
    assert [result.config["op"] for result in ours] == list(OPS)
    for result in results:
        assert result.verdict.passed and len(result.samples) == 2 and result.figures["share_of_ceiling"] > 0


def test_a_wrong_result_is_not_timed_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = kernels._operands(kernels._shape("2x8x256x128", True, torch.device("cpu")), seed=0)
    exact = OPS["fprop_bf16"].exact(operands)
    assert kernels._verdict("right", lambda: exact, exact, 1e-4).passed
    assert not kernels._verdict("wrong", lambda: exact.flip(0), exact, 1e-4).passed
    assert not kernels._verdict("nan", lambda: exact * float("nan"), exact, 1e-4).passed

    def broken() -> torch.Tensor:
        raise RuntimeError("not on this device\nmore")

    assert kernels._verdict("peer", broken, exact, 1e-4).text == "peer: not on this device"
