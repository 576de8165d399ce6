"""A model as the planner sees it: its matrices, layer by layer, and how tensor parallelism cuts them.

`ModelConfig` says what the engine can build. The planner also answers for models that it cannot (dense GPTs with biases
and learned positions), so it has its own, wider description. A layer is a list of `Matrix`: from it follow parameters
(inputs x outputs), operations (2 per parameter and token) and, in `activations`, what backward needs.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1) for latent attention; Megatron (arXiv 1909.08053, section 3) for
which matrices are cut by columns and which by rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.schema import ModelConfig


@dataclass(frozen=True)
class Matrix:
    """A weight matrix. `split`: tensor parallelism cuts it (by columns or rows), or every rank holds all of it."""

    name: str
    inputs: int
    outputs: int
    split: bool

    @property
    def size(self) -> int:
        return self.inputs * self.outputs

    def local(self, tp: int) -> float:
        """Elements that one of `tp` ranks holds."""
        return self.size / tp if self.split else self.size


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder. `kv_lora_rank` > 0 means latent attention, else grouped-query attention.

    dense_layers: those with a dense MLP, counted from 0; without experts, which they are says nothing.
    gated: the MLP has gate and up (SwiGLU); otherwise one matrix up, one down (GeLU). biases: linear layers have them,
    and norms are LayerNorm with two vectors. learned_positions: rows of a position table, 0 for none.
    shared_hidden: hidden width of the shared experts together. rotary_dim: numbers of a head of grouped queries that
    turn; 0: all. attention_vectors: sizes of biases and sinks in attention. expert_biases: of router and experts.
    sigmoid_scores: the router's, else softmax. window: a query of every `window_every`-th layer, the first on, sees so
    many keys; 0: all.
    """

    vocab_size: int
    dim: int
    num_layers: int
    dense_layers: frozenset[int]
    dense_hidden: int
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    qk_norm: bool = False
    qk_norm_whole: bool = False
    rotary_dim: int = 0
    attention_vectors: tuple[int, ...] = ()
    gated: bool = True
    biases: bool = False
    learned_positions: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0
    shared_gate: bool = False
    expert_biases: bool = False
    clamped: bool = False  # the experts' SwiGLU
    top_groups: int = 1
    num_groups: int = 1
    mtp_depth: int = 0
    tied_head: bool = False
    sigmoid_scores: bool = True
    normalized_weights: bool = True
    window: int = 0
    window_every: int = 1

    @property
    def num_dense_layers(self) -> int:
        return len(self.dense_layers)

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, MTP blocks not counted."""
        return self.num_layers - self.num_dense_layers

    @property
    def up_factor(self) -> int:
        """Width of the first MLP matrix in units of the hidden width: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def norm_vectors(self) -> int:
        """Vectors of one norm: RMSNorm has a scale, LayerNorm a shift too."""
        return 2 if self.biases else 1

    def attention(self) -> list[Matrix]:
        """The projections of one attention."""
        query, value = self.num_heads * self.qk_head_dim, self.num_heads * self.v_head_dim
        out = Matrix("attention out", value, self.dim, True)
        if not self.kv_lora_rank:
            width = query + self.num_kv_heads * (self.qk_head_dim + self.v_head_dim)
            return [Matrix("qkv", self.dim, width, True), out]
        nope = self.qk_head_dim - self.qk_rope_head_dim
        down = Matrix("kv down", self.dim, self.kv_lora_rank + self.qk_rope_head_dim, False)
        up = Matrix("kv up", self.kv_lora_rank, self.num_heads * (nope + self.v_head_dim), True)
        if self.q_lora_rank:
            queries = [
                Matrix("q down", self.dim, self.q_lora_rank, False),
                Matrix("q up", self.q_lora_rank, query, True),
            ]
        else:
            queries = [Matrix("q", self.dim, query, True)]
        return [*queries, down, up, out]

    def mlp(self, hidden: int, name: str = "mlp") -> list[Matrix]:
        """The two matrices of an MLP (gate and up are one)."""
        return [
            Matrix(f"{name} up", self.dim, self.up_factor * hidden, True),
            Matrix(f"{name} down", hidden, self.dim, True),
        ]

    def dense_matrices(self, moe: bool) -> list[Matrix]:
        """All matrices of a layer but those of the routed experts."""
        if not moe:
            return [*self.attention(), *self.mlp(self.dense_hidden)]
        shared = self.mlp(self.shared_hidden, "shared") if self.shared_hidden else []
        return [*self.attention(), Matrix("router", self.dim, self.num_experts, False), *shared]

    @property
    def qk_norms(self) -> tuple[int, ...]:
        """Sizes of the norms of queries and of keys."""
        heads = (self.num_heads, self.num_kv_heads) if self.qk_norm_whole else (1, 1)
        return tuple(self.qk_head_dim * number for number in heads) if self.qk_norm else ()

    @property
    def expert_size(self) -> int:
        """Parameters of one routed expert."""
        return sum(matrix.size for matrix in self.mlp(self.expert_hidden)) + sum(self.expert_vectors)

    @property
    def expert_vectors(self) -> tuple[int, ...]:
        """Sizes of a routed expert's biases."""
        return (self.up_factor * self.expert_hidden, self.dim) if self.expert_biases else ()

    def vectors(self, moe: bool) -> int:
        """Norms and biases of a layer."""
        norms = 2 * self.dim * self.norm_vectors + self.q_lora_rank + self.kv_lora_rank
        norms += sum(self.qk_norms) + sum(self.attention_vectors)
        norms += moe * (self.shared_gate * self.dim + self.expert_biases * self.num_experts)
        return norms + (sum(matrix.outputs for matrix in self.dense_matrices(moe)) if self.biases else 0)

    @property
    def vocabulary_size(self) -> int:
        """Parameters of the embedding table, and of the head."""
        return self.vocab_size * self.dim

    @property
    def mtp_extra(self) -> int:
        """What an MTP module has beside its block: the projection of two vectors to one, and three norms."""
        return 2 * self.dim * self.dim + 3 * self.dim

    def parameters(self) -> int:
        """All trained scalars, MTP modules included."""
        dense, moe = self.num_dense_layers, self.num_moe_layers + self.mtp_depth
        if not self.num_experts:
            dense, moe = dense + moe, 0
        total = self.vocabulary_size * (1 if self.tied_head else 2) + self.dim * self.norm_vectors
        total += self.learned_positions * self.dim + self.mtp_depth * self.mtp_extra
        for count, is_moe in ((dense, False), (moe, True)):
            matrices = sum(matrix.size for matrix in self.dense_matrices(is_moe)) if count else 0
            total += count * (matrices + self.vectors(is_moe)) if count else 0
        return total + moe * self.num_experts * self.expert_size

    def windowed(self, layer: int) -> bool:
        """Whether a layer has the window."""
        return self.window > 0 and layer % self.window_every == 0

    def forward_flops(self, seq_len: int, causal: bool = True) -> float:
        """Model FLOPs of the forward of one sequence: matrix products alone, the router left out.

        causal: attention counts the scores below the diagonal, S²/2; otherwise S². Backward is twice as much.
        """
        blocks = self.num_layers + self.mtp_depth
        moe = (self.num_moe_layers + self.mtp_depth) if self.num_experts else 0
        weights = blocks * sum(matrix.size for matrix in self.attention())
        weights += (blocks - moe) * sum(matrix.size for matrix in self.mlp(self.dense_hidden))
        weights += moe * (self.top_k * (self.expert_size - sum(self.expert_vectors)))
        weights += moe * sum(matrix.size for matrix in self.mlp(self.shared_hidden))
        weights += self.mtp_depth * 2 * self.dim * self.dim + (1 + self.mtp_depth) * self.vocabulary_size
        width = self.num_heads * (self.qk_head_dim + self.v_head_dim)
        windowed = -(-self.num_layers // self.window_every) if self.window else 0
        pairs = blocks * seq_len**2 - windowed * max(seq_len - self.window, 0) ** 2  # twice those below the diagonal
        return 2.0 * weights * seq_len + width * (pairs if causal else 2.0 * blocks * seq_len**2)


def _attention_vectors(model: ModelConfig) -> tuple[int, ...]:
    """Sizes of the biases of grouped queries' projections, and of the sinks."""
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads) if model.attention_bias else ()
    sizes = [number * model.head_dim for number in heads]
    return *sizes, *[model.dim] * model.attention_out_bias, *[model.num_heads] * model.attention_sinks


def architecture(model: ModelConfig) -> Architecture:
    """The planner's view of a model of the engine."""
    latent = model.attention == "mla"
    nope, rope = model.qk_nope_head_dim, model.qk_rope_head_dim
    return Architecture(
        vocab_size=model.vocab_size,
        dim=model.dim,
        num_layers=model.num_layers,
        dense_layers=frozenset(model.all_dense_layers()),
        dense_hidden=model.dense_hidden,
        num_heads=model.num_heads,
        num_kv_heads=model.num_heads if latent else model.num_kv_heads,
        qk_head_dim=nope + rope if latent else model.head_dim,
        v_head_dim=model.v_head_dim if latent else model.head_dim,
        q_lora_rank=model.q_lora_rank if latent else 0,
        kv_lora_rank=model.kv_lora_rank if latent else 0,
        qk_rope_head_dim=rope if latent else 0,
        qk_norm=model.qk_norm and not latent,
        qk_norm_whole=model.qk_norm_whole,
        rotary_dim=0 if latent else model.rotary_dim,
        attention_vectors=() if latent else _attention_vectors(model),
        num_experts=model.num_experts if model.all_moe_layers() or model.mtp_depth else 0,
        top_k=model.top_k,
        expert_hidden=model.expert_hidden,
        shared_hidden=model.num_shared_experts * model.expert_hidden,
        shared_gate=model.shared_gate,
        expert_biases=model.expert_biases,
        clamped=model.swiglu_limit > 0,
        top_groups=model.top_groups,
        num_groups=model.num_groups,
        mtp_depth=model.mtp_depth,
        tied_head=model.tied_head,
        sigmoid_scores=model.score_function == "sigmoid",
        normalized_weights=model.normalize_weights,
        window=model.sliding_window,
        window_every=model.sliding_window_every,
    )
