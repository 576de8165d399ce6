"""The planner's arithmetic against dry runs, the engine's own code: memory within 2%, messages to the byte."""

from __future__ import annotations

import pytest

from moe_engine.config.load import load
from moe_engine.config.schema import Config
from moe_engine.config.validate import resolve, validate
from moe_engine.dryrun.collectives import by_purpose
from moe_engine.dryrun.run import dry_run
from moe_engine.planner.collectives import step_bytes
from moe_engine.planner.job import cut_of
from moe_engine.planner.memory import rank_memory

MINI = "model=mini_v3 model.num_layers=4 parallel.dp=4 parallel.ep=4"
SHARED = "model=mini_v3 model.num_layers=3 parallel.dp=2 parallel.ep=4"
GLM4 = "model=glm4_5 model.num_layers=5 model.dim=256 model.vocab_size=1000 model.dense_hidden=512"
QWEN2 = "model=qwen1_5_moe_a2_7b model.num_layers=3 model.dim=256 model.vocab_size=1000"
OLMOE = "model=olmoe_1b_7b model.num_layers=3 model.dim=256 model.vocab_size=1000"
GPT_OSS = "model=gpt_oss_20b model.num_layers=3 model.dim=256 model.vocab_size=1000 model.expert_hidden=256"
GROUPED = "model=qwen3_30b_a3b model.num_layers=3 model.dim=256 model.vocab_size=1000"
BETWEEN = "model=qwen3_30b_a3b model.dim=256 model.vocab_size=1000 parallel.dp=4 parallel.ep=4"
FAST = [
    (f"{MINI} pipeline=dualpipe parallel.pp=2", 0, 1.0),
    ("model=mini_v3 model.num_layers=6 pipeline=zbv parallel.pp=2 parallel.dp=4 parallel.ep=2 recompute=full", 0, 1.0),
    (f"{MINI} parallel.pp=1 precision=fp8 precision.moments=bfloat16 moe.wire=fp8", 0, 1.0),
    ("model=mini_v3 model.num_layers=2 model.mtp_depth=0 parallel.dp=32 parallel.ep=4 moe.dispatch=hierarchical "
     "parallel.ranks_per_node=2 moe.max_recv_rows=1024", 0, 1.0),
    (f"{SHARED} parallel.cp=2 cp.exchange=ring", 0, 1.0),
    ("model=qwen3_30b_a3b model.num_layers=3 model.dim=256 model.vocab_size=1000 parallel.dp=8 parallel.ep=8", 0, 1.0),
    (f"{BETWEEN} model.num_layers=4 model.dense_layers=[1,3] parallel.pp=2", 0, 1.0),
]  # fmt: skip
TWO_HOPS = f"{MINI} moe.dispatch=hierarchical parallel.ranks_per_node=2"
MORE = [
    (f"{MINI} moe.capacity_factor=0.5", 0, 1.0),
    (f"{MINI} moe.capacity_factor=1.0 moe.drop=position parallel.pp=2", 2, 2.0),
    (f"{MINI} moe.max_recv_rows=1024", 0, 1.0),
    (f"{MINI} moe.max_recv_rows=512 parallel.pp=2 pipeline=dualpipe moe.wire=fp8", 1, 2.0),
    (f"{TWO_HOPS} parallel.pp=2 pipeline=zb_h1 recompute=selective", 3, 1.0),
    (f"{TWO_HOPS} moe.combine=exact", 2, 1.0),
    (f"{TWO_HOPS} moe.max_recv_rows=1024", 0, 1.0),
    (f"{TWO_HOPS} moe.wire=fp8 precision=fp8 parallel.pp=2", 0, 1.0),
    (f"{TWO_HOPS} moe.capacity_factor=0.75 moe.max_recv_rows=1024", 1, 1.0),
    (f"{MINI} precision=fp8 precision.bf16_first_layers=1 precision.bf16_last_layers=1", 0, 1.0),
    (f"{MINI} pipeline=zb_h1 parallel.pp=2 precision=fp8 precision.wgrad=bf16 precision.bf16_last_layers=1", 4, 1.0),
    (f"{MINI} pipeline=dualpipe parallel.pp=2 precision=fp8 precision.wgrad=bf16 recompute=full", 0, 1.0),
    (f"{MINI} pipeline=1f1b parallel.pp=2", 7, 1.0),
    (f"{MINI} pipeline=dualpipe parallel.pp=2 recompute=full", 3, 1.0),
    (f"{MINI} pipeline=dualpipe parallel.pp=2 recompute=selective", 0, 1.0),
    (f"{MINI} pipeline=zb_h1 parallel.pp=2 recompute=selective model.q_lora_rank=64", 0, 1.0),
    (f"{MINI} pipeline=gpipe parallel.pp=2 recompute=selective recompute.names=[attention]", 0, 1.0),
    (f"{MINI} pipeline=interleaved_1f1b pipeline.virtual_stages=2 parallel.pp=2 model.tied_head=true", 0, 1.0),
    (f"{MINI} parallel.pp=1 precision=fp32", 0, 1.0),
    (f"{MINI} pipeline=dualpipe parallel.pp=2 precision=fp8 model.q_lora_rank=64 recompute=selective", 0, 1.0),
    (f"{MINI} pipeline=zb_h1 parallel.pp=2 precision=fp8", 4, 1.0),
    (f"{MINI} pipeline=zb_h1 parallel.pp=2 precision=fp8 precision.keep_transposed_codes=false", 4, 1.0),
    (f"{SHARED} parallel.cp=2 cp.exchange=ulysses precision=fp8", 0, 1.0),
    (f"{MINI} pipeline=1f1b parallel.pp=2 precision=fp8 recompute=full", 0, 1.0),
    (f"{MINI} pipeline=1f1b parallel.pp=2 precision=fp8 recompute=full moe.wire=fp8", 0, 1.0),
    (f"{MINI} pipeline=1f1b parallel.pp=2 moe.wire=fp8", 0, 1.0),
    (f"{MINI} pipeline=dualpipe parallel.pp=2 moe.dispatch=nvshmem recompute=full", 0, 1.0),
    (f"{MINI} moe.dispatch=nvshmem moe.recv_capacity=6000 moe.combine=exact moe.wire=fp8 precision=fp8", 0, 1.0),
    (f"{SHARED} parallel.cp=2 cp.exchange=all_gather cp.payload=latent pipeline=zb_h1 parallel.pp=2", 0, 1.0),
    (f"{SHARED} parallel.cp=2 cp.exchange=ulysses cp.payload=latent", 3, 1.0),
    (f"{SHARED} parallel.cp=2 cp.exchange=ulysses recompute=full", 0, 1.0),
    (f"{SHARED} parallel.cp=2 cp.payload=latent precision=fp8 pipeline=dualpipe parallel.pp=2", 0, 1.0),
    (f"{GROUPED} parallel.dp=2 parallel.cp=4 parallel.ep=8 cp.exchange=ulysses", 0, 1.0),
    (f"{MINI} parallel.pp=1 moe.combine=exact", 0, 1.0),
    (f"{GPT_OSS} parallel.dp=4 parallel.ep=4", 0, 1.0),
    (f"{GPT_OSS} model.num_layers=4 parallel.dp=4 parallel.ep=4 parallel.pp=2 pipeline=zb_h1", 0, 1.0),
    (f"{GPT_OSS} parallel.dp=4 parallel.ep=4 precision=fp8", 0, 1.0),
    (f"{GLM4} parallel.pp=2 parallel.dp=4 parallel.ep=4 pipeline=zb_h1", 4, 1.0),
    (f"{QWEN2} parallel.dp=4 parallel.ep=4", 0, 1.0),
    (f"{QWEN2} parallel.dp=4 parallel.ep=4 precision=fp8 recompute=full", 0, 1.0),
    (f"{OLMOE} parallel.dp=4 parallel.cp=2 parallel.ep=8", 0, 1.0),
    ("model=mixtral_8x7b model.num_layers=4 model.dim=256 model.vocab_size=1000 model.expert_hidden=512 "
     "parallel.pp=2 parallel.dp=4 parallel.ep=4 pipeline=dualpipev", 0, 1.0),
    (f"{BETWEEN} model.num_layers=5 model.dense_layers=[0,3,4] parallel.pp=2 pipeline=dualpipe precision=fp8", 4, 1.0),
    (f"{BETWEEN} model.num_layers=6 model.dense_layers=[2,3] parallel.pp=2 pipeline=zb_h1 recompute=full", 0, 1.0),
    ("model=deepseek_v2_lite model.num_layers=3 parallel.dp=8 parallel.ep=8", 3, 1.5),
]  # fmt: skip


def job(words: str) -> Config:
    given = ["precision=bf16"] if "precision=" not in words else []
    given += [*words.split(), "train.seq_len=1024", "train.micro_batch=1", "train.global_batch=32"]
    config = load("train", [*given, "train.eval_sequences=0"])
    validate(config)
    return resolve(config)


@pytest.mark.parametrize(
    ("words", "rank", "load"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_arithmetic_agrees_with_a_dry_run(words: str, rank: int, load: float) -> None:
    config = job(words)
    cut, found = cut_of(config), dry_run(config, rank, load)
    pp = cut.strategy.layout.coordinate(rank).pp
    planned = rank_memory(cut, "engine", load)[pp]
    for name, size in found.states.items():
        assert getattr(planned, name) == pytest.approx(size, rel=0.02)
    assert planned.activation_bytes == pytest.approx(found.kept, rel=0.02)
    assert planned.buffers.get("symmetric memory", 0) == found.symmetric
    assert step_bytes(cut, pp, load) == by_purpose(found.collectives)
