"""Rank arithmetic, stages and holders: properties that must hold for every size."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import ModelConfig, ParallelConfig, PipelineConfig
from moe_engine.layout import Layout, Placement, part_of, shard_chunks, split_stages, stages_of
from moe_engine.schedule import schedules

LAYOUTS = [
    Layout(pp, dp, cp, tp, ep)
    for pp, dp, cp, tp in product((1, 3), (1, 2, 4), (1, 2), (1, 2))
    for ep in (1, 2, 4, 8)
    if (dp * cp * tp) % ep == 0
]


def test_ranks_and_coordinates_are_the_same_thing() -> None:
    for layout in LAYOUTS:
        seen = set()
        sizes = (layout.pp, layout.dp, layout.cp, layout.tp, layout.ep, layout.edp)
        for rank in range(layout.world):
            c = layout.coordinate(rank)
            places = (c.pp, c.dp, c.cp, c.tp, c.ep, c.edp)
            assert rank == ((c.pp * layout.dp + c.dp) * layout.cp + c.cp) * layout.tp + c.tp, layout
            assert rank == (c.pp * layout.edp + c.edp) * layout.ep + c.ep, layout
            assert all(0 <= place < size for place, size in zip(places, sizes, strict=True)), layout
            assert rank in layout.stage_ranks(c.pp), layout
            seen.add(c)
        assert len(seen) == layout.world == layout.pp * layout.dp * layout.cp * layout.tp


def test_groups_cut_each_stage_without_rest() -> None:
    """An expert-parallel group is contiguous and has all experts once; expert replicas meet across such groups."""
    for layout in LAYOUTS:
        check_groups(layout)


def check_groups(layout: Layout) -> None:
    ranks = range(layout.world)
    for groups in (
        {layout.ep_ranks(r) for r in ranks},
        {layout.expert_ranks(r, (layout.coordinate(r).pp,)) for r in ranks},
        {layout.dense_ranks(r, (layout.coordinate(r).pp,)) for r in ranks},
        {layout.cp_ranks(r) for r in ranks},
    ):
        assert sorted(r for group in groups for r in group) == list(ranks)
    for r in ranks:
        c, ep = layout.coordinate(r), layout.ep_ranks(r)
        assert ep == tuple(range(ep[0], ep[0] + layout.ep)) and r in ep
        assert [layout.coordinate(member).ep for member in ep] == list(range(layout.ep))
        assert {layout.coordinate(member).pp for member in ep} == {c.pp}
        assert layout.cp_ranks(r)[c.cp] == r and len(layout.cp_ranks(r)) == layout.cp
        assert {replace(layout.coordinate(member), cp=0, ep=0, edp=0) for member in layout.cp_ranks(r)} == {
            replace(c, cp=0, ep=0, edp=0)
        }
        replicas = layout.expert_ranks(r, (c.pp,))
        assert len(replicas) == layout.edp and {layout.coordinate(member).ep for member in replicas} == {c.ep}
        assert [layout.coordinate(member).edp for member in replicas] == list(range(layout.edp))
        assert {layout.coordinate(member).tp for member in layout.dense_ranks(r, (c.pp,))} == {c.tp}
        for pp in range(layout.pp):
            neighbour = layout.coordinate(layout.neighbour(r, pp))
            assert neighbour == replace(c, pp=pp)


@given(st.integers(1, 9), st.integers(1, 9))
def test_shards_are_equal_disjoint_and_have_equal_work(cp: int, size: int) -> None:
    length = 2 * cp * size
    shards = [[place for chunk in shard_chunks(length, cp, shard) for place in chunk] for shard in range(cp)]
    assert sorted(place for shard in shards for place in shard) == list(range(length))
    assert len({sum(place + 1 for place in shard) for shard in shards}) == 1  # pairs that a causal mask leaves


@pytest.mark.parametrize(("length", "cp", "shard"), [(9, 2, 0), (6, 4, 0), (8, 2, 2), (8, 2, -1)])
def test_shards_that_cannot_be_are_refused(length: int, cp: int, shard: int) -> None:
    with pytest.raises(ValueError, match=f"shard {shard} of {cp} of a sequence of {length} tokens"):
        shard_chunks(length, cp, shard)


@pytest.mark.parametrize("holders", [(0,), (0, 2), (0, 1, 2)])
def test_groups_over_holders_are_the_union_of_their_stages(holders: tuple[int, ...]) -> None:
    layout = Layout(pp=3, dp=4, ep=2)
    for r in range(layout.world):
        c = layout.coordinate(r)
        assert layout.dense_ranks(r, holders) == tuple(m for pp in holders for m in range(pp * 4, pp * 4 + 4))
        experts = layout.expert_ranks(r, holders)
        assert len(experts) == len(holders) * layout.edp
        assert {layout.coordinate(m).ep for m in experts} == {c.ep}


def test_of_needs_a_resolved_configuration() -> None:
    assert Layout.of(ParallelConfig(pp=2, dp=4, ep=2)) == Layout(2, 4, 1, 1, 2)
    with pytest.raises(ValueError, match="parallel.dp=None"):
        Layout.of(ParallelConfig())


SIZES = [
    (layers, depth, n) for layers in range(1, 14) for depth in range(4) for n in range(1, layers + (depth > 0) + 1)
]


def test_stages_cover_every_layer_once_as_evenly_as_can_be() -> None:
    for layers, depth, n in SIZES:
        stages = split_stages(ModelConfig(num_layers=layers, mtp_depth=depth), n)
        assert [stage.index for stage in stages] == list(range(n)) and {stage.num_stages for stage in stages} == {n}
        assert [i for stage in stages for i in stage.layers] == list(range(layers))
        assert [k for stage in stages for k in stage.mtp] == list(range(depth)) and len(stages[-1].mtp) == depth
        blocks = [len(stage.layers) + len(stage.mtp) for stage in stages]
        assert min(blocks) >= 1, (layers, depth, n)
        movable = blocks if stages[-1].layers else blocks[:-1]  # MTP alone may make the last stage the largest
        assert max(movable) - min(movable) <= 1, (layers, depth, n, blocks)
        if stages[-1].layers:
            assert blocks == sorted(blocks, reverse=True), "a remainder goes to earlier stages"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_first_and_last_stage_hold_embedding_and_head(tied: bool, depth: int) -> None:
    model = ModelConfig(num_layers=6, tied_head=tied, mtp_depth=depth)
    for n in (1, 2, 3, 6):
        stages = split_stages(model, n)
        assert [stage.head for stage in stages] == [i == n - 1 for i in range(n)]
        needs_table = [i == 0 or (i == n - 1 and (tied or depth > 0)) for i in range(n)]
        assert [stage.embedding for stage in stages] == needs_table
        assert stages[0].first and stages[-1].last


def placement(name: str, pp: int, model: ModelConfig) -> Placement:
    stages = split_stages(model, schedules.num_stages(name, pp))
    return Placement(tuple(stages), tuple(map(tuple, schedules.stage_of_rank(name, pp))))


def test_holders_of_a_straight_pipeline() -> None:
    both = placement("1f1b", 4, ModelConfig(num_layers=7, mtp_depth=1))
    assert both.holders("embedding.weight") == (0, 3)
    assert both.holders("head.weight") == both.holders("norm.weight") == (3,)
    assert both.holders("layers.0.moe.experts.3.down") == (0,)
    assert both.holders("layers.6.mlp_norm.weight") == both.holders("mtp.0.block.moe.router.weight") == (3,)
    assert both.holder_sets == ((0,), (0, 3), (1,), (2,), (3,))
    assert placement("1f1b", 4, ModelConfig(num_layers=7)).holders("embedding.weight") == (0,)
    assert placement("1f1b", 1, ModelConfig(tied_head=True)).holder_sets == ((0,),)


def test_holders_of_a_folded_pipeline() -> None:
    """In a V the first rank has both ends, so nothing is shared; DualPipe holds every stage on two ranks."""
    model = ModelConfig(num_layers=8, mtp_depth=1, tied_head=True)
    folded = placement("dualpipev", 2, model)
    assert folded.holder_sets == ((0,), (1,)) and folded.holders("embedding.weight") == (0,)
    assert folded.rank_of_stage == {0: (0,), 1: (1,), 2: (1,), 3: (0,)}
    mirrored = placement("dualpipe", 4, model)
    assert mirrored.holder_sets == ((0, 3), (1, 2))
    assert mirrored.holders("layers.0.mlp_norm.weight") == (0, 3)


def test_an_unknown_name_has_no_holders() -> None:
    with pytest.raises(KeyError):
        placement("1f1b", 2, ModelConfig()).holders("layers.99.mlp_norm.weight")


def test_part_of_a_name() -> None:
    assert part_of("layers.12.moe.experts.3.down") == "layers.12"
    assert part_of("mtp.0.block.attention.out.weight") == "mtp.0"
    assert part_of("embedding.weight") == "embedding"


def described(model: ModelConfig, *stages: str, num_stages: int = 3) -> list[tuple[int, bool, bool, bool]]:
    """(layers, embedding table, head, MTP) of each stage."""
    found = stages_of(model, PipelineConfig(stages=list(stages)), num_stages)
    assert [i for stage in found for i in stage.layers] == list(range(model.num_layers))
    return [(len(stage.layers), stage.embedding, stage.head, bool(stage.mtp)) for stage in found]


def test_stages_as_described() -> None:
    plain, mtp = ModelConfig(num_layers=4), ModelConfig(num_layers=4, mtp_depth=2)
    tied = ModelConfig(num_layers=4, tied_head=True)
    assert described(plain, "embedding", "4L", "head") == [(0, True, False, False), (4, False, False, False),
                                                          (0, False, True, False)]  # fmt: skip
    assert described(mtp, "embedding+3L", "1L+head", "mtp") == [(3, True, False, False), (1, False, True, False),
                                                                (0, True, False, True)]  # fmt: skip
    assert described(tied, "1+embedding", "2 + 1L", "head")[2] == (0, True, True, False)
    assert stages_of(mtp, PipelineConfig(), 3) == split_stages(mtp, 3)


def test_an_own_head_of_mtp_is_held_where_its_modules_are() -> None:
    model = ModelConfig(num_layers=2, mtp_depth=1)
    stages = stages_of(model, PipelineConfig(stages=["embedding+2L", "head", "mtp"]), 3)
    held = Placement(tuple(stages), ((0,), (1,), (2,)))
    assert held.holders("head.weight") == (1, 2) and held.holders("norm.weight") == (1,)
    assert held.holders("embedding.weight") == (0, 2) and held.holders("mtp.0.norm.weight") == (2,)


@pytest.mark.parametrize(
    ("stages", "rule"),
    [
        (["embedding+2L", "2L+head"], "describes 2 stages, and the schedule has 3"),
        (["embedding+2L", "1L", "head"], "has 3 layers, and the model has model.num_layers=4"),
        (["embedding+2L", "2L", ""], "'' is no part of a model"),
        (["embedding+2L", "2L+heads", "head"], "'heads' is no part of a model"),
        (["embedding+-2L", "2L", "head"], "'-2' is no part of a model"),
        (["embedding+4L+head", "0L", "0L"], "stage 2 (0L) is empty"),
        (["embedding+2L", "2L", "mtp"], "names head never, and should name it once"),
        (["embedding+2L", "embedding", "2L+head"], "names embedding twice"),
        (["embedding+2L", "2L", "head+mtp"], "names mtp once, and should name it never with model.mtp_depth=0"),
        (["2L", "embedding", "2L+head"], "has the embedding on stage 1"),
        (["embedding+2L", "head", "2L"], "has the head on stage 1, and layers after it, on stage 2"),
    ],
)
def test_stages_that_do_not_cover_the_model_are_refused_with_what_works(stages: list[str], rule: str) -> None:
    model = ModelConfig(num_layers=4)
    with pytest.raises(ConfigError) as error:
        stages_of(model, PipelineConfig(stages=stages), 3)
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"pipeline.stages=[{','.join(stages)}]: ") for line in lines)
    assert any(rule in line for line in lines), lines
    assert all(line.endswith("; use pipeline.stages=[embedding+2L,1L,1L+head]") for line in lines)


def test_mtp_before_the_head_is_refused() -> None:
    model = ModelConfig(num_layers=2, mtp_depth=1)
    with pytest.raises(ConfigError, match=r"has mtp on stage 0, before the head on stage 1"):
        stages_of(model, PipelineConfig(stages=["embedding+2L+mtp", "head"]), 2)
    with pytest.raises(ConfigError, match=r"names mtp never, and should name it once with model.mtp_depth=1"):
        stages_of(model, PipelineConfig(stages=["embedding+2L", "head"]), 2)
