"""A training job from the first step to the finished run folder: data, loop, checkpoints, evaluation, a sample.

Every rank runs this; the one with rank 0 reports.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from moe_engine.config.errors import ConfigError
from moe_engine.config.load import to_yaml
from moe_engine.config.schema import Config, moments_format
from moe_engine.data.baseline import BigramModel
from moe_engine.data.batches import PackedDataset, micro_batches
from moe_engine.data.corpus import Corpus, prepare_text
from moe_engine.distributed import groups
from moe_engine.distributed.collectives import CollectiveLog
from moe_engine.distributed.device import check_device, device_of_rank
from moe_engine.expert_load import LoadHistory
from moe_engine.metrics import RunFolder, StepMetrics, measure_matrix_rate, peak_memory_gib, progress, shown
from moe_engine.model.batch import Batch
from moe_engine.pipeline.generate import generate
from moe_engine.pipeline.trace import makespan_and_bubbles
from moe_engine.planner.flops import mfu, sequence_flops
from moe_engine.trainer import StepResult, Trainer

PROMPT = "def "


def train(config: Config) -> None:
    """Run the whole job on this rank. `config` must be resolved and valid."""
    torch.set_num_threads(config.train.threads)
    device = device_of_rank()
    check_device(config, device)
    rank = groups.start(device, timeout_s=config.run.exchange_limit_s)
    try:
        Job(config, rank, device).run()
    finally:
        groups.stop()


class Job:
    """One rank's view of the job."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self.config, self.device = config, device
        self.console = Console(quiet=rank != 0, markup=False, highlight=False)  # texts hold paths and lists
        self.corpus = self._prepare_text()
        log = CollectiveLog(waits=[]) if config.trace.enabled else None
        connect = functools.partial(groups.build_groups, limit_s=config.run.exchange_limit_s)
        self.trainer = Trainer(config, rank, device, log, connect)
        self.world = self.trainer.groups.world
        self.data = self._dataset("train")
        self.validation = self._validation_rows()
        path = Path(config.run.dir) / config.run.name
        self.checkpoints = path / "checkpoints"
        self._set_weights()
        self.folder = RunFolder(path) if rank == 0 else None
        self.load_history = LoadHistory(
            path / "expert_load.safetensors", self.trainer.rebalancer.layers, config.model.num_experts
        )
        if self.folder:
            self.folder.hold()
            self.folder.begin(to_yaml(config), self.trainer.steps_done)
            self.load_history.begin(self.trainer.steps_done)
        dtype = getattr(torch, config.precision.compute)
        self.matrix_rate = measure_matrix_rate(self.world, dtype, device)
        self.step_flops = config.train.global_batch * sequence_flops(config.model, config.train.seq_len)

    def run(self) -> None:
        """Train to the last step, then evaluate, sample, save and report."""
        config = self.config.train
        self._announce()
        with progress(self.console, config.steps, self.trainer.steps_done) as bar:
            for step in range(self.trainer.steps_done, config.steps):
                self._report(self._timed_step(step), bar)
                if config.checkpoint_every and (step + 1) % config.checkpoint_every == 0 and step + 1 < config.steps:
                    self._save()
        checkpoint = self._save()
        summary = self._evaluate()
        if config.sample_tokens:
            summary["sample"] = self._sample()
        summary["peak_memory_gib_per_rank"] = self.world.gather_objects(peak_memory_gib(self.trainer.device))
        if self.folder:
            self.folder.finish(summary, self.load_history)
            self._print_summary(summary, checkpoint)

    def _save(self) -> Path:
        """A checkpoint, and the loads up to it."""
        saved = self.trainer.save(self.checkpoints, self._data_meta())
        if self.folder:
            self.folder.save_loads(self.load_history)
        return saved

    def _prepare_text(self) -> Corpus:
        data = self.config.data
        with self.console.status("reading text …"):
            return prepare_text(
                data.text_paths,
                data.cache_dir,
                validation_fraction=data.validation_fraction,
                max_bytes=data.max_bytes,
            )

    def _set_weights(self) -> None:
        """Where training starts: the run's newest checkpoint, weights from elsewhere, or the initial values."""
        if self.config.run.resume:
            saved = self.trainer.load_newest(self.checkpoints)
            self._compare_moments(saved.get("moments"))
            self._compare_data(saved.get("data", {}))
        elif self.config.train.init_from:
            source = Path(self.config.train.init_from)
            for line in self.trainer.load_weights(source):
                self.console.print(line)
            self.console.print(f"starting from the weights in {source}")

    def _compare_moments(self, before: str | None) -> None:
        """Say so when the optimizer's moments had another format. Checkpoints of before there was a choice say none."""
        now = moments_format(self.config.precision)
        if before not in (None, now):
            self.console.print(f"the checkpoint's moments are {before} and this run's {now}: they are converted")

    def _data_meta(self) -> dict[str, str]:
        return {"tokenizer": self.corpus.tokenizer.name, "content_digest": self.corpus.content_digest}

    def _compare_data(self, saved: Mapping[str, str]) -> None:
        """Refuse another tokenizer than the checkpoint's; say so when the text is another."""
        for name, now in self._data_meta().items():
            before = saved.get(name, now)
            if name == "tokenizer" and before != now:
                raise ConfigError(
                    f"run.resume=true: the checkpoint was trained on tokens of {before!r} and this run has {now!r}; "
                    "go on with the same tokenizer, or start a new run with init_from"
                )
            if before != now:
                self.console.print(
                    f"the data are not those of the checkpoint (digest {before[:12]} then, {now[:12]} now): "
                    f"training goes on with the new ones, in their order from step {self.trainer.steps_done + 1}",
                )

    def _dataset(self, name: str) -> PackedDataset:
        return PackedDataset(
            self.corpus.train if name == "train" else self.corpus.validation,
            seq_len=self.config.train.seq_len,
            mtp_depth=self.config.model.mtp_depth if name == "train" else 0,
            mask_documents=self.config.data.mask_documents,
            seed=self.config.train.seed,
            name=name,
        )

    def _validation_rows(self) -> Batch | None:
        """All ranks' validation rows, read at the start: too little text is a mistake to learn of before training."""
        if not self.config.train.eval_sequences:
            return None
        dataset = self._dataset("validation")
        return dataset.batch(dataset.fixed_rows(self.config.train.eval_sequences))

    def _batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step."""
        groups, train = self.trainer.groups, self.config.train
        batches = micro_batches(
            self.data,
            step,
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            dp_rank=groups.layout.coordinate(groups.rank).dp,
            dp_size=groups.layout.dp,
            shard=groups.cp.rank,
            shards=groups.cp.size,
        )
        return [batch.to(self.device) for batch in batches]

    def _timed_step(self, step: int) -> StepMetrics:
        recorded = step + 1 == self.config.moe.record_routing
        if recorded:
            self.trainer.record_choices()
        start = time.perf_counter()
        result = self.trainer.step(self._batches(step))
        metrics = self._metrics(step, result, time.perf_counter() - start)
        if recorded:
            path = self.trainer.save_choices(self.checkpoints.parent / "routing")
            self.console.print(f"choices of step {step + 1}: {path}")
        self.load_history.add(step, result.expert_loads.counts)
        return replace(metrics, **self._traced(step)) if self.config.trace.enabled else metrics

    def _traced(self, step: int) -> dict[str, Any]:
        """What the trace adds to the metrics; draws the step that is to be drawn."""
        figures = self.trainer.trace_figures()
        makespan, bubbles = makespan_and_bubbles(figures)
        if step + 1 == min(self.config.trace.drawn_step, self.config.train.steps):
            trace = self.trainer.trace()
            if self.folder:
                title = f"{self.config.pipeline.schedule}, step {step + 1}"
                (self.folder.path / "trace.svg").write_text(trace.picture(title))
                (self.folder.path / "trace.json").write_text(trace.perfetto(title))
        return {
            "pipeline_s": makespan,
            "bubble_per_rank": bubbles,
            "exposed_communication_s_per_rank": [each.exposed_s for each in figures],
        }

    def _metrics(self, step: int, result: StepResult, seconds: float) -> StepMetrics:
        tokens = result.items.tokens
        return StepMetrics(
            step=step + 1,
            loss=result.loss,
            mtp_loss=sum(result.mtp_losses) / max(len(result.mtp_losses), 1),
            aux_loss=result.aux_loss,
            z_loss=result.z_loss,
            total_loss=result.total_loss,
            tokens=tokens,
            tokens_seen=self.trainer.tokens_seen,
            lr=result.lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            dropped_share=result.dropped_share,
            **self._balance(result),
            step_time_s=seconds,
            tokens_per_s=tokens / seconds,
            tokens_per_s_per_rank=tokens / seconds / self.world.size,
            model_tflops=self.step_flops / seconds / 1e12,
            mfu=mfu(self.step_flops, seconds, self.matrix_rate),
        )

    def _balance(self, result: StepResult) -> dict[str, Any]:
        """The figures of expert load, and of re-placement where there was one."""
        loads, moved = result.expert_loads, result.rearranged
        found: dict[str, Any] = {
            "expert_load_max_over_mean": loads.expert_max_over_mean,
            "rank_load_max_over_mean": loads.rank_max_over_mean,
            "expert_load_entropy": loads.entropy,
            "dead_experts": loads.dead_experts,
            "expert_load_by_layer": dict(zip(loads.layers, loads.figures, strict=True)),
        }
        if moved is not None:
            found |= {"experts_moved": moved.moved, "placement_s": moved.seconds}
            found |= {"rank_load_before": moved.before, "rank_load_after": moved.after}
        return found

    def _report(self, metrics: StepMetrics, bar: Progress) -> None:
        if not self.folder:
            return
        self.folder.write(metrics)
        if metrics.experts_moved:
            self.console.print(
                f"step {metrics.step}: {metrics.experts_moved} experts moved in {metrics.placement_s:.2f} s; "
                f"the busiest rank's load over the mean, as predicted: {metrics.rank_load_before:.2f} before, "
                f"{metrics.rank_load_after:.2f} after",
            )
        bar.update(bar.task_ids[0], completed=metrics.step, shown=shown(metrics))
        last = metrics.step == self.config.train.steps
        if metrics.skipped or (not self.console.is_terminal and (metrics.step % 10 == 1 or last)):
            self.console.print(f"step {metrics.step}/{self.config.train.steps}  {shown(metrics)}")

    def _evaluate(self) -> dict[str, Any]:
        """Validation loss beside that of bigram counts of the same training tokens, on the same targets."""
        rows = self.validation
        if rows is None:
            return {}
        groups, micro_batch = self.trainer.groups, self.config.train.micro_batch
        own, dp = rows.shape[0] // groups.layout.dp, groups.layout.coordinate(groups.rank).dp
        pieces = [slice(i, min(i + micro_batch, (dp + 1) * own)) for i in range(dp * own, (dp + 1) * own, micro_batch)]
        batches = [
            rows.slice_rows(piece.start, piece.stop).share(groups.cp.rank, groups.cp.size).to(self.device)
            for piece in pieces
        ]
        summary: dict[str, Any] = {"validation_loss": self.trainer.evaluate(batches)}
        if self.folder:
            bigram = BigramModel.fit(
                self.corpus.train, self.config.model.vocab_size, mask_documents=self.config.data.mask_documents
            )
            summary["bigram_loss"] = bigram.nats_per_target([rows])
        return summary

    def _sample(self) -> str:
        tokenizer, train = self.corpus.tokenizer, self.config.train
        prompt = [int(token) for token in tokenizer.encode(PROMPT)]
        tokens = generate(self.trainer.executor, prompt, train.sample_tokens, train.seq_len, train.seed)
        return tokenizer.decode(tokens)

    def _announce(self) -> None:
        layout, train, cp = self.trainer.groups.layout, self.config.train, self.config.cp
        shared = f" x cp {layout.cp} ({cp.exchange} of {cp.payload})" if layout.cp > 1 else ""
        self.console.print(
            f"{layout.world} ranks: pp {layout.pp} x dp {layout.dp}{shared}, ep {layout.ep}, "
            f"{self.config.pipeline.schedule}, routing {self.config.moe.routing}; "
            f"{self.trainer.num_parameters:,} parameters; {len(self.data.stream.tokens):,} training tokens; "
            f"matrix rate {self.matrix_rate / 1e9:,.0f} GFLOP/s (MFU: model FLOPs over it, causal half of attention, "
            f"nothing recomputed); {train.steps - self.trainer.steps_done} of {train.steps} steps to do",
        )

    def _print_summary(self, summary: dict[str, Any], checkpoint: Path) -> None:
        print_ = self.console.print
        if "validation_loss" in summary:
            print_(
                f"validation loss {summary['validation_loss']:.4f} nats per byte "
                f"(bigram counts of the same text: {summary['bigram_loss']:.4f})",
            )
        if "sample" in summary:
            print_("sample:")
            print_(summary["sample"])
        peaks = summary["peak_memory_gib_per_rank"]
        print_(f"peak memory of a rank {max(peaks):.2f} GiB (least {min(peaks):.2f})")
        print_(f"run folder {self.checkpoints.parent}, checkpoint {checkpoint}")
