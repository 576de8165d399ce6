"""What `plan validate=` prints: rows used and dropped, errors by group and overall, floors, and the worst misses."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from moe_engine.planner.calibrate import quantile
from moe_engine.planner.floor import TOLD, as_run, as_tabled, floor
from moe_engine.planner.report import Table
from moe_engine.planner.validate import MemoryCheck, Prediction, Validation, rank_agreement

WORST = 12


def validation_tables(found: Validation) -> list[Table]:
    """Everything about predicted steps."""
    return [_rows_table(found), _groups_table(found), _overall_table(found), _floor_table(found), _worst_table(found)]


def memory_table(checks: list[MemoryCheck]) -> Table:
    """Peak memory, by software."""
    groups: dict[str, list[float]] = defaultdict(list)
    for check in checks:
        groups[check.row.stack].append(abs(check.error))
    groups["all"] = [abs(check.error) for check in checks]
    rows = [[stack, str(len(errors)), *_quantiles(errors), _within(errors)] for stack, errors in groups.items()]
    return Table("Peak memory of the fullest rank, error", ["software", "rows", "median", "90%", "within 5%"], rows)


def feasibility_table(counts: tuple[int, int, int, int]) -> Table:
    """Fits or does not fit, both weighted alike."""
    fitted, all_fitted, refused, all_refused = counts
    shares = fitted / max(1, all_fitted), refused / max(1, all_refused)
    rows = [
        ["fitted", str(all_fitted), f"{shares[0]:.1%}"],
        ["ran out of memory", str(all_refused), f"{shares[1]:.1%}"],
        ["balanced accuracy", str(all_fitted + all_refused), f"{sum(shares) / 2:.1%}"],
    ]
    return Table("Layouts that fitted or did not, said rightly", ["", "layouts", "right"], rows)


def _rows_table(found: Validation) -> Table:
    reasons = Counter(dropped.reason for dropped in found.dropped)
    rows = [["used", str(found.used), f"{found.used / found.rows:.1%}"]]
    rows += [[f"dropped: {reason}", str(count), f"{count / found.rows:.1%}"] for reason, count in reasons.most_common()]
    return Table("Rows", ["", "rows", "share"], rows)


def _groups_table(found: Validation) -> Table:
    groups: dict[tuple[str, str, str], list[Prediction]] = defaultdict(list)
    for prediction in found.predictions:
        groups[prediction.row.group].append(prediction)
    rows = []
    for group, predictions in sorted(groups.items()):
        models = {prediction.row.name for prediction in predictions}
        rows.append([*group, str(len(predictions)), str(len(models)), *_three(predictions)])
    header = ["card", "format", "software", "rows", "models", "fitted", "90%", "default", "90%", "naive", "90%"]
    return Table("Step time by group, best row of each configuration: median error and 90th percentile", header, rows)


def _overall_table(found: Validation) -> Table:
    dense = [p for p in found.predictions if not p.row.model.num_experts]
    moe = [p for p in found.predictions if p.row.model.num_experts]
    rows = []
    for name, predictions in (("all", found.predictions), ("dense", dense), ("MoE", moe)):
        errors = [abs(p.fitted) for p in predictions]
        mean = sum(errors) / max(1, len(errors))
        worst = max(errors, default=0.0)
        rows.append([name, str(len(predictions)), *_three(predictions), f"{mean:.1%}", f"{worst:.1%}"])
    spread = [(bool(row.model.num_experts), excess) for row, excess in found.noise]
    kinds = {"": (False, True), ", dense": (False,), ", MoE": (True,)}
    for name, experts in kinds.items():
        noise = [excess for moe, excess in spread if moe in experts]
        mean, worst = sum(noise) / max(1, len(noise)), max(noise, default=0.0)
        cells = [str(len(noise)), *_quantiles(noise), *[""] * 4, f"{mean:.1%}", f"{worst:.1%}"]
        rows.append([f"noise floor: equal configurations{name}", *cells])
    pairs, right = rank_agreement(found.predictions)
    share = f"{right / max(1, pairs):.1%}"
    rows.append(["pairs of layouts in the right order", str(pairs), share, *[""] * 7])
    header = ["", "rows", "fitted", "90%", "default", "90%", "naive", "90%", "mean", "worst"]
    return Table("Step time: each model by efficiencies fitted on others", header, rows)


def _floor_table(found: Validation) -> Table:
    """What a plan that knew the other measurements of a configuration would miss."""
    rows = []
    for how, alike in (("as tables state it", as_tabled), ("recipes known", as_run)):
        for kind, experts in (("all", (False, True)), ("dense", (False,)), ("MoE", (True,))):
            least = floor([row for row in found.measurements if bool(row.model.num_experts) in experts], alike)
            if least is None:
                continue
            cells = [f"{value:.1%} ({low:.1%} to {high:.1%})" for value, low, high in least.told.values()]
            rows.append([f"{kind}, {how}", str(least.configurations), str(least.rows), *cells, f"{least.worst:.1%}"])
    header = ["configuration", "configurations", "rows", *TOLD, "worst"]
    return Table("The least error on this table: rows predicted by the others of their configuration", header, rows)


def _worst_table(found: Validation) -> Table:
    worst = sorted(found.predictions, key=lambda p: -abs(p.fitted))[:WORST]
    rows = []
    for prediction in worst:
        row, layout = prediction.row, prediction.row.strategy.layout
        axes = f"tp {layout.tp} cp {layout.cp} pp {layout.pp} ep {layout.ep} dp {layout.dp}"
        rows.append([row.id, row.name, " ".join(row.group), axes, f"{prediction.fitted:+.0%}"])
    return Table("The worst", ["row", "model", "group", "layout", "error"], rows)


def _three(predictions: Iterable[Prediction]) -> list[str]:
    found = list(predictions)
    texts: list[str] = []
    for name in ("fitted", "default", "naive"):
        texts += _quantiles([abs(getattr(prediction, name)) for prediction in found])
    return texts


def _quantiles(errors: list[float]) -> list[str]:
    return [f"{quantile(errors, share):.1%}" for share in (0.5, 0.9)]


def _within(errors: list[float]) -> str:
    return f"{sum(error <= 0.05 for error in errors) / max(1, len(errors)):.0%}"
