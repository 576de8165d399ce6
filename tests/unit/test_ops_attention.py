"""Blocked attention against the formula: forward, every gradient, pieces of sequences, documents, grouped heads."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from measures import calc_diff
from torch import Tensor

from moe_engine.ops import short_attention
from moe_engine.ops.attention import LIMIT, attention, attention_backward, attention_forward
from moe_engine.ops.attention_parts import HEADS
from moe_engine.ops.rotary import Turn, rotate_end
from moe_engine.ops.short_attention import latent_attention
from moe_engine.ops.visible import EDGE, KEY_TILE, LONG_QUERY_BLOCK, LONG_ROWS, QUERY_BLOCK, Visible, whole_rows


def inputs(
    B: int, H: int, G: int, S: int, d: int, e: int, dtype: torch.dtype = torch.float64, keys: int | None = None
) -> list[Tensor]:
    """q, k, v and a gradient, laid out [B, S, heads, …] as projections leave them."""
    chance = torch.Generator().manual_seed(S)
    Sk = S if keys is None else keys
    sizes = ((S, H, d), (Sk, G, d), (Sk, G, e), (S, H, e))
    return [torch.randn(B, *size, generator=chance, dtype=torch.float64).to(dtype) for size in sizes]


def seen(visible: Visible, B: int) -> Tensor:
    """bool [B, Sq, Sk], pair by pair."""
    places = visible.k_places[None, :] <= visible.q_places[:, None]
    if visible.window:
        places = places & (visible.k_places[None, :] > visible.q_places[:, None] - visible.window)
    found = (places if visible.causal else torch.ones_like(places)).expand(B, -1, -1)
    if visible.q_documents is None or visible.k_documents is None:
        return found
    return found & (visible.q_documents[:, :, None] == visible.k_documents[:, None])


def formula(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen(visible, q.shape[0])[:, None], -math.inf)
    weights = scores.softmax(dim=-1).nan_to_num(nan=0.0)  # 0 / 0 where nothing is seen
    return (weights @ v).transpose(1, 2), scores.logsumexp(dim=-1).transpose(1, 2)


def two_documents(B: int, S: int) -> Tensor:
    """Each row cut in two at a place of its own: [B, S]."""
    return (torch.arange(S)[None] >= torch.arange(1, B + 1)[:, None] * S // (B + 1)).int()


def check(tensors: list[Tensor], d_out: Tensor, visible: Visible) -> None:
    """Both what autograd knows and, for any length, the two functions that it may leave out."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    true_out, true_lse = formula(*leaves, visible, 0.3)
    true = torch.autograd.grad(true_out, leaves, d_out)
    out = attention(*leaves, visible, 0.3)
    results = [[out, true_lse, *torch.autograd.grad(out, leaves, d_out)]]
    out, lse = attention_forward(*tensors, visible, 0.3)
    results.append([out, lse, *attention_backward(d_out, *tensors, out, lse, visible, 0.3)])
    for found in results:
        for ours, right in zip(found, (true_out, true_lse, *true), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-11, atol=1e-11)


LONG = KEY_TILE + LONG_QUERY_BLOCK + 17  # two tiles, and no whole number of blocks


@pytest.mark.parametrize("S", [0, 1, 3, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 2 * QUERY_BLOCK + 17, LONG])
@pytest.mark.parametrize(("H", "G"), [(1, 1), (HEADS + 2, HEADS + 2), (12, 6), (8, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_gradients_are_those_of_the_formula(S: int, H: int, G: int, packed: bool) -> None:
    *tensors, d_out = inputs(2, H, G, S, 6, 5)
    check(tensors, d_out, whole_rows(S, two_documents(2, S) if packed else None))


@pytest.mark.parametrize(("window", "packed"), [(1, False), (5, True), (100, True), (700, False)])
def test_a_window_hides_what_is_farther(window: int, packed: bool) -> None:
    for S in (50, LONG):
        *tensors, d_out = inputs(2, 2, 1, S, 6, 5)
        check(tensors, d_out, whole_rows(S, two_documents(2, S) if packed else None, window=window))
    steps = whole_rows(2048, window=128).steps_of(0)
    assert sum(step.keys.stop - step.keys.start for step in steps) <= 16 * (128 + 128 + 64)


@pytest.mark.parametrize("packed", [False, True])
def test_not_causal(packed: bool) -> None:
    for S in (50, LONG):
        *tensors, d_out = inputs(2, 2, 2, S, 6, 5)
        documents, places = (two_documents(2, S) if packed else None), torch.arange(S)
        check(tensors, d_out, Visible(places, places, documents, documents, causal=False))


def test_documents_that_are_no_runs() -> None:
    """As padding in the middle of a document is; and documents anywhere."""
    *tensors, d_out = inputs(3, 2, 1, LONG, 6, 5)
    documents = torch.zeros(3, LONG, dtype=torch.int32)
    documents[0, 100:130] = documents[0, 600:] = -1
    documents[1] = torch.randint(0, 3, (LONG,), generator=torch.Generator().manual_seed(0))
    check(tensors, d_out, whole_rows(LONG, documents))


def zig_zag(S: int, ranks: int, rank: int) -> Tensor:
    piece = S // (2 * ranks)
    first, last = rank * piece, (2 * ranks - 1 - rank) * piece
    return torch.cat((torch.arange(first, first + piece), torch.arange(last, last + piece)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("S", [90, 600])
def test_pieces_of_a_sequence_against_one_another_add_up_to_the_whole(S: int, packed: bool) -> None:
    """As ranks do that share sequences: each block of queries meets each block of keys, some of which it cannot see."""
    ranks, B = 3, 2
    *tensors, d_out = inputs(B, 4, 2, S, 6, 5)
    documents = two_documents(B, S) if packed else None
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected_out, expected_lse = formula(*leaves, whole_rows(S, documents), 0.3)
    expected = torch.autograd.grad(expected_out, leaves, d_out)
    q, k, v = tensors
    places = [zig_zag(S, ranks, rank) for rank in range(ranks)]
    part_of = [None if documents is None else documents[:, place] for place in places]
    grads = [torch.zeros_like(x) for x in tensors]
    for mine in range(ranks):
        own = places[mine]
        blocks = [Visible(own, places[r], part_of[mine], part_of[r]) for r in range(ranks)]
        parts = [attention_forward(q[:, own], k[:, p], v[:, p], s, 0.3) for p, s in zip(places, blocks, strict=True)]
        lse = torch.stack([lse for _, lse in parts]).logsumexp(dim=0)
        out = sum(((part_lse - lse).exp().unsqueeze(-1) * part for part, part_lse in parts), torch.zeros(()))
        torch.testing.assert_close(out, expected_out[:, own], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(lse, expected_lse[:, own], rtol=1e-11, atol=1e-12)
        for place, visible in zip(places, blocks, strict=True):
            args = d_out[:, own], q[:, own], k[:, place], v[:, place], out, lse
            d_q, d_k, d_v = attention_backward(*args, visible, 0.3)
            for grad, where, found in zip(grads, (own, place, place), (d_q, d_k, d_v), strict=True):
                grad[:, where] += found
    for found, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-11)


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient() -> None:
    for keys in (0, 40, LONG):
        q, k, v, d_out = inputs(2, 4, 2, 100, 6, 5, keys=keys)
        # Keys come later than the first 30 queries, and than all of them, and there are none.
        for offset in (30, 100):
            visible = Visible(torch.arange(100), torch.arange(keys) + offset)
            out, lse = attention_forward(q, k, v, visible, 0.3)
            blind = slice(0, offset if keys else 100)
            assert not out[:, blind].any() and bool((lse[:, blind] == -math.inf).all())
            d_q, d_k, d_v = attention_backward(d_out, q, k, v, out, lse, visible, 0.3)
            assert not d_q[:, blind].any() and all(bool(x.isfinite().all()) for x in (out, d_q, d_k, d_v))
            assert bool(lse[:, blind.stop :].isfinite().all())


def test_large_scores_do_not_overflow() -> None:
    q, k, v, d_out = inputs(1, 2, 2, LONG, 8, 8, torch.float32)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (100 * q, 100 * k, v)]
        out = attention(*leaves, whole_rows(LONG), 1.0)
        results.append([out, *torch.autograd.grad(out, leaves, d_out.to(dtype))])
    for found, right in zip(*results, strict=True):
        assert calc_diff(found, right) < 1e-5


def test_a_score_far_above_a_querys_own() -> None:
    """Sums of powers less the own score overflow for some queries: these, and no others, seek the greatest score."""
    q, k, v, d_out = inputs(1, 2, 1, LONG, 8, 8, torch.float32)
    q[0, KEY_TILE:, 0], k[0, 3, 0] = q[0, KEY_TILE:, 0].abs() + 3, 5.0  # those of the last run, and one head
    visible = whole_rows(LONG)
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors = [x.to(dtype) for x in (q, k, v)]
        out, lse = attention_forward(*tensors, visible, 1.0)
        results.append([out, lse, *attention_backward(d_out.to(dtype), *tensors, out, lse, visible, 1.0)])
    own = (q.double() * k.double()).sum(dim=3)
    assert float((results[1][1] - own).max()) > math.log(LIMIT)
    for exact, right in zip(results[1], formula(q.double(), k.double(), v.double(), visible, 1.0), strict=False):
        torch.testing.assert_close(exact, right, rtol=1e-11, atol=1e-11)
    for found, exact in zip(*results, strict=True):
        assert calc_diff(found, exact) < 1e-9  # scores of 200 are rounded to about 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("S", [90, LONG])
def test_a_row_has_the_same_bits_alone_and_among_others(S: int, dtype: torch.dtype) -> None:
    *tensors, d_out = inputs(5, 6, 6, S, 20, 12, dtype)

    def run(rows: slice) -> list[Tensor]:
        leaves = [x[rows].clone().requires_grad_() for x in tensors]
        out = attention(*leaves, whole_rows(S), 0.2)
        lse = attention_forward(*(x[rows] for x in tensors), whole_rows(S), 0.2)[1]
        return [out, lse, *torch.autograd.grad(out, leaves, d_out[rows])]

    whole = run(slice(0, 5))
    for start, stop in ((0, 1), (2, 5), (4, 5)):
        for part, all_rows in zip(run(slice(start, stop)), whole, strict=True):
            assert torch.equal(part, all_rows[start:stop])


@pytest.mark.parametrize("wild", [1e3, math.inf])
def test_queries_beside_one_that_overflows_keep_their_bits(wild: float) -> None:
    q, k, v, d_out = inputs(1, 4, 2, LONG, 8, 8, torch.float32)
    visible, place, head = whole_rows(LONG), KEY_TILE + 5, 1
    results = []
    for factor in (1.0, wild):
        q[0, place, head] = factor * k[0, 3, 0].abs()  # not its own key, where it is wild
        out, lse = attention_forward(q, k, v, visible, 0.3)
        results.append([out, lse, attention_backward(d_out, q, k, v, out, lse, visible, 0.3)[0]])
    others = torch.ones(1, LONG, 4, dtype=torch.bool)
    others[0, place, head] = False
    for calm, beside in zip(*results, strict=True):
        assert torch.equal(calm[others], beside[others]) and not torch.equal(calm[~others], beside[~others])


def test_sixteen_bit_tensors_are_rounded_once() -> None:
    q, k, v, d_out = inputs(2, 4, 4, 100, 32, 16, torch.bfloat16)
    visible = whole_rows(100)
    out, lse = attention_forward(q, k, v, visible, 0.2)
    wide = [x.float() for x in (q, k, v)]
    wide_out, wide_lse = attention_forward(*wide, visible, 0.2)
    assert torch.equal(out, wide_out.bfloat16()) and torch.equal(lse, wide_lse)
    assert torch.equal(attention_forward(q, k, v, visible, 0.2, torch.float32)[0], wide_out)
    narrow = attention_backward(d_out, q, k, v, out, lse, visible, 0.2)
    exact = attention_backward(d_out.float(), *wide, out.float(), lse, visible, 0.2)
    for found, right in zip(narrow, exact, strict=True):
        assert torch.equal(found, right.bfloat16())
    for found, right in zip(
        attention_backward(d_out, q, k, v, out, lse, visible, 0.2, dtype=torch.float32), exact, strict=True
    ):
        assert torch.equal(found, right)


def test_steps_are_the_blocks_that_see_something() -> None:
    """Exactly, for causal rows; and masks only on edges."""
    S = KEY_TILE + 3 * EDGE
    visible = whole_rows(S)
    steps = visible.steps_of(0)
    mask = seen(visible, 1)[0]
    done = torch.zeros_like(mask, dtype=torch.int32)
    for step in steps:
        done[step.queries, step.keys] += 1
        sure = torch.zeros(S, dtype=torch.bool)
        sure[step.keys] = True
        if step.edge is not None:
            sure[step.edge] = False
            assert step.edge.stop - step.edge.start <= LONG_QUERY_BLOCK
        assert bool(mask[step.queries][:, sure].all())
    assert int(done.max()) == 1 and bool((done.bool() | ~mask).all())
    computed, needed = int(done.sum()), int(mask.sum())
    assert computed < needed + S * (EDGE + LONG_QUERY_BLOCK) / 2
    tails = Visible(torch.arange(S, 2 * S), torch.arange(S), torch.ones(1, S), torch.zeros(1, S))
    assert tails.steps_of(0) == []  # all keys are earlier, and of another document


def test_no_tensor_has_two_dimensions_of_the_length() -> None:
    S, sizes = 4096, set()

    class Note(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, Tensor):
                    sizes.add(x.numel())
            return result

    q, k, v, d_out = inputs(1, 1, 1, S, 4, 4, torch.float32)
    for documents in (None, two_documents(1, S)):
        with Note():
            visible = whole_rows(S, documents)
            out, lse = attention_forward(q, k, v, visible, 0.3)
            attention_backward(d_out, q, k, v, out, lse, visible, 0.3)
    assert max(sizes) <= LONG_ROWS * KEY_TILE < S * S / 16


@pytest.mark.parametrize("S", [4 * QUERY_BLOCK, KEY_TILE + 1])
def test_what_is_saved_is_linear_in_the_length(S: int) -> None:
    """Beside inputs and results the softmax, but for keys of one tile, and nothing of its upper half."""
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    H = 4
    q, k, v, _ = inputs(1, H, H, S, 8, 8)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = attention(q.requires_grad_(), k, v, whole_rows(S), 0.3)
    more = sum(saved) - sum(x.numel() for x in (q, k, v))
    softmax, log_sums = H * sum(QUERY_BLOCK * (i + 1) * QUERY_BLOCK for i in range(4)), H * S
    assert more == (softmax if S <= KEY_TILE else out.numel() + log_sums)


def test_without_gradients_no_softmax_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of queries that are parameters, which autograd asks gradients of in any mode."""
    kept: list[object] = []
    forward = short_attention._forward
    monkeypatch.setattr(short_attention, "_forward", lambda *args: (kept.append(args[3]), forward(*args))[1])
    q, k, v, _ = inputs(1, 2, 2, 20, 8, 8)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            attention(q.requires_grad_(), k, v, whole_rows(20), 0.3)
    assert kept[0] and kept[1] is None


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("H", "own"), [(1, 6), (HEADS + 2, 6), (3, 5)])
def test_latent_attention_is_that_of_turned_queries_and_whole_keys(H: int, own: int, interleaved: bool) -> None:
    B, S, rope, value = 2, 2 * QUERY_BLOCK + 9, 4, 5
    chance = torch.Generator().manual_seed(3)
    shapes = (B, S, H, own + rope), (B, S, H, own + value), (B, S, rope), (B, S, H, value)
    q, kv, k_rope, d_out = (torch.randn(*shape, generator=chance, dtype=torch.float64) for shape in shapes)
    cos, sin = (torch.randn(B, S, 1, rope // 2, generator=chance, dtype=torch.float64) for _ in range(2))
    visible = whole_rows(S, two_documents(B, S))

    def plain(q: Tensor, kv: Tensor, k_rope: Tensor) -> Tensor:
        k = torch.cat((kv[..., :own], k_rope[:, :, None].expand(-1, -1, H, -1)), dim=3)
        return formula(rotate_end(q, cos, sin, interleaved), k, kv[..., own:], visible, 0.3)[0]

    def fused(q: Tensor, kv: Tensor, k_rope: Tensor) -> Tensor:
        turn, turned = Turn.of(cos, sin, interleaved), q.clone()
        turn.ends(turned)
        return latent_attention(turned, kv, k_rope, visible, 0.3, turn, value)

    results = []
    for function in (plain, fused):
        leaves = [x.clone().requires_grad_() for x in (q, kv, k_rope)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, d_out)])
    for right, found in zip(*results, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)


def test_works_under_autocast() -> None:
    q, k, v, _ = inputs(1, 2, 2, 20, 8, 8, torch.float32)
    expected = attention(q, k, v, whole_rows(20), 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(q, k, v, whole_rows(20), 0.3)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_every_shape_of_edge() -> None:
    """Places with holes and out of step with the blocks."""
    chance = torch.Generator().manual_seed(5)
    for Sq, Sk, causal in product((1, 70, 200), (1, 65, 700), (True, False)):
        q, k, v, d_out = inputs(2, 2, 1, Sq, 4, 4, keys=Sk)
        q_places, k_places = (torch.randperm(1000, generator=chance)[:n].sort().values for n in (Sq, Sk))
        q_documents, k_documents = (torch.randint(0, 2, (2, n), generator=chance).sort().values for n in (Sq, Sk))
        visible = Visible(q_places, k_places, q_documents, k_documents, causal)
        out, lse = attention_forward(q, k, v, visible, 0.3)
        expected_out, expected_lse = formula(q, k, v, visible, 0.3)
        torch.testing.assert_close(out, expected_out, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(lse.exp(), expected_lse.exp(), rtol=1e-11, atol=1e-12)
        assert all(bool(x.isfinite().all()) for x in attention_backward(d_out, q, k, v, out, lse, visible, 0.3))


def test_what_threads_keep_may_be_replaced_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = whole_rows(64)
    (step,) = visible.steps_of(0)
    mask = visible.mask(0, step, torch.float32)
    known = visible._masks
    for name in ("_masks", "_made"):
        asked = iter([getattr(visible, name)])
        monkeypatch.setattr(Visible, name, property(lambda _, asked=asked: next(asked, {})))
        found = visible.mask(0, step, torch.float32) if name == "_masks" else visible.steps_of(0)[0]
        assert found is (mask if name == "_masks" else step)
    assert mask in known.values()
