"""`moe-engine plan`: memory, time and cost of a run, before the cluster is booked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from moe_engine.cli import out_file
from moe_engine.cli.help import available
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import conf_folder, load
from moe_engine.config.model_rules import check_model
from moe_engine.config.routing_rules import check_routing
from moe_engine.config.rules import Rules
from moe_engine.config.schema import (
    ContextParallelConfig,
    ModelConfig,
    MoESection,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    TrainConfig,
)
from moe_engine.config.strict import shown
from moe_engine.config.validate import check_precision
from moe_engine.planner import report, search
from moe_engine.planner.answer import answer
from moe_engine.planner.architecture import Architecture
from moe_engine.planner.calibrate import DEFAULTS
from moe_engine.planner.efficiencies import efficiency_of_card, read_efficiencies
from moe_engine.planner.hardware import ClusterConfig, Efficiency
from moe_engine.planner.job import cut_of
from moe_engine.planner.measured import read_table
from moe_engine.planner.memory import zero_table
from moe_engine.planner.own_machine import efficiency_of_machine
from moe_engine.planner.records import is_records, read_records, sends_itself
from moe_engine.planner.request import PlanSection, Request, efficiency_of, precision_of, request, wrong_values
from moe_engine.planner.strategy import Strategy

SUMMARY = "plan a run: memory of every rank, time of a step, days and GPU-hours"
TOPICS = ("memory_70b",)
SUFFIXES = (".json", ".md", ".svg")


@dataclass
class PlanConfig:
    """The options of this command; those it shares with `train` have their names there."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    moe: MoESection = field(default_factory=MoESection)  # of a dry run
    cp: ContextParallelConfig = field(default_factory=ContextParallelConfig)  # of a dry run
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanSection = field(default_factory=PlanSection)
    tokens: float = 1e12  # to train on, for days and GPU-hours
    topic: str = ""  # a worked example in place of a plan
    dry_run: bool = False  # run one rank's step by the engine's own code on tensors without data
    rank: int = 0  # which, of a dry run
    search: bool = False  # find the fastest layouts in place of planning one
    validate: str = ""  # a table of published measurements to predict
    fit: str = ""  # a table of measurements to fit efficiencies on
    out: str = ""  # a .json, .md or .svg file, or a folder for all three; empty: none


def help_text() -> str:
    return f"""usage: moe-engine plan [group=choice …] [section.option=value …]

Print what a run will need and how fast it will be: bytes on the ranks of every pipeline stage by part, time of a step
by part with the bubble of the real schedule, tokens per second, MFU, days and GPU-hours. Nothing runs, no torch is
loaded.

groups of ready choices:
{available("plan")}

options:
  cluster.gpus=2048         cards; also cluster.gpus_per_node, cluster.link_gb_s, cluster.network_gb_s, cluster.topology
  parallel.pp=16            also parallel.dp, cp, tp, ep, zero (0 to 3)
  pipeline.schedule=NAME    also pipeline.virtual_stages
  train.global_batch=15360  also train.micro_batch, train.seq_len
  plan.recompute=[norm]     computed again in backward: norm, moe_act, mla_up_proj, core_attn, mlp, moe, full
  plan.compute=fp8          format of matrix products; also plan.etp, plan.load, plan.dispatch, plan.moment_bytes
  plan.graphs=attention     what of a block is launched as one graph: none, router, attention, full
  plan.matmul=0.7           shares of the card's rates in place of fitted ones; also grouped, attention, memory, links
  tokens=14.8e12            tokens to train on
  search=true               the ten fastest layouts for this model, batch and cluster; out=best.yaml for `train`
  dry_run=true rank=5       that rank's step by the engine's own code without data: exact bytes, collectives, actions;
                            plan.load=1.5: its experts are the busiest and get 1.5 times the mean; sections moe and
                            cp as for train: moe.wire=fp8, cp.exchange=ulysses
  validate=measured.csv     predict published steps (or layouts that fitted or not) and print the errors
  fit=measured.csv          fit efficiencies to measured steps into out=efficiencies.csv; plan.efficiencies= uses them
  plan.efficiencies=bench   efficiencies of your own machine, from its records of `moe-engine bench` in that folder
  topic=memory_70b          worked example: 70 billion parameters under data parallel and ZeRO-1, 2, 3
  out=plan.json             also .md, .svg, or a folder for all

examples:
  moe-engine plan model=deepseek_v3 cluster=h800_2048 parallel=deepseek_v3
  moe-engine plan model=deepseek_v3 cluster=h800_2048 parallel=deepseek_v3 search=true
  moe-engine plan topic=memory_70b"""


def run(words: list[str]) -> int:
    config = load("plan", words, PlanConfig)
    _check_options(config)
    if config.topic:
        example = [_memory_70b(config.cluster.gpus)]
        _print(example)
        if config.out:
            _write(Path(config.out), {".md": report.markdown(example, [])})
        return 0
    if config.validate or config.fit:
        return _measured(config)
    if config.dry_run:
        return _dry_run(config)
    asked = asked_of(config)
    efficiency, source = efficiency_for(config, asked.model, asked.strategy)
    if config.search:
        return _search(config, asked, efficiency, source)
    found = answer(asked, efficiency)
    name = config.model.name
    tables = report.tables(found, name, config.tokens)
    _print(tables)
    print(f"efficiencies: {source}")
    for warning in found.warnings:
        print(f"warning: {warning}")
    if config.out:
        texts = {
            ".json": json.dumps(report.as_data(found, name, config.tokens, source), indent=2) + "\n",
            ".md": report.markdown(tables, found.warnings, [f"efficiencies: {source}"]),
            ".svg": report.picture(found, f"{name} on {config.cluster.gpus} {config.cluster.card}"),
        }
        _write(Path(config.out), texts)
    return 0


def _dry_run(config: PlanConfig) -> int:
    from moe_engine.cli.plan_dry import job, run_dry

    asked = job(config)
    cut = cut_of(asked)
    efficiency, source = efficiency_for(config, cut.model, cut.strategy)
    tables, data, notes = run_dry(config, asked, cut, efficiency)
    notes.append(f"efficiencies of planned times: {source}")
    _print(tables)
    for note in notes:
        print(note)
    if config.out:
        _write(
            Path(config.out), {".json": json.dumps(data, indent=2) + "\n", ".md": report.markdown(tables, [], notes)}
        )
    return 0


def asked_of(config: PlanConfig) -> Request:
    """The question that a configuration asks. Raises ConfigError with a line for each rule that is broken."""
    plan, given = config.plan, Path(config.plan.efficiencies)
    if plan.efficiencies and given.exists() and is_records(given) and sends_itself(read_records(given)):
        plan = replace(plan, cp_hidden=plan.cp_hidden or 0.0, dp_hidden=plan.dp_hidden or 0.0)
    return request(
        config.model,
        config.parallel,
        config.pipeline,
        config.precision,
        config.train,
        config.cluster,
        plan,
        config.search,
    )


def efficiency_for(config: PlanConfig, model: Architecture, strategy: Strategy) -> tuple[Efficiency, str]:
    """Efficiencies as given, else as known for this job; and where those that are known come from."""
    known, source = _known_efficiency(config, model, strategy)
    return efficiency_of(config.plan, known), source


def _known_efficiency(config: PlanConfig, model: Architecture, strategy: Strategy) -> tuple[Efficiency, str]:
    """Efficiencies, and where they come from: records of a machine that are given, at the sizes of this job; else those
    of the card, fitted on published runs or the defaults. Raises ConfigError naming a file that has none."""
    compute, given = precision_of(config.precision, config.plan).compute, Path(config.plan.efficiencies)
    own = bool(config.plan.efficiencies) and is_records(given)
    if config.plan.efficiencies and not given.exists():
        raise ConfigError(
            f"plan.efficiencies={given}: is not there; use a folder that `moe-engine bench` wrote, or a table of "
            "`moe-engine plan fit=measured.csv out=efficiencies.csv`"
        )
    path = given if config.plan.efficiencies and not own else conf_folder() / "published/efficiencies.csv"
    known = read_efficiencies(read_table(path), path)
    card, software = config.cluster.card, config.plan.software
    experts = model.num_experts > 0
    usual, words = efficiency_of_card(known, card, compute, software, DEFAULTS[compute], experts)
    return efficiency_of_machine(given, model, strategy, config.cluster, usual, words) if own else (usual, words)


def _measured(config: PlanConfig) -> int:
    """Predict, or fit to, a table of published measurements."""
    from moe_engine.cli.plan_measured import calibration, validation

    option, given = ("fit", config.fit) if config.fit else ("validate", config.validate)
    try:
        tables = calibration(Path(given), Path(config.out)) if config.fit else validation(Path(given), config.cluster)
    except ConfigError as error:
        lines = str(error).splitlines()
        raise ConfigError(
            "\n".join(f"{option}={line}" if line.startswith(f"{given}:") else line for line in lines)
        ) from None
    if config.out and not config.fit:
        out_file.write(config.out, report.markdown(tables, []))
    _print(tables)
    if config.out:
        print(f"written to {config.out}")
    return 0


def _search(config: PlanConfig, asked: Request, efficiency: Efficiency, source: str) -> int:
    """Print the best layouts; `out` takes the first that `train` runs as values for it."""
    from moe_engine.cli.plan_search import table, to_train

    result, train, gpus = search.search(asked, efficiency), config.train, asked.cluster.gpus
    _print([table(result, train)])
    print(f"efficiencies: {source}")
    if train.global_batch < gpus:
        print(
            f"train.global_batch={train.global_batch} is less than a sequence for each of {gpus} cards: "
            "give the batch of the real job, with train.seq_len, or a choice that has them (parallel=deepseek_v3)"
        )
    across = search.tensor_parallel_across_nodes(result, efficiency)
    if across:
        print(across)
    chosen, why = to_train(result, config, efficiency)
    if why:
        print(why)
    values = search.override(chosen)
    if config.out:
        out_file.write(config.out, values)
        print(f"values for `moe-engine train` written to {config.out}")
    else:
        print(f"as values for `moe-engine train`:\n{values}", end="")
    return 0


def _check_options(config: PlanConfig) -> None:
    """Raises ConfigError, with a line for each option of this command that cannot be as it is."""
    problems = []
    if config.topic and config.topic not in TOPICS:
        problems.append(f"topic={config.topic}: no such topic; use topic={TOPICS[0]}")
    if config.tokens <= 0:
        problems.append(f"tokens={config.tokens}: must be positive; use tokens=1e12")
    if config.dry_run and config.search:
        problems.append("search=true: a dry run is of one layout; use search=false, or dry_run=false")
    if config.rank and not config.dry_run:
        problems.append(f"rank={config.rank}: is which rank of a dry run; use dry_run=true, or rank=0")
    for section, usual in (("moe", MoESection()), ("cp", ContextParallelConfig())):
        given = getattr(config, section)
        if given != usual and not config.dry_run:
            name = next(name for name, value in vars(given).items() if value != getattr(usual, name))
            option = shown(f"{section}.{name}", getattr(given, name))
            problems.append(f"{option}: is for a dry run; use dry_run=true, or leave it out")
    out = Path(config.out)
    suffixes: tuple[str, ...]
    if config.topic:
        what, suffixes = "a worked example is written as markdown", (".md",)
    elif config.fit:
        what, suffixes = "fitted efficiencies are a table", (".csv",)
    elif config.validate:
        what, suffixes = "a validation is written as markdown", (".md",)
    elif config.dry_run:
        what, suffixes = "a dry run is written as .json or .md", ("", ".json", ".md")
    elif config.search:
        what, suffixes = "a search writes values for `train`", (".yaml",)
    else:
        what, suffixes = f"written are {', '.join(SUFFIXES)}", ("", *SUFFIXES)
    if (config.out or config.fit) and out.suffix not in suffixes:
        example = (out if config.out else Path("efficiencies")).with_suffix(suffixes[0] or ".json")
        problems.append(f"out={config.out}: {what}; use out={example}")
    problems += out_file.problems(config.out, folder=not out.suffix)
    problems += _wrong_values(config)
    if problems:
        raise ConfigError("\n".join(problems))


def _wrong_values(config: PlanConfig) -> list[str]:
    """A line for each rule of `train` on the model and on formats that is broken, and for values of the plan's own."""
    rules = Rules(config)
    check_model(rules)
    check_routing(rules, "model.", "moe.")
    check_precision(rules)
    # a search looks for the layout itself, and whatever is given for it is not judged
    own = [] if config.search else wrong_values(config.parallel, config.pipeline, config.train, config.plan)
    return [*rules.problems, *own]


def _memory_70b(ranks: int) -> report.Table:
    """States of 70 billion parameters in bf16 with AdamW, by part and rank."""
    rows = [
        [name, *(f"{value / report.GB:,.2f}" for value in (*vars(state).values(), state.total))]
        for name, state in zero_table(70e9, ranks).items()
    ]
    header = ["", "parameters", "gradients", "fp32 master", "two moments", "GB a rank"]
    return report.Table(f"70e9 parameters in bf16 with AdamW on {ranks} ranks, GB on each", header, rows)


def _print(tables: list[report.Table]) -> None:
    console = Console(width=None if Console().is_terminal else 160)
    for table in tables:
        rich = RichTable(title=table.title, title_justify="left", show_edge=False, pad_edge=False)
        for position, name in enumerate(table.header):
            rich.add_column(name, justify="left" if position == 0 else "right")
        for row in table.rows:
            rich.add_row(*row)
        console.print(rich)
        console.print()


def _write(out: Path, texts: dict[str, str]) -> None:
    if out.suffix:
        out_file.write(str(out), texts[out.suffix])
        print(f"written to {out}")
        return
    out.mkdir(exist_ok=True)
    for suffix, text in texts.items():
        out_file.write(str(out / f"plan{suffix}"), text)
    print(f"written to {out}/plan{{{','.join(texts)}}}")
