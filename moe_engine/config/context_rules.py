"""The rules of context parallelism: sequences, heads and payloads that can be shared out."""

from __future__ import annotations

from moe_engine.config.rules import Rules

EXCHANGES = ("ring", "all_gather", "ulysses")
PAYLOADS = ("kv", "latent")
FP8_BLOCK = 128  # rows of a weight that share a scale


def check_context_parallel(rules: Rules) -> None:
    """What section `cp` says, and that a sequence can be cut in 2 * parallel.cp equal chunks."""
    rules.one_of("cp.exchange", EXCHANGES)
    rules.one_of("cp.payload", PAYLOADS)
    if not rules.sound("parallel.cp") or rules["parallel.cp"] == 1:
        return
    cp, length, latent = rules["parallel.cp"], "train.seq_len", rules["cp.payload"] == "latent"
    if rules.sound(length) and rules[length] % (2 * cp):
        below = rules[length] // (2 * cp) * 2 * cp
        near = f"{below} or {below + 2 * cp}" if below else f"{2 * cp}"
        rules.refuse(
            length,
            f"each of parallel.cp={cp} ranks holds two equal chunks of a sequence, so it must be a multiple of "
            f"{2 * cp}; use {length}={near}",
        )
    if rules.sound("cp.payload", "model.attention") and latent and rules["model.attention"] != "mla":
        rules.refuse(
            "cp.payload", f"model.attention={rules['model.attention']} has no latents to exchange; use cp.payload=kv"
        )
    used = ("cp.exchange", "model.num_heads", "model.num_kv_heads", "model.attention", length)
    if rules.sound(*used) and rules["cp.exchange"] == "ulysses":
        _check_heads(rules, cp)
        if rules["precision.name"] == "fp8" and latent:
            _check_blocks(rules, cp)
    if rules["recompute.mode"] == "selective" and "attention" in rules["recompute.names"]:
        left = [name for name in rules["recompute.names"] if name != "attention"]
        rules.refuse(
            "recompute.names",
            f"with parallel.cp={cp} attention keeps its output alone, and making it again would exchange keys and "
            f"values again; leave attention out: use recompute.names=[{','.join(left or ['norm'])}]",
        )


def _check_heads(rules: Rules, cp: int) -> None:
    """Ulysses gives each rank as many heads; kv heads fewer than ranks are repeated."""
    heads, length = rules["model.num_heads"], rules["train.seq_len"]
    kv_heads = rules["model.num_kv_heads"] if rules["model.attention"] == "gqa" else heads

    def fits(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if fits(cp):
        return
    near = min((n for n in range(1, heads + 1) if fits(n) and length % (2 * n) == 0), key=lambda n: (abs(n - cp), n))
    rule = f"must divide model.num_heads={heads}"
    if heads % cp == 0:
        rule = f"and model.num_kv_heads={kv_heads} must divide one another"
    rules.refuse("cp.exchange", f"parallel.cp={cp} {rule}; use parallel.cp={near}, or cp.exchange=ring")


def _check_blocks(rules: Rules, cp: int) -> None:
    """In fp8 a rank of Ulysses takes its heads' part of the up-projection, which is quantised in blocks."""
    sizes = "model.num_heads", "model.qk_nope_head_dim", "model.v_head_dim"
    if not rules.sound(*sizes) or rules["model.num_heads"] % cp or rules["model.attention"] != "mla":
        return
    heads, nope, value = (rules[name] for name in sizes)
    own = heads // cp * (nope + value)
    if own % FP8_BLOCK:
        rules.refuse(
            "cp.payload",
            f"precision=fp8 has the up-projection in blocks of {FP8_BLOCK} rows, and with cp.exchange=ulysses each of "
            f"parallel.cp={cp} ranks takes model.num_heads / parallel.cp * (model.qk_nope_head_dim + "
            f"model.v_head_dim) = {own} of them, which is no multiple of {FP8_BLOCK}; use cp.payload=kv, or "
            "cp.exchange=ring",
        )
