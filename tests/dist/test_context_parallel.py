"""Attention over ranks equals attention in one process: every exchange and payload, and what they put on the wire."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from moe_engine.config.schema import ModelConfig
from moe_engine.distributed.collectives import CollectiveLog, CollectiveRecord, Communicator
from moe_engine.model.batch import Shard
from moe_engine.model.context_parallel import ContextParallel, SharedRows, shared_attention
from moe_engine.model.payload import KeysValues, Latents
from moe_engine.ops.linear import Linear
from moe_engine.planner.context import cost, payload_numbers

B, S, H, NOPE, ROPE, VALUE, RANK = 2, 48, 4, 6, 2, 4, 7
SCALE = 0.3
EXCHANGES = ("ring", "all_gather", "ulysses")
# Of the two rows: where documents begin. At cp=4 chunks are 6 places: borders lie inside and on those of shards, one
# document is a single token, and one spans several shards.
PACKED = ((0, 6, 7, 24), (0, 5, 30, 42, 44))
WHOLE: tuple[tuple[int, ...], ...] = ((0,), (0,))


def documents(starts: tuple[tuple[int, ...], ...]) -> Tensor:
    ids = torch.zeros(B, S, dtype=torch.int32)
    for row, places in enumerate(starts):
        ids[row, list(places[1:])] = 1
    return ids.cumsum(dim=1).int()


def inputs(kv_heads: int) -> dict[str, Tensor]:
    """Whole rows: queries, keys and values, latents, and the gradient of the result."""
    chance = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance, dtype=torch.float64)

    return {
        "q": normal(B, S, H, NOPE + ROPE), "k": normal(B, S, kv_heads, NOPE + ROPE), "v": normal(B, S, kv_heads, VALUE),
        "latent": normal(B, S, RANK), "k_rope": normal(B, S, ROPE), "weight": normal(H * (NOPE + VALUE), RANK),
        "d_out": normal(B, S, H, VALUE),
    }  # fmt: skip


def made_from_latents(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    kv = (x["latent"] @ x["weight"].T).view(B, S, H, NOPE + VALUE)
    return torch.cat((kv[..., :NOPE], x["k_rope"][:, :, None].expand(B, S, H, ROPE)), dim=3), kv[..., NOPE:]


def dense(x: dict[str, Tensor], ids: Tensor, causal: bool, latent: bool) -> dict[str, Tensor]:
    """Output and gradients by the definition, with the whole score matrix."""
    x = {name: t.clone().requires_grad_(name != "d_out") for name, t in x.items()}
    k, v = made_from_latents(x) if latent else (x["k"], x["v"])
    k, v = (t.repeat_interleave(H // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", x["q"], k) * SCALE
    seen = ids[:, :, None] == ids[:, None]
    seen = seen.tril() if causal else seen
    out = torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1), v)
    out.backward(x["d_out"])
    return {"out": out.detach(), **{name: t.grad for name, t in x.items() if t.grad is not None}}


def shared(
    x: dict[str, Tensor], ids: Tensor, causal: bool, latent: bool, cp: ContextParallel
) -> tuple[dict[str, Tensor], list[CollectiveRecord]]:
    """This rank's part of the same, and what it sent."""
    rank, size, log = cp.ranks.rank, cp.ranks.size, cp.ranks.log
    assert log is not None
    log.records.clear()
    rows = SharedRows(Shard(rank, size, ids, torch.full((B,), S)), causal)
    own = rows.shard.places()
    up = Linear(RANK, H * (NOPE + VALUE), torch.float64)
    up.weight.data.copy_(x["weight"])
    part = {name: t[:, own].clone().requires_grad_() for name, t in x.items() if name != "weight"}
    payload: KeysValues | Latents = KeysValues(part["k"], part["v"])
    if latent:
        payload = Latents(part["latent"], part["k_rope"], up, VALUE, 0, H, H)
    out = shared_attention(part["q"], payload, cp, rows, SCALE)
    out.backward(part["d_out"].detach())
    found = {"out": out.detach(), **{name: t.grad for name, t in part.items() if t.grad is not None}}
    if up.weight.grad is not None:
        found["weight"] = up.weight.grad
    return found, list(log.records)


def _attend(rank: int, size: int, cases: list[tuple[Any, ...]]) -> list[Any]:
    log = CollectiveLog()
    everybody = Communicator("cp", range(size), rank, dist.group.WORLD, log)
    results = []
    for exchange, payload, kv_heads, causal, starts in cases:
        cp = ContextParallel(everybody, exchange, payload)
        results.append(shared(inputs(kv_heads), documents(starts), causal, payload == "latent", cp))
    return results


def sent_bytes(record: CollectiveRecord, size: int) -> float:
    """What left the rank: a gathered block goes to all others, of an all-to-all a part stays."""
    factor = {"shift": 1.0, "all_gather": size - 1.0}.get(record.op, 1 - 1 / size)
    return record.bytes * factor


@pytest.mark.parametrize("size", [2, 4])
def test_attention_over_ranks_equals_the_definition(size: int) -> None:
    """Output, every gradient, and the bytes of the planner's formula."""
    forms = [("kv", H), ("latent", H), ("kv", 2), ("kv", 1)]
    cases = [
        (exchange, payload, kv_heads, causal, starts)
        for exchange, (payload, kv_heads), causal, starts in product(EXCHANGES, forms, (True, False), (WHOLE, PACKED))
    ]
    by_rank = run_ranks(size, _attend, size, cases)
    places = [Shard(rank, size, documents(WHOLE), torch.full((B,), S)).places() for rank in range(size)]
    for i, (exchange, payload, kv_heads, causal, starts) in enumerate(cases):
        expected = dense(inputs(kv_heads), documents(starts), causal, payload == "latent")
        parts = [results[i][0] for results in by_rank]
        assert expected.keys() == parts[0].keys()
        for name, truth in expected.items():
            if name == "weight":
                found = torch.stack([part[name] for part in parts]).sum(dim=0)
            else:
                found = torch.empty_like(truth)
                for part, own in zip(parts, places, strict=True):
                    found[:, own] = part[name]
            error = float((found - truth).norm() / truth.norm())
            assert error < 1e-12, f"{cases[i]} {name}: {error}"
        check_bytes(exchange, payload, kv_heads, size, [results[i][1] for results in by_rank])


def check_bytes(exchange: str, payload: str, kv_heads: int, size: int, logs: list[list[CollectiveRecord]]) -> None:
    model = ModelConfig(num_heads=H, kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE)
    if payload == "kv" and kv_heads != H:
        # The formula's grouped heads have equal keys and values: the sum of both sizes is what counts.
        model = ModelConfig(attention="gqa", num_heads=H, num_kv_heads=kv_heads, head_dim=(NOPE + ROPE + VALUE) // 2)
    formula = cost(model, exchange, payload, rows=B, seq_len=S, cp=size, size=8, wide=8)
    for log in logs:
        forward = sum(sent_bytes(record, size) for record in log if "backward" not in record.label)
        backward = sum(sent_bytes(record, size) for record in log if "backward" in record.label)
        again = 0.0
        if exchange != "ulysses" or payload == "latent":  # blocks come once more in backward, under the same label
            again = (size - 1) * B * S / size * payload_numbers(model, payload) * 8
        assert forward - again == pytest.approx(formula.forward.sent)
        assert backward + again == pytest.approx(formula.backward.sent)


def _cross(rank: int, size: int, ways: list[tuple[str, str]]) -> list[dict[str, Tensor]]:
    """For each way and chunk: gradients of this rank's tokens where only the chunk's last query has one."""
    everybody = Communicator("cp", range(size), rank, dist.group.WORLD, CollectiveLog())
    found = []
    for exchange, payload in ways:
        cp = ContextParallel(everybody, exchange, payload)
        for chunk in range(2 * size):
            x = only_query(size, chunk)
            found.append(shared(x, documents(WHOLE), True, payload == "latent", cp)[0])
    return found


def only_query(size: int, chunk: int) -> dict[str, Tensor]:
    x = inputs(H)
    last = (chunk + 1) * S // (2 * size) - 1
    d_out = torch.zeros_like(x["d_out"])
    d_out[:, last] = x["d_out"][:, last]
    return x | {"d_out": d_out}


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_cross_every_border(size: int) -> None:
    """From a query to every token before it, whichever ranks hold them, and to none after it."""
    ways = list(product(EXCHANGES, ("kv", "latent")))
    by_rank = run_ranks(size, _cross, size, ways)
    places = [Shard(rank, size, documents(WHOLE), torch.full((B,), S)).places() for rank in range(size)]
    number = 0
    for _, payload in ways:
        for chunk in range(2 * size):
            expected = dense(only_query(size, chunk), documents(WHOLE), True, payload == "latent")
            for name in ("latent", "k_rope") if payload == "latent" else ("k", "v"):
                found = torch.empty_like(expected[name])
                for results, own in zip(by_rank, places, strict=True):
                    found[:, own] = results[number][name]
                assert float((found - expected[name]).norm() / expected[name].norm()) < 1e-12
                reached = (found != 0).flatten(2).any(dim=2).all(dim=0)  # [S]
                seen = torch.arange(S) < (chunk + 1) * S // (2 * size)
                assert torch.equal(reached, seen), (ways, name, chunk)
            number += 1
