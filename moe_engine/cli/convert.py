"""`moe-engine convert`: a Hugging Face folder into a checkpoint of this engine, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from moe_engine.cli.launch import interrupt_ends_at_once
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import load

SUMMARY = "turn a Hugging Face folder into a checkpoint, and a checkpoint into a Hugging Face folder"
LARGEST_GB = 1e9  # of a file; beyond it bytes are no number any more
DTYPES = {"keep": None, "bfloat16": "bfloat16", "float32": "float32", "fp8": "float8_e4m3fn"}


@dataclass
class ConvertConfig:
    """The options of this command."""

    from_: str = ""  # a Hugging Face folder, a checkpoint folder, or a run folder (its newest checkpoint)
    to: str = ""  # the folder to make
    dtype: str = "keep"  # keep | bfloat16 | float32 | fp8 (into a Hugging Face folder)
    max_shard_gb: float = 5.0  # 10^9 bytes
    upcycle: int = 0  # above 0: a dense model into experts, so many copies of each MLP
    top_k: int = 2  # of the copies a token goes to; this and the others below with upcycle
    granularity: int = 1  # slices that each copy is cut into
    seed: int = 0  # of the new routers


def help_text() -> str:
    return """usage: moe-engine convert from=FOLDER to=FOLDER [dtype=…] [max_shard_gb=…]
       moe-engine convert from=DENSE_FOLDER to=FOLDER upcycle=COPIES [top_k=…] [granularity=…] [seed=…]

Convert weights between the Hugging Face layout and this engine's checkpoints; what `from` is says which way.

  a Hugging Face folder (config.json and safetensors, in one file or in several with an index) becomes a checkpoint
  that `train init_from=` starts from. Experts may be stored one by one or fused, weights may be fp8 with scales of
  128 x 128 blocks (they become fp32), MTP layers are kept.
  a checkpoint (runs/NAME/checkpoints/step_N, one made by this command, or a run folder: its newest one) becomes a
  Hugging Face folder that transformers opens. Optimizer states stay behind.

Families: deepseek_v3 (also kimi_k2), deepseek_v2, mixtral, qwen3_moe, qwen2_moe, olmoe, glm4_moe, gpt_oss (its MXFP4 is
read), ernie4_5_moe (without its MTP). Every tensor of the source is used exactly once and every tensor of the result
written exactly once, or the command names those that are not and makes nothing. Only a few tensors are in memory at a
time. Tokenizer files are not touched: copy them beside the weights.

options:
  from=FOLDER        what to convert
  to=FOLDER          what to make; must not be there yet
  dtype=keep         type of the weights: keep (as they are stored) | bfloat16 | float32; balancing biases stay float32.
                     fp8, into a Hugging Face folder: matrices of attention and MLPs as codes with scales; where
                     they came from such codes, the same codes and scales again
  max_shard_gb=5     the largest file, in 10^9 bytes

upcycling: a Hugging Face folder of a dense model (mistral, llama, qwen3) becomes one of mixtral or qwen3_moe that
computes the same until it is trained.
  upcycle=8          copies of each MLP; 0: not this
  top_k=2            how many of them a token goes to
  granularity=1      slices of each copy, experts of their own: then upcycle * granularity experts, and a token goes to
                     top_k * granularity of them
  seed=0             of the routers, random numbers of the model's initializer_range

examples:
  moe-engine convert from=DeepSeek-V2-Lite to=checkpoints/v2_lite
  moe-engine convert from=runs/quickstart to=quickstart_hf dtype=bfloat16
  moe-engine train model=DeepSeek-V2-Lite/config.json init_from=checkpoints/v2_lite run.check=true
  moe-engine convert from=Qwen3-0.6B-Base to=qwen3_8x upcycle=8 granularity=4"""


def run(words: list[str]) -> int:
    config = load("convert", words, ConvertConfig)
    _check_options(config)
    with interrupt_ends_at_once():
        import torch

        from moe_engine.checkpoint import stream
        from moe_engine.checkpoint.huggingface.writer import write_huggingface
        from moe_engine.checkpoint.weights import CheckpointWeights, open_weights, write_checkpoint
    source, out = Path(config.from_), Path(config.to)
    console = Console(stderr=True)
    if config.upcycle:
        return _upcycle(config, console)
    weights = open_weights(source)
    for note in weights.notes:
        console.print(note, markup=False, highlight=False)
    weights.check_copies()
    name = DTYPES[config.dtype]
    dtype = None if name is None else getattr(torch, name)
    to_huggingface = isinstance(weights, CheckpointWeights)
    if config.dtype == "fp8" and not to_huggingface:
        raise ConfigError(
            "dtype=fp8: a checkpoint has master weights; use dtype=keep, which keeps the scales of fp8 weights too"
        )
    write = write_huggingface if to_huggingface else write_checkpoint
    with _bar(console) as bar:
        show = partial(_show, bar)
        sizes = write(weights, out, dtype, int(config.max_shard_gb * 1e9), stream.Progress(show))
    print(
        f"{'Hugging Face folder' if to_huggingface else 'checkpoint'} {out}: {weights.model.name}, "
        f"{len(weights.shapes):,} tensors, {sum(sizes.values()):,} bytes in {len(sizes)} file{'s' * (len(sizes) > 1)}"
    )
    return 0


def _upcycle(config: ConvertConfig, console: Console) -> int:
    import torch

    from moe_engine.checkpoint import stream
    from moe_engine.checkpoint.huggingface.upcycle import Recipe, upcycle

    name, out = DTYPES[config.dtype], Path(config.to)
    dtype = None if name is None else getattr(torch, name)
    recipe = Recipe(config.upcycle, config.top_k, config.granularity, config.seed)
    with _bar(console) as bar:
        progress = stream.Progress(partial(_show, bar))
        sizes = upcycle(Path(config.from_), out, recipe, dtype, int(config.max_shard_gb * 1e9), progress)
    print(
        f"Hugging Face folder {out}: {config.upcycle * config.granularity} experts a layer, top "
        f"{config.top_k * config.granularity}, {sum(sizes.values()):,} bytes in {len(sizes)} file"
        f"{'s' * (len(sizes) > 1)}"
    )
    return 0


def _check_options(config: ConvertConfig) -> None:
    """Raises ConfigError, with a line for each option that cannot be as it is."""
    problems = []
    if not config.from_:
        problems.append("from=: a folder is needed, for example from=DeepSeek-V2-Lite")
    elif not Path(config.from_).is_dir():
        problems.append(
            f"from={config.from_}: no such folder; give a Hugging Face folder, a checkpoint or a run folder"
        )
    if not config.to:
        problems.append("to=: a folder to make is needed, for example to=converted")
    else:
        problems += _folder_problem(config.to)
    if config.dtype not in DTYPES:
        problems.append(f"dtype={config.dtype}: no such choice; there are {', '.join(DTYPES)}")
    if config.upcycle and config.dtype == "fp8":
        problems.append("dtype=fp8: upcycled weights are to be trained; use dtype=bfloat16")
    if config.upcycle < 0:
        problems.append(f"upcycle={config.upcycle}: copies of each MLP, 2 or more, for example upcycle=8; 0: none")
    if not 0 < config.max_shard_gb <= LARGEST_GB:
        rule = f"must be larger than 0 and at most {LARGEST_GB:g}"
        problems.append(f"max_shard_gb={config.max_shard_gb:g}: {rule}, for example max_shard_gb=5")
    if not config.upcycle:
        given, default = vars(config), vars(ConvertConfig())
        problems += [
            f"{name}={given[name]}: is for upcycle= alone; leave it out, or give upcycle=8"
            for name in ("top_k", "granularity", "seed")
            if given[name] != default[name]
        ]
    if problems:
        raise ConfigError("\n".join(problems))


def _folder_problem(to: str) -> list[str]:
    try:
        there = Path(to).exists() or Path(to).is_symlink()  # also to nowhere
    except OSError as error:  # a name too long
        return [f"to={to}: cannot be made ({error.strerror}); use another name, for example to=converted"]
    return [f"to={to}: is already there; remove it or name a new folder, for example to={to}_new"] if there else []


def _bar(console: Console) -> Progress:
    """A bar over the bytes to write; nothing is shown where nobody looks."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn("converting"), *columns, console=console, disable=not console.is_terminal)
    bar.add_task("converting", total=None)
    return bar


def _show(bar: Progress, done: int, total: int) -> None:
    bar.update(bar.task_ids[0], completed=done, total=total)
