"""Efficiencies from records of `moe-engine bench`, and from a table of measured steps: planned times follow them."""

from __future__ import annotations

import csv
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_engine.__main__ import main
from moe_engine.bench.record import Result, Verdict, write
from moe_engine.cli.plan_measured import published
from moe_engine.config.errors import ConfigError
from moe_engine.layout import Layout
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.efficiencies import read_efficiencies
from moe_engine.planner.fit import LIMITS, Sample
from moe_engine.planner.hardware import ClusterConfig, Efficiency, Group
from moe_engine.planner.measured import read_measurements, read_table
from moe_engine.planner.own_machine import efficiency_of_machine
from moe_engine.planner.records import read_records
from moe_engine.planner.stages import cut
from moe_engine.planner.strategy import Precision, Strategy
from moe_engine.planner.timing import step_work
from moe_engine.planner.work import Rates, block_parts, crossings

FACTS = Path(__file__).parent.parent / "facts"
BENCH = FACTS / "bench"  # of one CPU, a thread a rank
CPU = ClusterConfig("Xeon", 4, 4, bf16_tflops=0.16, memory_gb=6, memory_tb_s=0.012, link_gb_s=2, runtime_gb=0.5)
# attention as in the records: 16 heads of 192 (queries, keys) and 128 (values)
MODEL = Architecture(
    1024, 512, 4, frozenset({0}), 1024, 16, 16, 192, 128, num_experts=16, top_k=4, expert_hidden=256,
    shared_hidden=256,
)  # fmt: skip
WORDS = [
    "model=mini_v3", "parallel.ep=4", "train.global_batch=8", "train.micro_batch=1", "train.seq_len=1024",
    "cluster.card=Xeon", "cluster.gpus=4", "cluster.gpus_per_node=4", "cluster.bf16_tflops=0.16",
    "cluster.memory_gb=6", "cluster.memory_tb_s=0.012", "cluster.link_gb_s=2", "cluster.link_latency_us=0",
]  # fmt: skip


def of_machine(path: Path, strategy: Strategy, cluster: ClusterConfig = CPU) -> tuple[Efficiency, str]:
    return efficiency_of_machine(path, MODEL, strategy, cluster, Efficiency(), "defaults")


def kernels(*rows: tuple[str, float], op: str = "fprop_bf16", device: str = "cpu") -> list[Result]:
    """Records of shapes that reached so many TFLOPS."""
    found = []
    for shape, tflops in rows:
        seconds = 2.0 * math.prod(map(int, shape.split("x"))) / tflops / 1e12
        config = {"op": op, "shape": shape, "balanced": True, "device": device}
        case = f"{op} {shape}"
        found.append(Result("kernels", case, "moe_kernels", case, [seconds], Verdict(True, ""), {}, config))
    return found


def recorded(folder: Path, results: list[Result], machine: dict[str, Any] | None = None) -> Path:
    write(folder, results, machine or {"gpu": None}, "", "")
    return folder


def test_what_benchmarks_write_is_read(tmp_path: Path) -> None:
    wrong = Result("kernels", "a", "b", "c", [], Verdict(False, "off"))
    (record,) = read_records(recorded(tmp_path / "one", [*kernels(("1x512x512x512", 0.1)), wrong]))
    assert [row.case for row in record.rows] == ["fprop_bf16 1x512x512x512"]
    assert [found.folder.name for found in read_records(BENCH)] == ["attention", "comm", "kernels"]
    assert read_records(BENCH / "comm" / "results.jsonl")[0].machine["cores"] == 2


def test_planned_attention_takes_as_long_as_was_measured() -> None:
    """A block's attention core, forward and backward, at each recorded length."""
    rows = [json.loads(line) for line in (BENCH / "attention" / "results.jsonl").read_text().splitlines()]
    for length in (256, 1024, 2048):
        strategy = Strategy(Layout(), seq_len=length)
        efficiency, words = of_machine(BENCH, strategy)
        passes = block_parts(MODEL, Rates(strategy, CPU), moe=False)["attention"]
        planned = (passes.forward + passes.dgrad + passes.wgrad).attention / efficiency.attention
        own = [row for row in rows if row["candidate"] == "moe_engine" and row["config"]["length"] == length]
        measured = sum(statistics.median(row["samples"]) for row in own) / own[0]["config"]["rows"]
        assert planned == pytest.approx(measured, rel=1e-6)
        assert f"attention: bf16 on 1 threads, by tokens, measured at 256 to 2,048, read at {length:,}" in words


def test_a_planned_layer_in_fp32_takes_as_long_as_was_measured(tmp_path: Path) -> None:
    """Where kernels were not measured in a format, whole layers say how fast experts' products are."""
    sizes = {"dim": 512, "hidden": 256, "experts": 16, "top_k": 4, "tokens": 1024}
    config = {**sizes, "dtype": "fp32", "phase": "both", "threads": 1}
    results = [
        Result("layer", "both", "moe_engine", "a", [0.5], Verdict(True, ""), {}, config),
        Result("layer", "both", "torch_grouped_mm", "a", [0.1], Verdict(True, ""), {}, config),
        Result("layer", "forward", "moe_engine", "a", [0.1], Verdict(True, ""), {}, config | {"phase": "forward"}),
        Result("layer", "both", "moe_engine", "b", [0.1], Verdict(True, ""), {}, config | {"threads": 2}),
    ]
    path = recorded(tmp_path, [*results, *kernels(("4x64x512x512", 0.1))])
    strategy = Strategy(Layout(), seq_len=1024, precision=Precision(parameter=4))
    efficiency, words = of_machine(path, strategy)
    passes = block_parts(MODEL, Rates(strategy, CPU), moe=True)["experts"]
    planned = (passes.forward + passes.dgrad + passes.wgrad).compute_seconds(efficiency)
    assert planned == pytest.approx(0.5, rel=1e-6)
    assert "layers in fp32 on 1 threads" in words
    assert "layers in" not in of_machine(path, replace(strategy, precision=Precision()))[1]


def test_rates_are_read_at_the_sizes_of_the_job(tmp_path: Path) -> None:
    """Experts' products at 16 and 1,024 rows an expert; memory that costs nothing leaves the rate as recorded."""
    fast = ClusterConfig("Xeon", 4, 4, bf16_tflops=0.16, memory_tb_s=1e9)
    shapes = ("4x16x512x512", 0.04), ("4x1024x512x512", 0.12), ("1x512x512x512", 0.08)
    path = recorded(tmp_path, kernels(*shapes))
    model = {"expert_hidden": 512, "gated": False}  # both products are 512 x 512

    def grouped(tokens: int, ep: int) -> float:
        strategy = Strategy(Layout(dp=ep, ep=ep), seq_len=tokens)
        asked = Architecture(**{**vars(MODEL), **model})
        return efficiency_of_machine(path, asked, strategy, fast, Efficiency(), "")[0].grouped

    assert grouped(64, 1) == pytest.approx(0.25, rel=1e-3)  # 64 tokens · 4 of 16 experts
    assert grouped(16, 1) == pytest.approx(0.25, rel=1e-3)  # below what was measured
    assert grouped(4096, 1) == grouped(1024, 4) == pytest.approx(0.75, rel=1e-3)
    assert grouped(512, 1) == pytest.approx(0.5, rel=1e-3)  # 128 rows: half way by the logarithm
    assert of_machine(path, Strategy(Layout()), fast)[0].matmul == pytest.approx(0.5, rel=1e-3)


def test_a_planned_exchange_takes_as_long_as_was_measured(tmp_path: Path) -> None:
    """Rows to the experts' ranks at two sizes; what a rank keeps for itself counts in a record alone."""
    results = []
    for tokens, seconds in ((256, 0.004), (4096, 0.032)):
        sent = tokens * MODEL.dim * 2.0 * crossings(MODEL, "rank", Group(4, 4, 1))[0]
        figures = {"mib": sent * 4 / 3 / 2**20}
        case = f"dispatch natural {tokens}"
        results.append(
            Result("comm", case, "all-to-all_bf16", case, [seconds], Verdict(True, ""), figures, {"ranks": 4})
        )
    path = recorded(tmp_path, results)
    for tokens, seconds in ((256, 0.004), (4096, 0.032)):
        strategy = Strategy(Layout(dp=4, ep=4), seq_len=tokens, dispatch="rank")
        links = of_machine(path, strategy)[0].links
        exchange = block_parts(MODEL, Rates(strategy, CPU), moe=True)["dispatch and combine"].forward
        assert exchange.ep / links == pytest.approx(2 * seconds)  # there and back


@pytest.mark.parametrize("words", [["model=llama3_70b", "parallel.ep=2"], ["model=deepseek_v3"], ["plan.etp=2"]])
def test_any_model_reads_records(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Also a dense one with ranks for experts that it has not: links as at the largest size."""
    assert main(["plan", *WORDS, f"plan.efficiencies={BENCH}", "parallel.ep=1", *words]) == 0
    out = capsys.readouterr().out
    assert ("grouped, block_us: defaults" in out) == ("model=llama3_70b" in words)
    assert "read at 11,740,560" in out


def test_products_that_wait_for_memory_say_nothing_of_the_matrix_rate(tmp_path: Path) -> None:
    """And those of another format neither."""
    bound = kernels(("4x16x512x512", 0.002), ("1x16x512x512", 0.002))
    others = kernels(("4x512x512x512", 0.1), op="fprop_fp8")
    machine = {"gpu": None, "ceilings": {"copy_bytes": {"2": 2e9, "1": 1.2e8}}}
    efficiency, words = of_machine(recorded(tmp_path, [*bound, *others], machine), Strategy(Layout()))
    assert efficiency.memory == pytest.approx(0.01)  # one thread
    assert (efficiency.matmul, efficiency.grouped) == (Efficiency().matmul, Efficiency().grouped)
    assert "matmul, grouped, attention, links, block_us: defaults" in words


def test_on_a_machine_with_a_gpu_only_its_own_rates_count(tmp_path: Path) -> None:
    machine = {
        "gpu": "H100",
        "ceilings": {"copy_bytes": {"1": 2e12}, "matrix_flops": {"1": {"bfloat16": 1e14}}},
        "kernel_ceilings": {"bf16": 7e14, "fp8": 1.2e15, "copy": 3e12},
    }
    h100 = ClusterConfig(gpus=1)
    rows = kernels(("4x8192x4096x7168", 700.0), device="cuda") + kernels(("4x128x512x512", 0.1))
    path = recorded(tmp_path / "gpu", rows, machine)
    efficiency, _ = of_machine(path, Strategy(Layout()), h100)
    assert efficiency.matmul == pytest.approx(700 / 989.4)
    assert efficiency.memory == pytest.approx(3 / 3.35)
    assert 700 / 989.4 < efficiency.grouped < 1  # the kernel's time less its operands' way from memory
    narrow = of_machine(path, Strategy(Layout(), precision=Precision(compute="fp8")), h100)[0]
    assert narrow.matmul == pytest.approx(1200 / 1978.9)
    attention = [json.loads(line) for line in (BENCH / "attention" / "results.jsonl").read_text().splitlines()]
    of_cpu = [Result(**{**row, "verdict": Verdict(**row["verdict"])}) for row in attention]
    path = recorded(tmp_path / "cpu", [*of_cpu, *rows], machine)
    assert of_machine(path, Strategy(Layout()), h100)[0].attention == Efficiency().attention


def planned(tmp_path: Path, bench: Path, *words: str) -> dict[str, Any]:
    assert main(["plan", *WORDS, f"plan.efficiencies={bench}", f"out={tmp_path / 'plan.json'}", *words]) == 0
    data: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
    return data


def test_a_plan_follows_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that takes twice as long for everything, every part of a step takes twice as long."""
    first = planned(tmp_path, BENCH, "plan.block_us=1e-9")
    out = capsys.readouterr().out
    for words in (
        "memory 0.783 from", "a copy at 9.4 GB/s", "matmul 0.6", "products in bf16, by the edge of an equal cube",
        "grouped 0.", "attention 0.766 from", "links 0.", "rows exchanged, by bytes of a rank",
        "block_us: defaults: nothing measured for Xeon",
    ):  # fmt: skip
        assert words in out
    for folder in BENCH.iterdir():
        (tmp_path / "slow" / folder.name).mkdir(parents=True)
        lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        machine = json.loads((folder / "machine.json").read_text())
        machine["ceilings"]["copy_bytes"]["1"] /= 2
        slow = [{**line, "samples": [2 * sample for sample in line["samples"]]} for line in lines]
        target = tmp_path / "slow" / folder.name
        (target / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in slow))
        (target / "machine.json").write_text(json.dumps(machine))
    second = planned(tmp_path, tmp_path / "slow", "plan.block_us=1e-9")
    parts = first["time"]["parts_s"]
    assert second["time"]["step_s"] == pytest.approx(2 * first["time"]["step_s"])
    assert second["time"]["parts_s"] == pytest.approx({part: 2 * seconds for part, seconds in parts.items()})
    by_hand = planned(tmp_path, BENCH, "plan.attention=0.1")
    assert by_hand["efficiency"]["attention"] == 0.1
    assert by_hand["efficiency"]["links"] == first["efficiency"]["links"]


def test_on_a_machine_without_a_gpu_nothing_hides_unless_it_is_said(tmp_path: Path) -> None:
    """Gloo sends with the cores that compute."""
    left = planned(tmp_path, BENCH)
    assert left == planned(tmp_path, BENCH, "plan.dp_hidden=0", "plan.cp_hidden=0")
    hidden = planned(tmp_path, BENCH, "plan.dp_hidden=1")
    assert hidden["tokens_per_s_per_gpu"] > left["tokens_per_s_per_gpu"]


def test_a_search_takes_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, f"plan.efficiencies={BENCH}", "search=true"]) == 0
    assert "attention 0.766 from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none", None, "is not there; use a folder that `moe-engine bench` wrote, or a table"),
        ("empty", None, "no results.jsonl there nor in a folder inside; name a folder of `moe-engine bench`"),
        ("broken", "{\n", "line 1 is no result in format 1; run that benchmark again"),
        ("older", '{"format": 0}\n', "line 1 is no result in format 1"),
        ("other", "[1]\n", "line 1 is no result in format 1"),
        ("table.csv", "a,b\n1,2\n", "the column card is missing; use a table that `plan fit=measured.csv"),
        ("rowless.csv", "", "has no rows; use a table that `plan fit=measured.csv"),
    ],
)
def test_what_is_no_record_is_refused(
    name: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if name != "none" and path.suffix != ".csv":
        path.mkdir()
    if text is not None:
        (path if path.suffix == ".csv" else path / "results.jsonl").write_text(text)
    assert main(["plan", f"plan.efficiencies={path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"plan.efficiencies={path}: ") and message in error and "Traceback" not in error


def test_records_without_anything_for_the_job_are_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a", kernels(("4x512x512x512", 0.1), op="fprop_fp8"))
    with pytest.raises(
        ConfigError, match=r"1 results \(kernels\), and nothing in them for products in bf16; use a fol"
    ):
        of_machine(path, Strategy(Layout()))
    (path / "machine.json").write_text("[]")
    with pytest.raises(ConfigError, match="no description of a machine; run that benchmark again"):
        of_machine(path, Strategy(Layout()))
    (path / "machine.json").write_text('{"ceilings": {"copy_bytes": 3}}')
    with pytest.raises(ConfigError, match="lacks what this version's benchmarks write"):
        of_machine(path, Strategy(Layout()))


def measured_rows(path: Path, change: dict[str, str]) -> list[dict[str, str]]:
    """Six published rows of a dense model under FSDP, with some columns changed, and their file."""
    with (FACTS / "planner_measured.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["gpu"]) == ("MPT-1b", "a100_40gb")]
    rows = [{**row, **change} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def test_a_fit_makes_the_table_that_a_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within the limits, nearer to the measured steps than the defaults are, and named beside a plan."""
    measured, out = tmp_path / "measured.csv", tmp_path / "efficiencies.csv"
    rows = measured_rows(measured, {})
    assert main(["plan", f"fit={measured}", f"out={out}"]) == 0
    assert f"Efficiencies fitted on {len(rows)} rows (0 dropped)" in capsys.readouterr().out
    table = read_efficiencies(read_table(out), out)
    (known,) = table.groups.values()
    assert list(table.groups) == [("A100", "bf16", "fsdp")] and known.dense == len(rows) == 6
    for name, (low, high) in LIMITS.items():
        assert low <= getattr(known.efficiency, name) <= high
    used, _ = read_measurements(rows, published())
    samples = [Sample.of(step_work(cut(row.model, row.strategy), row.cluster), row.seconds) for row in used]
    fitted, usual = (
        statistics.median(abs(sample.error(efficiency)) for sample in samples)
        for efficiency in (known.efficiency, Efficiency())
    )
    assert fitted < 0.05 and fitted < usual
    assert main(["plan", "cluster=a100", "model=mini_v3", f"plan.efficiencies={out}"]) == 0
    assert "efficiencies: fitted on 6 configurations of fsdp" in capsys.readouterr().out


def test_a_fit_to_no_usable_row_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = dict.fromkeys(("iter_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct"), "")
    measured_rows(tmp_path / "m.csv", nothing)
    assert main(["plan", f"fit={tmp_path / 'm.csv'}", f"out={tmp_path / 'e.csv'}"]) == 2
    assert "none of 6 rows can be used, no time, throughput or FLOPS published" in capsys.readouterr().err
    assert not (tmp_path / "e.csv").exists()
