"""`moe-engine plan search=true`: the fastest layouts that fit, and one of them as values that `train` takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moe_engine.config.errors import ConfigError
from moe_engine.config.schema import Config, ParallelConfig, PipelineConfig, RunConfig, TrainConfig
from moe_engine.layout import Layout
from moe_engine.planner import report, search
from moe_engine.planner.hardware import Efficiency
from moe_engine.planner.search import Found, Result
from moe_engine.planner.strategy import recompute_section

if TYPE_CHECKING:
    from moe_engine.cli.plan import PlanConfig

HEADER = (
    "", "tp", "cp", "pp", "dp", "ep", "zero", "schedule", "mb", "recompute", "step s", "tokens/s/GPU", "GB", "",
)  # fmt: skip


def table(result: Result, train: TrainConfig) -> report.Table:
    """The best layouts, fastest first, with what each loses to the first."""
    rows = []
    for position, found in enumerate(result.best, start=1):
        strategy = found.answer.request.strategy
        layout = strategy.layout
        axes = [layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, strategy.zero]
        name = strategy.schedule + (f" x{strategy.virtual_stages}" if strategy.virtual_stages > 1 else "")
        rows.append(
            [
                *map(str, [position, *axes, name, strategy.micro_batch]),
                " ".join(sorted(strategy.recompute)),
                f"{found.seconds:.3f}",
                f"{found.answer.tokens_per_s_per_gpu:.0f}",
                f"{found.answer.peak_bytes / report.GB:.1f}",
                search.why(found, result.best[0]),
            ]
        )
    cluster = result.best[0].answer.request.cluster
    title = (
        f"The fastest layouts of {cluster.gpus} {cluster.card} for {train.global_batch:,} sequences of "
        f"{train.seq_len:,} tokens a step ({result.candidates} possible, {result.planned} planned in full, "
        f"{result.too_large} too large)"
    )
    return report.Table(title, list(HEADER), rows)


def to_train(result: Result, config: PlanConfig, efficiency: Efficiency) -> tuple[Found, str]:
    """The fastest layout that `train` runs, and a line that says which it is, empty for the first of the result.

    Where it runs none of the best, it is looked for among those of the axes that it has; where none of these fits, it
    is the first, and the line says why `train` refuses it.
    """
    first = result.best[0]
    refusals = [_refusal(found, config) for found in result.best]
    if refusals[0] is None:
        return first, ""
    reason = f"`moe-engine train` does not run the first ({refusals[0]})"
    if None in refusals:
        place = refusals.index(None)
        return result.best[place], f"{reason}; here is number {place + 1}"
    request = first.answer.request
    request = replace(request, strategy=replace(request.strategy, layout=Layout(), zero=1, micro_batch=1,
                                                micro_batches=request.strategy.global_batch))  # fmt: skip
    try:
        own = search.search(request, efficiency, of_engine=True).best
    except ConfigError:
        own = []
    found = next((found for found in own if _refusal(found, config) is None), None)
    if found is None:
        return first, f"{reason}, and none that it runs fits; here is the first"
    slower = f"{found.seconds:.3f} s, {found.seconds / first.seconds - 1:+.1%}"
    return found, f"{reason}; here is the fastest that it runs: {slower}"


def _refusal(found: Found, config: PlanConfig) -> str | None:
    """Why `train` would refuse a layout, a line; None where it would not."""
    from moe_engine.cli.train import checked

    strategy = found.answer.request.strategy
    layout = strategy.layout
    asked = Config(
        model=config.model,
        precision=config.precision,
        parallel=ParallelConfig(layout.pp, layout.dp, layout.cp, layout.ep, layout.tp, zero=strategy.zero),
        pipeline=PipelineConfig(strategy.schedule, strategy.virtual_stages),
        recompute=recompute_section(strategy.recompute),
        train=TrainConfig(
            global_batch=strategy.global_batch,
            micro_batch=strategy.micro_batch,
            seq_len=strategy.seq_len,
            eval_sequences=0,
        ),
        run=RunConfig(check=True, ranks=layout.world),
    )
    try:
        checked(asked, None)
    except ConfigError as error:
        return str(error).splitlines()[0]
    return None
