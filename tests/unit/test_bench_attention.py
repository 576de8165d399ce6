"""`moe-engine bench attention`: what it refuses, its truth, and that every case is checked, timed and recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_engine.__main__ import main
from moe_engine.bench import attention, machine, record
from moe_engine.model.core_attention import fused_attention


def test_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = [
        "heads=[4x3x8x8,4x4x8x16,4x4]",
        "dtypes=[fp16]",
        "lengths=[0,1]",
        "threads=[0]",
        "rounds=0",
        f"out={tmp_path}/file",
    ]
    assert main(["bench", "attention", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "Traceback" not in output.err
    for part in (
        "heads=[4x3x8x8]",
        "heads=[4x4x8x16]",
        "heads=[4x4]",
        "dtypes=[fp16]",
        "lengths=[0]",
        "lengths=[1]: must be 2 or more, for example lengths=[2]",
        "threads=[0]",
        "rounds=0",
    ):
        assert part in output.err
    assert "is a file" in output.err
    assert main(["bench", "attention", "heads=[]"]) == 2


def test_every_case_is_checked_timed_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = {"cpu": "", "cores": 1, "cpu_capability": "", "torch": "", "platform": "", "gpu": ""}
    rates = {"matrix_flops": {}, "copy_bytes": {}, "send_bytes": 1.0}
    monkeypatch.setattr(machine, "describe", lambda threads: known | {"ceilings": rates})
    device = torch.device("cpu")
    monkeypatch.setattr(attention, "run_ranks", lambda world, threads, function, *args: [function(0, device, *args)])
    words = ["heads=[4x2x12x8]", "lengths=[5,600]", "threads=[1]", "tokens=20", "rounds=2", f"out={tmp_path}/b"]
    assert main(["bench", "attention", *words]) == 0
    results = record.read(tmp_path / "b")
    assert len(results) == 2 * 2 * 2 * 2  # dtypes, lengths, phases, candidates
    for result in results:
        assert result.verdict.passed and len(result.samples) == 2 and result.figures["gflops"] > 0
    assert {result.config["rows"] for result in results} == {4, 1}


def test_what_a_case_shows() -> None:
    def case(ours: float, torchs: float, rounds: int) -> str:
        times = {"ours": ours, "torch": torchs}
        results = [
            record.Result("attention", f"{phase} fp32", name, "", [times[name]] * rounds, record.Verdict(True, ""))
            for phase in ("forward", "backward")
            for name in times
        ]
        (line,) = attention._shown(results)
        return line

    assert case(1.0, 2.0, 6).startswith("fp32: faster, 2.00x as fast as torch (95%: 2.00 … 2.00; best 2.00x;")
    assert case(2.0, 1.0, 6).startswith("fp32: slower, 0.50x") and case(1.0, 1.0, 6).startswith(
        "fp32: not shown, 1.00x"
    )
    assert case(1.0, 2.0, 5).startswith("fp32: not shown, 2.00x as fast as torch (rounds=6 give an interval;")


def test_the_truth_is_that_of_autograd() -> None:
    chance = torch.Generator().manual_seed(0)
    shapes = (1, 600, 2, 6), (1, 600, 1, 6), (1, 600, 1, 4), (1, 600, 2, 4)
    q, k, v, d_out = (torch.randn(*shape, generator=chance, dtype=torch.float64) for shape in shapes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjd->bhij", leaves[0], leaves[1][:, :, 0]) * 0.3
    hidden = torch.ones(600, 600, dtype=torch.bool).triu(1)
    out = torch.einsum("bhij,bje->bihe", scores.masked_fill(hidden, float("-inf")).softmax(dim=-1), leaves[2][:, :, 0])
    d_q, d_k, d_v = torch.autograd.grad(out, leaves, d_out)
    truth = attention._formula(q, k, v, d_out, 0.3)
    for found, right in zip(truth, (out[0], d_q[0], d_k[0, :, 0], d_v[0, :, 0]), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_a_wrong_result_fails() -> None:
    q, k, v, d_out = (torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(4))
    truth = attention._formula(q, k, v, d_out, 0.5)
    right = attention._verdict("right", lambda *x: fused_attention(*x, 0.5), (q, k, v), d_out, truth, 1e-10)
    wrong = attention._verdict("wrong", lambda *x: fused_attention(*x, 0.4), (q, k, v), d_out, truth, 1e-10)
    assert right.passed and not wrong.passed
