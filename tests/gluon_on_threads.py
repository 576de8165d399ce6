"""Gluon kernels whose warps have roles, run on CPU tensors: each role is a thread, a tile is a torch tensor.

Triton's interpreter cannot run them. `emulated(module)` runs a module's kernels as the Python functions they are, with
what they call replaced: barriers that block, bulk copies that fill what lies outside with zeros, products that read
shared memory only when they are waited for (so that a stage given back too early gives wrong results), loads and
stores that refuse every place outside of their tensor. Layouts, registers and the speed are not modelled. Two
multiprocessors that share rows are one program here, whose roles do for both what each does, in step; how they really
wait for one another is the model's of `test_hopper_protocol`.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

SECONDS = 120.0  # after which a wait is a deadlock


class Int(int):
    """A number of the device: sums and products of such numbers are such numbers, and `.to` changes nothing."""

    def to(self, _: Any) -> Int:
        return self


def _operator(name: str) -> Callable[[Any, Any], Any]:
    plain = getattr(int, name)

    def apply(self: Int, other: Any) -> Any:
        result = plain(self, other)
        return Int(result) if type(result) is int else result

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "xor", "rshift"):
    for _side in ("", "r"):
        setattr(Int, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))


class Pointer:
    """A place in a tensor, or a tensor of places."""

    def __init__(self, flat: Tensor, place: Any = 0) -> None:
        self.flat, self.place = flat, place
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.flat, self.place + places)

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self.flat, self.place[places])

    def at(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(places as a tensor, which of them are meant). Raises AssertionError for one outside of the tensor."""
        places = torch.as_tensor(self.place)
        meant = torch.ones_like(places, dtype=torch.bool) if mask is None else mask.expand_as(places)
        assert bool(((places >= 0) & (places < self.flat.numel()))[meant].all()), "a place outside of the tensor"
        return places.where(meant, 0), meant


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Any:
    places, meant = pointer.at(mask)
    values = pointer.flat[places.long()] if pointer.flat.numel() else places.to(pointer.flat.dtype)
    if not values.dim():
        return Int(values.item()) if not values.is_floating_point() else values
    return torch.where(meant, values, torch.tensor(other, dtype=values.dtype))


def store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    places, meant = pointer.at(mask)
    assert value.dtype == pointer.flat.dtype and value.shape == places.shape
    pointer.flat[places[meant].long()] = value[meant]


class Barrier:
    """An mbarrier: completes a phase when all arrivals and all expected bytes are in; waited for by parity."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def change(self, arrivals: int, size: int) -> None:
        with self.changed:
            assert self.missing >= arrivals, "more arrivals than the barrier counts"
            self.missing, self.bytes = self.missing - arrivals, self.bytes + size
            if self.missing == 0 and self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != parity, SECONDS), "deadlock"


class Shared:
    """Shared memory: poisoned with NaN until something is copied there."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def index(self, place: int) -> Any:
        part = self.data[place]
        return part if isinstance(part, Barrier) else Shared(part)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.data.dtype
        self.data.copy_(value)

    def load(self, _: Any) -> Tensor:
        return self.data.clone()


def _shared(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    if layout == "barriers":
        return Shared([Barrier() for _ in builtins.range(shape[0])])
    return Shared(torch.full(shape, float("nan")).to(dtype))


class Descriptor:
    """A tensor descriptor: of blocks of a matrix."""

    def __init__(self, matrix: Tensor, block: list[int], layout: Any) -> None:
        assert matrix.is_contiguous() and matrix.dim() == len(block) == 2
        assert matrix.stride(0) * matrix.element_size() % 16 == 0, "rows of a descriptor start every 16 bytes"
        self.matrix, self.block, self.layout, self.dtype = matrix, block, layout, matrix.dtype

    @staticmethod
    def from_tensor(matrix: Tensor, block: list[int], layout: Any) -> Descriptor:
        return Descriptor(matrix, block, layout)


def _load_tile(descriptor: Descriptor, place: list[int], barrier: Barrier, to: Shared, multicast: bool = False) -> None:
    """Its bytes count at the barrier of each multiprocessor: those of its part, of a shared tile all."""
    row, column = place
    cuts = descriptor.layout or [[0, 0]]
    assert multicast == (descriptor.layout == [[0, 0]])
    assert list(to.data.shape) == descriptor.block and row >= 0 and column >= 0
    to.data.view(torch.uint8).zero_()
    found = descriptor.matrix[row : row + descriptor.block[0], column : column + descriptor.block[1]]
    to.data[: found.shape[0], : found.shape[1]] = found
    barrier.change(0, -to.data.numel() * to.data.element_size() // (2 if any(cuts[0]) else 1))


def _load_rows(to: Shared, pointer: Pointer, mask: Tensor) -> None:
    places, meant = pointer.at(mask)
    found = pointer.flat.view(torch.uint8 if pointer.flat.element_size() == 1 else torch.int16)[places.long()]
    to.data.copy_(torch.where(meant, found, 0).view(pointer.flat.dtype))


class Product:
    """Sums, and the products that are still on their way into them."""

    def __init__(self, sums: Tensor, waiting: list[tuple[Shared, Shared]]) -> None:
        self.sums, self.waiting = sums, waiting


def _mma(a: Shared, b: Shared, sums: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async and a.data.shape[1] == b.data.shape[0]
    before = sums if isinstance(sums, Product) else Product(sums if use_acc else torch.zeros_like(sums), [])
    return Product(before.sums, [*before.waiting, (a, b)])


def _mma_wait(in_flight: int, deps: list[Any]) -> Any:
    product = deps[0]
    if not isinstance(product, Product):
        return product
    while len(product.waiting) > in_flight:
        a, b = product.waiting.pop(0)
        product.sums = product.sums + a.data.float() @ b.data.float()
    return product if product.waiting else product.sums


def _choose(pick: Callable[..., Any], wide: Callable[..., Tensor]) -> Callable[..., Any]:
    def apply(*values: Any) -> Any:
        if any(isinstance(value, Tensor) for value in values):
            return wide(*(torch.as_tensor(value) for value in values))
        return Int(pick(*values))

    return apply


class _Program(threading.local):
    index, number, threads = 0, 1, 0


def _run(roles: list[tuple[Callable[..., Any], tuple[Any, ...]]], warps: list[int], program: _Program) -> None:
    """Each role in a thread of its own; the first error of any is raised. warps: of each role but the first."""
    errors: list[BaseException] = []
    index, number = program.index, program.number

    def role(function: Callable[..., Any], arguments: tuple[Any, ...], warps: int) -> None:
        program.index, program.number, program.threads = index, number, 32 * warps
        try:
            function(*arguments)
        except BaseException as error:  # raised again below, in the test's thread
            errors.append(error)

    threads = [
        threading.Thread(target=role, args=(*pair, count)) for pair, count in zip(roles, [4, *warps], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _language(program: _Program) -> SimpleNamespace:
    """What kernels know as `gl`."""
    return SimpleNamespace(
        float32=torch.float32, int64=torch.int64, int32=torch.int32, float8e4nv=torch.float8_e4m3fn,
        bfloat16=torch.bfloat16, float16=torch.float16,
        program_id=lambda _: Int(program.index), num_programs=lambda _: Int(program.number),
        arange=lambda start, stop, layout: torch.arange(start, stop), static_range=builtins.range,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        load=load, store=store, allocate_shared_memory=_shared,
        where=_choose(lambda condition, a, b: a if condition else b, torch.where),
        minimum=_choose(min, torch.minimum), maximum=_choose(max, torch.maximum),
        to_tensor=Int, convert_layout=lambda x, layout: x, split=lambda x: (x[..., 0], x[..., 1]),
        warp_specialize=lambda roles, warps, registers: _run(roles, warps, program),
        SwizzledSharedLayout=lambda *_: None, SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None,
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda block, dtype, cga_layout: cga_layout),
    )  # fmt: skip


class _Kernel:
    def __init__(self, function: Callable[..., Any], program: _Program) -> None:
        self.function, self.program = function, program

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, num_ctas: int, **constants: Any) -> None:
            assert num_warps == 4 and num_ctas == constants["CTAS"]
            for index in builtins.range(grid[0]):
                self.program.index, self.program.number = index, grid[0]
                given = [Pointer(x.view(-1)) if isinstance(x, Tensor) else Int(x) if isinstance(x, int) else x
                         for x in arguments]  # fmt: skip
                self.function(*given, **constants)

        return launch


@contextmanager
def emulated(*modules: ModuleType) -> Iterator[None]:
    """While it lasts, launchers of these modules (those they take functions from included) run on CPU tensors."""
    program = _Program()
    barriers = SimpleNamespace(
        MBarrierLayout=lambda *_: "barriers", init=lambda barrier, count: barrier.init(count),
        wait=lambda barrier, parity: barrier.wait(parity), expect=lambda barrier, size: barrier.change(1, size),
        arrive=lambda barrier, count=1, pred=True, from_cta=0: barrier.change(count, 0) if pred else None,
    )  # fmt: skip
    copies = SimpleNamespace(mbarrier_arrive=lambda barrier, increment_count: barrier.change(program.threads, 0))
    replaced: dict[str, Any] = {
        "gl": _language(program), "mbarrier": barriers, "load_tile": _load_tile, "TensorDescriptor": Descriptor,
        "load_rows": _load_rows, "async_copy": copies, "fence_async_shared": lambda: None,
        "sums_layout": lambda *_: None, "stored_layout": lambda *_: None, "layout_of": lambda x: None,
        "warpgroup_mma": _mma, "warpgroup_mma_wait": _mma_wait,
        "TYPES": {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16},
    }  # fmt: skip
    patches = []
    for module in modules:
        own = {name: value for name, value in replaced.items() if name in vars(module)}
        own["range"] = lambda *ends: (Int(i) for i in builtins.range(*ends))
        for name, value in vars(module).items():
            if hasattr(value, "fn") and hasattr(value, "arg_names"):
                own[name] = _Kernel(value.fn, program) if name.endswith("_kernel") else value.fn
        patches.append(mock.patch.multiple(module, create=True, **own))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
