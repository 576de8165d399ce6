"""A checkpoint saved in any layout loads in any other: parameters, moments, steps, biases, and the next step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import NUM_EXPERTS, SHAPES, add_gradients, name_of, optimizer_of, take_states, value, whole
from torch import Tensor

from moe_engine.checkpoint import files, store
from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import OptimConfig
from moe_engine.distributed.collectives import Communicator
from moe_engine.distributed.groups import Groups
from moe_engine.layout import Layout
from moe_engine.optim.zero import ZeroOptimizer

OPTIM = OptimConfig(clip=50.0)
LR = 3e-3
KINDS = ("master", "exp_avg", "exp_avg_sq")
STEPS = 2  # before the checkpoint; one more follows it
LAYOUTS = [
    Layout(),
    Layout(dp=2, ep=2),  # a vocabulary of 1003 rows over two ranks
    Layout(dp=3),  # parameters cut within rows
    Layout(dp=4, ep=4),
    Layout(pp=2, dp=2, ep=2),  # the embedding over both stages
    Layout(pp=4),
]


def _step(named: Any, groups: Groups, optimizer: ZeroOptimizer, step: int) -> None:
    optimizer.zero_grad()
    add_gradients(named, groups, step)
    optimizer.reduce_gradients()
    optimizer.step(LR)


def _biases(groups: Groups, fill: float | None = None) -> dict[str, Tensor]:
    """The balancing biases of this rank's MoE layers; equal on all ranks of a stage."""
    pp = groups.layout.coordinate(groups.rank).pp
    layers = [i for i in (1, 3) if pp in groups.placement.holders(f"layers.{i}.moe.router.weight")]
    biases = {f"layers.{i}.moe.router.expert_bias": torch.arange(float(NUM_EXPERTS)) + i for i in layers}
    return biases if fill is None else {name: torch.full_like(bias, fill) for name, bias in biases.items()}


def _save(rank: int, layout: Layout, folder: Path, more: bool = False, precision: str = "bf16") -> list[dict[str, Any]]:
    """Train, save; with `more`, go on for a step. The states at the save and at the end."""
    named, groups, optimizer = optimizer_of(rank, layout, OPTIM, precision)
    for step in range(STEPS):
        _step(named, groups, optimizer, step)
    meta = {"optimizer_steps": optimizer.state_steps, "tokens_seen": 1003}
    store.save(folder, STEPS, optimizer.named_shards(), _biases(groups), meta, groups.world)
    states = [take_states(optimizer)]
    if more:
        _step(named, groups, optimizer, STEPS)
        states.append(take_states(optimizer))
    return states


def _load(
    rank: int, layout: Layout, folders: list[Path], precision: str = "bf16"
) -> list[tuple[list[dict[str, Any]], list[tuple[str, Tensor]]]]:
    """From each folder: load and go on for a step. The states after loading and after that, and the parameters."""
    named, groups, optimizer = optimizer_of(rank, layout, OPTIM, precision)
    results = []
    for folder in folders:
        for shard in optimizer.named_shards():  # nothing of before may survive
            for values in shard.states.values():
                values.fill_(float("nan"))
        biases, path = _biases(groups, fill=-1.0), store.newest(folder)
        assert path is not None
        meta = store.load(path, optimizer.named_shards(), biases, groups.world)
        assert meta == {"optimizer_steps": STEPS, "tokens_seen": 1003, "step": STEPS}
        assert all(torch.equal(bias, _biases(groups)[name]) for name, bias in biases.items())
        optimizer.state_steps = meta["optimizer_steps"]
        optimizer.set_parameters_from_masters()
        states = [take_states(optimizer)]
        parameters = [(name, piece.detach().clone()) for each in named for name, piece in each.pieces()]
        _step(named, groups, optimizer, STEPS)
        results.append(([*states, take_states(optimizer)], parameters))
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[dict[str, dict[str, Tensor]]]]:
    """A checkpoint from each layout, and the states of one process at the save and a step later."""
    folders = [tmp_path_factory.mktemp(name_of(layout)) for layout in LAYOUTS]
    truth: list[dict[str, dict[str, Tensor]]] = []
    for layout, folder in zip(LAYOUTS, folders, strict=True):
        results = run_ranks(layout.world, _save, layout, folder, layout == Layout())
        if layout == Layout():
            truth = [{kind: whole([state[kind]]) for kind in KINDS} for state in results[0]]
    return folders, truth


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_checkpoint_of_every_layout_loads_and_goes_on(
    layout: Layout, saved: tuple[list[Path], list[dict[str, dict[str, Tensor]]]]
) -> None:
    folders, truth = saved
    results = run_ranks(layout.world, _load, layout, folders)
    for source, by_rank in zip(LAYOUTS, zip(*results, strict=True), strict=True):
        for when, right in enumerate(truth):
            for kind in KINDS:
                found = whole(states[when][kind] for states, _ in by_rank)
                assert found.keys() == SHAPES.keys()
                for name in SHAPES:
                    assert torch.equal(found[name], right[kind][name]), (name_of(source), when, kind, name)
        for _, parameters in by_rank:
            for name, piece in parameters:
                assert torch.equal(piece, truth[0]["master"][name].bfloat16()), (name_of(source), name)


@pytest.mark.parametrize(("before", "after"), [("bf16", "bf16_moments"), ("bf16_moments", "bf16")])
def test_moments_of_another_format_are_converted(before: str, after: str, tmp_path: Path) -> None:
    """Saved on four ranks, loaded on three: rounded to the nearest, or widened as they are; masters stay."""
    four, three = Layout(pp=2, dp=2, ep=2), Layout(dp=3)
    saved = [states for (states,) in run_ranks(four.world, _save, four, tmp_path, False, before)]
    loaded = run_ranks(three.world, _load, three, [tmp_path], after)
    for kind in KINDS:
        right, found = whole(states[kind] for states in saved), whole(by_rank[0][0][0][kind] for by_rank in loaded)
        narrow = after == "bf16_moments" and kind != "master"
        for name in SHAPES:
            assert found[name].dtype == (torch.bfloat16 if narrow else torch.float32)
            assert torch.equal(found[name], right[name].to(found[name].dtype)), (kind, name)
            assert found[name].any()


def test_training_has_moved_what_the_matrix_compares(
    saved: tuple[list[Path], list[dict[str, dict[str, Tensor]]]],
) -> None:
    _, (at_save, later) = saved
    for name in SHAPES:
        assert not torch.equal(at_save["master"][name], value(name))
        for kind in KINDS:
            assert not torch.equal(at_save[kind][name], later[kind][name])


def test_every_element_is_stored_once(saved: tuple[list[Path], list[dict[str, dict[str, Tensor]]]]) -> None:
    folders, _ = saved
    numel = 3 * sum(torch.Size(shape).numel() for shape in SHAPES.values()) + 2 * NUM_EXPERTS
    for folder in folders:
        index = files.read_index(folder / f"step_{STEPS}")
        ranges = [each for entry in index.tensors.values() for each in entry.ranges]
        assert sum(each.end - each.start for each in ranges) == numel
        assert len(index.tensors) == 3 * len(SHAPES) + 2


def _error(rank: int, layout: Layout, folder: Path) -> str:
    """What loading the newest checkpoint says."""
    _, groups, optimizer = optimizer_of(rank, layout, OPTIM, "bf16")
    try:
        store.load(folder / f"step_{STEPS}", optimizer.named_shards(), _biases(groups), groups.world)
    except ConfigError as error:
        return str(error)
    return ""


def test_damage_that_one_rank_sees_stops_all(tmp_path: Path) -> None:
    run_ranks(2, _save, Layout(pp=2), tmp_path)
    path = tmp_path / f"step_{STEPS}" / "rank_1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    messages = run_ranks(2, _error, Layout(pp=2), tmp_path)
    assert messages[0] == messages[1]
    assert "rank_1.safetensors: damaged" in messages[0] and "is not as it was written" in messages[0]


def _failing_save(rank: int, folder: Path) -> str:
    _, groups, optimizer = optimizer_of(rank, Layout(dp=2), OPTIM, "bf16")
    if rank == 1:

        def full(*_args: object) -> None:
            raise OSError(28, "No space left on device")

        files.save_file = full
    try:
        store.save(folder, 9, optimizer.named_shards(), _biases(groups), {}, groups.world)
    except ConfigError as error:
        return str(error)
    return ""


def test_rank_that_cannot_write_stops_all_and_leaves_nothing(tmp_path: Path) -> None:
    run_ranks(2, _save, Layout(dp=2), tmp_path)
    messages = run_ranks(2, _failing_save, tmp_path)
    assert messages[0] == messages[1]
    assert "rank_1.safetensors: cannot be written" in messages[0] and "No space left on device" in messages[0]
    assert [each.name for each in tmp_path.iterdir()] == [f"step_{STEPS}"]


def _killed_save(rank: int, folder: Path) -> None:
    _, groups, optimizer = optimizer_of(rank, Layout(dp=2), OPTIM, "bf16")
    if rank == 1:
        files.save_file = lambda *_args: os._exit(9)
    store.save(folder, 9, optimizer.named_shards(), _biases(groups), {}, groups.world)


def test_rank_that_is_killed_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, _save, Layout(dp=2), tmp_path)
    with pytest.raises(AssertionError, match="ranks .* failed"):
        run_ranks(2, _killed_save, tmp_path)
    assert store.newest(tmp_path) == tmp_path / f"step_{STEPS}"
    run_ranks(2, _save, Layout(dp=2), tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [f"step_{STEPS}"]


def _replicas(rank: int, folder: Path) -> None:
    world = Communicator("world", (0, 1, 2), rank, torch.distributed.group.WORLD)
    given = {"only_1_and_2": torch.arange(3.0)} if rank > 0 else {"only_0": torch.ones(2)}
    store.save(folder, 1, [], given, {}, world)


def test_replicated_tensor_is_written_by_the_first_rank_that_has_it(tmp_path: Path) -> None:
    run_ranks(3, _replicas, tmp_path)
    index = files.read_index(tmp_path / "step_1")
    assert {key: entry.ranges[0].file for key, entry in index.tensors.items()} == {
        "buffer/only_0": "rank_0.safetensors",
        "buffer/only_1_and_2": "rank_1.safetensors",
    }
    assert not (tmp_path / "step_1" / "rank_2.safetensors").exists()
