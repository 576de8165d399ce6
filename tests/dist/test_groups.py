"""Communicators: every operation on every dtype, who is in which, and that a deadlock is red."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_cases import Case, config_of
from layouts import rank_batches
from ranks import run_ranks
from torch import Tensor

from moe_engine.config.schema import ModelConfig
from moe_engine.distributed import lost
from moe_engine.distributed.collectives import CollectiveLog, Communicator, Pending
from moe_engine.distributed.groups import Groups, build_groups
from moe_engine.layout import Layout, Placement, split_stages
from moe_engine.schedule import schedules
from moe_engine.trainer import Trainer

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
SIZES = (0, 1, 2, 5, 67)


def values(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    """A rank's input: small whole numbers, exact in every dtype, and different for each rank and place."""
    return ((torch.arange(n) * 7 + rank * 5) % 11 % (2 if dtype == torch.bool else 11)).to(dtype)


class Unchanged:
    """A tensor that must have the same bits after the calls made in this context."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.before, self.version = x, x.clone(), x._version

    def __enter__(self) -> Tensor:
        return self.x

    def __exit__(self, *error: object) -> None:
        assert torch.equal(self.x, self.before) and self.x._version == self.version


def _every_operation(rank: int, size: int) -> None:
    everybody = Communicator("all", range(size), rank, dist.group.WORLD)
    for dtype in DTYPES:
        for n in SIZES:
            _check_sums(everybody, dtype, n)
            _check_moves(everybody, dtype, n)
    _check_shapes(everybody)


def _check_sums(c: Communicator, dtype: torch.dtype, n: int) -> None:
    every = [values(r, n, dtype) for r in range(c.size)]
    total, largest = every[0].clone(), every[0].clone()
    for part in every[1:]:
        total = total + part
        largest = torch.maximum(largest, part)
    with Unchanged(values(c.rank, n, dtype)) as x:
        found = c.all_reduce_sum(x, "sum")
        assert found.dtype == dtype and torch.equal(found, total), (dtype, n)
        found = c.all_reduce_max(x, "max")
        assert found.dtype == dtype and torch.equal(found, largest), (dtype, n)
        found = c.all_gather(x, "gather")
        assert torch.equal(found, torch.cat(every)), (dtype, n)
    every = [values(r, c.size * n, dtype) for r in range(c.size)]
    own = slice(c.rank * n, (c.rank + 1) * n)
    with Unchanged(every[c.rank]) as x:
        expected = every[0][own].clone()
        for part in every[1:]:
            expected = expected + part[own]
        assert torch.equal(c.reduce_scatter_sum(x, "reduce"), expected), (dtype, n)


def _check_moves(c: Communicator, dtype: torch.dtype, n: int) -> None:
    # rank r sends (n + r + d) % 4 rows to rank d
    splits = [[(n + source + to) % 4 for to in range(c.size)] for source in range(c.size)]
    rows = [values(source, 3 * sum(splits[source]), dtype).view(-1, 3) for source in range(c.size)]
    with Unchanged(rows[c.rank]) as x:
        received = c.all_to_all(x, splits[c.rank], [splits[source][c.rank] for source in range(c.size)], "exchange")
        expected = torch.cat([rows[source].split(splits[source])[c.rank] for source in range(c.size)])
        assert torch.equal(received.wait(), expected) and received.wait() is received.wait()
    nxt, before = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    with Unchanged(values(c.rank, n, dtype)) as x:
        # two messages with their tags crossed: they must not be swapped
        sends = [c.send(x, nxt, 0, "message"), c.send(values(c.rank + 1, n, dtype), nxt, 1, "message")]
        got = {tag: c.receive(torch.empty(n, dtype=dtype), before, tag, "message") for tag in (1, 0)}
        for tag, pending in got.items():
            assert torch.equal(pending.wait(), values(before + tag, n, dtype)), (dtype, n, tag)
        for pending in sends:
            pending.wait()


def _check_shapes(c: Communicator) -> None:
    """Scalars, empty dimensions, tensors that are not contiguous, and inputs with a gradient (never recorded)."""
    ranks = range(c.size)
    for shape in ((), (1,), (0, 3), (2, 0), (2, 3, 4)):
        x = torch.full(shape, float(c.rank + 1))
        assert torch.equal(c.all_reduce_sum(x), torch.full(shape, float(sum(r + 1 for r in ranks))))
        assert torch.equal(c.all_reduce_max(x), torch.full(shape, float(c.size)))
    for dtype in (torch.float32, torch.int64):
        base = torch.arange(12).view(3, 4).to(dtype)
        with Unchanged((base + c.rank).T[::2]) as x:
            assert torch.equal(c.all_reduce_sum(x), sum((base + r).T[::2] for r in ranks))
            assert torch.equal(c.all_reduce_max(x), (base + c.size - 1).T[::2])
            assert torch.equal(c.all_gather(x), torch.cat([(base + r).T[::2] for r in ranks]))
    x = torch.ones(4, requires_grad=True)
    splits = [4] + [0] * (c.size - 1)
    for result in (c.all_reduce_sum(x), c.all_gather(x), c.all_to_all(x, splits, [4 * (c.rank == 0)] * c.size).wait()):
        assert not result.requires_grad


@pytest.mark.parametrize("size", [2, 3])
def test_operations_are_right_for_every_dtype_and_size_and_change_no_argument(size: int) -> None:
    run_ranks(size, _every_operation, size)


def test_one_rank_does_the_same_without_a_process_group() -> None:
    alone = Communicator.alone()
    for dtype in DTYPES:
        for n in SIZES:
            with Unchanged(values(0, n, dtype)) as x:
                for found in (alone.all_reduce_sum(x), alone.all_reduce_max(x), alone.all_gather(x)):
                    assert torch.equal(found, x) and (n == 0 or found.data_ptr() != x.data_ptr())
                assert torch.equal(alone.reduce_scatter_sum(x), x)
                assert torch.equal(alone.all_to_all(x, [n], [n]).wait(), x)
    assert alone.gather_objects("a") == ["a"]
    alone.barrier()


def _order_of_sums(rank: int) -> Tensor:
    everybody = Communicator("all", range(4), rank, dist.group.WORLD)
    x = torch.tensor([1e8, 1.0, -1e8, 1.0])[rank].repeat(5)
    return torch.stack([everybody.all_reduce_sum(x), everybody.reduce_scatter_sum(x.repeat(4))])


def test_floating_point_is_summed_in_rank_order() -> None:
    """((1e8 + 1) - 1e8) + 1 = 1 in fp32; other orders give 0 or 2."""
    for found in run_ranks(4, _order_of_sums):
        assert torch.equal(found, torch.ones(2, 5))


def placement_of(layout: Layout, schedule: str) -> Placement:
    model = ModelConfig(num_layers=8, mtp_depth=1, tied_head=True)
    stages = split_stages(model, schedules.num_stages(schedule, layout.pp))
    return Placement(tuple(stages), tuple(map(tuple, schedules.stage_of_rank(schedule, layout.pp))))


def _membership(rank: int, cases: list[tuple[Layout, str]]) -> None:
    for layout, schedule in cases:
        groups = build_groups(layout, placement_of(layout, schedule), rank)
        _check_membership(groups, rank)
        groups.world.barrier()


def _check_membership(groups: Groups, rank: int) -> None:
    layout, holder_sets = groups.layout, groups.placement.holder_sets
    pp = layout.coordinate(rank).pp
    expected = {
        "ep": (groups.ep, layout.ep_ranks(rank)),
        "ep_counts": (groups.ep_counts, layout.ep_ranks(rank)),
        "data": (groups.data, layout.dense_ranks(rank, (pp,))),
        "world": (groups.world, tuple(range(layout.world))),
    }
    by_node = layout.ep_node_ranks(rank)
    assert (groups.ep_nodes is None) == (by_node is None)
    if groups.ep_nodes is not None and by_node is not None:
        expected["between"], expected["within"] = zip(groups.ep_nodes, by_node, strict=True)
    mine = [holders for holders in holder_sets if pp in holders]
    assert set(groups.dense) == set(groups.expert) == set(mine)
    for holders in mine:
        expected[f"dense{holders}"] = (groups.dense[holders], layout.dense_ranks(rank, holders))
        expected[f"expert{holders}"] = (groups.expert[holders], layout.expert_ranks(rank, holders))
    for name, (communicator, ranks) in expected.items():
        assert communicator.ranks == ranks and communicator.ranks[communicator.rank] == rank, name
        assert (communicator.group is None) == (len(ranks) == 1), f"{name}: one rank needs no group, several need one"
        if len(ranks) > 1:  # and it is a group of just these ranks
            assert communicator.all_gather(torch.tensor([rank])).tolist() == list(ranks), name
    assert groups.ep.size == 1 or groups.ep.group is not groups.ep_counts.group
    for (source, target, kind), edge in groups.edges.items():
        assert pp in (source, target) and kind in ("activation", "gradient")
        assert edge.ranks == tuple(sorted(layout.neighbour(rank, end) for end in (source, target)))
        assert edge.all_gather(torch.tensor([rank])).tolist() == list(edge.ranks)
    assert len({id(edge.group) for edge in groups.edges.values()}) == len(groups.edges)


def test_every_rank_is_in_the_groups_of_its_layout() -> None:
    run_ranks(
        4,
        _membership,
        [
            (Layout(pp=4), "1f1b"),
            (Layout(pp=2, dp=2, ep=2), "1f1b"),
            (Layout(dp=4, ep=4, ranks_per_node=2), "1f1b"),
            (Layout(dp=4, ep=2, ranks_per_node=4), "1f1b"),
            (Layout(pp=2, dp=2), "dualpipe"),
            (Layout(dp=4, ep=2), "gpipe"),
            (Layout(pp=2, dp=2, ep=2), "dualpipev"),
        ],
    )


def test_ranks_out_of_order_are_refused() -> None:
    """Torch sorts them: places in the communicator would not be places in its group."""
    with pytest.raises(ValueError, match=r"ranks=\[3, 1\] must be ascending; use \[1, 3\]"):
        Communicator("pair", (3, 1), 1)


def _wrong_world(rank: int) -> str:
    with pytest.raises(ValueError) as error:
        build_groups(Layout(pp=3), placement_of(Layout(pp=3), "1f1b"), rank)
    return str(error.value)


def test_a_layout_of_another_size_is_refused() -> None:
    assert all("needs 3 ranks" in message for message in run_ranks(2, _wrong_world))


# A deadlock is a red test within seconds, and what the ranks recorded shows where they part.


class WrittenLog(CollectiveLog):
    """Records into a file as well, so that the record outlives a rank that is killed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def add(self, op: str, communicator: str, label: str, tensor: Tensor) -> None:
        super().add(op, communicator, label, tensor)
        with self.path.open("a") as file:
            file.write(f"{communicator}|{op} {label}\n")


def _skip_one(rank: int, folder: Path) -> None:
    lost.ROLL_CALL_S = 0.5  # in a process of its own
    case = Case(dp=2, ep=2, micro_batch=4)
    trainer = Trainer(config_of(case), rank, torch.device("cpu"), WrittenLog(folder / f"log{rank}"))
    if rank == 1:
        skip_call_of(trainer.groups.ep, 5)
    trainer.step(rank_batches(trainer, case, 0))


def skip_call_of(ep: Communicator, number: int) -> None:
    """Make the call with this number do nothing, as a forgotten collective of one rank would."""
    real, calls = ep.all_to_all, 0

    def all_to_all(x: Tensor, send_splits: list[int], recv_splits: list[int], label: str = "") -> Pending:
        nonlocal calls
        calls += 1
        if calls == number:
            return Pending(x.new_zeros((sum(recv_splits), *x.shape[1:])))
        return real(x, send_splits, recv_splits, label)

    ep.all_to_all = all_to_all  # type: ignore[method-assign]


def orders(folder: Path, size: int) -> list[dict[str, list[str]]]:
    """By rank: what each communicator was told, in order."""
    found: list[dict[str, list[str]]] = []
    for rank in range(size):
        by_communicator = defaultdict(list)
        for line in (folder / f"log{rank}").read_text().splitlines():
            communicator, entry = line.split("|")
            by_communicator[communicator].append(entry)
        found.append(by_communicator)
    return found


def test_a_rank_that_skips_a_collective_is_red_and_its_log_shows_where(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(2, _skip_one, tmp_path)
    assert "failed or ran past" in str(error.value)  # Gloo aborts the process where sizes differ: no stack then
    first, second = ([each for name, entries in log.items() if name.startswith("ep[") for each in entries]
                     for log in orders(tmp_path, 2))  # fmt: skip
    assert first[:4] == second[:4] and first[4] != second[4]
    assert first[4].startswith("all_to_all layers.1 micro_batch 0") or "layers.2" in first[4]


def _crosswise(rank: int, folder: Path) -> None:
    """The classic: two communicators, entered in opposite orders."""
    log = WrittenLog(folder / f"log{rank}")
    a, b = (Communicator(name, (0, 1), rank, dist.new_group([0, 1]), log) for name in "ab")
    for communicator in (a, b) if rank == 0 else (b, a):
        communicator.all_reduce_sum(torch.ones(1), "crosswise")


def test_a_deadlock_ends_within_seconds_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(2, _crosswise, tmp_path, time_limit=2.0)
    message: Any = str(error.value)
    assert "--- rank 0" in message and "--- rank 1" in message
    assert message.count("Timeout (0:00:02)!") == 2  # each ended itself: nobody had to
    assert "in _crosswise" in message and "in all_reduce_sum" in message
    assert [list(log) for log in orders(tmp_path, 2)] == [["a"], ["b"]]
