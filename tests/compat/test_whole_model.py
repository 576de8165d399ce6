"""`load_hf` against transformers, and dense models upcycled to experts: the same function, there and here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import relative
from hf_models import GROUPED, MIXTRAL, QWEN3, V2_LITE, V3, VOCABULARY, logits_of, opened, random_model

from moe_engine import ConfigError, load_hf
from moe_engine.__main__ import main

BOUND = 1e-5
DENSE = {key: value for key, value in GROUPED.items() if key != "num_experts_per_tok"}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": DENSE | dict(model_type="mistral", intermediate_size=48, sliding_window=None),
    "llama, square": DENSE | dict(model_type="llama", intermediate_size=32),
    "qwen3": DENSE | dict(model_type="qwen3", intermediate_size=48, head_dim=16, tie_word_embeddings=True),
}


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("config", [V3, V2_LITE, MIXTRAL, QWEN3], ids=lambda config: config["model_type"])
def test_a_loaded_folder_has_transformers_logits_and_trains(config: dict[str, Any], tmp_path: Path) -> None:
    theirs = random_model(config)
    theirs.save_pretrained(tmp_path / "model")
    model = load_hf(tmp_path / "model")
    assert relative(model(tokens()).detach(), logits_of(theirs, tokens())) < BOUND
    loss = torch.nn.functional.cross_entropy(model(tokens())[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.step()
    again = torch.nn.functional.cross_entropy(model(tokens())[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
    assert again < loss


def test_documents_are_separate_and_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    random_model(MIXTRAL).save_pretrained(tmp_path / "model")
    model = load_hf(tmp_path / "model", dtype=torch.float64)
    both = torch.arange(20).expand(2, 20) >= 8
    separate = model(tokens(), both.int())
    torch.testing.assert_close(separate[:, :8], model(tokens()[:, :8]), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(separate[:, 8:], model(tokens())[:, 8:])
    with pytest.raises(ConfigError, match="nowhere"):
        load_hf(tmp_path / "nowhere")


@pytest.mark.parametrize("words", [[], ["granularity=4", "top_k=1"]], ids=["copies", "granular"])
@pytest.mark.parametrize("name", MODELS)
def test_an_upcycled_model_computes_what_the_dense_one_did(name: str, words: list[str], tmp_path: Path) -> None:
    dense = random_model(MODELS[name])
    dense.save_pretrained(tmp_path / "dense")
    made = tmp_path / "experts"
    assert main(["convert", f"from={tmp_path / 'dense'}", f"to={made}", "upcycle=3", "max_shard_gb=1e-4", *words]) == 0
    right = logits_of(dense, tokens())
    theirs, ours = opened(made), load_hf(made)
    assert relative(logits_of(theirs, tokens()), right) < BOUND
    assert relative(ours(tokens()).detach(), right) < BOUND
    G = 4 if words else 1
    assert (ours.config.num_experts, ours.config.top_k) == (3 * G, G if words else 2)
    layer = next(iter(ours.stage.moe_layers().values()))
    routers = layer.router.weight.view(3, G, -1)
    assert torch.equal(routers, routers[:, :1].expand_as(routers)) and len(routers[:, 0].unique(dim=0)) == 3


def test_what_cannot_be_upcycled_is_told_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model(MODELS["mistral"]).save_pretrained(tmp_path / "dense")
    random_model(MIXTRAL).save_pretrained(tmp_path / "moe")
    words = [f"from={tmp_path / 'dense'}", f"to={tmp_path / 'new'}"]
    assert main(["convert", *words, "upcycle=1", "top_k=5", "granularity=7"]) == 2
    error = capsys.readouterr().err
    for part in ("upcycle=1: must be 2 or more", "top_k=5: must be between", "granularity=7: must divide", "size=48"):
        assert part in error
    assert main(["convert", *words, "upcycle=-1"]) == 2 and main(["convert", *words, "upcycle=2", "dtype=fp8"]) == 2
    assert main(["convert", f"from={tmp_path / 'moe'}", words[1], "upcycle=4"]) == 2
    assert "model_type=mixtral: dense models to upcycle are mistral, llama, qwen3" in capsys.readouterr().err
    whole = json.loads((tmp_path / "dense" / "config.json").read_text())
    for change, part in (
        ({"rope_parameters": {"rope_type": "llama3"}}, "llama3"),
        ({"mlp_bias": True}, "biases"),
        ({"layer_types": 5}, "layers of several kinds"),
        ({"initializer_range": "x"}, "initializer_range"),
        ({"model_type": ["llama"]}, "model_type=['llama']"),
        ({"intermediate_size": None}, "intermediate_size=None"),
    ):
        (tmp_path / "dense" / "config.json").write_text(json.dumps(whole | change))
        assert main(["convert", *words, "upcycle=2"]) == 2
        error = capsys.readouterr().err
        assert part in error and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "moe"]
