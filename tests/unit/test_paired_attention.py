"""Attention over shards in pairs of segments, as fused kernels take them: against the definition, in float64.

The kernel here is the CPU form of torch's FlashAttention, which has the rules of the GPU's: its backward takes the
output and log-sum-exp of all keys.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from moe_engine.model.batch import Shard
from moe_engine.model.context_parallel import SharedRows
from moe_engine.model.paired_attention import Flash, Pairs, merge, paired_backward, paired_forward, seen_pairs

B, S, H, G, KEY, VALUE, SCALE = 2, 48, 4, 2, 6, 4, 0.3
SIZES = (1, 2, 4)
# Borders inside and on those of chunks, a single token, a document over several shards.
PACKED = ((0, 6, 7, 24), (0, 5, 30, 42, 44))


def documents(packed: bool) -> Tensor:
    ids = torch.zeros(B, S, dtype=torch.int32)
    for row, starts in enumerate(PACKED if packed else ()):
        ids[row, list(starts[1:])] = 1
    ids = ids.cumsum(dim=1).int()
    if packed:  # padding at two places of a row is one document
        ids[0, 9:12] = ids[0, 40:] = -1
    return ids


def inputs(packed: bool) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(1 + packed)
    sizes = {"q": (H, KEY), "k": (G, KEY), "v": (G, VALUE), "d_out": (H, VALUE)}
    return {name: torch.randn(B, S, *size, generator=chance, dtype=torch.float64) for name, size in sizes.items()}


def definition(x: dict[str, Tensor], ids: Tensor, causal: bool) -> dict[str, Tensor]:
    q, k, v = (x[name].clone().requires_grad_() for name in "qkv")
    every_k, every_v = (t.repeat_interleave(H // G, dim=2) for t in (k, v))
    seen = ids[:, :, None] == ids[:, None]
    seen = seen.tril() if causal else seen
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, every_k) * SCALE).masked_fill(~seen[:, None], -torch.inf)
    out = torch.einsum("bhqk,bkhe->bqhe", scores.softmax(dim=-1), every_v)
    out.backward(x["d_out"])
    assert q.grad is not None and k.grad is not None and v.grad is not None
    lse = scores.logsumexp(dim=-1).transpose(1, 2)
    return {"out": out.detach(), "lse": lse.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


class CpuFlash:
    """Segment by segment; keys and values of grouped heads are repeated, as this form wants them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = q.new_full((*q.shape[:2], v.shape[2]), torch.nan), q.new_full(q.shape[:2], torch.nan)
        for queries, keys in segments(pairs):
            operands = self._padded(q[queries], k[keys], v[keys])
            out_, lse_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *operands, 0.0, pairs.causal, scale=scale
            )
            out[queries], lse[queries] = out_[0].transpose(0, 1)[..., : v.shape[2]], lse_[0].T
        return out, lse

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: Pairs, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for queries, keys in segments(pairs):
            operands = self._padded(d_out[queries], q[queries], k[keys], v[keys], out[queries])
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *operands, lse[queries].T[None], 0.0, pairs.causal, scale=scale
            )
            for gradient, part, rows in zip(gradients, parts, (queries, keys, keys), strict=True):
                heads = part[0].transpose(0, 1).unflatten(1, (gradient.shape[1], -1)).sum(dim=2)
                gradient[rows] = heads[..., : gradient.shape[2]]
        return gradients[0], gradients[1], gradients[2]

    def _padded(self, *tensors: Tensor) -> list[Tensor]:
        """[1, H, n, KEY] of each."""
        wide = [torch.nn.functional.pad(x, (0, KEY - x.shape[2])) for x in tensors]
        return [x.repeat_interleave(H // x.shape[1], dim=1).transpose(0, 1)[None] for x in wide]


def segments(pairs: Pairs) -> list[tuple[slice, slice]]:
    borders = [[slice(*ends) for ends in pairwise(starts.tolist())] for starts in (pairs.q_starts, pairs.k_starts)]
    lengths = [max(part.stop - part.start for part in side) for side in borders]
    assert tuple(lengths) == pairs.longest and pairs.q_starts.dtype == torch.int32
    return list(zip(*borders, strict=True))


def over_shards(x: dict[str, Tensor], ids: Tensor, causal: bool, size: int, whole: bool) -> dict[str, Tensor]:
    """The same shard by shard: queries of each rank, or of whole rows, meet the keys of all ranks."""
    found = {name: torch.zeros_like(t) for name, t in x.items() if name in "qkv"}
    found |= {"out": torch.zeros_like(x["d_out"]), "lse": torch.zeros(B, S, H, dtype=torch.float64)}
    for rank in range(1 if whole else size):
        rows = SharedRows(Shard(rank, size, ids, torch.full((B,), S)), causal)
        own = torch.arange(S) if whole else rows.shard.places()
        q, d_out = x["q"][:, own], x["d_out"][:, own]
        blocks = [(rows.seen(source, whole), rows.shard.places(source)) for source in range(size)]
        out, lse = torch.zeros_like(d_out), torch.full(d_out.shape[:3], -torch.inf, dtype=torch.float64)
        for seen, keys in blocks:
            k, v = x["k"][:, keys], x["v"][:, keys]
            part = paired_forward(q, k, v, seen.pairs, SCALE, torch.float64, CpuFlash())
            out, lse = merge(out, lse, *part)
        for seen, keys in blocks:
            k, v = x["k"][:, keys], x["v"][:, keys]
            parts = paired_backward(d_out, q, k, v, out, lse, seen.pairs, SCALE, torch.float64, CpuFlash())
            for name, part, places in zip("qkv", parts, (own, keys, keys), strict=True):
                found[name][:, places] += part
        found["out"][:, own], found["lse"][:, own] = out, lse
    return found


@pytest.mark.parametrize(("causal", "packed", "whole"), list(product((True, False), repeat=3)))
def test_shards_together_are_the_definition(causal: bool, packed: bool, whole: bool) -> None:
    """Output, log-sum-exp and every gradient; `whole`: queries of whole rows, as by heads over latents."""
    x, ids = inputs(packed), documents(packed)
    expected = definition(x, ids, causal)
    for size in SIZES:
        found = over_shards(x, ids, causal, size, whole)
        for name, truth in expected.items():
            torch.testing.assert_close(found[name], truth, rtol=1e-11, atol=1e-11, msg=f"{name} of {size} ranks")


def test_a_share_is_one_call_of_a_kernel() -> None:
    """Zig-zag chunks of plain rows: the own block is causal as it stands, of any other half is seen whole."""
    ids, size = documents(packed=False), 4
    for rank, source in product(range(size), repeat=2):
        (call,) = SharedRows(Shard(rank, size, ids, torch.full((B,), S))).seen(source).pairs
        assert call.causal == (rank == source)
        assert (call.queries is None) == (source <= rank) and (call.keys is None) == (source >= rank)
        chunk = S // (2 * size)
        assert call.longest == (chunk * (1 + (source <= rank)), chunk * (1 + (source >= rank)))


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_hold_each_visible_key_once(causal: bool) -> None:
    """For runs of places of any kind: equal, apart, within and across one another."""
    runs = [[range(3, 5), range(9, 12)], [range(0, 12)], [range(4, 10)], [range(0, 1), range(1, 3), range(5, 6)], []]
    for queries, keys in product(runs, repeat=2):
        q, k = ([place for run in side for place in run] for side in (queries, keys))
        squares, wholes = seen_pairs(queries, keys, causal)
        counts = torch.zeros(len(q), len(k), dtype=torch.int64)
        for pair in squares:
            assert len(pair.queries) == len(pair.keys)
            counts[pair.queries.start : pair.queries.stop, pair.keys.start : pair.keys.stop] += torch.ones(
                len(pair.queries), len(pair.keys), dtype=torch.int64
            ).tril()
        for pair in wholes:
            counts[pair.queries.start : pair.queries.stop, pair.keys.start : pair.keys.stop] += 1
        expected = [[int(not causal or key <= query) for key in k] for query in q]
        assert counts.tolist() == expected, (queries, keys)


def test_flash_gives_shapes_as_asked() -> None:
    """The operators of a GPU by their rules for sizes: DeepSeek-V3's head sizes, and grouped heads of 20 numbers."""
    ids = documents(packed=True)
    calls = SharedRows(Shard(1, 2, ids, torch.full((B,), S))).seen(1).pairs
    for heads, kv_heads, key, value in ((4, 4, 192, 128), (4, 2, 20, 20)):
        sizes = ((heads, key), (kv_heads, key), (kv_heads, value), (heads, value))
        q, k, v, out = (torch.empty(B, S // 2, *size, dtype=torch.bfloat16, device="meta") for size in sizes)
        for pairs in calls:
            some = [None if index is None else index.to("meta") for index in (pairs.queries, pairs.keys)]
            rows = [B * S // 2 if index is None else len(index) for index in some]
            operands = [x.flatten(0, 1)[:n] for x, n in zip((q, k, v, out), (*rows, rows[1], rows[0]), strict=True)]
            on_meta = pairs._replace(q_starts=pairs.q_starts.to("meta"), k_starts=pairs.k_starts.to("meta"))
            found, lse = Flash().forward(*operands[:3], on_meta, SCALE)
            assert found.shape == operands[3].shape and lse.shape == (rows[0], heads) and lse.dtype == torch.float32
            gradients = Flash().backward(found, *operands[:3], found, lse, on_meta, SCALE)
            assert [g.shape for g in gradients] == [x.shape for x in operands[:3]]
