"""The rules that a configuration must keep, checked before any process or device is touched.

`strict` has already checked names and types; here are the values: first each by itself, then those that must fit
together (a rule is skipped when a value it uses is already refused). All failures are one ConfigError, a line each,
with `name=value`, the rule, and a value that works. Legal pipeline schedules are known to `schedule`, which lies above
this room, so the command line asks there.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict

from moe_engine.config import strict
from moe_engine.config.context_rules import check_context_parallel
from moe_engine.config.model_rules import check_length, check_model
from moe_engine.config.routing_rules import check_room, check_routing, check_routing_mode
from moe_engine.config.rules import Rules, divisors, nearest
from moe_engine.config.schema import FORMAT_BYTES, Config, MoEConfig, PrecisionConfig, RecomputeConfig, moments_format

# recipe: its compute format
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "fp8": "bfloat16"}

LONGEST_WAIT_S = 7 * 24 * 3600  # of an exchange; far beyond it the backends' own clocks overflow
LONGEST_BF16_MEMORY = 1 - 2**-8  # the largest beta of moments in bf16
_CHOICES = {
    "activation": ("silu", "gelu", "gelu_tanh", "relu", "relu_squared"),
    "recompute.mode": ("none", "selective", "full"),
    "recompute.names": ("norm", "mla_up", "swiglu", "attention"),
    "precision.name": tuple(PRECISIONS),
    "precision.compute": tuple(FORMAT_BYTES),
    "precision.gradient": ("float32", "float64"),
    "precision.master": ("float32", "float64"),
    "precision.moments": ("master", *FORMAT_BYTES),
    "precision.wgrad": ("fp8", "bf16"),
    "train.kernels": ("auto", "triton", "hopper"),
}


def validate(config: Config, world: int | None = None) -> None:
    """Check every rule. `world` is the number of ranks, where it is given from outside (torchrun, Slurm).

    `run.ranks` stands for it where it is not: on a laptop that checks a job of the cluster.
    Raises ConfigError with a line for each rule that is broken.
    """
    strict.build(Config, asdict(config))  # the types, of a configuration made in Python
    rules = Rules(config)
    _check_ranks(rules, world)
    world = world or config.run.ranks
    check_model(rules)
    check_length(rules)
    check_routing(rules, "model.", "moe.")
    check_precision(rules)
    _check_recompute(rules)
    _check_optim_and_data(rules)
    _check_train(rules)
    _check_layout(rules, world)
    _check_placement(rules)
    check_room(rules)
    check_context_parallel(rules)
    check_routing_mode(rules)
    _check_batch(rules, world)
    rules.finish()


def validate_moe(config: MoEConfig) -> None:
    """Check the configuration of a layer that stands alone. Raises ConfigError with a line for each broken rule."""
    strict.build(MoEConfig, asdict(config))
    rules = Rules(config)
    rules.at_least(1, "dim")
    rules.at_least(0, "init_std")
    check_routing(rules, "", "")
    _check_activation(rules)
    rules.finish()


def validate_activation(activation: str, gated: bool, swiglu_limit: float) -> None:
    """Check what stands between an expert's projections, for experts without a layer. Raises as `validate_moe`."""
    rules = Rules(MoEConfig(1, 1, 1, 1, activation=activation, gated=gated, swiglu_limit=swiglu_limit))
    rules.at_least(0, "swiglu_limit")
    _check_activation(rules)
    rules.finish()


def _check_activation(rules: Rules) -> None:
    config = rules.config
    rules.one_of("activation", _CHOICES["activation"])
    if rules.sound("swiglu_limit", "activation") and config.swiglu_limit > 0:
        if not config.gated:
            rules.refuse("swiglu_limit", "there is a gate to clamp only in gated experts; use gated=true")
        if config.activation != "silu":
            rules.refuse("swiglu_limit", "the clamped activation takes the place of silu; use activation=silu")


def resolve(config: Config, world: int | None = None) -> Config:
    """A copy with everything filled in that follows from the rest: `parallel.dp` and `pipeline.micro_batches`.

    Without a `world` and `run.ranks`, dp is the smallest that holds `parallel.ep`. The configuration must be valid.
    """
    resolved = copy.deepcopy(config)
    resolved.parallel.dp = _data_parallel(config, world or config.run.ranks)
    resolved.pipeline.micro_batches = config.train.global_batch // (resolved.parallel.dp * config.train.micro_batch)
    return resolved


def _data_parallel(config: Config, world: int | None) -> int:
    """Dense replicas: as given, else all that the world has room for, else as few as the experts need."""
    parallel = config.parallel
    if parallel.dp is not None:
        return parallel.dp
    if world is not None:
        return max(1, world // (parallel.pp * parallel.cp * parallel.tp))
    return parallel.ep // math.gcd(parallel.ep, parallel.cp)


def check_precision(rules: Rules) -> None:
    """The formats of section `precision`, and the options of its recipe."""
    names = ("name", "compute", "gradient", "master", "moments", "wgrad")
    for name in names:
        rules.one_of(f"precision.{name}", _CHOICES[f"precision.{name}"])
    if not rules.sound(*(f"precision.{name}" for name in names)):
        return
    recipe, compute = rules["precision.name"], rules["precision.compute"]
    if PRECISIONS[recipe] != compute:
        right = next(name for name, format_ in PRECISIONS.items() if format_ == compute)
        rules.refuse("precision.compute", f"recipe {recipe} computes in {PRECISIONS[recipe]}; use precision={right}")
        return
    for name in ("gradient", "master"):
        if FORMAT_BYTES[rules[f"precision.{name}"]] < FORMAT_BYTES[compute]:
            rules.refuse(
                f"precision.{name}",
                f"must be at least as wide as precision.compute={compute}; use precision.{name}={compute}",
            )
    moments, master = moments_format(rules["precision"]), rules["precision.master"]
    if FORMAT_BYTES[moments] > FORMAT_BYTES[master]:
        rules.refuse(
            "precision.moments",
            f"have at most the bits of precision.master={master}; use precision.moments=master",
        )
    _check_fp8(rules)


def _check_fp8(rules: Rules) -> None:
    """The options of the fp8 recipe."""
    ends = ("precision.bf16_first_layers", "precision.bf16_last_layers")
    rules.at_least(0, *ends)
    default, given = PrecisionConfig(), rules["precision"]
    if rules["precision.name"] != "fp8":
        for name in ("wgrad", "power_of_two_scales", "keep_transposed_codes", "bf16_first_layers", "bf16_last_layers"):
            usual = getattr(default, name)
            if getattr(given, name) != usual:
                shown = str(usual).lower() if isinstance(usual, bool) else usual
                rules.refuse(
                    f"precision.{name}", f"is an option of fp8 training; use precision=fp8, or precision.{name}={shown}"
                )
    elif rules.sound(*ends, "model.num_layers"):
        layers, (first, last) = rules["model.num_layers"], (rules[end] for end in ends)
        for end, number in zip(ends, (first, last), strict=True):
            if number > layers:
                rules.refuse(end, f"the model has model.num_layers={layers}; use {end}={layers} or less")
        if max(first, last) <= layers < first + last:
            rules.refuse(
                ends[1],
                f"with {ends[0]}={first} these are more than model.num_layers={layers}; "
                f"use {ends[1]}={layers - first}, or precision=bf16",
            )


def _check_recompute(rules: Rules) -> None:
    rules.one_of("recompute.mode", _CHOICES["recompute.mode"])
    names, known = rules["recompute.names"], _CHOICES["recompute.names"]
    wrong = [name for name in names if name not in known]
    if wrong:
        rules.refuse("recompute.names", f"{', '.join(wrong)}: no such part; there are {', '.join(known)}")
    elif len(set(names)) < len(names):
        rules.refuse(
            "recompute.names", f"a part is named twice; use recompute.names=[{','.join(dict.fromkeys(names))}]"
        )
    elif rules["recompute.mode"] == "selective" and not names:
        rules.refuse("recompute.names", "recompute=selective needs a part to recompute; use recompute.names=[norm]")
    elif rules["recompute.mode"] != "selective" and names != RecomputeConfig().names:
        rules.refuse(
            "recompute.names",
            f"parts count with recompute=selective alone, not with {rules['recompute.mode']}; "
            "use recompute.mode=selective, or leave the names out",
        )


def _check_optim_and_data(rules: Rules) -> None:
    rules.positive(3e-3, "optim.lr")
    rules.positive(1e-8, "optim.eps")
    rules.at_least(0, "optim.warmup_steps", "optim.weight_decay", "optim.clip", "data.max_bytes")
    rules.fraction(0.9, "optim.beta1", "optim.beta2")
    if rules.sound("precision.moments") and moments_format(rules["precision"]) == "bfloat16":
        _check_short_memory(rules)
    rules.fraction(0.05, "data.validation_fraction")
    if not 0 <= rules["optim.min_lr_ratio"] <= 1:
        rules.refuse("optim.min_lr_ratio", "must be from 0 to 1, for example optim.min_lr_ratio=0.1")
    if not rules["data.cache_dir"]:
        rules.refuse("data.cache_dir", "a folder is needed, for example data.cache_dir=data_cache")


def _check_short_memory(rules: Rules) -> None:
    """bf16 rounds by up to 1/256 of a number: a moment that a step makes smaller by less than that never falls."""
    for name, usual in (("optim.beta1", 0.9), ("optim.beta2", 0.95)):
        if rules.sound(name) and rules[name] > LONGEST_BF16_MEMORY:
            rules.refuse(
                name,
                "a step without gradient changes a moment by less than bf16 rounds it, and it would never fall; "
                f"use {name}={usual}, {LONGEST_BF16_MEMORY} at most, or precision.moments=master",
            )


def _check_train(rules: Rules) -> None:
    rules.at_least(1, "train.steps", "train.global_batch", "train.micro_batch", "train.seq_len", "train.threads")
    counts = ("seed", "mtp_loss_weight", "eval_sequences", "sample_tokens", "checkpoint_every")
    rules.at_least(0, *(f"train.{name}" for name in counts))
    if rules["train.eval_sequences"] > 0 and rules["data.validation_fraction"] == 0:
        rules.refuse(
            "data.validation_fraction",
            f"train.eval_sequences={rules['train.eval_sequences']} needs text to validate on; "
            "use data.validation_fraction=0.05, or train.eval_sequences=0",
        )
    rules.one_of("train.kernels", _CHOICES["train.kernels"])
    rules.at_least(1, "trace.drawn_step")
    rules.at_least(1, "run.exchange_limit_s")
    rules.at_most(LONGEST_WAIT_S, "run.exchange_limit_s")
    if not rules["run.dir"]:
        rules.refuse("run.dir", "a folder is needed, for example run.dir=runs")
    name = rules["run.name"]
    if not name or "/" in name or name in (".", ".."):
        rules.refuse("run.name", "the name of one folder inside run.dir is needed, for example run.name=first")


def _check_ranks(rules: Rules, world: int | None) -> None:
    ranks = rules["run.ranks"]
    if ranks is not None:
        rules.at_least(1, "run.ranks")
    if ranks is not None and world is not None and ranks != world:
        rules.refuse("run.ranks", f"{world} ranks are given; leave it out, or use run.ranks={world}")


def _check_layout(rules: Rules, world: int | None) -> None:
    rules.at_least(1, "parallel.pp", "parallel.cp", "parallel.ep", "parallel.tp", "pipeline.virtual_stages")
    if rules["parallel.dp"] is not None:
        rules.at_least(1, "parallel.dp")
    if rules["parallel.tp"] > 1:
        rules.refuse("parallel.tp", "tensor parallelism is not built yet; use parallel.tp=1, with more pp, ep or cp")
    if rules["parallel.zero"] != 1:
        rules.refuse("parallel.zero", "optimizer states are always sharded (ZeRO-1); use parallel.zero=1")
    if rules.sound("parallel.pp", "model.num_layers", "model.mtp_depth") and not rules["pipeline.stages"]:
        # Split evenly, every stage has a block; MTP blocks are all on the last one.
        most = rules["model.num_layers"] + (rules["model.mtp_depth"] > 0)
        if rules["parallel.pp"] > most:
            rules.refuse("parallel.pp", f"the model has blocks for {most} stages; use parallel.pp={most} or less")
    if rules.sound("parallel.ep", "model.num_experts") and rules["model.num_experts"] % rules["parallel.ep"]:
        near = nearest(rules["parallel.ep"], divisors(rules["model.num_experts"]))
        rules.refuse(
            "parallel.ep", f"must divide model.num_experts={rules['model.num_experts']}; use parallel.ep={near}"
        )
    _check_nodes(rules)
    _check_bound(rules)
    axes = [f"parallel.{axis}" for axis in ("pp", "dp", "cp", "tp")]
    if world is not None and rules.sound(*axes, "run.ranks"):
        _check_world(rules, world)
    if rules.sound(*axes, "parallel.ep", "run.ranks"):
        _check_expert_parallel(rules, world)


def _check_world(rules: Rules, world: int) -> None:
    """The ranks given from outside are the ones that the layout needs."""
    parallel = rules["parallel"]
    others = parallel.pp * parallel.cp * parallel.tp
    grid = f"pp={parallel.pp} x cp={parallel.cp} x tp={parallel.tp}"
    if parallel.dp is None and world % others:
        rules.refuse(
            "parallel.pp", f"{grid} does not divide the {world} ranks given; start a multiple of {others} ranks"
        )
    elif parallel.dp is not None and world != others * parallel.dp:
        needed = others * parallel.dp
        fits = f", or use parallel.dp={world // others}" if world % others == 0 else ""
        rules.refuse("parallel.dp", f"with {grid} needs {needed} ranks, and {world} are given; start {needed}{fits}")


def _check_expert_parallel(rules: Rules, world: int | None) -> None:
    """Experts fold into the data-parallel ranks of a stage."""
    replicas = _data_parallel(rules.config, world) * rules["parallel.cp"]
    ep = rules["parallel.ep"]
    if replicas % ep:
        near = nearest(ep, [d for d in divisors(replicas) if rules["model.num_experts"] % d == 0])
        rules.refuse(
            "parallel.ep",
            f"must divide parallel.dp * parallel.cp = {replicas}; use parallel.ep={near}, "
            f"or parallel.dp={math.lcm(replicas, ep)}",
        )


def _check_placement(rules: Rules) -> None:
    """Experts that move need ranks to move between, and more than one of them on a rank."""
    every, gain, ep, experts = "moe.placement.every", "moe.placement.least_gain", "parallel.ep", "model.num_experts"
    rules.at_least(0, every)
    rules.fraction(0.05, gain)
    if rules[every] and rules.sound(every, ep, experts) and rules[ep] in (1, rules[experts]):
        where = "all experts are on one rank" if rules[ep] == 1 else "each rank has one expert"
        others = [ranks for ranks in divisors(rules[experts]) if 1 < ranks < rules[experts]]
        use = f"{every}=0" + (f", or {ep}={others[0]}" if others else "")
        rules.refuse(every, f"with {ep}={rules[ep]} {where}, and moving them evens out nothing; use {use}")


def _check_bound(rules: Rules) -> None:
    """Every rank of the group has a share of the rows that a rank may hold."""
    name, ep = "moe.max_recv_rows", rules["parallel.ep"]
    if rules.sound(name, "parallel.ep") and 0 < rules[name] < ep:
        rules.refuse(name, f"each of parallel.ep={ep} ranks needs a share of it; use {name}={ep} or more, or 0")


def _check_nodes(rules: Rules) -> None:
    """A node holds whole expert-parallel groups, or a group whole nodes."""
    name, ep = "parallel.ranks_per_node", rules["parallel.ep"]
    size = rules[name]
    if size is None:
        if rules["moe.dispatch"] == "hierarchical":
            rules.refuse("moe.dispatch", f"needs to know what a node is; use {name}=8, or moe.dispatch=all_to_all")
        return
    rules.at_least(1, name)
    if rules.sound(name, "parallel.ep") and size % ep and ep % size:
        rules.refuse(name, f"must divide parallel.ep={ep} or be a multiple of it; use {name}={math.gcd(size, ep)}")


def _check_batch(rules: Rules, world: int | None) -> None:
    """The batch is whole micro-batches on every data-parallel rank."""
    batch, micro_batch = "train.global_batch", "train.micro_batch"
    if not rules.sound(
        batch, micro_batch, *(f"parallel.{axis}" for axis in ("pp", "dp", "cp", "ep", "tp")), "run.ranks"
    ):
        return
    dp = _data_parallel(rules.config, world)
    evaluated = "train.eval_sequences"
    if rules.sound(evaluated) and rules[evaluated] % dp:
        near = max(rules[evaluated] // dp, 1) * dp
        rules.refuse(evaluated, f"must be a multiple of parallel.dp={dp}; use {evaluated}={near}")
    unit = dp * rules[micro_batch]
    if rules[batch] % unit:
        below = rules[batch] // unit * unit
        near = f"{batch}={below + unit}" if below == 0 else f"{batch}={below} or {below + unit}"
        rules.refuse(
            batch, f"must be a multiple of parallel.dp * {micro_batch} = {dp} * {rules[micro_batch]}; use {near}"
        )
        return
    derived, given = rules[batch] // unit, rules["pipeline.micro_batches"]
    if given is not None and given != derived:
        rules.refuse(
            "pipeline.micro_batches",
            f"{batch} / (parallel.dp * {micro_batch}) = {derived} here; leave it out, "
            f"or use {batch}={unit * given if given > 0 else unit}",
        )
