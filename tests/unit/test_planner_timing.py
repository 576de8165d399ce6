"""Time of a step: links and networks, work by arithmetic, the step against its simulated schedule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from moe_engine.config.errors import ConfigError
from moe_engine.layout import Layout
from moe_engine.planner import hardware
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.hardware import ClusterConfig, Efficiency, Group
from moe_engine.planner.stages import cut
from moe_engine.planner.strategy import Overlap, Precision, Strategy
from moe_engine.planner.timing import beside, quick_seconds, stage_cost, steadiness, step_time, step_work
from moe_engine.planner.work import Rates, block_parts, crossings
from moe_engine.schedule import schedules
from moe_engine.schedule.simulate import simulate

DENSE = Architecture(32000, 4096, 32, frozenset(range(32)), 11008, 32, 32, 128, 128)
MOE = Architecture(
    32000, 4096, 32, frozenset(), 0, 32, 8, 128, 128, num_experts=64, top_k=8, expert_hidden=2048, shared_hidden=2048
)
CLUSTER = ClusterConfig(gpus=64)


def seconds(model: Architecture, strategy: Strategy, cluster: ClusterConfig = CLUSTER) -> float:
    return step_time(step_work(cut(model, strategy), cluster), Efficiency()).seconds


def test_groups_know_nodes() -> None:
    assert hardware.group(CLUSTER, 8) == Group(8, 8, 1)
    assert hardware.group(CLUSTER, 16) == Group(16, 8, 2)
    assert hardware.group(CLUSTER, 4, stride=4) == Group(4, 2, 2)
    assert hardware.group(CLUSTER, 4, stride=8) == Group(4, 1, 4)
    assert hardware.group(CLUSTER, 1, stride=64) == Group(1, 1, 1)
    assert hardware.group(replace(CLUSTER, gpus_per_node=72), 64) == Group(64, 64, 1)


def test_ring_passes_what_others_need() -> None:
    free = replace(CLUSTER, link_latency_us=0, network_latency_us=0)
    inside = hardware.ring_seconds(free, Group(8, 8, 1), 450e9)
    assert inside == pytest.approx(7 / 8)
    assert hardware.ring_seconds(free, Group(8, 1, 8), 50e9) == pytest.approx(7 / 8)
    assert hardware.ring_seconds(free, Group(16, 8, 2), 400e9) == pytest.approx(15 / 16)  # eight network cards
    assert hardware.ring_seconds(free, Group(1, 1, 1), 1e12) == 0


def test_oversubscription_counts_above_the_first_switch() -> None:
    slow = replace(CLUSTER, oversubscription=2.0, leaf_nodes=4)
    assert hardware.network_rate(slow, 4) == 50e9
    assert hardware.network_rate(slow, 5) == 25e9


def test_rails_send_over_the_link_first() -> None:
    tree, rail = (replace(CLUSTER, topology=name, link_gb_s=50.0) for name in ("fat_tree", "rail"))
    ranks = Group(16, 8, 2)
    assert hardware.all_to_all_seconds(rail, ranks, 1e9, 1e9) > hardware.all_to_all_seconds(tree, ranks, 1e9, 1e9)


def test_node_limited_dispatch_crosses_the_network_once_per_node() -> None:
    ranks = Group(64, 8, 8)
    by_expert, by_rank, by_node = (crossings(MOE, how, ranks)[1] for how in ("expert", "rank", "node"))
    assert by_expert == pytest.approx(8 * 56 / 64)
    assert by_node < by_rank <= by_expert
    assert crossings(MOE, "node", Group(8, 8, 1)) == crossings(MOE, "rank", Group(8, 8, 1))


def test_matrix_work_is_the_models_flops() -> None:
    """Everything but the router, which model FLOPs leave out, at the peak rate."""
    for model in (DENSE, MOE):
        strategy = Strategy(Layout())
        rates = Rates(strategy, CLUSTER)
        moe = model.num_experts > 0
        parts = block_parts(model, rates, moe)
        forward = sum(part.forward.matmul + part.forward.grouped for part in parts.values())
        router = 2 * 4096 * model.dim * model.num_experts
        core = model.num_layers * model.num_heads * 256 * 4096 * 4096
        head = 2 * 4096 * model.vocabulary_size
        expected = (model.forward_flops(4096) - core - head) / model.num_layers + router
        assert forward * CLUSTER.peak("bf16") == pytest.approx(expected)


def test_a_window_saves_attention_in_its_layers_alone() -> None:
    """Half of the layers see 512 of 4,096 keys, and what the border's tile holds besides."""
    near = replace(DENSE, window=512, window_every=2)
    core = [
        sum(stage.total.forward.attention for stage in step_work(cut(model, Strategy()), CLUSTER).stages)
        for model in (DENSE, near)
    ]
    seen = 1 - (1 - (512 + 128) / 4096) ** 2
    assert core[1] == pytest.approx((16 + 16 * seen) / 32 * core[0])
    width, scores = DENSE.num_heads * 256, 4096**2 - (4096 - 512) ** 2
    saved = 16 * width * (4096**2 - scores)
    assert near.forward_flops(4096) == pytest.approx(DENSE.forward_flops(4096) - saved)
    assert seconds(replace(DENSE, window=8192), Strategy()) == pytest.approx(seconds(DENSE, Strategy()))


def test_graphs_take_launches_from_the_host() -> None:
    layout = Layout(dp=8, ep=8)

    def launches(model: Architecture, **how: object) -> float:
        strategy = Strategy(layout, **how)  # type: ignore[arg-type]
        return block_parts(model, Rates(strategy, CLUSTER), model.num_experts > 0)["launches"].forward.blocks

    for model in (DENSE, MOE):
        found = [launches(model, graphs=graphs) for graphs in ("none", "router", "attention", "full")]
        assert found == sorted(found, reverse=True) and found[0] == launches(model) and found[-1] == 0.0
    waiting = launches(MOE, dispatch="expert")
    assert waiting > launches(MOE, dispatch="expert", capacity_factor=1.0) == launches(MOE, dispatch="node")
    assert launches(MOE) < launches(replace(MOE, num_experts=128))  # products of each expert are launched by themselves
    assert launches(MOE) < launches(MOE, precision=Precision(compute="fp8"))


def test_biases_of_experts_cost_memory_traffic_where_they_are_added_apart() -> None:
    model = replace(MOE, expert_biases=True)
    apart, fused = (
        block_parts(model, Rates(Strategy(fused_biases=fused), CLUSTER), True)["experts"].forward.memory
        for fused in (False, True)
    )
    rows = 4096 * 8 * (2 * 2048 + 4096)
    assert (apart - fused) * CLUSTER.memory_tb_s * 1e12 == pytest.approx(20 * rows)


@pytest.mark.parametrize("axis", ["tp", "pp", "dp"])
def test_more_ranks_are_faster_but_not_more_than_proportionally(axis: str) -> None:
    sizes = {"tp": 1, "pp": 1, "dp": 1}
    one = seconds(DENSE, Strategy(Layout(), micro_batches=32))
    eight = Strategy(Layout(**{**sizes, axis: 8}), micro_batches=32 if axis != "dp" else 4)
    assert one / 8 < seconds(DENSE, eight) < one


def test_recompute_costs_time() -> None:
    times = [
        seconds(DENSE, Strategy(Layout(tp=2), micro_batches=4, recompute=frozenset(what)))
        for what in ((), ("norm",), ("core_attn",), ("full",))
    ]
    assert times == sorted(times)
    assert times[0] < times[1] < times[-1] < 1.5 * times[0]


def test_dualpipe_hides_the_exchange() -> None:
    cluster = replace(CLUSTER, gpus=512)
    layout = Layout(pp=8, dp=64, ep=64)
    plain = seconds(MOE, Strategy(layout, micro_batches=32, dispatch="node"), cluster)
    paired = seconds(MOE, Strategy(layout, schedule="dualpipe", micro_batches=32, dispatch="node"), cluster)
    assert paired < 0.9 * plain


def test_parts_add_up_to_the_step() -> None:
    for schedule, pp in (("1f1b", 1), ("1f1b", 4), ("dualpipe", 4), ("zbv", 4)):
        strategy = Strategy(Layout(pp=pp, dp=16 // pp, tp=4), schedule=schedule, micro_batches=16)
        time = step_time(step_work(cut(DENSE, strategy), CLUSTER), Efficiency())
        assert sum(time.parts.values()) == pytest.approx(time.seconds)
        assert 0 <= time.bubble < 1


@pytest.mark.parametrize("name", schedules.names())
def test_long_schedules_extend_the_short_ones(name: str) -> None:
    """The time of many micro-batches, extended from fewer, is that of simulating them all."""
    pp, micro_batches = 4, 40
    work = step_work(cut(DENSE, Strategy(Layout(pp=pp), schedule=name, micro_batches=micro_batches)), CLUSTER)
    efficiency = Efficiency()
    costs = [stage_cost(work, stage, efficiency) for stage in range(len(work.stages))]
    lists = schedules.schedule(name, pp, micro_batches)
    whole = simulate(lists, len(costs), costs).makespan
    time = step_time(work, efficiency)
    once = time.parts["data parallel"] + time.parts["optimizer"]
    assert time.seconds - once == pytest.approx(whole, rel=0.01)
    assert quick_seconds(work, efficiency, steadiness(work, efficiency)) == pytest.approx(time.seconds, rel=1e-6)


def test_communication_beside_computation() -> None:
    assert beside(0, 1) == 0
    assert beside(1, 0) == pytest.approx(1)
    assert 0 < beside(0.5, 1) < 0.1
    assert 1 < beside(2, 1) < 1.2


def test_hidden_tensor_parallel_costs_less() -> None:
    exposed, hidden = (
        seconds(DENSE, Strategy(Layout(tp=8), micro_batches=4, overlap=Overlap(tp=share))) for share in (0.0, 0.5)
    )
    assert hidden < exposed


def test_wrong_clusters_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        ClusterConfig(gpus=0, link_gb_s=-1, topology="torus")
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    for line, name in itertools.zip_longest(
        lines, ["cluster.gpus=0", "cluster.link_gb_s=-1", "cluster.topology=torus"]
    ):
        assert line.startswith(name) and "use" in line or "leave it out" in line
