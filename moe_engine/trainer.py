"""One rank of a training job: the parts put together, a step, evaluation, saving and going on.

A step goes through the rooms in this order: `data` gives this rank's micro-batches; their valid items are counted
over all data-parallel ranks (the loss normaliser); `pipeline` runs the schedule and leaves summed gradients;
`optim` reduces, clips, updates the shards and gathers the parameters; the routers' counts are completed and the
balancing bias moves once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.checkpoint import store
from moe_engine.checkpoint.choices import load_choices, save_choices
from moe_engine.checkpoint.weights import model_meta, model_of, require_model
from moe_engine.config.errors import ConfigError
from moe_engine.config.load import to_yaml
from moe_engine.config.routing import routing_mode
from moe_engine.config.schema import Config, moe_layer_config, moments_format
from moe_engine.distributed.collectives import CollectiveLog
from moe_engine.distributed.device import pair_sms, synchronizer
from moe_engine.distributed.groups import Groups, build_groups
from moe_engine.expert_load import ExpertLoads, load_figures
from moe_engine.layout import Layout, Placement
from moe_engine.model.batch import Batch, ItemCounts, count_items
from moe_engine.model.names import NamedParameter, named_parameters
from moe_engine.model.transformer import LossRule, Stage, mean_losses
from moe_engine.moe.balance import update_expert_bias
from moe_engine.moe.choices import ForcedChoices, RecordedChoices, Recorder, SkewedLoads
from moe_engine.moe.dispatch import with_windows
from moe_engine.moe.layer import MoELayer
from moe_engine.ops.fp8 import Fp8
from moe_engine.ops.random import normal
from moe_engine.optim.lr import learning_rate
from moe_engine.optim.rebalance import Rearranged, Rebalancer
from moe_engine.optim.zero import ZeroOptimizer
from moe_engine.pipeline.executor import Executor, StepSums
from moe_engine.pipeline.trace import StepFigures, Trace, Tracer
from moe_engine.planner.flops import parameter_count
from moe_engine.planner.job import placement_of
from moe_engine.schedule import pair, schedules
from moe_engine.schedule.check import check

Connect = Callable[[Layout, Placement, int, CollectiveLog | None], Groups]


@dataclass(frozen=True)
class StepGradients:
    """A step between backward and update: the gradients themselves are in the optimizer's shards."""

    items: ItemCounts
    sums: StepSums


@dataclass(frozen=True)
class StepResult:
    """One step of the whole job; losses in nats per valid target, equal on all ranks."""

    loss: float
    mtp_losses: tuple[float, ...]
    aux_loss: float
    z_loss: float
    total_loss: float
    items: ItemCounts
    lr: float
    grad_norm: float
    skipped: bool
    expert_counts: dict[str, Tensor]  # by MoE layer of this rank, [E] int64, over the whole global batch
    dropped_share: float | None  # of all choices, those that moe.capacity_factor dropped; None without it
    expert_loads: ExpertLoads
    rearranged: Rearranged | None  # where experts were due to move after this step


class Trainer:
    """Model stages, optimizer and executor of one rank. `config` must be resolved (`parallel.dp` filled in).

    connect: makes the communicators; a dry run has its own.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        device: torch.device,
        log: CollectiveLog | None = None,
        connect: Connect = build_groups,
    ) -> None:
        self.config, self.device = config, device
        self.micro_batches = config.train.global_batch // ((config.parallel.dp or 1) * config.train.micro_batch)
        self.groups = connect(Layout.of(config.parallel), placement_of(config), rank, log)
        self.groups = with_windows(config, self.groups, device)
        precision = config.precision
        self.fp8 = None
        if precision.name == "fp8":
            self.fp8 = Fp8(
                precision.wgrad, precision.power_of_two_scales, keep_transposed=precision.keep_transposed_codes
            )
        self.stages = self._stages()
        self.optimizer = ZeroOptimizer(self.named, self.groups, config.optim, config.precision)
        self.optimizer.fill_masters(self._initial_values)
        self.rebalancer = Rebalancer(
            config.moe.placement, config.model, self.groups, self.stages.values(), self.optimizer
        )
        pipeline, pp = config.pipeline, config.parallel.pp
        order = pair.BLOCKING if device.type == "cpu" else pair.LAUNCHING
        self.tracer = None if log is None or log.waits is None else Tracer(self.groups, log, synchronizer(device))
        order_of_pairs = order if pipeline.overlap else None
        self.executor = Executor(
            self.stages,
            self.groups,
            order_of_pairs,
            self.tracer,
            pair_sms(device, config.moe.exchange_sms),
            hopper=config.train.kernels == "hopper",
        )
        self.lists = schedules.schedule(pipeline.schedule, pp, self.micro_batches, pipeline.virtual_stages)
        check(self.lists, len(self.groups.placement.stages), self.micro_batches)
        self.num_parameters = parameter_count(config.model).total
        self.steps_done = 0
        self.tokens_seen = 0
        self._set_choices()

    def _stages(self) -> dict[int, Stage]:
        config = self.config
        dtype = getattr(torch, config.precision.compute)
        placement = self.groups.placement
        stages: dict[int, Stage] = {}
        for index in placement.stages_of_rank[self.groups.layout.coordinate(self.groups.rank).pp]:
            spec = placement.stages[index]
            stage = Stage(spec, config.model, config.moe, self.groups, dtype, self.device, config.recompute, config.cp)
            if self.fp8 is not None:
                stage.use_fp8(self.fp8, config.precision.bf16_first_layers, config.precision.bf16_last_layers)
            for other in stages.values():
                stage.share(other)
            stages[index] = stage
        return stages

    def _initial_values(self, name: str, start: int, end: int, shape: torch.Size) -> Tensor:
        """Elements start … end-1 of a parameter at step 0: biases 0, norms 1, others normal."""
        dtype = getattr(torch, self.config.precision.master)
        if name.endswith("bias"):
            return torch.zeros(end - start, dtype=dtype, device=self.device)
        if len(shape) == 1 and not name.endswith("sinks"):
            return torch.ones(end - start, dtype=dtype, device=self.device)
        std, seed = self.config.model.init_std, self.config.train.seed
        return normal((end - start,), std, name=name, seed=seed, first=start, dtype=dtype, device=self.device)

    def _set_choices(self) -> None:
        """Other choices than the router's, where `moe.routing` wants them."""
        config, mode, layers = self.config, routing_mode(self.config.moe.routing), self.moe_layers()
        if mode.kind == "forced":
            loads = SkewedLoads(moe_layer_config(config.model, config.moe), mode.skew)
            for name, layer in layers.items():
                layer.choices = ForcedChoices(loads, zlib.crc32(f"{name} of {self.groups.data.rank}".encode()))
        elif mode.kind == "replay":
            rows = config.train.global_batch // self.groups.layout.dp
            found = load_choices(Path(mode.folder), list(layers), config, self._first_row(), rows, self.groups)
            for name, layer in layers.items():
                layer.choices = RecordedChoices(found[name])

    def _first_row(self) -> int:
        """Of this rank's part of the global batch."""
        layout = self.groups.layout
        return layout.coordinate(self.groups.rank).dp * (self.config.train.global_batch // layout.dp)

    def record_choices(self) -> None:
        """Keep the choices of the next step, for `save_choices`."""
        for layer in self.moe_layers().values():
            layer.choices = Recorder(layer.choices)

    def save_choices(self, folder: Path) -> Path:
        """Write what `record_choices` kept of the last step to `folder/step_<n>`, and keep no more."""
        found: dict[str, dict[int, Tensor]] = {}
        for name, layer in self.moe_layers().items():
            if isinstance(layer.choices, Recorder):
                found[name] = layer.choices.by_micro_batch
                layer.choices = layer.choices.choices
        return save_choices(folder, self.steps_done, found, self.config, self._first_row(), self.groups, self.device)

    @property
    def named(self) -> list[NamedParameter]:
        """Every parameter of this rank with its global names: experts' names change when they move."""
        return named_parameters(self.stages.values(), self.groups.placement)

    def _parameters_moved(self) -> None:
        if self.fp8 is not None:
            self.fp8.forget()

    def moe_layers(self) -> dict[str, MoELayer]:
        """Every MoE layer of this rank by global name."""
        return {name: layer for stage in self.stages.values() for name, layer in stage.moe_layers().items()}

    def trace_figures(self) -> list[StepFigures]:
        """The last step's figures of all ranks, where a trace is on."""
        assert self.tracer is not None
        own = self.tracer.figures(self.lists[self.executor.here])
        return self.groups.world.gather_objects(own)

    def trace(self) -> Trace:
        """The last step of all ranks in time, where a trace is on."""
        assert self.tracer is not None
        return self.tracer.gather(self.lists, self.executor.num_stages)

    def count_items(self, batches: Sequence[Batch]) -> ItemCounts:
        """Valid items of the whole global batch."""
        counts = count_items(batches).as_tensor().to(self.device)
        return ItemCounts.from_tensor(self.groups.data.all_reduce_sum(counts, "valid items"))

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """Train on this rank's micro-batches of the next step."""
        return self.update(self.accumulate(batches))

    def accumulate(self, batches: Sequence[Batch]) -> StepGradients:
        """Forward and backward of all micro-batches; gradients summed over them and over all ranks.

        Raises ValueError when there are more or fewer micro-batches than the schedule was made for.
        """
        if len(batches) != self.micro_batches:
            raise ValueError(f"{len(batches)} micro-batches: this job has {self.micro_batches} per rank and step")
        items = self.count_items(batches)
        self.optimizer.zero_grad()
        if self.tracer:
            self.tracer.begin()
        sums = self.executor.run(self.lists, batches, LossRule(items, self.config.train.mtp_loss_weight))
        if self.groups.ep_windows is not None:
            self.groups.ep_windows.check()
        if self.tracer:
            self.tracer.end_pass()
        self.optimizer.reduce_gradients()
        return StepGradients(items, sums)

    def update(self, gradients: StepGradients) -> StepResult:
        """Clip, move the parameters and the balancing biases once, and complete the figures over ranks."""
        items, sums = gradients.items, gradients.sums
        lr = learning_rate(self.config.optim, self.steps_done, self.config.train.steps)
        stats = self.optimizer.step(lr)
        self._parameters_moved()
        counts = self._take_expert_counts()
        if not stats.skipped:
            for name, layer in self.moe_layers().items():
                update_expert_bias(layer.router.expert_bias, counts[name], self.config.moe.bias_step)
        dropped_share = self._take_dropped_share()
        self.steps_done += 1
        self.tokens_seen += items.tokens
        loss, *mtp = self._mean_losses(sums, items)
        aux, z_loss = self.groups.world.all_reduce_sum(sums.aux, "aux losses").tolist()
        mtp_weight = self.config.train.mtp_loss_weight / max(len(mtp), 1)
        loads = self._loads(counts)
        return StepResult(
            loss=loss,
            mtp_losses=tuple(mtp),
            aux_loss=aux,
            z_loss=z_loss,
            total_loss=loss + mtp_weight * sum(mtp) + aux + z_loss,
            items=items,
            lr=lr,
            grad_norm=stats.grad_norm,
            skipped=stats.skipped,
            expert_counts=counts,
            dropped_share=dropped_share,
            expert_loads=loads,
            rearranged=self._rearrange(loads),
        )

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss in nats per valid target over all ranks' batches (equal numbers of batches on every rank)."""
        items = self.count_items(batches)
        sums = self.executor.forward_only(batches, LossRule(items, 0.0))
        return self._mean_losses(sums, items)[0]

    def _mean_losses(self, sums: StepSums, items: ItemCounts) -> list[float]:
        """Main and MTP losses of the whole batch, nats per valid target."""
        return mean_losses(self.groups.world.all_reduce_sum(sums.loss_sums, "losses"), [items.tokens, *items.mtp])

    def _take_dropped_share(self) -> float | None:
        """Over all layers and the whole global batch; the layers' own counters start anew."""
        if not self.config.moe.capacity_factor:
            return None
        own = torch.zeros(2, dtype=torch.int64, device=self.device)
        for layer in self.moe_layers().values():
            own += layer.dropped_choices
            layer.dropped_choices.zero_()
        dropped, choices = self.groups.world.all_reduce_sum(own, "dropped choices").tolist()
        return float(dropped / max(choices, 1))

    def _take_expert_counts(self) -> dict[str, Tensor]:
        """Chosen counts of each MoE layer over the whole global batch; the layers' own counters start anew."""
        by_holders: dict[tuple[int, ...], list[str]] = {}
        layers = self.moe_layers()
        for name in layers:
            by_holders.setdefault(self.groups.placement.holders(name), []).append(name)
        totals: dict[str, Tensor] = {}
        for holders, names in sorted(by_holders.items()):
            own = torch.stack([layers[name].router.num_tokens_per_expert for name in names])
            summed = self.groups.dense[holders].all_reduce_sum(own, "expert counts")  # [layers, E]
            totals.update(zip(names, summed, strict=True))
        for layer in layers.values():
            layer.router.num_tokens_per_expert.zero_()
        return totals

    def _loads(self, counts: dict[str, Tensor]) -> ExpertLoads:
        """The loads of all layers of the model from those of this rank's layers."""
        layers, placements = self.rebalancer.layers, self.rebalancer.placements
        own = torch.zeros(len(layers), self.config.model.num_experts, dtype=torch.int64, device=self.device)
        for i, name in enumerate(layers):
            if name in counts:
                own[i] = counts[name]
        if layers:
            own = self.groups.world.all_reduce_max(own, "expert loads")  # 0 on ranks without the layer
        everywhere = own.cpu()
        figures = (load_figures(row, placements[name]) for name, row in zip(layers, everywhere.tolist(), strict=True))
        return ExpertLoads(tuple(layers), everywhere, tuple(figures))

    def _rearrange(self, loads: ExpertLoads) -> Rearranged | None:
        """Count a step's loads; where it is time, let them decide where experts go."""
        every = self.config.moe.placement.every
        if not every:
            return None
        self.rebalancer.observe(loads.counts)
        if self.steps_done % every:
            return None
        rearranged = self.rebalancer.rearrange()
        self._parameters_moved()
        return rearranged

    def _extras(self) -> dict[str, Tensor]:
        """State beside parameters: the balancing biases."""
        return {f"{name}.router.expert_bias": layer.router.expert_bias for name, layer in self.moe_layers().items()}

    def save(self, folder: Path, data: Mapping[str, str] | None = None) -> Path:
        """Write `folder/step_<n>`, complete or not at all. `data` describes what was trained on."""
        meta = {
            **model_meta(self.config.model),
            "data": dict(data or {}),
            "moments": moments_format(self.config.precision),
            "tokens_seen": self.tokens_seen,
            "optimizer_steps": self.optimizer.state_steps,
            "experts": self.rebalancer.state(),
            "config": to_yaml(self.config),
        }
        return store.save(
            folder, self.steps_done, self.optimizer.named_shards(), self._extras(), meta, self.groups.world
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Go on from a checkpoint made in any layout."""
        meta = store.load(path, self.optimizer.named_shards(), self._extras(), self.groups.world)
        require_model(model_of(meta, path), self.config.model, path)
        self.steps_done, self.tokens_seen = meta["step"], meta["tokens_seen"]
        self.optimizer.state_steps = meta["optimizer_steps"]
        self.optimizer.set_parameters_from_masters()
        if "experts" in meta:
            self.rebalancer.restore(meta["experts"])
        self._parameters_moved()
        return meta

    def load_weights(self, path: Path) -> list[str]:
        """Start from weights (a Hugging Face folder, checkpoint or run folder): step 0, a fresh optimizer.

        Each rank reads what its own shards need. Returns what a person should know of them, a line each.
        """
        notes = store.load_weights(
            path, self.config.model, self.optimizer.named_shards(), self._extras(), self.groups.world
        )
        self.optimizer.set_parameters_from_masters()
        self._parameters_moved()
        return notes

    def load_newest(self, folder: Path) -> dict[str, Any]:
        """Go on from the newest complete checkpoint in `folder`; a fresh start when there is none is refused."""
        world = self.groups.world
        path = world.gather_objects(store.newest(folder) if world.rank == 0 else None)[0]
        if path is None:
            raise ConfigError(f"run.resume=true: no complete checkpoint in {folder}; start with run.resume=false")
        return self.load(path)
