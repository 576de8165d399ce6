"""One configuration for each rule between options that it breaks, and how the message must begin.

Options by their dotted names (`__` for the dot), on top of the schema's defaults.
"""

from __future__ import annotations

from typing import Any

RULES: list[tuple[dict[str, Any], str]] = [
    ({"model__dim": 0}, "model.dim=0: must be 1 or more, for example model.dim=1"),
    ({"model__num_layers": -1, "model__num_dense_layers": 0}, "model.num_layers=-1: must be 1 or more"),
    ({"model__mtp_depth": -1}, "model.mtp_depth=-1: must be 0 or more"),
    (
        {"model__num_dense_layers": 9},
        "model.num_dense_layers=9: the model has model.num_layers=4; use model.num_dense_layers=4 or less",
    ),
    (
        {"model__dense_layers": [2, 4, -1]},
        "model.dense_layers=[2, 4, -1]: layers are counted from 0, and the model has model.num_layers=4; "
        "use model.dense_layers=[2]",
    ),
    ({"model__dense_layers": [3, 3]}, "model.dense_layers=[3, 3]: names a layer twice; use model.dense_layers=[3]"),
    (
        {"model__qk_rope_head_dim": 15},
        "model.qk_rope_head_dim=15: RoPE turns pairs, so it must be even; use model.qk_rope_head_dim=16",
    ),
    ({"moe__routing": "even"}, "moe.routing=even: no such choice; there are natural, balanced, skewed:<x>"),
    ({"moe__routing": "skewed:9"}, "moe.routing=skewed:9: an expert can have at most num_experts / top_k = 4 times"),
    (
        {"moe__record_routing": 101},
        "moe.record_routing=101: the last step is train.steps=100; use moe.record_routing=100",
    ),
    ({"moe__placement__every": -1}, "moe.placement.every=-1: must be 0 or more, for example moe.placement.every=0"),
    ({"moe__placement__least_gain": 1.5}, "moe.placement.least_gain=1.5: must be at least 0 and less than 1"),
    (
        {"moe__placement__every": 5},
        "moe.placement.every=5: with parallel.ep=1 all experts are on one rank, and moving them evens out nothing; "
        "use moe.placement.every=0, or parallel.ep=2",
    ),
    (
        {"moe__placement__every": 5, "parallel__ep": 16, "train__global_batch": 64},
        "moe.placement.every=5: with parallel.ep=16 each rank has one expert, and moving them evens out nothing",
    ),
    (
        {"model__vocab_size": 256},
        "model.vocab_size=256: the byte tokenizer has 257 tokens; use model.vocab_size=257 or more",
    ),
    ({"model__attention": "mha"}, "model.attention=mha: no such choice; there are mla, gqa"),
    ({"model__rope_style": "halfs"}, "model.rope_style=halfs: no such choice; did you mean halves?"),
    ({"model__rope_scaling": "linear"}, "model.rope_scaling=linear: no such choice; there are none, yarn"),
    ({"model__kv_lora_rank": 0}, "model.kv_lora_rank=0: must be 1 or more"),
    (
        {"model__attention": "gqa", "model__num_kv_heads": 3},
        "model.num_kv_heads=3: must divide model.num_heads=4; use model.num_kv_heads=2",
    ),
    ({"model__attention": "gqa", "model__num_kv_heads": 0}, "model.num_kv_heads=0: must be 1 or more"),
    (
        {"model__attention": "gqa", "model__head_dim": 33},
        "model.head_dim=33: RoPE turns pairs, so it must be even; use model.head_dim=34",
    ),
    (
        {"model__rope_scaling": "yarn", "model__rope_factor": 0.5},
        "model.rope_factor=0.5: YaRN stretches the context, so it must be 1 or more, for example model.rope_factor=40",
    ),
    (
        {"model__rope_scaling": "yarn", "model__rope_beta_fast": 0.5},
        "model.rope_beta_fast=0.5: must be at least model.rope_beta_slow=1.0, for example model.rope_beta_fast=32",
    ),
    ({"model__rope_scaling": "yarn", "model__rope_theta": 1.0}, "model.rope_theta=1.0: YaRN needs pairs of different"),
    (
        {"model__sliding_window": 128},
        "model.sliding_window=128: latent attention is built without it; use model.sliding_window=0, or "
        "model.attention=gqa",
    ),
    (
        {"model__max_positions": 100},
        "train.seq_len=256: the model is for model.max_positions=100 positions; use train.seq_len=100 or less, "
        "or model.max_positions=0 for any length",
    ),
    (
        {"model__attention_bias": True},
        "model.attention_bias=true: latent attention is built without it; use model.attention_bias=false, or "
        "model.attention=gqa",
    ),
    (
        {"model__attention": "gqa", "model__rotary_dim": 66},
        "model.rotary_dim=66: a head has model.head_dim=64 numbers; use model.rotary_dim=64 or 0",
    ),
    (
        {"model__attention": "gqa", "model__rotary_dim": 3},
        "model.rotary_dim=3: RoPE turns pairs, so it must be even; use model.rotary_dim=4",
    ),
    (
        {"model__attention": "gqa", "model__qk_norm_whole": True},
        "model.qk_norm_whole=true: says over what model.qk_norm=true is; use model.qk_norm_whole=false",
    ),
    (
        {"model__num_shared_experts": 0, "model__shared_gate": True},
        "model.shared_gate=true: there is no shared expert to gate; use model.shared_gate=false, or "
        "model.num_shared_experts=1",
    ),
    ({"model__attention_sinks": True}, "model.attention_sinks=true: latent attention is built without it"),
    ({"model__swiglu_limit": -1.0}, "model.swiglu_limit=-1.0: must be 0 or more"),
    ({"model__attention": "gqa", "model__sliding_window_every": 0}, "model.sliding_window_every=0: must be 1 or more"),
    ({"moe__z_loss_weight": -0.1}, "moe.z_loss_weight=-0.1: must be 0 or more"),
    ({"model__rope_theta": 0.0}, "model.rope_theta=0.0: must be larger than 0, for example model.rope_theta=10000.0"),
    (
        {"model__top_k": 17},
        "model.top_k=17: a token cannot use more experts than there are; use model.top_k=16 or less",
    ),
    ({"model__num_groups": 3}, "model.num_groups=3: must divide model.num_experts=16; use model.num_groups=2"),
    (
        {"model__num_groups": 4, "model__top_groups": 5},
        "model.top_groups=5: there are model.num_groups=4; use model.top_groups=4 or less",
    ),
    (
        {"model__num_groups": 8, "model__top_groups": 1},
        "model.top_groups=1: 1 groups of 2 experts hold fewer than model.top_k=4; use model.top_groups=2 or more",
    ),
    (
        {"model__num_groups": 16, "model__top_groups": 4},
        "model.group_score=sum_top2: the sum of the best two needs at least 2 experts a group, and "
        "model.num_experts=16 in model.num_groups=16 gives 1; use model.group_score=max",
    ),
    (
        {"model__score_function": "sigmoyd"},
        "model.score_function=sigmoyd: no such choice; did you mean sigmoid? There are sigmoid, softmax",
    ),
    ({"model__group_score": "mean"}, "model.group_score=mean: no such choice; there are sum_top2, max"),
    ({"moe__combine": "exakt"}, "moe.combine=exakt: no such choice; did you mean exact? There are dedup, exact"),
    (
        {"recompute__mode": "selektive"},
        "recompute.mode=selektive: no such choice; did you mean selective? There are none, selective, full",
    ),
    (
        {"recompute__names": ["norm", "softmax"]},
        "recompute.names=[norm, softmax]: softmax: no such part; there are norm, mla_up, swiglu, attention",
    ),
    (
        {"recompute__mode": "selective", "recompute__names": ["norm", "norm"]},
        "recompute.names=[norm, norm]: a part is named twice; use recompute.names=[norm]",
    ),
    (
        {"recompute__mode": "selective", "recompute__names": []},
        "recompute.names=[]: recompute=selective needs a part to recompute; use recompute.names=[norm]",
    ),
    (
        {"recompute__mode": "full", "recompute__names": ["norm"]},
        "recompute.names=[norm]: parts count with recompute=selective alone, not with full; "
        "use recompute.mode=selective, or",
    ),
    ({"moe__bias_step": -1e-3}, "moe.bias_step=-0.001: must be 0 or more"),
    ({"precision__name": "fp4"}, "precision.name=fp4: no such choice"),
    ({"precision__wgrad": "bf16"}, "precision.wgrad=bf16: is an option of fp8 training; use precision=fp8"),
    (
        {"precision__power_of_two_scales": False},
        "precision.power_of_two_scales=false: is an option of fp8 training; use precision=fp8, or "
        "precision.power_of_two_scales=true",
    ),
    (
        {"precision__name": "fp8", "precision__bf16_first_layers": 3, "precision__bf16_last_layers": 2},
        "precision.bf16_last_layers=2: with precision.bf16_first_layers=3 these are more than model.num_layers=4; "
        "use precision.bf16_last_layers=1",
    ),
    (
        {"precision__name": "fp8", "precision__bf16_first_layers": 5},
        "precision.bf16_first_layers=5: the model has model.num_layers=4; use precision.bf16_first_layers=4 or less",
    ),
    ({"precision__compute": "float16"}, "precision.compute=float16: no such choice"),
    ({"precision__moments": "bf16"}, "precision.moments=bf16: no such choice; there are master, bfloat16"),
    (
        {"precision__moments": "float64"},
        "precision.moments=float64: have at most the bits of precision.master=float32; use precision.moments=master",
    ),
    (
        {"precision__moments": "bfloat16", "optim__beta1": 0.997},
        "optim.beta1=0.997: a step without gradient changes a moment by less than bf16 rounds it, and it would never "
        "fall; use optim.beta1=0.9, 0.99609375 at most, or precision.moments=master",
    ),
    ({"precision__moments": "bfloat16", "optim__beta2": 0.999}, "optim.beta2=0.999: a step without gradient changes"),
    ({"precision__gradient": "bfloat16"}, "precision.gradient=bfloat16: no such choice; did you mean"),
    (
        {"precision__compute": "float32"},
        "precision.compute=float32: recipe bf16 computes in bfloat16; use precision=fp32",
    ),
    (
        {"precision__name": "fp64", "precision__compute": "float64", "precision__gradient": "float64"},
        "precision.master=float32: must be at least as wide as precision.compute=float64; use precision.master=float64",
    ),
    ({"optim__lr": 0.0}, "optim.lr=0.0: must be larger than 0"),
    ({"optim__lr": float("nan")}, "optim.lr=nan: a finite number is expected"),
    ({"optim__beta2": 1.0}, "optim.beta2=1.0: must be at least 0 and less than 1, for example optim.beta2=0.9"),
    ({"optim__min_lr_ratio": 2.0}, "optim.min_lr_ratio=2.0: must be from 0 to 1"),
    ({"optim__warmup_steps": -1}, "optim.warmup_steps=-1: must be 0 or more"),
    ({"data__validation_fraction": 1.0}, "data.validation_fraction=1.0: must be at least 0 and less than 1"),
    (
        {"data__validation_fraction": 0.0},
        "data.validation_fraction=0.0: train.eval_sequences=64 needs text to validate on",
    ),
    ({"data__cache_dir": ""}, "data.cache_dir=: a folder is needed"),
    ({"train__steps": 0}, "train.steps=0: must be 1 or more, for example train.steps=1"),
    ({"train__kernels": "Hopper"}, "train.kernels=Hopper: no such choice; did you mean hopper? There are auto"),
    ({"train__threads": 0}, "train.threads=0: must be 1 or more"),
    ({"train__seed": -1}, "train.seed=-1: must be 0 or more, for example train.seed=0"),
    ({"train__steps": "3"}, "train.steps=3: a whole number is expected"),
    ({"run__name": "a/b"}, "run.name=a/b: the name of one folder inside run.dir is needed"),
    ({"run__name": ".."}, "run.name=..: the name of one folder"),
    (
        {"parallel__tp": 2},
        "parallel.tp=2: tensor parallelism is not built yet; use parallel.tp=1, with more pp, ep or cp",
    ),
    (
        {"parallel__cp": 3},
        "train.seq_len=256: each of parallel.cp=3 ranks holds two equal chunks of a sequence, so it must be a multiple "
        "of 6; use train.seq_len=252 or 258",
    ),
    (
        {"parallel__cp": 4, "train__seq_len": 7},
        "train.seq_len=7: each of parallel.cp=4 ranks holds two equal chunks of a sequence, so it must be a "
        "multiple of 8; use train.seq_len=8",
    ),
    ({"cp__exchange": "rings"}, "cp.exchange=rings: no such choice; did you mean ring? There are ring, all_gather"),
    ({"cp__payload": "q"}, "cp.payload=q: no such choice; there are kv, latent"),
    (
        {"parallel__cp": 2, "cp__payload": "latent", "model__attention": "gqa"},
        "cp.payload=latent: model.attention=gqa has no latents to exchange; use cp.payload=kv",
    ),
    (
        {"parallel__cp": 8, "cp__exchange": "ulysses", "model__num_heads": 12},
        "cp.exchange=ulysses: parallel.cp=8 must divide model.num_heads=12; use parallel.cp=4, or cp.exchange=ring",
    ),
    (
        {
            "parallel__cp": 4,
            "cp__exchange": "ulysses",
            "model__attention": "gqa",
            "model__num_heads": 12,
            "model__num_kv_heads": 6,
        },
        "cp.exchange=ulysses: parallel.cp=4 and model.num_kv_heads=6 must divide one another; use parallel.cp=2, or "
        "cp.exchange=ring",
    ),
    (
        {
            "parallel__cp": 2,
            "cp__exchange": "ulysses",
            "cp__payload": "latent",
            "precision__name": "fp8",
            "model__num_heads": 2,
        },
        "cp.payload=latent: precision=fp8 has the up-projection in blocks of 128 rows, and with cp.exchange=ulysses "
        "each of parallel.cp=2 ranks takes model.num_heads / parallel.cp * (model.qk_nope_head_dim + model.v_head_dim) "
        "= 64 of them, which is no multiple of 128; use cp.payload=kv, or cp.exchange=ring",
    ),
    (
        {"parallel__cp": 2, "recompute__mode": "selective", "recompute__names": ["norm", "attention"]},
        "recompute.names=[norm, attention]: with parallel.cp=2 attention keeps its output alone, and making it again "
        "would exchange keys and values again; leave attention out: use recompute.names=[norm]",
    ),
    ({"parallel__zero": 3}, "parallel.zero=3: optimizer states are always sharded (ZeRO-1); use parallel.zero=1"),
    ({"parallel__pp": 0}, "parallel.pp=0: must be 1 or more"),
    ({"parallel__dp": 0}, "parallel.dp=0: must be 1 or more"),
    ({"parallel__pp": 5}, "parallel.pp=5: the model has blocks for 4 stages; use parallel.pp=4 or less"),
    (
        {"parallel__pp": 6, "model__mtp_depth": 2},
        "parallel.pp=6: the model has blocks for 5 stages; use parallel.pp=5 or less",
    ),
    (
        {"moe__dispatch": "hierarchical"},
        "moe.dispatch=hierarchical: needs to know what a node is; use parallel.ranks_per_node=8, "
        "or moe.dispatch=all_to_all",
    ),
    (
        {"parallel__ranks_per_node": 0},
        "parallel.ranks_per_node=0: must be 1 or more, for example parallel.ranks_per_node=1",
    ),
    (
        {"moe__max_recv_rows": 1, "parallel__ep": 2, "parallel__dp": 2},
        "moe.max_recv_rows=1: each of parallel.ep=2 ranks needs a share of it; use moe.max_recv_rows=2 or more, or 0",
    ),
    (
        {"moe__max_recv_rows": 8, "moe__dispatch": "nvshmem"},
        "moe.max_recv_rows=8: moe.dispatch=nvshmem has no further rounds; use moe.max_recv_rows=0, "
        "or moe.dispatch=all_to_all",
    ),
    (
        {"moe__recv_capacity": 8},
        "moe.recv_capacity=8: with moe.dispatch=all_to_all a rank takes what comes; use moe.recv_capacity=0, "
        "or moe.dispatch=nvshmem",
    ),
    ({"moe__exchange_sms": 0}, "moe.exchange_sms=0: must be 1 or more, for example moe.exchange_sms=1"),
    ({"moe__capacity_factor": -1.0}, "moe.capacity_factor=-1.0: must be 0 or more"),
    ({"moe__drop": "first"}, "moe.drop=first: no such choice; there are score, position"),
    ({"moe__wire": "fp4"}, "moe.wire=fp4: no such choice; there are model, fp8"),
    ({"parallel__ep": 3}, "parallel.ep=3: must divide model.num_experts=16; use parallel.ep=2"),
    (
        {"parallel__ep": 4, "parallel__dp": 2},
        "parallel.ep=4: must divide parallel.dp * parallel.cp = 2; use parallel.ep=2, or parallel.dp=4",
    ),
    (
        {"train__global_batch": 10},
        "train.global_batch=10: "
        "must be a multiple of parallel.dp * train.micro_batch = 1 * 4; use train.global_batch=8 or 12",
    ),
    (
        {"train__global_batch": 3, "parallel__dp": 2},
        "train.global_batch=3: must be a multiple of parallel.dp * train.micro_batch = 2 * 4; use train.global_batch=8",
    ),
    (
        {"train__eval_sequences": 3, "parallel__dp": 4},
        "train.eval_sequences=3: must be a multiple of parallel.dp=4; use train.eval_sequences=4",
    ),
    (
        {"train__eval_sequences": 63, "parallel__dp": 2},
        "train.eval_sequences=63: must be a multiple of parallel.dp=2; use train.eval_sequences=62",
    ),
    (
        {"pipeline__micro_batches": 3},
        "pipeline.micro_batches=3: train.global_batch / (parallel.dp * train.micro_batch) = 4 here; "
        "leave it out, or use train.global_batch=12",
    ),
]
