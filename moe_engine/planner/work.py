"""The work of one block, one head and one step on one rank, in seconds at the card's peaks.

`Work` keeps apart what is limited by different things, so that efficiencies can be applied, and fitted, afterwards:
time = matmul/e_matmul + grouped/e_grouped + … A matrix product counts its operations and, as memory, its operands
once: small products are thereby slower per operation, without a constant for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_engine.planner import hardware
from moe_engine.planner.architecture import Architecture, Matrix
from moe_engine.planner.hardware import ClusterConfig, Efficiency
from moe_engine.planner.routing import distinct_ranks
from moe_engine.planner.strategy import Strategy

# Share of the bf16 peak that large products reach on every card: those an fp8 recipe leaves in bf16 (the output head).
BF16_PRODUCTS = 0.75
# Bytes between memory and units for each number that a product reads or writes: 2 in bf16. In fp8 it reads codes and
# writes 2 bytes; before, that was read in 2 bytes and written as codes both ways round. Means of three products.
CODED_PRODUCT, CODING = 1.3, 1.4
# Units and launches run side by side: how sharply the longer one wins (1: they add up).
LAUNCH_POWER = 3.0
# Bytes between memory and units for each number of an expert's products where biases, weighted by the router's fp32
# scores, are kernels of their own, expert by expert: the sum in fp32, joined to one tensor, and rounded.
BIASES = 20.0
# Launches of a pass through a block with experts, in those of a dense one: routing, permutation, exchange; of each of
# a rank's experts, whose products are launched one by one and in fp8 make codes first; and where rows go by all-to-all,
# the host waits until their numbers are known, unless they are limited.
MOE_LAUNCHES, COUNTS_AWAITED = 3.5, 2.0
EXPERT_LAUNCHES = {"bf16": 0.06, "fp8": 0.12, "fp4": 0.12}
# Of these, what graphs take over: the router; attention too. In racks of more cards than a node's most is captured as a
# rule, where nothing is said.
CAPTURED = {"none": 0.0, "router": 0.8, "attention": 1.8}
EAGER_IN_RACKS, NODE = 0.3, 8
# Attention cores reach half of their rate at this many tokens, and backward takes so much longer per operation. From
# published rates on Hopper: forward 553 and 638 TFLOP/s at 4,096 and 16,384 tokens, backward 422 and 523.
SHORT_SEQUENCE = 885.0
ATTENTION_BACKWARD = 1.27
# Kernels compute scores in tiles of so many keys: the window's border lies in one more.
WINDOW_TILE = 128
# Since Hopper's matrix units the exponential of a score takes as long as the products with this sum of widths, partly
# beside them: per operation, heads of 64 take a third longer than heads of 128, which the published rates are of.
EXPONENTIAL = 128.0


@dataclass(frozen=True)
class Work:
    """Seconds at the peaks: matrix products (dense; experts'), attention core, memory traffic, communication of each
    axis, products that stay in bf16 in an fp8 recipe; and passes through blocks (a count)."""

    matmul: float = 0.0
    grouped: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    plain: float = 0.0
    blocks: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(  # written out: a search adds hundreds of thousands
            self.matmul + other.matmul,
            self.grouped + other.grouped,
            self.attention + other.attention,
            self.memory + other.memory,
            self.tp + other.tp,
            self.cp + other.cp,
            self.ep + other.ep,
            self.plain + other.plain,
            self.blocks + other.blocks,
        )

    def __mul__(self, times: float) -> Work:
        return Work(*(value * times for value in vars(self).values()))

    def compute_seconds(self, efficiency: Efficiency) -> float:
        """Time on the card's units."""
        units = (
            self.matmul / efficiency.matmul
            + self.grouped / efficiency.grouped
            + self.attention / efficiency.attention
            + self.memory / efficiency.memory
            + self.plain / BF16_PRODUCTS
        )
        launches = self.blocks * efficiency.block_us * 1e-6
        # the host launches ahead: it is felt only where the card would be faster
        return float((units**LAUNCH_POWER + launches**LAUNCH_POWER) ** (1 / LAUNCH_POWER))

    def communication_seconds(self, efficiency: Efficiency) -> float:
        """Time on links and network."""
        return (self.tp + self.cp + self.ep) / efficiency.links


@dataclass(frozen=True)
class Passes:
    """Forward, gradient of the input (recomputed forward included), gradient of the weights."""

    forward: Work
    dgrad: Work
    wgrad: Work

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.dgrad + other.dgrad, self.wgrad + other.wgrad)

    def __mul__(self, times: float) -> Passes:
        return Passes(self.forward * times, self.dgrad * times, self.wgrad * times)


class Rates:
    """Converts operations and bytes of one strategy on one cluster to seconds at the peaks."""

    def __init__(self, strategy: Strategy, cluster: ClusterConfig) -> None:
        self.strategy, self.cluster = strategy, cluster
        self.matrix = 1.0 / cluster.peak(strategy.precision.compute)
        self.attention = 1.0 / cluster.peak("bf16")
        self.memory = 1.0 / (cluster.memory_tb_s * 1e12)
        self.operand = 2.0 if strategy.precision.compute == "bf16" else CODED_PRODUCT + CODING
        layout = strategy.layout
        self.tp = hardware.group(cluster, layout.tp)
        self.cp = hardware.group(cluster, layout.cp, layout.tp)
        self.ep = hardware.group(cluster, layout.ep, strategy.etp)
        self.etp = hardware.group(cluster, strategy.etp)

    def product(self, tokens: float, matrix: Matrix) -> Work:
        """One product of `tokens` rows with a matrix cut by tensor parallelism."""
        tp, sequence = self.strategy.layout.tp, self.strategy.sequence_parallel
        if not matrix.split and sequence:
            tokens = tokens / tp
        local = matrix.local(tp)
        narrow = (matrix.inputs + matrix.outputs) / (tp if matrix.split else 1)
        traffic = self.operand * (tokens * narrow + local)
        return Work(matmul=2.0 * tokens * local * self.matrix, memory=traffic * self.memory)

    def traffic(self, size: float) -> Work:
        return Work(memory=size * self.memory)


def block_parts(model: Architecture, rates: Rates, moe: bool, windowed: bool = False) -> dict[str, Passes]:
    """The passes of one block over one micro-batch, by part; what backward computes again is a part of its own."""
    strategy = rates.strategy
    projections = _products(rates, strategy.tokens, model.attention())
    core, around = _attention(model, rates, windowed), _elementwise(model, rates, moe)
    tensor, context = _tensor_parallel(model, rates, moe), _context_parallel(model, rates)
    others = _products(rates, strategy.tokens, [m for m in model.dense_matrices(moe) if m not in model.attention()])
    backward = 2.5 * ATTENTION_BACKWARD if strategy.flash else 2.0
    launches = Work(blocks=_launches(model, rates, moe))
    # with sequence parallelism the inputs of column-split matrices are gathered again for their weight gradients
    gathered_again = 1.5 if strategy.sequence_parallel else 1.0
    parts = {
        "attention": Passes(projections + core, projections + core * backward, projections),
        "dense mlp": Passes(others, others, others),
        "elementwise": Passes(around, around * 1.5, Work()),
        "tensor parallel": Passes(tensor, tensor * gathered_again, Work()),
        "context parallel": Passes(context, context * 2.0, Work()),
        "launches": Passes(launches, launches * 2.0, Work()),
    }
    if moe:
        products, routed, exchange = experts_work(model, rates)
        parts["experts"] = Passes(products + routed, products + routed, products)
        parts["dispatch and combine"] = Passes(exchange, exchange, Work())
    forward = sum((part.forward for part in parts.values()), Work())
    parts["recompute"] = Passes(Work(), _recomputed(model, rates, moe, forward, core), Work())
    if strategy.frozen:
        parts = {name: replace(passes, wgrad=Work()) for name, passes in parts.items()}
    return parts


def _launches(model: Architecture, rates: Rates, moe: bool) -> float:
    """Launches of one pass through a block by the host, in those of a dense one."""
    strategy = rates.strategy
    total = 1.0
    if moe:
        total = MOE_LAUNCHES + EXPERT_LAUNCHES[strategy.precision.compute] * model.num_experts / strategy.layout.ep
        if strategy.dispatch == "expert" and strategy.layout.ep > 1 and not strategy.capacity_factor:
            total += COUNTS_AWAITED
    if strategy.graphs == "full":
        return 0.0
    if strategy.graphs:
        return max(0.0, total - CAPTURED[strategy.graphs])
    return total * (EAGER_IN_RACKS if rates.cluster.gpus_per_node > NODE else 1.0)


def head_passes(model: Architecture, rates: Rates) -> Passes:
    """Final norm, output head and loss; the logits are read and written a few times in fp32."""
    tokens, tp = rates.strategy.tokens, rates.strategy.layout.tp
    matrix = Matrix("head", model.dim, model.vocab_size, True)
    seconds = 2.0 * tokens * matrix.local(tp) / rates.cluster.peak("bf16")
    in_fp8 = rates.strategy.precision.compute != "bf16"
    product = Work(
        matmul=0.0 if in_fp8 else seconds,
        plain=seconds if in_fp8 else 0.0,
        memory=2.0 * (tokens * (matrix.inputs + matrix.outputs / tp) + matrix.local(tp)) * rates.memory,
    )
    logits = tokens * model.vocab_size / tp
    loss = rates.traffic(4.0 * logits * 3)
    gather = Work(tp=hardware.ring_seconds(rates.cluster, rates.tp, 2.0 * tokens * model.dim) if tp > 1 else 0.0)
    return Passes(product + loss + gather, product + loss + gather, product)


def _products(rates: Rates, tokens: float, matrices: list[Matrix]) -> Work:
    total = Work()
    for matrix in matrices:
        total = total + rates.product(tokens, matrix)
    return total


def _attention(model: Architecture, rates: Rates, windowed: bool) -> Work:
    """Scores and values; with flash the half above the diagonal, and what no window sees, is not computed and nothing
    goes to memory."""
    strategy = rates.strategy
    heads = model.num_heads / strategy.layout.tp
    pairs = strategy.tokens * strategy.seq_len * heads
    width = model.qk_head_dim + model.v_head_dim
    if strategy.flash:
        loss = core_loss(rates.cluster, width, strategy.seq_len / strategy.layout.cp)
        near = model.window + WINDOW_TILE if windowed else strategy.seq_len
        seen = 1.0 - max(0.0, 1.0 - near / strategy.seq_len) ** 2
        return Work(attention=pairs * seen * width * rates.attention * loss)
    # a whole matrix of scores, 2 bytes each: written, read and written as a softmax, read; dropout: again, and its mask
    passes = 9.0 if strategy.dropout else 5.0
    return Work(attention=2.0 * pairs * width * rates.attention, memory=2.0 * passes * pairs * rates.memory)


def core_loss(cluster: ClusterConfig, width: float, tokens: float) -> float:
    """How much longer an attention core takes than long sequences of the usual width do. width: of a head's keys and
    values together; tokens: of a sequence on a rank."""
    exponentials = (1.0 + EXPONENTIAL / width) / 1.5 if cluster.fp8_tflops > cluster.bf16_tflops else 1.0
    return (1.0 + SHORT_SEQUENCE / tokens) * exponentials


def _elementwise(model: Architecture, rates: Rates, moe: bool) -> Work:
    """Norms, residuals, rotary positions, activation function: bytes read and written in forward."""
    strategy = rates.strategy
    tokens, tp = strategy.tokens, strategy.layout.tp
    cut = tp if strategy.sequence_parallel else 1
    hidden = (model.shared_hidden if moe else model.dense_hidden) / tp
    rotary = (model.num_heads + model.num_kv_heads) * model.qk_head_dim / tp
    size = 2.0 * tokens * (10 * model.dim / cut + 2 * rotary + (model.up_factor + 1) * hidden)
    if model.biases:
        size += 2.0 * tokens * 6 * model.dim / cut  # dropout masks and bias additions
    return rates.traffic(size)


def experts_work(model: Architecture, rates: Rates) -> tuple[Work, Work, Work]:
    """Products of the routed experts; their permutation and activation; their exchange."""
    strategy, cluster = rates.strategy, rates.cluster
    layout = strategy.layout
    tokens = strategy.tokens / layout.tp
    rows = tokens * model.top_k * strategy.etp
    local_experts = model.num_experts / layout.ep
    weights = model.expert_size / strategy.etp
    products = Work(
        grouped=2.0 * rows * weights * rates.matrix,
        memory=rates.operand
        * (
            rows * (2 * model.dim + (model.up_factor + 1) * model.expert_hidden / strategy.etp)
            + local_experts * weights
        )
        * rates.memory,
    )
    width = (model.up_factor + 1) * model.expert_hidden / strategy.etp
    routed = rates.traffic(2.0 * rows * (4 * model.dim + width) + 8.0 * tokens * model.num_experts)
    if model.expert_biases and not strategy.fused_biases:
        outputs = model.up_factor * model.expert_hidden / strategy.etp + model.dim
        routed = routed + rates.traffic(BIASES * rows * outputs)
    exchange = hardware.Group(layout.ep, rates.ep.local, rates.ep.nodes)
    inside, outside = (tokens * model.dim * 2.0 * times for times in crossings(model, strategy.dispatch, exchange))
    seconds = 2 * hardware.all_to_all_seconds(cluster, exchange, inside, outside)
    if strategy.etp > 1:
        seconds += 2 * hardware.ring_seconds(cluster, rates.etp, 2.0 * rows * model.dim)
    return products, routed, Work(ep=seconds)


def crossings(model: Architecture, dispatch: str, ranks: hardware.Group) -> tuple[float, float]:
    """How often a token goes over a link and over the network to reach its experts on `ranks`, on the average.

    By `expert`: a copy for each; by `rank`: one for each rank that has some; by `node`: one over the network for each
    other node that has some, and from there over links to the ranks.
    """
    sent = float(model.top_k) if dispatch == "expert" else distinct_ranks(model, ranks.size)
    inside = sent / ranks.size * (ranks.local - 1)
    outside = sent / ranks.size * (ranks.size - ranks.local)
    if dispatch != "node" or ranks.nodes == 1:
        return inside, outside
    nodes = distinct_ranks(model, ranks.nodes)
    return inside + outside, nodes * (ranks.nodes - 1) / ranks.nodes


def _tensor_parallel(model: Architecture, rates: Rates, moe: bool) -> Work:
    """Gather and scatter around attention, and around a dense MLP or the shared expert."""
    strategy = rates.strategy
    if strategy.layout.tp == 1:
        return Work()
    pairs = 1 + (1 if not moe or model.shared_hidden else 0)
    return Work(tp=2 * pairs * hardware.ring_seconds(rates.cluster, rates.tp, 2.0 * strategy.tokens * model.dim))


def _context_parallel(model: Architecture, rates: Rates) -> Work:
    """Keys and values of all other ranks come round once."""
    strategy = rates.strategy
    if strategy.layout.cp == 1:
        return Work()
    if model.kv_lora_rank:
        width = float(model.kv_lora_rank + model.qk_rope_head_dim)
    else:
        width = max(1.0, model.num_kv_heads / strategy.layout.tp) * (model.qk_head_dim + model.v_head_dim)
    volume = 2.0 * strategy.tokens * strategy.layout.cp * width
    return Work(cp=hardware.ring_seconds(rates.cluster, rates.cp, volume))


def _recomputed(model: Architecture, rates: Rates, moe: bool, forward: Work, attention: Work) -> Work:
    """What is computed again in backward."""
    strategy = rates.strategy
    chosen = strategy.recompute
    if "full" in chosen:
        return forward
    again = Work()
    if "core_attn" in chosen:
        again = again + attention
    if "mla_up_proj" in chosen and model.kv_lora_rank:
        again = again + _products(rates, strategy.tokens, [m for m in model.attention() if m.name.endswith("up")])
    if "mlp" in chosen and not moe:
        again = again + _products(rates, strategy.tokens, model.mlp(model.dense_hidden)[:1])
    if "moe" in chosen and moe:
        products, routed, exchange = experts_work(model, rates)
        again = again + products + routed + exchange
    if chosen & {"norm", "moe_act"}:
        again = again + _elementwise(model, rates, moe) * (0.25 * len(chosen & {"norm", "moe_act"}))
    return again
