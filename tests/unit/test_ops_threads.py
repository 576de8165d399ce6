"""Work shared out over threads: all of it is done once, with torch's settings as they were, and failures are raised.

In a process of its own: a child forked after work on two threads may hang.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run(text: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_pieces_threads_and_failures() -> None:
    run("""
        import threading, torch
        from moe_engine.ops.threads import share_out
        torch.set_num_threads(3)
        done, threads, weight = [], set(), torch.ones(2, requires_grad=True)
        def work(pieces):
            threads.add((threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()))
            assert not (weight * 2).requires_grad
            done.extend(pieces)
        share_out(work, range(10))
        assert sorted(done) == list(range(10))
        assert len(threads) == 3 and all(number == 1 and not grad for _, number, grad in threads)
        assert torch.get_num_threads() == 3 and torch.is_grad_enabled()
        def broken(pieces):
            if 1 in pieces:
                raise ValueError("broken")
        try:
            share_out(broken, range(10))
        except ValueError as error:
            assert str(error) == "broken" and torch.get_num_threads() == 3
        else:
            raise AssertionError("no failure")
        share_out(work, [])
        threads.clear()
        share_out(work, range(10), alone=True)
        assert threads == {("MainThread", 3, False)}
        threads.clear()
        share_out(work, range(10), short=True)
        assert threads == {("MainThread", 1, False)} and torch.get_num_threads() == 3
        join = threading.Thread.join
        def interrupted(thread):
            join(thread)
            raise KeyboardInterrupt
        threading.Thread.join = interrupted
        try:
            share_out(work, range(10))
        except KeyboardInterrupt:
            assert torch.get_num_threads() == 3
        else:
            raise AssertionError("no interrupt")
    """)


def test_attention_has_the_same_bits_on_any_number_of_threads() -> None:
    run("""
        import torch
        from moe_engine.ops.attention import attention
        from moe_engine.ops.attention_parts import SHARED_PAIRS
        from moe_engine.ops.visible import whole_rows
        chance = torch.Generator().manual_seed(0)
        S, H = 300, 6
        assert 3 * H * S * S >= SHARED_PAIRS
        q, k = (torch.randn(3, S, H, 20, generator=chance).bfloat16().requires_grad_() for _ in range(2))
        v, d_out = (torch.randn(3, S, H, 12, generator=chance).bfloat16() for _ in range(2))
        documents = (torch.arange(S) >= torch.tensor([[100], [150], [300]])).int()
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = attention(q, k, v, whole_rows(S, documents), 0.2)
            results.append([out, *torch.autograd.grad(out, (q, k), d_out)])
            with torch.inference_mode():
                assert torch.equal(attention(q, k, v, whole_rows(S, documents), 0.2), out)
        for others in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))
    """)


def test_gradient_norm_and_update_have_the_same_bits_on_any_number_of_threads() -> None:
    run("""
        import torch
        from torch import nn
        from moe_engine.config.schema import Config
        from moe_engine.distributed.groups import build_groups
        from moe_engine.layout import Layout
        from moe_engine.model.names import NamedParameter
        from moe_engine.optim.zero import UPDATE_BLOCK, ZeroOptimizer
        from moe_engine.planner.job import placement_of
        config, results = Config(), []
        config.optim.clip, config.parallel.dp = 1.0, 1
        groups = build_groups(Layout.of(config.parallel), placement_of(config), 0, None)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weight = nn.Parameter(torch.ones(3, UPDATE_BLOCK + 128))
            named = [NamedParameter(("w",), weight, False, (0,))]
            optimizer = ZeroOptimizer(named, groups, config.optim, config.precision)
            optimizer.zero_grad()
            chance = torch.Generator().manual_seed(0)
            weight.grad.copy_(torch.randn(weight.shape, generator=chance) ** 3)
            optimizer.reduce_gradients()
            stats = optimizer.step(1e-2)
            assert 0 < stats.clip_scale < 1
            results.append((stats.grad_norm, weight.detach().clone(), next(optimizer.named_shards()).states))
        for norm, values, states in results[1:]:
            assert norm == results[0][0] and torch.equal(values, results[0][1])
            assert all(torch.equal(states[name], kept) for name, kept in results[0][2].items())
    """)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells where a thread runs")
def test_threads_leave_the_processor_of_the_one_that_started_them() -> None:
    run("""
        import os, torch
        from moe_engine.ops.threads import share_out
        torch.set_num_threads(2)
        allowed, found = os.sched_getaffinity(0), {}
        def work(pieces):
            found[pieces[0]] = os.sched_getaffinity(0)
        for _ in range(20):
            share_out(work, range(2))
            assert found[0] == os.sched_getaffinity(0) == allowed
            assert found[1] < allowed and len(found[1]) == len(allowed) - 1 if len(allowed) > 1 else found[1] == allowed
        os.sched_setaffinity(0, {min(allowed)})
        share_out(work, range(2))
        assert found == {0: {min(allowed)}, 1: {min(allowed)}}
    """)
