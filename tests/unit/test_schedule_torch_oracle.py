"""torch's own schedules as a second oracle: the same operations in the same order.

torch computes its lists inside objects that want live stages and process groups; only the few attributes that the
computation reads are set here, so a new torch may need a new line in `torch_lists`. Slow because of that import alone.
"""

from __future__ import annotations

import pytest

from moe_engine.schedule.schedules import schedule

pytestmark = pytest.mark.slow

Operations = list[list[tuple[tuple[str, int, int], ...]]]  # per rank; (kind, stage, micro-batch), two in a pair


def torch_lists(kind: str, pp: int, micro_batches: int, stages_per_rank: int) -> Operations:
    from torch.distributed.pipelining import schedules

    oracle = object.__new__(getattr(schedules, kind))
    oracle._n_microbatches, oracle.pp_group_size, oracle.n_local_stages = micro_batches, pp, stages_per_rank
    oracle._num_stages = oracle.num_stages = stages_per_rank * pp
    oracle.number_of_rounds = max(1, micro_batches // pp)
    oracle.microbatches_per_round = micro_batches // oracle.number_of_rounds
    lists: Operations = []
    whole = oracle._get_pipeline_order() if stages_per_rank == 1 else None
    for rank in range(pp):
        order = whole[rank] if whole else oracle._calculate_single_rank_operations(rank)
        actions = [action for action in order if action is not None]
        lists.append(
            [
                tuple(
                    (half.computation_type.value, half.stage_index, half.microbatch_index)
                    for half in action.sub_actions or (action,)
                )
                for action in actions
                if action.is_compute_op
            ]
        )
    return lists


def our_lists(name: str, pp: int, micro_batches: int, virtual_stages: int) -> Operations:
    return [
        [tuple((half.kind.value, half.stage, half.micro_batch) for half in action.halves()) for action in actions]
        for actions in schedule(name, pp, micro_batches, virtual_stages)
    ]


def without_weight_gradients(lists: Operations) -> Operations:
    return [[halves for halves in operations if halves[0][0] != "W"] for operations in lists]


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 3), (2, 4), (3, 7), (4, 4), (8, 20), (16, 32)])
def test_gpipe(pp: int, micro_batches: int) -> None:
    assert our_lists("gpipe", pp, micro_batches, 1) == torch_lists("ScheduleGPipe", pp, micro_batches, 1)


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 3), (2, 4), (3, 7), (4, 4), (8, 20), (16, 32)])
def test_1f1b(pp: int, micro_batches: int) -> None:
    """torch 2.13 numbers the last rank's forwards from 1 in these lists (it does not run them); theirs are shifted."""
    theirs = torch_lists("Schedule1F1B", pp, micro_batches, 1)
    forwards = [halves[0][2] for halves in theirs[-1] if halves[0][0] == "F"]
    shift = min(forwards)
    theirs[-1] = [((k, s, m - shift if k == "F" else m),) for ((k, s, m),) in theirs[-1]]
    assert our_lists("1f1b", pp, micro_batches, 1) == theirs


@pytest.mark.parametrize(
    ("pp", "micro_batches", "virtual_stages"),
    [(4, 8, 2), (2, 6, 3), (8, 8, 2), (3, 12, 4), (2, 8, 8), (8, 32, 6), (16, 32, 2)],
)
def test_interleaved_1f1b(pp: int, micro_batches: int, virtual_stages: int) -> None:
    ours = our_lists("interleaved_1f1b", pp, micro_batches, virtual_stages)
    assert ours == torch_lists("ScheduleInterleaved1F1B", pp, micro_batches, virtual_stages)


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 2), (2, 4), (3, 7), (4, 10), (8, 16), (16, 40)])
def test_dualpipev(pp: int, micro_batches: int) -> None:
    assert our_lists("dualpipev", pp, micro_batches, 1) == torch_lists("ScheduleDualPipeV", pp, micro_batches, 2)


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (2, 3), (3, 5), (4, 10), (8, 16), (16, 33)])
def test_zbv(pp: int, micro_batches: int) -> None:
    """At the end, where only weight gradients are left, torch empties one side first and we the queue in its order."""
    ours, theirs = our_lists("zbv", pp, micro_batches, 1), torch_lists("ScheduleZBVZeroBubble", pp, micro_batches, 2)
    assert without_weight_gradients(ours) == without_weight_gradients(theirs)
    assert [sorted(operations) for operations in ours] == [sorted(operations) for operations in theirs]
