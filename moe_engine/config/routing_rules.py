"""The rules of routing: experts, router, the way of rows to experts, and choices that no router makes."""

from __future__ import annotations

from moe_engine.config.routing import routing_problem
from moe_engine.config.rules import Rules, divisors, nearest

CHOICES = {
    "score_function": ("sigmoid", "softmax"),
    "group_score": ("sum_top2", "max"),
    "combine": ("dedup", "exact"),
    "wire": ("model", "fp8"),
    "dispatch": ("all_to_all", "hierarchical", "nvshmem"),
    "drop": ("score", "position"),
}


def check_routing(rules: Rules, model: str, moe: str) -> None:
    """Experts and router; `model` and `moe` are the prefixes of the sections that hold the options."""
    experts, top_k, groups, top_groups = (model + name for name in ("num_experts", "top_k", "num_groups", "top_groups"))
    rules.at_least(1, model + "expert_hidden", experts, top_k, groups, top_groups)
    rules.at_least(0, model + "num_shared_experts", moe + "aux_loss_weight", moe + "z_loss_weight", moe + "bias_step")
    rules.at_least(0, moe + "max_recv_rows", moe + "capacity_factor")
    rules.at_least(0, model + "swiglu_limit")
    rules.positive(1.0, model + "route_scale")
    for name in (
        model + "score_function",
        model + "group_score",
        moe + "combine",
        moe + "wire",
        moe + "dispatch",
        moe + "drop",
    ):
        rules.one_of(name, CHOICES[name.rpartition(".")[2]])
    _check_nvshmem(rules, moe)
    gate, shared = model + "shared_gate", model + "num_shared_experts"
    if rules.sound(shared) and rules[gate] and not rules[shared]:
        rules.refuse(gate, f"there is no shared expert to gate; use {gate}=false, or {shared}=1")
    if rules.sound(experts, top_k) and rules[top_k] > rules[experts]:
        rules.refuse(top_k, f"a token cannot use more experts than there are; use {top_k}={rules[experts]} or less")
    if rules.sound(groups, top_groups) and rules[top_groups] > rules[groups]:
        rules.refuse(top_groups, f"there are {groups}={rules[groups]}; use {top_groups}={rules[groups]} or less")
    if rules.sound(experts, groups):
        _check_groups(rules, experts, top_k, groups, top_groups, model + "group_score")


def _check_nvshmem(rules: Rules, moe: str) -> None:
    """The host never learns how many rows arrive, so it cannot share them out over rounds."""
    dispatch, bound = moe + "dispatch", moe + "max_recv_rows"
    if rules.sound(dispatch, bound) and rules[dispatch] == "nvshmem" and rules[bound]:
        rules.refuse(bound, f"{dispatch}=nvshmem has no further rounds; use {bound}=0, or {dispatch}=all_to_all")


def check_room(rules: Rules) -> None:
    """Room of a rank for rows that kernels put."""
    capacity, dispatch = "moe.recv_capacity", "moe.dispatch"
    rules.at_least(0, capacity)
    rules.at_least(1, "moe.exchange_sms")
    if rules.sound(capacity, dispatch) and rules[capacity] and rules[dispatch] != "nvshmem":
        rules.refuse(
            capacity,
            f"with {dispatch}={rules[dispatch]} a rank takes what comes; use {capacity}=0, or {dispatch}=nvshmem",
        )


def _check_groups(rules: Rules, experts: str, top_k: str, groups: str, top_groups: str, group_score: str) -> None:
    """Node-limited routing: the experts in equal groups, of which the best few have room for top_k."""
    if rules[experts] % rules[groups]:
        near = divisors(rules[experts])
        rules.refuse(groups, f"must divide {experts}={rules[experts]}; use {groups}={nearest(rules[groups], near)}")
        return
    per_group = rules[experts] // rules[groups]
    if rules.sound(top_k, top_groups) and rules[top_groups] * per_group < rules[top_k]:
        enough = -(-rules[top_k] // per_group)
        rules.refuse(
            top_groups,
            f"{rules[top_groups]} groups of {per_group} experts hold fewer than {top_k}={rules[top_k]}; "
            f"use {top_groups}={enough} or more",
        )
    if rules[groups] > 1 and rules[group_score] == "sum_top2" and per_group < 2:
        rules.refuse(
            group_score,
            f"the sum of the best two needs at least 2 experts a group, and {experts}={rules[experts]} in "
            f"{groups}={rules[groups]} gives {per_group}; use {group_score}=max",
        )


def check_routing_mode(rules: Rules) -> None:
    """Choices that do not come from the router."""
    routing, record = "moe.routing", "moe.record_routing"
    rules.at_least(0, record)
    if rules.sound(record, "train.steps") and rules[record] > rules["train.steps"]:
        last = rules["train.steps"]
        rules.refuse(record, f"the last step is train.steps={last}; use {record}={last} or less")
    if rules.sound("model.num_experts", "model.top_k"):
        problem = routing_problem(routing, rules[routing], rules["model.num_experts"], rules["model.top_k"])
        if problem:
            rules.refuse(routing, problem)
