"""The planner against published measurements: what is read, how it is fitted, and how well it predicts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_engine.__main__ import main
from moe_engine.cli.plan_measured import published
from moe_engine.layout import Layout
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.calibrate import best_rows, families, quantile
from moe_engine.planner.efficiencies import (
    Known,
    Table,
    efficiency_of_card,
    read_efficiencies,
    scaled,
    write_efficiencies,
)
from moe_engine.planner.fit import Observation, Sample, Start, fit
from moe_engine.planner.floor import as_run, as_tabled, floor
from moe_engine.planner.hardware import ClusterConfig, Efficiency
from moe_engine.planner.many import NAMES, Steps
from moe_engine.planner.measured import Tables, card_of, read_feasibility, read_measurements, read_table
from moe_engine.planner.recipes import SETTINGS, recipe_of, release_of
from moe_engine.planner.stages import balanced, cut
from moe_engine.planner.strategy import Strategy
from moe_engine.planner.timing import quick_seconds, step_time, step_work
from moe_engine.planner.validate import check_feasibility, check_memory, validate

FACTS = Path(__file__).resolve().parents[1] / "facts"
MEASURED = FACTS / "planner_measured.csv"
PLANNER = Path(__file__).resolve().parents[2] / "moe_engine" / "planner"


@pytest.fixture(scope="module")
def tables() -> Tables:
    return published()


def test_nine_rows_in_ten_are_used_and_the_rest_say_why(tables: Tables) -> None:
    rows = read_table(MEASURED)
    used, dropped = read_measurements(rows, tables)
    assert len(used) + len(dropped) == len(rows) == 776
    assert len(used) >= 0.9 * len(rows)
    assert all(row.reason for row in dropped)
    assert all(row.seconds > 0 for row in used)


def test_models_have_the_parameters_that_are_published(tables: Tables) -> None:
    rows = {row["id"]: row for row in read_table(MEASURED)}
    used, _ = read_measurements(list(rows.values()), tables)
    whole: dict[str, int] = {}  # some rows are of a model with layers cut away, under its name
    for row in used:
        whole[row.name] = max(whole.get(row.name, 0), row.model.num_layers)
    for row in used:
        stated = rows[row.id]["params_total_B"]
        if stated and row.model.num_layers == whole[row.name]:
            assert row.model.parameters() / 1e9 == pytest.approx(float(stated), rel=0.16), row.name


def test_cards_are_found_by_the_longest_name(tables: Tables) -> None:
    clusters = tables.clusters
    names = {"H100 96GB HBM2e 2.4TB/s": "H100 96GB", "h100_80gb": "H100", "a100_40gb": "A100 40GB", "GB200": "GB200"}
    for text, card in names.items():
        found = card_of(text, clusters)
        assert found is not None and found.card == card
    assert card_of("TPU v5", clusters) is None


def test_the_fit_finds_efficiencies_that_made_the_times() -> None:
    truth = Efficiency(matmul=0.62, grouped=0.5, attention=0.4, memory=0.7, links=0.5, block_us=300)
    chance, observed, group = random.Random(0), [], ("H100", "bf16", "a")
    for _ in range(40):
        late = chance.random() < 0.3
        experts = chance.choice([0, 16])
        model = Architecture(
            32000, chance.choice([1024, 2048, 4096, 8192]), 16, frozenset() if experts else frozenset(range(16)), 8192,
            16, 16, 128, 128, num_experts=experts, top_k=4 if experts else 0, expert_hidden=1024 if experts else 0,
        )  # fmt: skip
        layout = Layout(dp=8, tp=chance.choice([1, 2, 8]), ep=chance.choice([1, 8]) if experts else 1)
        cluster = ClusterConfig(gpus=layout.world)
        strategy = Strategy(layout, micro_batches=4, seq_len=chance.choice([512, 2048, 16384]), dispatch="expert")
        work = step_work(cut(model, strategy), cluster)
        sample = Sample.of(work, step_time(work, truth).seconds * (0.95 if late else 1.0))
        observed.append(Observation(sample, group, f"{model.dim} {experts}", "b" if late else ""))
    found = fit(observed, {group: Start(Efficiency(block_us=500)), ("other", "fp8", "a"): Start(Efficiency())})
    for name in NAMES:
        assert getattr(found.efficiencies[group], name) == pytest.approx(getattr(truth, name), rel=0.1), name
    assert found.releases["b"] == pytest.approx(0.95, rel=0.02)
    other = found.efficiencies["other", "fp8", "a"]  # without rows: what the software shares over cards and formats
    assert abs(other.attention - truth.attention) < abs(Efficiency().attention - truth.attention)
    assert other.matmul == pytest.approx(Efficiency().matmul)


def test_without_rows_efficiencies_are_what_is_assumed() -> None:
    assumed = Efficiency(matmul=0.7, attention=0.3)
    found = fit([], {("H100", "bf16", "a"): Start(assumed)}).efficiencies["H100", "bf16", "a"]
    assert [getattr(found, name) for name in NAMES] == pytest.approx([getattr(assumed, name) for name in NAMES])


def test_an_odd_model_with_many_rows_bends_little() -> None:
    """Of two models one takes twice as long as the efficiencies say in ten layouts; the other is right in two."""
    truth, group = Efficiency(matmul=0.7), ("H100", "bf16", "a")
    observed = []
    for dim, times, batches in ((8192, 1.0, (4, 8)), (4096, 2.0, range(4, 14))):
        model = Architecture(32000, dim, 16, frozenset(range(16)), 4 * dim, 16, 16, 128, 128)
        for batch in batches:
            work = step_work(cut(model, Strategy(Layout(dp=8), micro_batches=batch)), ClusterConfig(gpus=8))
            observed.append(Observation(Sample.of(work, times * step_time(work, truth).seconds), group, str(dim)))
    found = fit(observed, {group: Start(truth)}).efficiencies[group]
    first = observed[0].sample
    assert abs(first.error(found)) < 0.15


def test_efficiencies_are_six_numbers_and_come_back_from_their_file(tmp_path: Path) -> None:
    assert len(NAMES) == 6
    usual, slower = Efficiency(), Efficiency(matmul=0.5)
    groups = {
        ("H100", "bf16", "a"): Known(usual, dense=30, experts=0, year=2023),
        ("H100", "bf16", "b"): Known(slower, dense=12, experts=9, year=2025),
    }
    write_efficiencies(tmp_path / "table.csv", Table(groups, {"b 26.06": 0.75}))
    known = read_efficiencies(read_table(tmp_path / "table.csv"), tmp_path / "table.csv")
    assert known == Table(groups, {"b 26.06": 0.75})

    def chosen(software: str, experts: bool, compute: str = "bf16") -> tuple[Efficiency, str]:
        return efficiency_of_card(known, "H100 96GB", compute, software, usual, experts)

    assert chosen("", experts=False)[0] == slower  # the newest with enough dense models
    assert chosen("", experts=True)[0] == slower  # the only one with experts
    assert chosen("a", experts=False)[0] == usual
    assert chosen("b 26.06", experts=False)[0] == slower  # a release is felt by models with experts alone
    faster, words = chosen("b 26.06", experts=True)
    assert faster == scaled(slower, 0.75) and "times 0.75 for b 26.06" in words
    assert (faster.matmul, faster.block_us) == pytest.approx((0.5 / 0.75, 75.0))
    for words in (chosen("", False, "fp8")[1], chosen("b 25.01", True)[1]):
        assert "nothing measured" in words


def test_many_steps_at_once_are_those_one_by_one(tables: Tables) -> None:
    """On every eleventh published row, with other efficiencies than any fit begins with."""
    used, _ = read_measurements(read_table(MEASURED), tables)
    works = [step_work(cut(row.model, row.strategy), row.cluster) for row in used[::11] if row.cluster.gpus < 513]
    efficiency = Efficiency(matmul=0.6, grouped=0.4, attention=0.3, memory=0.7, links=0.5, block_us=700)
    stretch = [1.0 + 0.01 * i for i in range(len(works))]
    alone = [quick_seconds(work, efficiency, each) for work, each in zip(works, stretch, strict=True)]
    rates = np.array([getattr(efficiency, name) for name in NAMES])
    assert Steps(works, stretch).seconds(rates) == pytest.approx(alone, rel=1e-9)
    each = np.stack([rates * (1 + 0.01 * i) for i in range(len(works))])
    rows = [Efficiency(*map(float, row)) for row in each]
    alone = [quick_seconds(w, e, s) for w, e, s in zip(works, rows, stretch, strict=True)]
    assert Steps(works, stretch).seconds(each) == pytest.approx(alone, rel=1e-9)
    assert {work.cut.strategy.zero for work in works} >= {0, 1, 3}
    assert any(work.cut.model.num_experts for work in works)


def test_a_configuration_is_what_was_run_and_not_how_it_was_written(tables: Tables) -> None:
    """Of rows that differ in their release alone, whatever words they use, the fastest stays."""
    used, _ = read_measurements(read_table(MEASURED), tables)
    best, noise = best_rows(used)
    assert len(best) + len(noise) == len(used)
    of_one = [row for row in used if row.configuration == next(r for r in used if r.id == "mb-033").configuration]
    assert len(of_one) >= 3 and {row.release for row in of_one} > {"26.06"}
    assert [row for row in best if row in of_one] == [min(of_one, key=lambda row: row.seconds)]


def test_recipes_say_what_rows_do_not(tables: Tables) -> None:
    """Of the source, the model, the card, the format and the release of a row; later lines over earlier ones."""
    rule = {"match": "Docs", "models": "gpt qwen3", "cards": "H100 B200", "formats": "bf16", "since": "25.09"}
    usual = rule | {"until": "26.04", "recompute": "norm", "graphs": "none", "ep_hidden": "", "dispatch": "expert"}
    later = rule | {"since": "26.02", "until": "26.02", "graphs": "router"}
    rules = [{name: "" for name in SETTINGS} | one for one in (usual, later)]
    row = {"source": "Docs release 26.02.01", "model": "Qwen3-30B"}
    assert release_of(row) == "26.02"
    assert recipe_of(row, "H100 96GB", "bf16", rules) == {"recompute": "norm", "graphs": "router", "dispatch": "expert"}
    assert recipe_of(row | {"source": "Docs release 25.11"}, "B200", "bf16", rules)["graphs"] == "none"
    for other in (
        {"source": "Docs release 26.06"},
        {"source": "Docs"},
        {"model": "Llama"},
        {"source": "release 26.02"},
    ):
        assert recipe_of(row | other, "H100", "bf16", rules) == {}
    assert recipe_of(row, "H200", "bf16", rules) == recipe_of(row, "H100", "fp8", rules) == {}
    for recipe in tables.recipes:
        Strategy(graphs=recipe["graphs"], dispatch=recipe["dispatch"] or "rank")
        assert recipe["since"] <= recipe["until"] and recipe["ep_hidden"] in ("", "0", "0.8")


def test_the_least_error_is_how_far_apart_equal_configurations_are(tables: Tables) -> None:
    used, _ = read_measurements(read_table(MEASURED)[:40], tables)
    first, other = used[0], next(row for row in used if row.configuration != used[0].configuration)
    rows = [replace(first, seconds=seconds) for seconds in (1.0, 2.0, 4.0)] + [other]
    found = floor(rows, as_run)
    assert found is not None and (found.configurations, found.rows) == (1, 3)  # of the other there is one row
    assert found.told["median"] == pytest.approx((0.625,) * 3)  # 1 by 3, 2 by 2.5, 4 by 1.5: errors 2, 0.25, 0.625
    assert found.worst == pytest.approx(2.0) and floor([first, other], as_run) is None
    again = [replace(row, release="26.02") for row in (first, replace(first, seconds=9.0))]
    again[1] = replace(again[1], strategy=replace(again[1].strategy, graphs="full"))
    assert floor(again, as_run) is None and floor(again, as_tabled) is not None  # recipes tell them apart


def test_no_row_of_a_model_is_left_when_it_is_predicted(tables: Tables) -> None:
    """Also where another publisher gives a model of the same sizes another name."""
    used, _ = read_measurements(read_table(MEASURED), tables)
    names = families(used)
    assert names["GPT 174.6B"] == names["GPT 175B"] and names["LLAMA3_70B"] == names["Llama3.1 70B"]
    assert names["Llama3 70B SFT"] == names["LLAMA3_70B"] and names["DeepSeek-V3"] == names["DeepSeekV3 (w/o MTP)"]
    by_sizes: dict[tuple[int, ...], str] = {}
    for row in used:
        m = row.model
        sizes = (m.dim, m.num_layers, m.num_heads, m.num_experts, m.dense_hidden)
        assert by_sizes.setdefault(sizes, names[row.name]) == names[row.name]


def test_stages_are_balanced_by_time() -> None:
    model = Architecture(128000, 4096, 32, frozenset(range(32)), 14336, 32, 8, 128, 128)
    assert sum(balanced(model, 8, 4096)) == 32 and balanced(model, 1, 4096) == (32,)
    assert balanced(model, 8, 4096)[-1] < min(balanced(model, 8, 4096)[:-1])  # beside the head
    with_mtp = replace(model, mtp_depth=1)
    assert balanced(with_mtp, 8, 4096)[-1] < balanced(model, 8, 4096)[-1]


def test_no_name_of_a_model_or_publisher_in_the_planner(tables: Tables) -> None:
    names = {row["match"] for row in tables.models if len(row["match"]) > 4}
    names |= {"llama", "qwen", "mixtral", "nemotron", "moonlight", "grok"}
    for file in PLANNER.glob("*.py"):
        code = "\n".join(line.split("#")[0] for line in file.read_text().split('"""')[::2])
        for name in names:
            assert name not in code.lower(), (file.name, name)


def test_layouts_that_fit_or_not_are_told_apart(tables: Tables) -> None:
    fitted, all_fitted, refused, all_refused = check_feasibility(
        read_feasibility(read_table(FACTS / "planner_feasibility.csv"), tables.clusters["h100"])
    )
    assert (fitted / all_fitted + refused / all_refused) / 2 >= 0.9


def test_peak_memory_of_one_measured_stack(tables: Tables) -> None:
    """Every published figure of the stack that says how much its allocator gave: within 8%, half of them within 2%."""
    used, _ = read_measurements(read_table(MEASURED), tables)
    errors = [abs(check.error) for check in check_memory([row for row in used if row.stack == "megatron core eager"])]
    assert len(errors) >= 10
    assert max(errors) < 0.08 and quantile(errors, 0.5) <= 0.025


def test_peak_memory_of_all_stacks(tables: Tables) -> None:
    used, _ = read_measurements(read_table(MEASURED), tables)
    errors = [abs(check.error) for check in check_memory(used)]
    assert quantile(errors, 0.5) < 0.026 and sum(error <= 0.05 for error in errors) >= 0.71 * len(errors)
    narrow = [u for u in used if u.strategy.precision.moments == 4]
    assert len(narrow) == 5 and max(abs(check.error) for check in check_memory(narrow)) < 0.02


@pytest.mark.slow
def test_steps_are_predicted_better_than_by_the_floor(tables: Tables) -> None:
    """Each model by efficiencies fitted on others; the bounds hold what docs/design/planner.md reports."""
    rows = read_table(MEASURED)
    used, dropped = read_measurements(rows, tables)
    found = validate(len(rows), used, dropped)
    errors = [abs(p.fitted) for p in found.predictions]
    naive = [abs(p.naive) for p in found.predictions]
    assert quantile(errors, 0.5) < 0.0565 < quantile(naive, 0.5)
    assert quantile(errors, 0.9) < 0.177 < quantile(naive, 0.9)
    dense = [abs(p.fitted) for p in found.predictions if not p.row.model.num_experts]
    experts = [abs(p.fitted) for p in found.predictions if p.row.model.num_experts]
    assert quantile(dense, 0.5) < 0.043 and quantile(dense, 0.9) < 0.143
    assert quantile(experts, 0.5) < 0.092 and sum(experts) / len(experts) < 0.13 and max(experts) < 0.6
    least = floor(used, as_tabled)  # what knowing a configuration's other rows would leave
    assert least is not None and sum(errors) / len(errors) < min(0.0815, least.told["mean"][0])
    korthikanti = [abs(p.fitted) for p in found.predictions if p.row.stack == "megatron 2022"]
    assert sum(korthikanti) / len(korthikanti) < 0.032


def test_validate_prints_balanced_accuracy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "fits.md"
    assert main(["plan", f"validate={FACTS / 'planner_feasibility.csv'}", "cluster=h100", f"out={out}"]) == 0
    assert "balanced accuracy" in capsys.readouterr().out
    assert "balanced accuracy" in out.read_text()


def test_a_file_that_is_no_table_of_measurements(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert main(["plan", f"validate={tmp_path / 'other.csv'}"]) == 2
    assert "the column source is missing" in capsys.readouterr().err
    assert main(["plan", f"validate={tmp_path / 'none.csv'}"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["plan", f"fit={MEASURED}"]) == 2
    assert "use out=efficiencies.csv" in capsys.readouterr().err
