"""The barriers of the Hopper forms, as a model: every interleaving ends, and no stage is read or written early.

The model's warps do what the kernels' do to the barriers, with the kernels' own arithmetic of stages and parities, in
random order, which `test_hopper_forms` cannot choose. Products of 8 bits are waited for within their step; one of 16
bits stays in flight through the next step's start, and its stage is given back only then.
"""

from __future__ import annotations

import random
from collections.abc import Generator

import pytest
from interpreter import interpreted

hopper = interpreted("hopper")
FORMS = {name: interpreted(name) for name in ("hopper_gemm_fp8", "hopper_wgrad_fp8", "hopper_gemm", "hopper_wgrad")}
Waiting = Generator["tuple[Barrier, int] | None", None, None]


class Barrier:
    """An mbarrier: completes a phase when `count` arrivals (and all expected bytes) are in; waited for by parity."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.pending_bytes = 0
        self.phase = 0

    def arrive(self) -> None:
        assert self.missing > 0, "more arrivals than the barrier counts"
        self.missing -= 1
        self._advance()

    def expect(self, size: int) -> None:
        self.pending_bytes += size
        self.arrive()

    def complete(self, size: int) -> None:
        self.pending_bytes -= size
        self._advance()

    def _advance(self) -> None:
        if self.missing == 0 and self.pending_bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def passes(self, parity: int) -> bool:
        """mbarrier.try_wait.parity: the phase of this parity is complete (a fresh barrier passes parity 1)."""
        return self.phase % 2 != parity


class Model:
    """One program: tiles with the given numbers of steps, a ring of stages, a producer and consumers.

    in_flight: products that a consumer leaves unfinished when it goes on, 0 or 1.
    """

    def __init__(
        self, tiles: list[int], stages: int, consumers: int, arrivals: int | None = None, in_flight: int = 0
    ) -> None:
        self.tiles, self.stages, self.consumers, self.in_flight = tiles, stages, consumers, in_flight
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(arrivals or consumers) for _ in range(stages)]
        self.content = [[-1] * (consumers + 1) for _ in range(stages)]  # the step whose bytes each part holds
        self.reads: list[list[int]] = [[] for _ in range(consumers)]
        self.copies: list[tuple[int, int, int]] = []  # (stage, part, step) on their way

    def producer(self) -> Waiting:
        step = 0
        for steps in self.tiles:
            for _ in range(steps):
                stage, parity = hopper.ring.fn(step, self.stages)
                yield self.empty[stage], parity ^ 1
                self.full[stage].expect(self.consumers + 1)
                for part in range(self.consumers + 1):
                    self.copies.append((stage, part, step))
                    yield None
                step += 1

    def consumer(self, part: int) -> Waiting:
        step = 0
        for steps in self.tiles:
            products: list[tuple[int, int]] = []  # (stage, step) of those that read shared memory now
            for _ in range(steps):
                stage, parity = hopper.ring.fn(step, self.stages)
                yield self.full[stage], parity
                products.append((stage, step))
                yield None
                while len(products) > self.in_flight:
                    self.finish(part, *products.pop(0))
                step += 1
            for product in products:
                yield None
                self.finish(part, *product)

    def finish(self, part: int, stage: int, step: int) -> None:
        """A product has read its stage, which must hold that step's bytes still; others may have the stage."""
        assert (self.content[stage][part], self.content[stage][-1]) == (step, step)
        self.empty[stage].arrive()
        self.reads[part].append(step)

    def land(self, choice: random.Random) -> None:
        """One copy arrives, in any order."""
        stage, part, step = self.copies.pop(choice.randrange(len(self.copies)))
        self.content[stage][part] = step
        self.full[stage].complete(1)

    def run(self, seed: int) -> None:
        choice = random.Random(seed)
        warps = [self.producer(), *(self.consumer(part) for part in range(self.consumers))]
        blocked: dict[int, tuple[Barrier, int] | None] = dict.fromkeys(range(len(warps)))
        while blocked:
            ready = [warp for warp, wait in blocked.items() if wait is None or wait[0].passes(wait[1])]
            actions = ready + ([-1] if self.copies else [])
            assert actions, "deadlock"
            action = choice.choice(actions)
            if action < 0:
                self.land(choice)
                continue
            try:
                blocked[action] = next(warps[action])
            except StopIteration:
                del blocked[action]
        assert self.reads == [list(range(sum(self.tiles)))] * self.consumers


@pytest.mark.parametrize("tiles", [[3], [1, 0, 2], [7, 7, 5], [56, 0, 0, 3], []])
@pytest.mark.parametrize("form", FORMS)
def test_every_order_ends_with_every_step_read_once(form: str, tiles: list[int]) -> None:
    in_flight = 0 if "fp8" in form else 1
    for stages in (1 + in_flight, 2, FORMS[form].TILE.stages):
        for seed in range(20):
            Model(tiles, stages, FORMS[form].CONSUMERS, in_flight=in_flight).run(seed)


def test_the_model_sees_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: int, in_flight: int = 0) -> bool:
        for seed in range(30):
            try:
                Model([7, 9], *arguments, in_flight=in_flight).run(seed)
            except AssertionError:
                return True
        return False

    assert not fails(5, 3)
    assert fails(5, 3, 2)  # a stage is free although one group still reads it
    assert fails(5, 3, 4)  # an arrival that never comes
    assert not fails(4, 2, in_flight=1)
    assert fails(1, 2, in_flight=1)  # the one stage is held by a product that the next step would finish
    finish = Model.finish

    def early(self: Model, part: int, stage: int, step: int) -> None:
        finish(self, part, hopper.ring.fn(step + 1, self.stages)[0], step)

    monkeypatch.setattr(Model, "finish", early)
    assert fails(4, 2, in_flight=1)  # the stage given back is that of the product still in flight
    monkeypatch.setattr(Model, "finish", finish)
    monkeypatch.setattr(hopper.ring, "fn", lambda step, stages: (step % stages, 0))
    assert fails(5, 3)
    monkeypatch.setattr(hopper.ring, "fn", lambda step, stages: (step % stages, (step // stages + 1) & 1))
    assert fails(5, 3)
