"""Forward of one micro-batch woven with backward of another: the graph is cut between phases, so that each can run
when the order of the pair says so, while exchanges of the other half are on their way.

`CutMicroBatch` takes one micro-batch through one stage. Its forward is the stage's own walk; at each stop the tensors
that later phases read are detached, and each compute phase is a graph of its own. Its backward runs these graphs one by
one from the last, the gradients of what travelled going back the same way. Every sum that autograd would take has the
same terms in the same order, so the bits are those of the plain forward and backward. Where graphs meet only places in
them are kept, no numbers: a tensor that no operation needs for its backward is gone once it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moe_engine.model.batch import Batch
from moe_engine.model.block import Combine, Dispatch, MlpOut
from moe_engine.model.transformer import LossRule, Seams, Stage, StageOutput
from moe_engine.moe import dispatch as wire
from moe_engine.ops.wgrad_queue import WgradQueue, accumulate, gradient_dtype
from moe_engine.pipeline.recorder import Recorder, recorded
from moe_engine.schedule.pair import EXCHANGES, Step, phases

T = TypeVar("T")


class Advancing(Protocol):
    """An exchange, perhaps of two hops."""

    def advance(self) -> None:
        """Stand still until the last hop can be started, and start it."""


class Exchanges:
    """Starts exchanges, in one total order on all ranks, and waits for them.

    A dispatch must know its counts, which are still on their way when its rows are packed. In a pair a second thread
    waits for them and starts it, so that computation goes on; whatever is asked for next is started after it. Exchanges
    of two hops are left to it as well, since it would be this thread that stands still between the hops.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None  # that of the pass under way
        self._courier = ThreadPoolExecutor(1, "courier")  # makes its thread at the first use
        self._last: Future[Any] | None = None

    def start(
        self, label: str, enqueue: Callable[[], tuple[Advancing, Callable[[], T]]], by_courier: bool = False
    ) -> Callable[[], T]:
        """`enqueue` starts the exchange, and returns it and what waits for it and gives the result; so does this.

        by_courier: left to the second thread, to the start of the last hop.
        """

        def recorded_enqueue() -> Callable[[], T]:
            if self.recorder is not None:
                self.recorder.start(label)
            exchange, wait = enqueue()
            if by_courier:
                exchange.advance()
            return wait

        with recorded(self.recorder, f"{label} start"):
            if by_courier:  # after whatever it still has to start
                self._last = started = self._courier.submit(recorded_enqueue)
            else:
                self.catch_up()
                started = Future()
                started.set_result(recorded_enqueue())

        def wait() -> T:
            with recorded(self.recorder, f"{label} wait"):
                result = started.result()()
            if self.recorder is not None:
                self.recorder.end(label)
            return result

        return wait

    def catch_up(self) -> None:
        """Return once everything asked for so far is started."""
        if self._last is not None:
            self._last.result()
            self._last = None


class _Start:
    """Where a graph starts: stands for a tensor whose gradient is wanted there, and takes it. Keeps no number of it."""

    def __init__(self, x: Tensor) -> None:
        self.grad: Tensor | None = None
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device

    def take(self, grad: Tensor) -> None:
        """Add a gradient: every graph that reads the tensor brings one."""
        self.grad = grad if self.grad is None else self.grad + grad

    def gradient(self) -> Tensor:
        """All of it; zeros where nothing came."""
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device) if self.grad is None else self.grad


class _Begin(torch.autograd.Function):
    """x as the start of a graph. A leaf would be kept by the place of its gradient: `anchor` is one, and empty."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, start: _Start) -> Tensor:
        ctx.start = start
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.start.take(grads[0])
        return None, None, None


def _begin(x: Tensor) -> tuple[Tensor, _Start]:
    """x, detached, for the graphs that follow, and what takes its gradient."""
    start = _Start(x)
    begun: Tensor = _Begin.apply(torch.empty(0, device=x.device, requires_grad=True), x.detach(), start)
    return begun, start


@dataclass
class _Graph:
    """One compute phase, with what connects it to the others.

    cuts: what later phases read: its place at the end of this graph, and its start for the others. sent: the places of
    what travels at its end, by `handle`; arrived: the starts of what came; d_sent: gives the gradients of `sent`, once
    these are on their way back.
    """

    cuts: list[tuple[GradientEdge, _Start]] = field(default_factory=list)
    sent: tuple[GradientEdge, ...] = ()
    handle: wire.DispatchHandle | None = None
    arrived: tuple[_Start, ...] = ()
    d_sent: Callable[[], tuple[Tensor, ...]] = tuple

    def roots(self) -> list[tuple[GradientEdge, Tensor]]:
        """Where its backward begins, with the gradients there; waits for those that travel."""
        pairs: list[tuple[GradientEdge, Tensor]] = list(zip(self.sent, self.d_sent(), strict=True))
        return pairs + [(made, start.grad) for made, start in self.cuts if start.grad is not None]


class _Tables(Seams):
    """Stand-ins for embedding tables and heads, which several phases read: one for each use.

    Autograd sums a table's gradients within one backward, the last use first, before it adds them to `.grad`; so here.
    """

    def __init__(self) -> None:
        self._uses: list[tuple[Tensor, Tensor]] = []  # table, stand-in

    def table(self, weight: Tensor) -> Tensor:
        stand_in = weight.detach().requires_grad_()
        stand_in.grad_dtype = gradient_dtype(weight)
        self._uses.append((weight, stand_in))
        return stand_in

    def hand_over(self) -> None:
        """Add the gradients to the tables' own."""
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        while self._uses:
            weight, stand_in = self._uses.pop()
            if stand_in.grad is not None:
                total = sums[id(weight)][1] + stand_in.grad if id(weight) in sums else stand_in.grad
                sums[id(weight)] = weight, total
        for weight, total in sums.values():
            accumulate(weight, total)


class CutMicroBatch(_Tables):
    """A micro-batch on one stage from its forward to the end of its backward, phase by phase.

    Phases are `schedule.pair.Step`s, in any order that `check_pair` accepts. `place` is (stage, micro-batch). `output`
    is there after tail(F); `x.grad` when the backward is `done`. `d_output`, the gradient of output.x, is to be set
    before tail(B), if there is a next stage. `by_courier`: the second thread starts dispatches of the forward, and all
    exchanges of two hops.
    """

    def __init__(
        self,
        stage: Stage,
        batch: Batch,
        x: Tensor | None,
        rule: LossRule,
        place: tuple[int, int],
        queue: WgradQueue,
        exchanges: Exchanges,
    ) -> None:
        super().__init__()
        self.x, self.place, self.queue, self.exchanges = x, place, queue, exchanges
        self.blocks, self.shared, self.by_courier = stage.num_blocks, batch.shard is not None, False
        self.output: StageOutput | None = None
        self.d_output: Tensor | None = None
        self._walk = stage.walk(batch, x, rule, self, queue, f"micro_batch {place[1]}")
        self._graphs: list[_Graph] = []
        self._stop: Dispatch | Combine | None = None
        self._reply: Callable[[], Any] = lambda: None  # what the walk goes on with; waits for it

    @property
    def done(self) -> bool:
        """Whether the gradient of the input is complete."""
        return self.output is not None and not self._graphs

    def cut(self, x: Tensor) -> Tensor:
        begun, start = _begin(x)
        self._graphs[-1].cuts.append((get_gradient_edge(x), start))
        return begun

    def forward(self) -> StageOutput:
        """All of the forward in the plain order."""
        for step in phases(self.blocks, backward=False):
            self.run(step)
        assert self.output is not None
        return self.output

    def backward(self, defer: bool) -> None:
        """All of the backward in the plain order; with `defer` the weight gradients stay in the queue, by `place`."""
        with self.queue.defer(self.place, defer):
            for step in phases(self.blocks, backward=True):
                if step.phase in EXCHANGES:
                    self._send_back(step)
                elif step.part == "B":
                    self._compute_back(step, weights_apart=False)

    def run(self, step: Step) -> None:
        """One phase. An exchange is started, and waited for by the phase that needs it."""
        if step.part == "W":
            with recorded(self.exchanges.recorder, self._label(step)):
                self.queue.run((*self.place, step.phase, step.block))
        elif step.part == "F":
            self._send(step) if step.phase in EXCHANGES else self._compute(step)
        else:
            self._send_back(step) if step.phase in EXCHANGES else self._compute_back(step, step.phase != "tail")

    def _label(self, step: Step) -> str:
        half, weights = ("F", "") if step.part == "F" else ("B", " W" if step.part == "W" else "")
        block = "" if step.phase == "tail" else f" {step.block}"
        return f"{half}{self.place[1]}@{self.place[0]} {step.phase}{block}{weights}"

    def _keep_order(self, step: Step) -> None:
        """A computation that communicates starts after every exchange that was asked for before it.

        Counts are exchanged at the end of a forward's attention; attention communicates where ranks share sequences,
        and experts where rows may need further rounds.
        """
        attends = step.phase == "attn" and (self.shared or step.part == "F")
        if attends or step.phase == "mlp" and _bounded(self._graphs[-1].handle):
            self.exchanges.catch_up()

    def _compute(self, step: Step) -> None:
        """To the next stop of the walk, or to its end."""
        self._keep_order(step)
        reply, self._reply = self._reply(), lambda: None
        self._graphs.append(_Graph())
        with recorded(self.exchanges.recorder, self._label(step)):
            try:
                stop = self._walk.send(reply)
            except StopIteration as end:
                self.output, self._stop = end.value, None
                return
            self._stop = self._cut_off(stop)

    def _cut_off(self, stop: Dispatch | Combine) -> Dispatch | Combine:
        """The stop with all its tensors detached from the graph that ends here."""
        graph = self._graphs[-1]
        if isinstance(stop, Combine):
            rows, local = stop.mlp.rows, stop.mlp.local
            if rows is not None:
                graph.sent, graph.handle = (get_gradient_edge(rows),), stop.handle
                rows = rows.detach()
            local, further = (None if x is None else self.cut(x) for x in (local, stop.mlp.further))
            return Combine(MlpOut(rows, local, further), stop.handle)
        packed = stop.out.packed
        if packed is not None:
            graph.sent = (get_gradient_edge(packed.rows.x), get_gradient_edge(packed.rows.weights))
            graph.handle = packed.handle
            aux_loss, weights, further = (
                None if x is None else self.cut(x)
                for x in (packed.aux_loss, packed.expert_weights, packed.rows.further)
            )
            x, scales = packed.rows.x.detach(), packed.rows.weights.detach()
            rows_ = replace(packed.rows, x=x, weights=scales, further=further)
            packed = replace(packed, rows=rows_, aux_loss=aux_loss, expert_weights=weights)
        out = stop.out
        return Dispatch(replace(out, residual=self.cut(out.residual), normed=self.cut(out.normed), packed=packed))

    def _send(self, step: Step) -> None:
        """Start the exchange of the forward at this stop."""
        stop, graph = self._stop, self._graphs[-1]
        if isinstance(stop, Dispatch):
            out, packed = stop.out, stop.out.packed
            if packed is None:
                self._reply = lambda: (out, None)
                return
            rows, handle = packed.rows, packed.handle

            def enqueue_rows() -> tuple[wire.PendingDispatch, Callable[[], wire.Rows]]:
                pending = wire.dispatch_start(rows, handle)
                return pending, lambda: wire.dispatch_wait(pending)

            wait = self.exchanges.start(self._label(step), enqueue_rows, self.by_courier and handle is not None)
            self._reply = lambda: (out, lambda: _received(graph, wait()))
            return
        assert stop is not None
        mlp, way = stop.mlp, stop.handle
        if mlp.rows is None:
            self._reply = lambda: mlp
            return
        back = mlp.rows

        def enqueue_back() -> tuple[wire.PendingCombine, Callable[[], Tensor]]:
            pending = wire.combine_start(back, way)
            return pending, lambda: wire.combine_arrive(pending)

        arrive = self.exchanges.start(self._label(step), enqueue_back, self.by_courier and _two_hops(way))

        def reply() -> Any:
            begun, start = _begin(arrive())
            graph.arrived = (start,)
            return replace(mlp, rows=begun)

        self._reply = reply

    def _send_back(self, step: Step) -> None:
        """Start the exchange of the backward: the gradients of what came in forward."""
        graph = self._graphs[-1]
        if not graph.sent:
            return
        handle = graph.handle
        grads = tuple(start.gradient() for start in graph.arrived)
        graph.arrived = ()
        if handle is None:
            graph.d_sent = lambda: grads
            return

        def enqueue() -> tuple[Any, Callable[[], tuple[Tensor, ...]]]:
            if len(grads) == 2:
                back = wire.dispatch_backward_start(*grads, handle)
                return back, back.wait
            pending = wire.combine_backward_start(grads[0], handle)
            return pending, lambda: (pending.wait(),)

        graph.d_sent = self.exchanges.start(self._label(step), enqueue, self.by_courier and _two_hops(handle))

    def _compute_back(self, step: Step, weights_apart: bool) -> None:
        """The backward of the last graph; with `weights_apart` its weight gradients stay for the phase's W."""
        self._keep_order(step)
        roots = self._graphs.pop().roots()
        if step.phase == "tail":
            assert self.output is not None
            if self.d_output is not None:
                roots.append((get_gradient_edge(self.output.x), self.d_output))
            if self.output.loss is not None:
                roots.append((get_gradient_edge(self.output.loss), torch.ones_like(self.output.loss)))
        key = (*self.place, step.phase, step.block)
        with recorded(self.exchanges.recorder, self._label(step)), self.queue.defer(key, weights_apart):
            torch.autograd.backward([made for made, _ in roots], [gradient for _, gradient in roots])
        if self.done:
            self.hand_over()


def _two_hops(handle: wire.DispatchHandle | None) -> bool:
    return handle is not None and handle.links.nodes is not None


def _bounded(handle: wire.DispatchHandle | None) -> bool:
    return handle is not None and handle.rounds is not None


def _received(graph: _Graph, rows: wire.Rows) -> wire.Rows:
    """Rows as starts of the next graph."""
    (x, start), (weights, weights_start) = _begin(rows.x), _begin(rows.weights)
    graph.arrived = (start, weights_start)
    return replace(rows, x=x, weights=weights)
