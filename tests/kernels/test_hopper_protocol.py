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
    """One program: tiles with the given numbers of steps, a ring of stages, a producer and consumers, of each of `ctas`
    multiprocessors that share rows.

    in_flight: products that a consumer leaves unfinished when it goes on, 0 or 1. loaders: threads that gather rows,
    each of which arrives when all its own copies have; 0: rows come in bulk, in a pair to both from the first.
    """

    def __init__(
        self, tiles: list[int], stages: int, consumers: int, arrivals: int | None = None, in_flight: int = 0,
        ctas: int = 1, loaders: int = 0,
    ) -> None:  # fmt: skip
        self.tiles, self.stages, self.consumers, self.in_flight = tiles, stages, consumers, in_flight
        self.ctas, self.loaders = ctas, loaders
        self.full = [[Barrier(1 + loaders) for _ in range(stages)] for _ in range(ctas)]
        self.empty = [Barrier((arrivals or consumers) * ctas) for _ in range(stages)]  # the first one's
        self.go = [[Barrier(1) for _ in range(stages)] for _ in range(ctas)]
        self.held: dict[tuple[int, int, int, int], int] = {}  # by cta, stage, part, loader: the step whose bytes
        self.reads: list[list[int]] = [[] for _ in range(ctas * consumers)]
        self.copies: list[tuple[int, int, int, int, int]] = []  # on their way: cta, stage, part, loader, step
        self.left: dict[tuple[int, int], int] = {}  # by loader and step: copies that have not landed

    def producer(self, cta: int) -> Waiting:
        step = 0
        for steps in self.tiles:
            for _ in range(steps):
                stage, parity = hopper.ring.fn(step, self.stages)
                yield from self.wait_until_read(cta, stage, parity)
                weights = self.consumers  # the part after the last group's rows
                self.full[cta][stage].expect(1 if self.loaders else weights + 1)
                if cta == 0 and not self.loaders:
                    for part in range(self.consumers):
                        self.copies += [(other, stage, part, 0, step) for other in range(self.ctas)]
                        yield None
                self.copies.append((cta, stage, weights, 0, step))
                for loader in range(self.loaders):
                    self.left[loader, step] = self.consumers
                    self.copies += [(cta, stage, part, loader, step) for part in range(self.consumers)]
                    yield None
                step += 1

    def wait_until_read(self, cta: int, stage: int, parity: int) -> Waiting:
        if cta == 0:
            yield self.empty[stage], parity ^ 1
        if self.ctas == 2:
            if cta == 0:
                for other in self.go:
                    other[stage].arrive()
                    yield None
            yield self.go[cta][stage], parity

    def consumer(self, cta: int, part: int) -> Waiting:
        step = 0
        for steps in self.tiles:
            products: list[tuple[int, int]] = []  # (stage, step) of those that read shared memory now
            for _ in range(steps):
                stage, parity = hopper.ring.fn(step, self.stages)
                yield self.full[cta][stage], parity
                products.append((stage, step))
                yield None
                while len(products) > self.in_flight:
                    self.finish(cta, part, *products.pop(0))
                step += 1
            for product in products:
                yield None
                self.finish(cta, part, *product)

    def finish(self, cta: int, part: int, stage: int, step: int) -> None:
        """A product has read its stage, which must hold that step's bytes still; others may have the stage."""
        parts = [(part, loader) for loader in range(max(1, self.loaders))] + [(self.consumers, 0)]
        assert all(self.held.get((cta, stage, *piece)) == step for piece in parts)
        self.empty[stage].arrive()
        self.reads[cta * self.consumers + part].append(step)

    def land(self, choice: random.Random) -> None:
        """One copy arrives, in any order."""
        cta, stage, part, loader, step = self.copies.pop(choice.randrange(len(self.copies)))
        self.held[cta, stage, part, loader] = step
        if part == self.consumers or not self.loaders:
            self.full[cta][stage].complete(1)
            return
        self.left[loader, step] -= 1
        if not self.left[loader, step]:
            self.full[cta][stage].arrive()

    def run(self, seed: int) -> None:
        choice = random.Random(seed)
        warps = [self.producer(cta) for cta in range(self.ctas)]
        warps += [self.consumer(cta, part) for cta in range(self.ctas) for part in range(self.consumers)]
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
        assert self.reads == [list(range(sum(self.tiles)))] * (self.ctas * self.consumers)


@pytest.mark.parametrize("tiles", [[3], [1, 0, 2], [7, 7, 5], [56, 0, 0, 3], []])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", [{}, {"ctas": 2}, {"loaders": 3}], ids=["alone", "pair", "gather"])
def test_every_order_ends_with_every_step_read_once(way: dict[str, int], form: str, tiles: list[int]) -> None:
    in_flight = 0 if "fp8" in form else 1
    for stages in (1 + in_flight, 2, FORMS[form].TILE.stages):
        for seed in range(10 if way else 20):
            Model(tiles, stages, FORMS[form].CONSUMERS, in_flight=in_flight, **way).run(seed)


class NobodySaysGo(Model):
    """A pair whose second producer does not wait for the first."""

    def wait_until_read(self, cta: int, stage: int, parity: int) -> Waiting:
        if cta == 0:
            yield self.empty[stage], parity ^ 1


class FirstAsksItsOwnGroups(Model):
    """A pair whose first producer shares rows when its own groups have read the last ones; the other's may not have."""

    def finish(self, cta: int, part: int, stage: int, step: int) -> None:
        super().finish(cta, part, stage, step)
        if cta == 0:
            self.empty[stage].arrive()
        else:
            self.empty[stage].missing += 1


@pytest.mark.parametrize("mistaken", [NobodySaysGo, FirstAsksItsOwnGroups])
def test_the_model_sees_mistakes_of_a_pair(mistaken: type[Model]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(30):
            mistaken([7, 9], 4, 2, ctas=2).run(seed)


def test_the_model_sees_a_loader_that_counts_for_all() -> None:
    with pytest.raises(AssertionError):
        for seed in range(30):
            model = Model([7, 9], 4, 2, loaders=3)
            model.full = [[Barrier(2) for _ in range(4)]]
            model.run(seed)


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

    def early(self: Model, cta: int, part: int, stage: int, step: int) -> None:
        finish(self, cta, part, hopper.ring.fn(step + 1, self.stages)[0], step)

    monkeypatch.setattr(Model, "finish", early)
    assert fails(4, 2, in_flight=1)  # the stage given back is that of the product still in flight
    monkeypatch.setattr(Model, "finish", finish)
    monkeypatch.setattr(hopper.ring, "fn", lambda step, stages: (step % stages, 0))
    assert fails(5, 3)
    monkeypatch.setattr(hopper.ring, "fn", lambda step, stages: (step % stages, (step // stages + 1) & 1))
    assert fails(5, 3)
