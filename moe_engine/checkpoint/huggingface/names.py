"""Which Hugging Face tensor holds which rows of which of our tensors: all the difference between the two layouts.

The layouts differ in these ways, and in no other:

* names (`model.layers.3.mlp.gate.weight` is our `layers.3.moe.router.weight`);
* gate and up projections are two tensors there and one here, gate rows first; a file may also hold all experts of a
  layer fused, `experts.gate_up_proj` [E, 2F, D] and `experts.down_proj` [E, D, F], as transformers has them in memory;
* gpt-oss's folders have them in that form alone, with rows and columns exchanged and with gates and ups in turns;
* an MTP module projects [embedding; hidden] there (`eh_proj`) and [hidden; embedding], as the report writes it
  (arXiv 2412.19437, eq. 21), here: the halves of the columns change places.

The order of rotary rows is the same: `model.rope_style` says which numbers turn together. Nothing is computed but these
moves, so a tensor that goes there and back keeps every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_engine.checkpoint.huggingface.mxfp4 import BLOCK, BLOCKS
from moe_engine.config.schema import ModelConfig


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one of our tensors: a whole Hugging Face tensor, or one slice of a fused one.

    shape: of these rows, [rows, columns] or [rows]. index, of: slice `index` of a tensor [of, rows, columns].
    swap: the halves of the columns are exchanged. transposed: a column there is a row here. turns: there a gate and an
    up in turns, here first all gates. packed: MXFP4, in blocks of 32 columns of half a byte each (`mxfp4`).
    """

    key: str
    shape: tuple[int, ...]
    index: int | None = None
    of: int = 1
    swap: bool = False
    transposed: bool = False
    turns: bool = False
    packed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of these rows as they are there."""
        if self.packed:
            return self.shape[0], self.shape[1] // BLOCK, BLOCK // 2
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the Hugging Face tensor."""
        return self.stored_shape if self.index is None else (self.of, *self.stored_shape)


@dataclass(frozen=True)
class Mapped:
    """One of our tensors. forms: the ways in which a folder may hold it, each from the first to the last row; the
    first form is the one that is written. No form: the family has no such tensor, here it is zero."""

    name: str
    shape: tuple[int, ...]
    forms: tuple[tuple[Rows, ...], ...]


@dataclass(frozen=True)
class Copy:
    """A Hugging Face tensor that repeats another one. written: a folder of ours has it; it may be absent in others'."""

    key: str
    original: str
    written: bool


@dataclass(frozen=True)
class Family:
    """How the models of one `model_type` spell what the others spell in another way."""

    moe: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router_bias: str = ""  # the module that holds the balancing bias, beside the gate
    skipped: str = ""  # how names of tensors begin that transformers passes over too
    shared: str = "shared_experts"
    router: str = "gate"
    fused: bool = False  # the published folders have a layer's experts in one tensor, as gpt-oss's


FAMILIES = {
    "deepseek_v3": Family(router_bias="gate"),
    "kimi_k2": Family(router_bias="gate"),
    "deepseek_v2": Family(),
    "mixtral": Family(moe="block_sparse_moe", gate="w1", up="w3", down="w2"),
    "qwen3_moe": Family(),
    "qwen2_moe": Family(shared="shared_expert"),
    "olmoe": Family(),
    "glm4_moe": Family(router_bias="gate"),
    "gpt_oss": Family(router="router", fused=True),
    "ernie4_5_moe": Family(router_bias="moe_statics", skipped="model.mtp_"),
}


@dataclass(frozen=True)
class Names:
    """Every tensor of a model, by our name, and the Hugging Face tensors that repeat others."""

    tensors: dict[str, Mapped]
    copies: tuple[Copy, ...]


def names(model: ModelConfig, family: Family) -> Names:
    """The two layouts of `model` side by side. Raises ValueError if a tensor would have two places, or a place two."""
    tensors = {mapped.name: mapped for mapped in _Model(model, family).tensors()}
    places = [(rows.key, rows.index) for mapped in tensors.values() for form in mapped.forms[:1] for rows in form]
    copies = tuple(_copies(model))
    if len(set(places)) < len(places) or {copy.key for copy in copies} & {key for key, _ in places}:
        raise ValueError(f"{model.name}: a Hugging Face tensor is used twice")
    return Names(tensors, copies)


def mtp_prefix(model: ModelConfig, depth: int) -> str:
    """Where Hugging Face folders keep MTP module `depth`: as a layer after the last one."""
    return f"model.layers.{model.num_layers + depth}"


def _copies(model: ModelConfig) -> Iterator[Copy]:
    head = "model.embed_tokens.weight" if model.tied_head else "lm_head.weight"
    if model.tied_head:
        yield Copy("lm_head.weight", head, written=False)
    for k in range(model.mtp_depth):
        yield Copy(f"{mtp_prefix(model, k)}.embed_tokens.weight", "model.embed_tokens.weight", written=True)
        yield Copy(f"{mtp_prefix(model, k)}.shared_head.head.weight", head, written=True)


def _same(name: str, key: str, *shape: int, swap: bool = False) -> Mapped:
    return Mapped(name, shape, ((Rows(key, shape, swap=swap),),))


@dataclass(frozen=True)
class _Model:
    """Makes the list, part by part."""

    model: ModelConfig
    family: Family

    def tensors(self) -> Iterator[Mapped]:
        model = self.model
        yield _same("embedding.weight", "model.embed_tokens.weight", model.vocab_size, model.dim)
        for i in range(model.num_layers):
            yield from self._block(f"layers.{i}", f"model.layers.{i}", dense=model.is_dense(i))
        for k in range(model.mtp_depth):
            yield from self._mtp(f"mtp.{k}", mtp_prefix(model, k))
        yield _same("norm.weight", "model.norm.weight", model.dim)
        if not model.tied_head:
            yield _same("head.weight", "lm_head.weight", model.vocab_size, model.dim)

    def _mtp(self, ours: str, theirs: str) -> Iterator[Mapped]:
        dim = self.model.dim
        yield _same(f"{ours}.hidden_norm.weight", f"{theirs}.hnorm.weight", dim)
        yield _same(f"{ours}.embedding_norm.weight", f"{theirs}.enorm.weight", dim)
        yield _same(f"{ours}.proj.weight", f"{theirs}.eh_proj.weight", dim, 2 * dim, swap=True)
        yield _same(f"{ours}.norm.weight", f"{theirs}.shared_head.norm.weight", dim)
        yield from self._block(f"{ours}.block", theirs, dense=False)

    def _block(self, ours: str, theirs: str, dense: bool) -> Iterator[Mapped]:
        dim = self.model.dim
        yield _same(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", dim)
        attention = self._latent_attention if self.model.attention == "mla" else self._grouped_attention
        yield from attention(f"{ours}.attention", f"{theirs}.self_attn")
        yield _same(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", dim)
        if dense:
            yield from self._mlp(f"{ours}.mlp", f"{theirs}.mlp", self.model.dense_hidden)
        else:
            yield from self._moe(f"{ours}.moe", f"{theirs}.{self.family.moe}", f"{theirs}.mlp")

    def _latent_attention(self, ours: str, theirs: str) -> Iterator[Mapped]:
        m = self.model
        nope, rope = m.qk_nope_head_dim, m.qk_rope_head_dim
        queries = m.num_heads * (nope + rope)
        if m.q_lora_rank:
            yield _same(f"{ours}.q_down.weight", f"{theirs}.q_a_proj.weight", m.q_lora_rank, m.dim)
            yield _same(f"{ours}.q_norm.weight", f"{theirs}.q_a_layernorm.weight", m.q_lora_rank)
            yield _same(f"{ours}.q_up.weight", f"{theirs}.q_b_proj.weight", queries, m.q_lora_rank)
        else:
            yield _same(f"{ours}.q_proj.weight", f"{theirs}.q_proj.weight", queries, m.dim)
        yield _same(f"{ours}.kv_down.weight", f"{theirs}.kv_a_proj_with_mqa.weight", m.kv_lora_rank + rope, m.dim)
        yield _same(f"{ours}.kv_norm.weight", f"{theirs}.kv_a_layernorm.weight", m.kv_lora_rank)
        keys_values = m.num_heads * (nope + m.v_head_dim)
        yield _same(f"{ours}.kv_up.weight", f"{theirs}.kv_b_proj.weight", keys_values, m.kv_lora_rank)
        yield _same(f"{ours}.out.weight", f"{theirs}.o_proj.weight", m.dim, m.num_heads * m.v_head_dim)

    def _grouped_attention(self, ours: str, theirs: str) -> Iterator[Mapped]:
        m = self.model
        queries, keys = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        for word, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield _same(f"{ours}.{word}_proj.weight", f"{theirs}.{word}_proj.weight", rows, m.dim)
            if m.attention_bias:
                yield _same(f"{ours}.{word}_proj.bias", f"{theirs}.{word}_proj.bias", rows)
        for word, rows in (("q", queries), ("k", keys)) if m.qk_norm else ():
            normed = rows if m.qk_norm_whole else m.head_dim
            yield _same(f"{ours}.{word}_norm.weight", f"{theirs}.{word}_norm.weight", normed)
        if m.attention_sinks:
            yield _same(f"{ours}.sinks", f"{theirs}.sinks", m.num_heads)
        yield _same(f"{ours}.out.weight", f"{theirs}.o_proj.weight", m.dim, queries)
        if m.attention_out_bias:
            yield _same(f"{ours}.out.bias", f"{theirs}.o_proj.bias", m.dim)

    def _mlp(self, ours: str, theirs: str, hidden: int) -> Iterator[Mapped]:
        dim = self.model.dim
        halves = (Rows(f"{theirs}.gate_proj.weight", (hidden, dim)), Rows(f"{theirs}.up_proj.weight", (hidden, dim)))
        yield Mapped(f"{ours}.gate_up.weight", (2 * hidden, dim), (halves,))
        yield _same(f"{ours}.down.weight", f"{theirs}.down_proj.weight", dim, hidden)

    def _moe(self, ours: str, theirs: str, fused: str) -> Iterator[Mapped]:
        """`fused` is the prefix under which transformers saves a layer as it has it in memory."""
        m, family = self.model, self.family
        keys = dict.fromkeys((f"{theirs}.{family.router}.weight", f"{fused}.{family.router}.weight"))
        shape = (m.num_experts, m.dim)
        yield Mapped(f"{ours}.router.weight", shape, tuple((Rows(key, shape),) for key in keys))
        yield Mapped(f"{ours}.router.expert_bias", (m.num_experts,), tuple(self._router_bias(theirs)))
        if m.expert_biases:
            yield _same(f"{ours}.router.bias", f"{theirs}.{family.router}.bias", m.num_experts)
        if m.num_shared_experts:
            hidden = m.num_shared_experts * m.expert_hidden
            yield from self._mlp(f"{ours}.shared", f"{theirs}.{family.shared}", hidden)
        if m.shared_gate:
            yield _same(f"{ours}.shared_gate.weight", f"{theirs}.{family.shared}_gate.weight", 1, m.dim)
        for e in range(m.num_experts):
            if family.fused:
                yield from self._fused_expert(f"{ours}.experts.{e}", f"{theirs}.experts", e)
            else:
                yield from self._expert(f"{ours}.experts.{e}", f"{theirs}.experts.{e}", f"{fused}.experts", e)

    def _router_bias(self, theirs: str) -> Iterator[tuple[Rows]]:
        """ERNIE's is a row, which transformers has in memory inside of the gate."""
        module, shape = self.family.router_bias, (self.model.num_experts,)
        if module == "gate":
            yield (Rows(f"{theirs}.gate.e_score_correction_bias", shape),)
        elif module:
            for place in (module, f"gate.{module}"):
                yield (Rows(f"{theirs}.{place}.e_score_correction_bias", shape, index=0),)

    def _fused_expert(self, ours: str, theirs: str, e: int) -> Iterator[Mapped]:
        """gpt-oss's, with biases."""
        hidden, dim, experts = self.model.expert_hidden, self.model.dim, self.model.num_experts
        for name, shape, turns in (("gate_up", (2 * hidden, dim), True), ("down", (dim, hidden), False)):
            matrix = Rows(f"{theirs}.{name}_proj", shape, e, experts, transposed=True, turns=turns)
            packed = Rows(f"{theirs}.{name}_proj{BLOCKS}", shape, e, experts, turns=turns, packed=True)
            whole_blocks = shape[1] % BLOCK == 0
            yield Mapped(f"{ours}.{name}", shape, ((matrix,), (packed,)) if whole_blocks else ((matrix,),))
            if self.model.expert_biases:
                bias = Rows(f"{theirs}.{name}_proj_bias", shape[:1], e, experts, turns=turns)
                yield Mapped(f"{ours}.{name}_bias", shape[:1], ((bias,),))

    def _expert(self, ours: str, theirs: str, fused: str, e: int) -> Iterator[Mapped]:
        hidden, dim, experts = self.model.expert_hidden, self.model.dim, self.model.num_experts
        gate, up, down = (f"{theirs}.{word}.weight" for word in (self.family.gate, self.family.up, self.family.down))
        whole = Rows(f"{fused}.gate_up_proj", (2 * hidden, dim), e, experts)
        yield Mapped(
            f"{ours}.gate_up", (2 * hidden, dim), ((Rows(gate, (hidden, dim)), Rows(up, (hidden, dim))), (whole,))
        )
        fused_down = Rows(f"{fused}.down_proj", (dim, hidden), e, experts)
        yield Mapped(f"{ours}.down", (dim, hidden), ((Rows(down, (dim, hidden)),), (fused_down,)))
