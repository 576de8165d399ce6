"""`train.kernels`: the form of grouped products reaches every one of a step, and is refused where it cannot be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import Case, config_of
from layouts import rank_batches
from torch import Tensor

import moe_kernels
from moe_engine.__main__ import main
from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import Config
from moe_engine.distributed.device import check_device
from moe_engine.ops import grouped_linear
from moe_engine.trainer import Trainer

PRODUCTS = ("grouped_gemm", "grouped_wgrad", "grouped_gemm_fp8", "grouped_wgrad_fp8")
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("kernels", ["auto", "triton", "hopper"])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_wide_wgrad"])
def test_every_product_of_a_step_is_told_its_form(
    precision: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward and weight gradients that waited; validation too."""
    case = Case(precision=precision, schedule="zb_h1", micro_batch=4, layers=2)
    config = config_of(case)
    config.train.kernels = kernels
    trainer = Trainer(config, 0, torch.device("cpu"))
    told: Counter[tuple[str, bool]] = Counter()

    def watched(name: str, product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run_it(*args: Any, hopper: bool | None = None, **options: Any) -> Tensor:
            told[name, hopper is (kernels == "hopper")] += 1
            return product(*args, **options)

        return run_it

    for place in (moe_kernels, grouped_linear):
        for name in PRODUCTS:
            if hasattr(place, name):
                monkeypatch.setattr(place, name, watched(name, getattr(place, name)))
    batches = rank_batches(trainer, case, 0)
    trainer.step(batches)
    trainer.evaluate(batches)
    gemm = "grouped_gemm" if precision == "bf16" else "grouped_gemm_fp8"
    wgrad = "grouped_wgrad_fp8" if precision == "fp8" else "grouped_wgrad"
    assert set(told) == {(gemm, True), (wgrad, True)}


@pytest.mark.parametrize(
    ("device", "capability", "here"),
    [(torch.device("cpu"), (9, 0), "there is no GPU here"), (GPU, (8, 0), "8.0"), (GPU, (10, 0), "10.0")],
)
def test_hopper_kernels_need_a_hopper(
    device: torch.device, capability: tuple[int, int], here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    config = Config()
    check_device(config, device)
    config.train.kernels = "hopper"
    with pytest.raises(ConfigError, match=f"^train.kernels=hopper: .*9.0 .*{here}.*; use train.kernels=auto"):
        check_device(config, device)


def test_a_hopper_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    config = Config()
    config.train.kernels = "hopper"
    check_device(config, GPU)


def test_they_are_refused_before_there_is_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all else that the machine cannot do; a job of another machine is checked all the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["train", "train.kernels=hopper", "moe.dispatch=nvshmem"]
    assert main([*words, "run.check=true"]) == 0
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["moe.dispatch=nvshmem", "train.kernels=hopper"]
    assert list(tmp_path.iterdir()) == []
