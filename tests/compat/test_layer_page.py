"""Every block of code in docs/layer.md runs as it is printed (one in smaller sizes), with what is there already."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MIXTRAL, V2_LITE, random_model
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from moe_engine import MoEConfig, MoELayer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layer.md"
BLOCKS = dict(zip(
    ["alone", "own router", "ranks", "transformers", "whole model", "megablocks"],
    re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), strict=True,
))  # fmt: skip


def run(name: str, **given: Any) -> dict[str, Any]:
    names: dict[str, Any] = {"torch": torch, "loss": lambda y: y.square().mean()} | given
    exec(BLOCKS[name].replace("=1024", "=32").replace("=2048", "=48"), names)
    return names


def test_the_layer_alone_with_the_functions_and_in_place_of_megablocks() -> None:
    found = run("alone", x=torch.randn(2, 5, 256), optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    layer = found["layer"]
    assert found["y"].shape == (2, 5, 256) and layer.experts.down.grad.any() and layer.router.expert_bias.any()
    K, E, D, F = 2, 8, 24, 16
    ids, weights = torch.randint(E, (4, 6, K)), torch.rand(4, 6, K)
    gate_up, down = torch.randn(E, 2 * F, D), torch.randn(E, D, F)
    found = run("own router", x=torch.randn(4, 6, D), ids=ids, weights=weights, gate_up=gate_up, down=down)
    assert found["y"].shape == (4, 6, D) and found["Router"] is not None
    found = run("megablocks", x=torch.randn(3, 2, 32))
    assert found["out"].shape == (3, 2, 32) and found["layer"].router.layer.weight.grad.any()


def _over_a_mesh(rank: int) -> Tensor:
    def mesh_here(device: str, *args: Any, **kwargs: Any) -> Any:
        return init_device_mesh("cpu", *args, **kwargs)

    config = MoEConfig(dim=24, expert_hidden=16, num_experts=4, top_k=2)
    found = run("ranks", world=2, init_device_mesh=mesh_here, config=config, MoELayer=MoELayer)
    out: Tensor = found["layer"](torch.randn(5, 24)).detach()
    return out


def test_the_layer_over_a_mesh() -> None:
    assert all(out.shape == (5, 24) for out in run_ranks(2, _over_a_mesh))


def test_folders_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random_model(MIXTRAL).save_pretrained(tmp_path / "mixtral")
    found = run("transformers", path=tmp_path / "mixtral", AutoModelForCausalLM=AutoModelForCausalLM)
    assert found["model"].config._experts_implementation == "moe_engine"
    random_model(V2_LITE).save_pretrained(tmp_path / "DeepSeek-V2-Lite")
    found = run("whole model", tokens=torch.randint(64, (2, 9)))
    assert found["logits"].shape == (2, 9, 64) and found["logits"].dtype == torch.bfloat16
