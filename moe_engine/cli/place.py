"""`moe-engine place`: experts and their copies to GPUs by the loads that a run had, for serving its model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from moe_engine.cli import out_file
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import load
from moe_engine.planner.eplb import ExpertCopies, max_over_mean, place_copies

SUMMARY = "place experts and copies of hot ones on GPUs by a run's loads (EPLB), for serving"
FILE = "expert_load.safetensors"


@dataclass
class PlaceConfig:
    """The options of this command."""

    loads: str = ""  # a run folder, or its expert_load.safetensors
    copies: int = 0  # of all experts of a layer together; 0: one of each
    gpus: int = 8
    nodes: int = 1  # that the GPUs are on
    groups: int = 1  # of experts that stay on one node: those of the router, where it limits tokens to some
    steps: int = 0  # go by the last so many steps of the run; 0: by all
    out: str = ""  # a JSON file to write


@dataclass(frozen=True)
class RunLoads:
    """What a run's history of loads holds: tokens of each expert by layer, and how many steps they are of."""

    tokens: dict[str, list[int]]
    steps: int


def help_text() -> str:
    return """usage: moe-engine place loads=RUN [copies=N] [gpus=N] [nodes=N] [groups=N] [steps=N] [out=FILE]

Place the experts of each MoE layer, and copies of the most loaded ones, on GPUs so that their loads even out: the EPLB
algorithm of DeepSeek-V3's deployment, by the loads that a training run counted. An expert's load is shared by its
copies. Shown is the busiest GPU's load over the mean, for experts in contiguous blocks and as placed.

options:
  loads=RUN     a run folder, or the expert_load.safetensors in it
  copies=0      in all, for each layer; a multiple of gpus, not fewer than experts; 0: one of each expert
  gpus=8        nodes=1: the GPUs, and the nodes they are on
  groups=1      of experts, as in the router, that stay together on a node; where nodes does not divide it, experts go
                to any GPU
  steps=0       go by the last so many steps, to whole columns of the history; 0: by all
  out=FILE      also write a JSON file: for each layer the expert in each slot, the slots of a GPU one after the other

examples:
  moe-engine place loads=runs/quickstart gpus=4
  moe-engine place loads=runs/v3 copies=288 gpus=32 nodes=4 groups=8 out=placement.json"""


def run(words: list[str]) -> int:
    config = load("place", words, PlaceConfig)
    _check_options(config)
    found = read_loads(_file_of(config.loads), config.steps)
    experts = len(next(iter(found.tokens.values())))
    placed = {
        name: place_copies(tokens, config.copies or experts, config.groups, config.nodes, config.gpus)
        for name, tokens in found.tokens.items()
    }
    print(_report(config, found, placed))
    if config.out:
        layers = {name: list(each.experts) for name, each in placed.items()}
        sizes = {"gpus": config.gpus, "nodes": config.nodes, "experts": experts, "copies": config.copies or experts}
        out_file.write(config.out, json.dumps({**sizes, "slots": layers}, indent=1) + "\n")
        print(f"written: {config.out}")
    return 0


def read_loads(path: Path, steps: int) -> RunLoads:
    """The loads of the last `steps` steps, or some more to whole columns; 0: of all. Raises ConfigError for none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            meta, columns = file.metadata() or {}, file.get_tensor("tokens")  # [columns, L, E]
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"loads={path}: cannot be read ({error}); give a run folder with {FILE}") from error
    a_column = int(meta.get("steps_a_column", 1))
    last = columns[-steps // a_column :] if steps else columns
    layers = [name for name in meta.get("layers", "").split(",") if name]
    if not layers or not len(last):
        raise ConfigError(f"loads={path}: holds no loads of experts; give a run of a model with experts")
    totals = last.sum(axis=0).tolist()
    return RunLoads(dict(zip(layers, totals, strict=True)), len(last) * a_column)


def _report(config: PlaceConfig, found: RunLoads, placed: dict[str, ExpertCopies]) -> str:
    lines = [
        f"loads of about {found.steps} steps; {config.gpus} GPUs on {config.nodes} "
        f"node{'s' * (config.nodes > 1)}; busiest GPU's load over the mean",
        f"  {'layer':<20} {'contiguous':>10} {'placed':>10}  experts with most copies",
    ]
    for name, each in placed.items():
        tokens = found.tokens[name]
        per_gpu = len(tokens) // config.gpus
        blocks = [sum(tokens[g * per_gpu : (g + 1) * per_gpu]) for g in range(config.gpus)]
        before = f"{max_over_mean(blocks):.3f}" if len(tokens) % config.gpus == 0 else "-"
        count = sorted((-len(each.slots_of(e)), e) for e in range(len(tokens)))[:3]
        most = ", ".join(f"{e} ({-copies})" for copies, e in count if copies < -1)
        lines.append(f"  {name:<20} {before:>10} {each.max_over_mean:>10.3f}  {most}".rstrip())
    return "\n".join(lines)


def _file_of(loads: str) -> Path:
    return Path(loads) / FILE if Path(loads).is_dir() else Path(loads)


def _check_options(config: PlaceConfig) -> None:
    """Raises ConfigError, with a line for each option that cannot be as it is; sizes are checked with the loads."""
    problems = []
    if not config.loads:
        problems.append("loads=: a run folder is needed, for example loads=runs/quickstart")
    elif not _file_of(config.loads).is_file():
        problems.append(f"loads={config.loads}: no {FILE} there; give the folder of a finished run, runs/<name>")
    for name, smallest in (("copies", 0), ("gpus", 1), ("nodes", 1), ("groups", 1), ("steps", 0)):
        if getattr(config, name) < smallest:
            problems.append(
                f"{name}={getattr(config, name)}: must be {smallest} or more, for example {name}={smallest}"
            )
    problems += out_file.problems(config.out)
    if problems:
        raise ConfigError("\n".join(problems))
