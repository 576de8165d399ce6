"""Reading a kernel's machine code (SASS, as `nvdisasm -c` prints it): counts, main loop, waits, and a static estimate.

The main loop is the shortest loop that holds tensor-core instructions. "Other" instructions of it compete with these
for issue slots; `WARPGROUP.DEPBAR.LE gsb0, 0x0` waits until no product is in flight, so a loop with it overlaps
nothing within a warp.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

MMA = ("HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "HMMA")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclass(frozen=True)
class Loop:
    """One pass of the main loop, per warp: instructions beside the tensor cores' by kind, and the waits in order."""

    mma: int
    other: int
    kinds: Counter[str]
    waits: tuple[int, ...]  # how many products each wait leaves in flight
    barriers: tuple[str, ...]  # operands of the BAR instructions: "0x0" is the whole program's

    @property
    def drains(self) -> bool:
        return 0 in self.waits

    @property
    def other_per_mma(self) -> float:
        return self.other / self.mma


@dataclass(frozen=True)
class Code:
    """A kernel's instructions: number, count by kind (first word), count of tensor-core instructions by full name."""

    length: int
    kinds: Counter[str]
    mma: Counter[str]
    accesses: Counter[str] = field(default_factory=Counter)  # global loads and stores by full name
    loop: Loop | None = None
    bulk: Counter[str] = field(default_factory=Counter)  # bulk tensor copies by full name
    register_limits: bool = False  # warps exchange registers (setmaxnreg)


def parse(text: str) -> Code:
    """Read the output of `nvdisasm -c` for one kernel."""
    labels: dict[str, int] = {}
    instructions: list[tuple[str, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append((instruction[1], instruction[2]))
    names = [name for name, _ in instructions]
    return Code(
        length=len(names),
        kinds=_kinds(names),
        mma=Counter(name for name in names if name.split(".")[0] in MMA),
        accesses=Counter(name for name in names if name.split(".")[0] in ("LDG", "STG")),
        bulk=Counter(name for name in names if name.startswith("UTMA")),
        loop=_main_loop(instructions, labels),
        register_limits="USETMAXREG" in _kinds(names),
    )


def _kinds(names: list[str]) -> Counter[str]:
    return Counter(name.split(".")[0] for name in names)


def _main_loop(instructions: list[tuple[str, str]], labels: dict[str, int]) -> Loop | None:
    bodies = []
    for end, (name, operands) in enumerate(instructions):
        target = _TARGET.search(operands)
        if name.startswith("BRA") and target and labels.get(target[1], end + 1) <= end:
            bodies.append(instructions[labels[target[1]] : end + 1])
    bodies = [body for body in bodies if any(name.split(".")[0] in MMA for name, _ in body)]
    if not bodies:
        return None
    body = min(bodies, key=len)
    kinds = _kinds([name for name, _ in body])
    mma = sum(kinds[name] for name in MMA)
    waits = [int(text.split(",")[1], 16) for name, text in body if name.startswith("WARPGROUP.DEPBAR")]
    barriers = [text.strip() for name, text in body if name.startswith("BAR")]
    return Loop(mma, len(body) - mma, kinds, tuple(waits), tuple(barriers))


# One multiprocessor of an H100, per clock: fused multiply-adds of the tensor cores by bytes of an operand's element
# (989 and 1,979 TFLOPS at 1.83 GHz), and bytes from L2 (measured by others; the least certain of these numbers).
MMA_PER_CLOCK = {2: 2048, 1: 4096}
L2_BYTES_PER_CLOCK = 40.0
SCHEDULERS = 4
REGISTERS, SHARED, THREADS = 65536, 232_448, 2048
DRAIN_CLOCKS = 200.0  # from a wait that drains until the tensor cores are busy again


def estimate(
    loop: Loop, rows: int, columns: int, depth: int, element_bytes: int, warps: int, roles: bool,
    registers: int, shared: int, threads: int, ctas: int = 1,
) -> float:  # fmt: skip
    """Share of the tensor cores' peak that the instruction mix allows in the main loop: a model, nothing measured.

    For one step of `depth`: clocks of the tensor cores, of issuing the other instructions of `warps` warps, and of
    bringing both operands from L2. They overlap, except that where one program alone is resident and drains the
    tensor cores, the first two follow one another. With `roles`, warps wait for themselves alone. `ctas`
    multiprocessors bring the rows once.
    """
    tensor = rows * columns * depth / MMA_PER_CLOCK[element_bytes]
    issue = loop.other * warps / SCHEDULERS
    traffic = (rows / ctas + columns) * depth * element_bytes / L2_BYTES_PER_CLOCK
    resident = max(1, min(REGISTERS // (registers * threads), SHARED // (shared + 1024), THREADS // threads))
    step = max(tensor, issue, traffic)
    if loop.drains and not roles:
        step = max(step, (tensor + issue + DRAIN_CLOCKS) / resident)
    return tensor / step
