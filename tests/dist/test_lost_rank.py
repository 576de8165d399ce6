"""A killed rank: the others end with an error that names it, within the time limit, in whatever exchange they stand."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from moe_engine import MoEConfig, MoELayer
from moe_engine.distributed import groups, lost
from moe_engine.distributed.collectives import Communicator
from moe_engine.distributed.groups import Maker, ep_nodes
from moe_engine.layout import Layout

WORLD, KILLED, TIME_LIMIT = 4, 2, 240.0


def _patient(roll_call: Callable[[Sequence[int]], list[int]]) -> Callable[[Sequence[int]], list[int]]:
    """A roll call that begins when the living have come, so that they come in time, however busy the machine is."""

    def called(ranks: Sequence[int]) -> list[int]:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"roll call {dist.get_rank()}", "here")
        living = [f"roll call {rank}" for rank in ranks if rank != KILLED]
        while not store.check(living):
            time.sleep(0.01)
        return roll_call(ranks)

    return called


def _rank(rank: int, folder: Path, way: str) -> None:
    torch.set_num_threads(1)
    lost.ROLL_CALL_S, lost._roll_call = 0.5, _patient(lost._roll_call)  # in a process of its own
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    groups.start(torch.device("cpu"), f"file://{folder}/rendezvous", timeout_s=TIME_LIMIT)
    ep = Communicator("ep", range(WORLD), rank, dist.group.WORLD)
    nodes = ep_nodes(Layout(dp=WORLD, ep=WORLD, ranks_per_node=2), Maker(rank, None))
    config = MoEConfig(8, 8, 8, 4, dispatch=way, wire="fp8")
    layer = MoELayer(config, ep=ep, ep_nodes=nodes)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    try:
        out = layer(x)
        if rank == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        out.sum().backward()
        layer(x)
    except lost.RankLostError as error:
        (folder / f"error{rank}").write_text(str(error))
        os._exit(3)
    os._exit(0)


class _Full(Communicator):
    """One whose exchanges find no memory for what arrives."""

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor) -> _Full:
        return self

    def wait(self) -> None:
        raise torch.OutOfMemoryError("no room for the result")


def test_a_rank_without_memory_loses_nobody() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        _Full("ep", (0, 1), 0).all_gather(torch.zeros(2))


def _own_mistakes(rank: int) -> list[str]:
    """What both do wrong; then an exchange that they do right."""
    ep, x, found = Communicator("ep", range(2), rank, dist.group.WORLD), torch.arange(4.0), []
    wrong = (
        lambda: ep.all_to_all(x, [3, 2], [1, 1], "rows"),
        lambda: ep.all_to_all(x, [4], [4], "rows"),
        lambda: ep.reduce_scatter_sum(x[:3], "gradients"),
    )
    for call in wrong:
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    assert ep.all_reduce_max(x + rank).tolist() == [1.0, 2.0, 3.0, 4.0]
    return found


def test_a_ranks_own_mistake_calls_nobody() -> None:
    """Wrong sizes are told at once, before anything is sent: nobody waits, and no rank is taken to be lost."""
    found, same = run_ranks(2, _own_mistakes)
    assert (
        same
        == found
        == [
            "ep rows: 2 ranks exchange 4 rows, and the splits are [3, 2] to send and [1, 1] to receive",
            "ep rows: 2 ranks exchange 4 rows, and the splits are [4] to send and [4] to receive",
            "ep gradients: 3 elements are no equal parts for 2 ranks",
        ]
    )


def _never_done(rank: int) -> str:
    """Rank 0 waits for what never ends, as for rows that a lost rank was to put; rank 1 is somewhere else."""
    lost.ROLL_CALL_S = 0.0  # in a process of its own, which is itself there
    if rank == 0:
        try:
            lost.wait_until(lambda: False, "rows put", (0, 1), 0.1)
        except lost.RankLostError as error:
            return str(error)
    return ""


def test_who_waits_for_a_device_names_the_rank_that_does_not_answer() -> None:
    assert run_ranks(2, _never_done)[0] == "rows put: rank 1 no longer answers (not done after 0.1 s)"
    calls = iter([False, False, True])
    lost.wait_until(lambda: next(calls), "rows put", (0, 1))


def _stands_still(rank: int) -> tuple[str, bool]:
    """Rank 0 waits for rank 1, which lives and takes no part until it has been missed."""
    lost.ROLL_CALL_S = 0.0  # in a process of its own, which is itself there
    ep, store = Maker(rank, None, limit_s=0.5).one("ep", [(0, 1)]), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["missed"])
        return "", False
    try:
        ep.all_reduce_max(torch.zeros(1))
    except lost.RankLostError as error:
        return str(error), error.timed_out
    finally:
        store.set("missed", "")
    return "", False


def test_every_group_has_the_time_limit_of_an_exchange() -> None:
    text, timed_out = run_ranks(2, _stands_still)[0]
    assert timed_out
    assert "rank 1 no longer answers" in text


@pytest.mark.parametrize("way", ["all_to_all", "hierarchical"])
def test_the_others_name_a_killed_rank(way: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    start = time.monotonic()
    ranks = [fork.Process(target=_rank, args=(rank, tmp_path, way), daemon=True) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(max(0.0, start + TIME_LIMIT - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert codes == [3, 3, -signal.SIGKILL, 3]
    texts = [(tmp_path / f"error{rank}").read_text() for rank in (0, 1, 3)]
    assert any("rank 2 no longer answers" in text for text in texts)
    # With two hops some rank exchanges with others alone: it loses them because they lost rank 2.
    assert way == "hierarchical" or all("rank 2 no longer answers" in text for text in texts)
