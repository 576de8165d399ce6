"""Every option of the engine, as dataclasses: the only schema there is.

YAML files in `conf/` and the command line pick values; `config.load` builds these objects and refuses what
they do not name, `config.validate` checks the rules that span fields. A component receives its own section,
never the whole `Config`. Sizes are in elements, times in seconds, learning rates per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ModelConfig:
    """The architecture: a decoder with experts, DeepSeek-V3's (arXiv 2412.19437, section 2) where nothing else is said.

    Mixtral, Qwen3-MoE, gpt-oss and their like are other values of the same options.
    """

    name: str = "custom"  # shown in results and reports
    vocab_size: int = 257  # tokens; bytes and the end of a document
    dim: int = 256  # of the hidden state
    num_layers: int = 4  # decoder layers, MTP blocks not counted
    num_dense_layers: int = 1  # the first layers, with a dense MLP in place of experts
    dense_layers: list[int] = field(default_factory=list)  # further layers that have one, counted from 0: [3,5]
    dense_hidden: int = 512  # inside the MLP of a dense layer
    attention: str = "mla"  # mla: multi-head latent attention | gqa: grouped queries (arXiv 2305.13245)
    num_heads: int = 4  # of queries
    # mla (section 2.1.1)
    q_lora_rank: int = 0  # 0: queries come straight from the hidden state
    kv_lora_rank: int = 64  # of the latent vector that keys and values are made from
    qk_nope_head_dim: int = 32  # of a query and key, the part without rotation
    qk_rope_head_dim: int = 16  # of a query and key, the part that turns with the position
    v_head_dim: int = 32  # of a value
    latent_norm_eps: float = 1e-6  # of the norms on the latent vectors, which DeepSeek's code keeps apart from norm_eps
    # gqa
    num_kv_heads: int = 2  # heads of keys and values; each serves num_heads / num_kv_heads heads of queries
    head_dim: int = 64  # of a query, key and value
    qk_norm: bool = False  # RMSNorm over every head of queries and of keys (Qwen3) …
    qk_norm_whole: bool = False  # … or one over all heads together (OLMoE)
    rotary_dim: int = 0  # so many numbers at the start of each head turn (GLM-4: half of them); 0: all
    attention_bias: bool = False  # biases on the projections of queries, keys and values
    attention_out_bias: bool = False  # a bias on the output's projection
    attention_sinks: bool = False  # a learned score for each head that takes weight and gives no value (gpt-oss)
    sliding_window: int = 0  # a query sees this many keys, itself included; 0: all
    sliding_window_every: int = 1  # of so many layers the first has the window; 1: all have it (MTP blocks never)
    # rotary embedding (arXiv 2104.09864)
    rope_theta: float = 10000.0  # the slowest pair turns once in about this many positions, times 2 pi
    rope_style: str = "interleaved"  # which numbers turn together: 2i and 2i+1 (DeepSeek) | halves: i and i+d/2 (Llama)
    rope_scaling: str = "none"  # none | yarn: longer contexts than rope_original_length (arXiv 2309.00071)
    rope_factor: float = 1.0  # how many times longer
    rope_original_length: int = 4096  # longest sequence of the training before rope_scaling
    rope_beta_fast: float = 32.0  # pairs with more turns than this in the original length keep their speed …
    rope_beta_slow: float = 1.0  # … those with fewer are slowed by rope_factor, and between is a ramp …
    rope_truncate: bool = True  # … that begins and ends at whole pairs
    # With m(s) = 1 + 0.1 s ln(rope_factor), queries and keys grow by m(rope_mscale) / m(rope_mscale_all_dim) each;
    # the scores of mla by m(rope_mscale_all_dim)^2 besides, as in DeepSeek's models.
    rope_mscale: float = 1.0
    rope_mscale_all_dim: float = 0.0  # see rope_mscale
    max_positions: int = 0  # longest sequence that the model is for; 0: any
    # experts (section 2.1.2)
    num_experts: int = 16  # in each layer that has some
    top_k: int = 4  # experts of a token
    expert_hidden: int = 128  # inside an expert
    num_shared_experts: int = 1  # merged into one MLP of num_shared_experts * expert_hidden
    shared_gate: bool = False  # its output is multiplied by sigmoid(w x) (Qwen2-MoE)
    score_function: str = "sigmoid"  # sigmoid | softmax
    num_groups: int = 1  # node-limited routing: experts are split in this many groups …
    top_groups: int = 1  # … and a token uses at most this many of them
    group_score: str = "sum_top2"  # sum_top2 (V3) | max (V2)
    normalize_weights: bool = True  # the weights of a token's experts sum to route_scale
    route_scale: float = 1.0  # factor on the weights of the chosen experts
    expert_biases: bool = False  # biases on the router and on the routed experts' projections (gpt-oss)
    swiglu_limit: float = 0.0  # above 0: gpt-oss's SwiGLU in all experts, gate and up clamped to this
    # output
    mtp_depth: int = 0  # multi-token prediction modules (section 2.2)
    tied_head: bool = False  # the output head is the embedding table
    norm_eps: float = 1e-6  # of the RMSNorms
    init_std: float = 0.006  # of the normal distribution that weights start from

    def is_dense(self, layer: int) -> bool:
        """Whether decoder layer `layer`, counted from 0, has a dense MLP; all others and MTP blocks have experts."""
        return layer < self.num_dense_layers or layer in self.dense_layers

    def all_dense_layers(self) -> list[int]:
        """The layers with a dense MLP, in their order."""
        return [layer for layer in range(self.num_layers) if self.is_dense(layer)]

    def all_moe_layers(self) -> list[int]:
        """The layers with experts, in their order; MTP blocks are not counted."""
        return [layer for layer in range(self.num_layers) if not self.is_dense(layer)]


@dataclass
class MoEConfig:
    """One MoE layer by itself: all that `MoELayer` needs in somebody else's model."""

    dim: int
    expert_hidden: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    shared_gate: bool = False
    score_function: str = "sigmoid"
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "sum_top2"
    normalize_weights: bool = True
    route_scale: float = 1.0
    activation: str = "silu"  # silu | gelu | gelu_tanh | relu | relu_squared
    gated: bool = True  # act(gate) * up (SwiGLU and its like), else act(up)
    swiglu_limit: float = 0.0  # above 0: gpt-oss's SwiGLU with gate and up clamped to this, in place of `activation`
    expert_biases: bool = False  # biases on the router and on the projections of the routed experts
    combine: str = "dedup"  # see MoESection
    wire: str = "model"
    dispatch: str = "all_to_all"
    max_recv_rows: int = 0
    capacity_factor: float = 0.0
    drop: str = "score"
    aux_loss_weight: float = 1e-4
    z_loss_weight: float = 0.0
    bias_step: float = 1e-3
    init_std: float = 0.006


@dataclass
class PlacementSection:
    """Section `moe.placement`: experts move between ranks during training, so that the ranks' loads even out."""

    every: int = 0  # steps between two re-placements, which go by the loads counted since the last one; 0: never
    least_gain: float = 0.05  # a layer's experts move where this makes its busiest rank's load smaller by this share


@dataclass
class MoESection:
    """Section `moe`: how the experts of a run are balanced and reached."""

    combine: str = "dedup"  # dedup: a row per (token, rank) | exact: a row per (token, expert), bit-equal across ep
    wire: str = "model"  # rows to the experts, and gradients of combine: as in the model | fp8 codes and scales
    # all_to_all | hierarchical: between nodes once per node, then within the node | nvshmem: put by GPUs themselves
    dispatch: str = "all_to_all"
    # For nvshmem: the most (token, expert) pairs that a rank has room for in a micro-batch; more is an error. 0: room
    # for as many as there can be.
    recv_capacity: int = 0
    # Multiprocessors of a GPU that nvshmem's kernels use and products of woven pairs leave alone; as DeepSeek-V3 gives
    # them of 132 (arXiv 2412.19437, section 3.2.2).
    exchange_sms: int = 20
    # An expert gets at most this many times its equal share of the choices of a micro-batch on a rank; what is more is
    # dropped, and so the result depends on the layout. 0: nothing is dropped.
    capacity_factor: float = 0.0
    drop: str = "score"  # what capacity_factor drops: score: the least weights | position: the last tokens
    # The most rows that a rank holds at once of those it received; what does not fit comes in further rounds, is sent
    # again in backward, and nothing is dropped. 0: no bound.
    max_recv_rows: int = 0
    aux_loss_weight: float = 1e-4  # alpha of the sequence-wise balance loss
    z_loss_weight: float = 0.0  # of the mean over tokens of logsumexp(router logits)^2, which keeps logits small
    bias_step: float = 1e-3  # gamma of the loss-free balance; 0 turns it off
    placement: PlacementSection = field(default_factory=PlacementSection)
    # Who chooses experts: natural, the router | balanced: at random, all equally loaded | skewed:<x>: the most loaded
    # one has x times the mean | replay:<folder>: as in a recorded step. All but the first are for measurements.
    routing: str = "natural"
    record_routing: int = 0  # the choices of this step, from 1, go to the run's folder `routing`; 0: of none


@dataclass
class ParallelConfig:
    """Section `parallel`: world = pp * dp * cp * tp; experts fold into the same ranks."""

    pp: int = 1  # pipeline ranks: stages of layers
    dp: int | None = None  # data-parallel replicas; derived from the number of ranks when not given
    cp: int = 1  # ranks that share out each sequence
    ep: int = 1  # ranks that share out the experts of a layer; divides dp * cp
    tp: int = 1  # ranks that share out each matrix
    ranks_per_node: int | None = None  # that share a fast network; for moe.dispatch=hierarchical
    zero: int = 1  # what dp ranks share out: 1 for optimizer states


@dataclass
class ContextParallelConfig:
    """Section `cp`: how the ranks that share a sequence exchange what attention needs; read where parallel.cp > 1."""

    # ring: keys and values go from rank to rank while others are used | all_gather: all of them at once
    # | ulysses: each rank gets whole sequences of some heads (arXiv 2309.14509)
    exchange: str = "ring"
    # kv: keys and values | latent: what MLA makes them from, far fewer bytes, multiplied up again where they arrive
    payload: str = "kv"


@dataclass
class PipelineConfig:
    """Section `pipeline`: in which order stages work on which micro-batches."""

    schedule: str = "1f1b"  # the order of work; `moe-engine schedule` lists and draws them
    virtual_stages: int = 1  # stages a rank holds; only interleaved_1f1b leaves it free
    # What each stage holds, in the order of the model: [embedding+2L,3L,2L,1L+head+mtp], 2L for two layers.
    # Empty: evenly.
    stages: list[str] = field(default_factory=list)
    overlap: bool = True  # weave the halves of a pair [F&B] phase by phase; the same bits either way
    micro_batches: int | None = None  # per data-parallel rank and step; derived for `train`, refused if it disagrees


@dataclass
class RecomputeConfig:
    """Section `recompute`: what backward makes again instead of keeping it from forward."""

    mode: str = "none"  # none | selective: the `names` | full: all but a block's input, its routing and arrived rows
    # norm: outputs of norms; mla_up: queries, keys and values; swiglu: its output; attention: softmax(QK^T)V
    names: list[str] = field(default_factory=lambda: ["norm", "mla_up", "swiglu"])


FORMAT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}  # a number of parameters, gradients, masters, moments


@dataclass
class PrecisionConfig:
    """Section `precision`: formats of parameters and compute, of summed gradients, of master weights and moments."""

    name: str = "bf16"  # the recipe: bf16 | fp32 | fp64 | fp8: bf16 with the products of layers and experts in fp8
    compute: str = "bfloat16"  # parameters and activations
    gradient: str = "float32"  # sums of gradients
    master: str = "float32"  # master weights
    moments: str = "master"  # of AdamW: as master weights | bfloat16, as DeepSeek-V3 keeps them | float32 | float64
    # fp8 alone
    wgrad: str = "fp8"  # fp8 | bf16: the operands of weight gradients
    power_of_two_scales: bool = True  # else any fp32 number, and the tiles of a kept input change with a rounding
    # Of weights, beside their codes, for input gradients; false: made at each of these, which halves the bytes of codes
    keep_transposed_codes: bool = True
    bf16_first_layers: int = 0  # this many decoder layers at the start stay in bf16 …
    bf16_last_layers: int = 0  # … and this many at the end, MTP blocks not counted


@dataclass
class OptimConfig:
    """Section `optim`: AdamW with warm-up and cosine decay."""

    lr: float = 3e-3  # the highest, after warm-up
    min_lr_ratio: float = 0.1  # the cosine ends at lr * min_lr_ratio
    warmup_steps: int = 20  # the learning rate rises to lr in this many
    beta1: float = 0.9  # of the mean of gradients
    beta2: float = 0.95  # of the mean of their squares
    eps: float = 1e-8  # in the denominator of the update
    weight_decay: float = 0.1  # per step, times the learning rate
    clip: float = 1.0  # largest global gradient norm; 0 turns clipping off
    decay_embedding: bool = True  # weight decay on the embedding table too (norms, router and biases never decay)


@dataclass
class DataConfig:
    """Section `data`: text in, memory-mapped token files out."""

    text_paths: list[str] = field(default_factory=list)  # files or folders; empty: this Python's standard library
    cache_dir: str = "data_cache"  # where token files are kept for the next run
    mask_documents: bool = True  # attention, positions and targets stop at a document's border
    validation_fraction: float = 0.05  # of the files
    max_bytes: int = 0  # never take more text than this; 0: all of it


@dataclass
class TrainConfig:
    """Section `train`: how long, in which batches, from where."""

    steps: int = 100  # optimizer steps, those before a resume included
    global_batch: int = 16  # sequences a step, over all ranks
    micro_batch: int = 4  # sequences a micro-batch, on one dp rank
    seq_len: int = 256  # tokens of a sequence
    seed: int = 0  # of the weights and of the order of the text
    mtp_loss_weight: float = 0.3  # lambda; each depth gets lambda / depths
    eval_sequences: int = 64  # validation sequences at the end; 0: no validation
    sample_tokens: int = 200  # length of the generated sample at the end; 0: none
    checkpoint_every: int = 0  # steps; 0: only at the end
    init_from: str = ""  # weights to start from, a Hugging Face folder, checkpoint or run folder; not read on resume
    threads: int = 1  # CPU threads of each rank
    # Form of grouped products on a GPU: triton, plain kernels for any GPU | hopper, kernels for H100, H200 and H800,
    # each used once it has agreed with the plain one there | auto: triton, until a GPU has compared their speed
    kernels: str = "auto"


@dataclass
class RunConfig:
    """Section `run`: where the results of a run go."""

    dir: str = "runs"  # the folder of all runs; on a cluster, one that all nodes see
    name: str = "default"  # this run's folder inside run.dir
    resume: bool = False  # go on from the newest complete checkpoint of this run
    overwrite: bool = False  # remove the run that this folder holds, where it is not resumed
    check: bool = False  # only validate the configuration, and print it with the layout
    # Seconds that a rank waits for others in an exchange; one that stands still longer is named, and the run ends
    exchange_limit_s: float = 600.0
    ranks: int | None = None  # of the whole job; null: those given by torchrun or Slurm, else what the layout needs


@dataclass
class TraceConfig:
    """Section `trace`: what really happened when, on every rank."""

    enabled: bool = False  # bubble and exposed communication of each rank in metrics.jsonl; pictures of one step
    drawn_step: int = 3  # its picture: trace.svg and trace.json (for ui.perfetto.dev) in the run's folder


@dataclass
class Config:
    """A whole training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoESection = field(default_factory=MoESection)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    cp: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)


def moments_format(precision: PrecisionConfig) -> str:
    """The format of AdamW's moments: the one that is named, or that of master weights."""
    return precision.master if precision.moments == "master" else precision.moments


def moe_layer_config(model: ModelConfig, moe: MoESection) -> MoEConfig:
    """The MoE layer of a model: its architecture from section `model`, its behaviour from section `moe`."""
    return MoEConfig(
        dim=model.dim,
        expert_hidden=model.expert_hidden,
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_shared_experts=model.num_shared_experts,
        shared_gate=model.shared_gate,
        score_function=model.score_function,
        num_groups=model.num_groups,
        top_groups=model.top_groups,
        group_score=model.group_score,
        normalize_weights=model.normalize_weights,
        route_scale=model.route_scale,
        swiglu_limit=model.swiglu_limit,
        expert_biases=model.expert_biases,
        combine=moe.combine,
        wire=moe.wire,
        dispatch=moe.dispatch,
        max_recv_rows=moe.max_recv_rows,
        capacity_factor=moe.capacity_factor,
        drop=moe.drop,
        aux_loss_weight=moe.aux_loss_weight,
        z_loss_weight=moe.z_loss_weight,
        bias_step=moe.bias_step,
        init_std=model.init_std,
    )
