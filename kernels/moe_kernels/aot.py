"""Compile every kernel for a GPU that is not there, and read from its machine code what a fast kernel must show.

    python -m moe_kernels.aot [--arch 90] [--only TEXT …] [--json]

The kernels of `moe_kernels.nvshmem` are among them only where TEXT names them: linking its bitcode takes long.

Prints a table of every kernel with every tuning entry: registers, spills (instructions that touch local memory),
shared memory, tensor-core instructions, bulk tensor copies, other instructions of the main loop for each tensor-core
instruction, waits in it (how many products they leave in flight), and a static estimate of the share of peak.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_kernels.device.tuning import Variant
from moe_kernels.sass import Code, estimate, parse

MODULES = (
    "quantize",
    "grouped_gemm",
    "hopper_gemm",
    "grouped_gemm_fp8",
    "hopper_gemm_fp8",
    "grouped_wgrad",
    "tails",
    "hopper_wgrad",
    "grouped_wgrad_fp8",
    "hopper_wgrad_fp8",
    "swiglu",
    "bias",
    "permute",
    "route",
)
HOPPER = 90


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a variant: registers per thread, bytes of local and shared memory, the code."""

    variant: Variant
    registers: int
    local: int
    shared: int
    code: Code

    @property
    def spills(self) -> int:
        return self.code.kinds["STL"] + self.code.kinds["LDL"]

    @property
    def share_of_peak(self) -> float | None:
        """The static estimate for a matrix product on Hopper."""
        tile, loop = self.variant.tile, self.code.loop
        if tile is None or loop is None or not any(name in loop.kinds for name in ("HGMMA", "QGMMA")):
            return None
        roles = self.variant.consumers
        return estimate(
            loop, tile.rows, tile.columns, tile.depth, self.variant.element_bytes,
            warps=4 * roles or tile.warps, roles=bool(roles), registers=self.registers, shared=self.shared,
            threads=32 * (4 * roles + 4 if roles else tile.warps), ctas=self.variant.ctas,
        )  # fmt: skip

    def row(self) -> dict[str, Any]:
        """One line of the table."""
        loop, kinds = self.code.loop, self.code.kinds
        return {
            "kernel": self.variant.name,
            "registers": self.registers,
            "spills": self.spills,
            "local": self.local,
            "shared": self.shared,
            "instructions": self.code.length,
            "mma": dict(self.code.mma),
            "bulk_loads": kinds["UTMALDG"],
            "multicasts": sum(count for name, count in self.code.bulk.items() if "MULTICAST" in name),
            "row_copies": kinds["LDGSTS"],
            "bulk_stores": kinds["UTMASTG"],
            "other_per_mma": round(loop.other_per_mma, 2) if loop else None,
            "waits": list(loop.waits) if loop else None,
            "barriers": list(loop.barriers) if loop else None,
            "ffma_per_mma": loop.kinds["FFMA"] / loop.mma if loop else None,
            "share_of_peak": round(self.share_of_peak, 2) if self.share_of_peak else None,
            "accesses": dict(self.code.accesses),
            "atomics": sum(kinds[name] for name in ("ATOM", "ATOMG", "RED")),
            "register_limits": self.code.register_limits,
        }


def variants(*only: str) -> list[Variant]:
    """Every kernel with every tuning entry; of these, where given, those whose name contains one of `only`."""
    found = []
    for name in MODULES:
        found += importlib.import_module(f"moe_kernels.device.{name}").variants()
    if any("nvshmem" in text for text in only):
        found += linked_with_nvshmem()
    return [variant for variant in found if not only or any(text in variant.name for text in only)]


def linked_with_nvshmem() -> list[Variant]:
    """The kernels that call NVSHMEM. Raises SystemExit without its bitcode."""
    runtime = importlib.import_module("moe_kernels.nvshmem.runtime")
    library = runtime.bitcode()
    if library is None:
        raise SystemExit("no libnvshmem_device.bc here: pip install moe-engine[nvshmem-bitcode]")
    found: list[Variant] = importlib.import_module("moe_kernels.nvshmem.exchange").variants(str(library))
    return found


def build(variant: Variant, arch: int = HOPPER) -> Compiled:
    """Compile for compute capability arch/10 and disassemble. Needs neither GPU nor driver nor CUDA toolkit."""
    kernel = variant.kernel
    signature = {name: variant.arguments.get(name, "constexpr") for name in kernel.arg_names}
    # As at launch: pointers and sizes that are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or signature[name] == "i32"
    }
    make_source = ASTSource
    if getattr(kernel, "is_gluon", lambda: False)():
        make_source = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    source = make_source(kernel, signature, dict(variant.constants), aligned)
    # Triton 3.10 would not contract products and sums by itself: a third more instructions in the fp8 loops.
    options = {"enable_fp_fusion": True, **variant.options}
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    text, usage = _disassemble(binary.asm["cubin"])
    sizes = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    local = max(sizes["STACK"], sizes["LOCAL"])
    return Compiled(variant, sizes["REG"], local, binary.metadata.shared, parse(text))


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(instructions, resource usage), by the tools in Triton's wheel."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        commands = (["nvdisasm", "-c"], ["cuobjdump", "--dump-resource-usage"])
        results = [
            subprocess.run([tools / name, option, path], capture_output=True, text=True, check=True)
            for name, option in commands
        ]
    return results[0].stdout, results[1].stdout


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text in columns."""
    heads = ("kernel", "regs", "spills", "shared", "instr", "tensor cores", "bulk ld/st", "other/mma", "waits", "peak")
    lines = [heads]
    for row in rows:
        mma = ", ".join(f"{count} {name.split('.F32')[0]}" for name, count in row["mma"].items()) or "-"
        lines.append((
            row["kernel"], str(row["registers"]), str(row["spills"]), str(row["shared"]), str(row["instructions"]), mma,
            f"{row['bulk_loads']}/{row['bulk_stores']}",
            "-" if row["other_per_mma"] is None else f"{row['other_per_mma']:.2f}",
            "-" if row["waits"] is None else " ".join(map(str, row["waits"])) or "none",
            "-" if row["share_of_peak"] is None else f"{row['share_of_peak']:.2f}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moe_kernels.aot", description="Compile all kernels without a GPU.")
    parser.add_argument(
        "--arch", type=int, default=HOPPER, help="compute capability x 10: 90 (Hopper), 100 (Blackwell)"
    )
    parser.add_argument("--only", nargs="+", default=[], help="only kernels whose name contains one of these texts")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with more fields")
    arguments = parser.parse_args()
    rows = []
    for variant in variants(*arguments.only):
        if variant.hopper_only and arguments.arch != HOPPER:
            continue
        row = build(variant, arguments.arch).row()
        rows.append(row)
        if arguments.json:
            print(json.dumps(row), flush=True)
    if not arguments.json:
        print(f"Triton {triton.__version__}, sm_{arguments.arch}; peak: static estimate, nothing was run")
        print(table(rows))


if __name__ == "__main__":
    main()
