"""What a benchmark leaves behind, the same for every benchmark, and the order in which candidates are timed.

    <folder>/results.jsonl   one `Result` a line, with every sample
             machine.json    what it ran on, with ceilings measured then and there (`bench.machine`)
             config.yaml     the exact options
             report.md       the same for people
             plot.svg        when asked for

Timings on a shared machine drift, so candidates that are to be compared take turns: A B B A A B B A … (`turns`).
Each is first checked against the same truth; a candidate whose results are wrong gets no timing. All samples are
seconds of one repetition: smaller is better.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_engine.config.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate computes the right thing: found before it is timed."""

    passed: bool
    text: str  # against what, and how near
    measures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """One candidate in one case of a benchmark.

    session: equal for candidates that took turns with one another, so that their n-th samples belong together;
    samples: seconds, in the order in which they were taken, empty where the verdict is negative;
    figures: derived numbers by name with unit (`tokens_per_s`); config: everything that distinguishes this case.
    """

    benchmark: str
    case: str
    candidate: str
    session: str
    samples: list[float]
    verdict: Verdict
    figures: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True)
class Summary:
    """median and best in seconds; spread: the middle half of the samples (third minus first quartile) over the median.

    A spread of 0.02 says that half of the samples lie within about 1% of the median.
    """

    count: int
    median: float
    best: float
    spread: float


def summarize(samples: Sequence[float]) -> Summary:
    """Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples to summarize")
    median = statistics.median(samples)
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [median] * 3
    return Summary(len(samples), median, min(samples), (third - first) / median)


def turns(candidates: Sequence[str], rounds: int) -> Iterator[str]:
    """Who is timed next: every round has each candidate once, every other round in reverse order.

    For two: A B B A A B B A …, so that a drift that is linear over four turns cancels in their ratio.
    """
    for index in range(rounds):
        yield from candidates if index % 2 == 0 else reversed(candidates)


def named_twice(option: str, values: Sequence[str]) -> list[str]:
    """The refusal, a line, of a list that has a name twice: both would have the turns of one candidate."""
    once = list(dict.fromkeys(values))
    shown = f"{option}=[{','.join(values)}]"
    return [f"{shown}: one is named twice; use {option}=[{','.join(once)}]"] if len(once) < len(values) else []


def write(
    folder: Path,
    results: Sequence[Result],
    machine: Mapping[str, Any],
    config_yaml: str,
    report: str,
    plot: bool = False,
) -> None:
    """Write the folder; a run that is repeated into the same folder replaces its results."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps(machine, indent=2) + "\n")
    (folder / "config.yaml").write_text(config_yaml)
    (folder / "report.md").write_text(report)
    if plot:
        draw(results, folder / "plot.svg")
    temporary = folder / "results.jsonl.part"
    temporary.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))
    temporary.rename(folder / "results.jsonl")


def read(path: Path) -> list[Result]:
    """The results in a benchmark's folder or a results.jsonl. Raises ConfigError naming the file and the line."""
    file = path / "results.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path}: no results there; give the folder of a benchmark, as in bench/first")
    results = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
        try:
            results.append(_read_line(line))
        except ValueError as error:
            raise ConfigError(
                f"{file}:{number}: not a result in format {FORMAT} ({error}); run the benchmark again with this version"
            ) from None
    if not results:
        raise ConfigError(f"{file}: no results in it; run the benchmark again")
    return results


def _read_line(line: str) -> Result:
    """Raises ValueError for anything but a line of `write`."""
    data = json.loads(line)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("another format")
    try:
        result = Result(**{**data, "verdict": Verdict(**data["verdict"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"another set of fields ({error})") from None
    words = (result.benchmark, result.case, result.candidate, result.session, result.verdict.text)
    if not all(isinstance(word, str) for word in words) or not isinstance(result.verdict.passed, bool):
        raise ValueError("names must be text, and the verdict true or false")
    numbers = isinstance(result.samples, list) and all(type(sample) in (int, float) for sample in result.samples)
    if not numbers or not all(0 < sample < math.inf for sample in result.samples):
        raise ValueError("samples must be a list of positive seconds")
    return result


def table(results: Sequence[Result], figures: Mapping[str, str]) -> str:
    """Markdown: a row for each result; `figures` gives a format for each figure that gets a column."""
    head = ["case", "candidate", "n", "median s", "best s", "spread", *(name.replace("_", " ") for name in figures)]
    lines = [head, ["---"] * len(head)]
    for result in results:
        row = [result.case, result.candidate, str(len(result.samples))]
        if result.samples:
            summary = summarize(result.samples)
            row += [f"{summary.median:.4g}", f"{summary.best:.4g}", f"{summary.spread:.1%}"]
        else:
            row += ["wrong result" if not result.verdict.passed else "not timed", "", ""]
        row += [
            format(result.figures[name], shape) if name in result.figures else "" for name, shape in figures.items()
        ]
        lines.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def draw(results: Sequence[Result], path: Path) -> None:
    """Every sample as a dot and the median as a bar, a row for each case and candidate."""
    from matplotlib.figure import Figure

    timed = [result for result in results if result.samples]
    figure = Figure(figsize=(8, 0.6 + 0.4 * len(timed)), layout="constrained")
    axes = figure.add_subplot()
    for row, result in enumerate(reversed(timed)):
        axes.barh(row, summarize(result.samples).median, height=0.6, alpha=0.4)
        axes.plot(result.samples, [row] * len(result.samples), ".", color="black", markersize=3)
    axes.set_yticks(range(len(timed)), [f"{result.case} {result.candidate}" for result in reversed(timed)])
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds (bar: median)")
    figure.savefig(path)
