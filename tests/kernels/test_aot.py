"""Every kernel compiled for Hopper without a GPU: what its machine code must show.

The ceilings keep the best version found from getting worse; `docs/design/fp8_gemm.md` tells how each was reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_kernels.nvshmem.runtime import bitcode
from moe_kernels.sass import SHARED, parse

# Longest name first: other instructions in the main loop for each tensor-core instruction.
LOOP_CEILINGS = {
    "hopper_gemm_fp8 gather": 33.5,
    "hopper_gemm_fp8": 32,
    "hopper_gemm fprop gather": 12.5,
    "hopper_gemm dgrad gather": 12.5,
    "hopper_gemm": 12,
    "hopper_wgrad_fp8 accumulate pair": 48.5,
    "hopper_wgrad_fp8 pair": 48.5,
    "hopper_wgrad_fp8": 48,
    "hopper_wgrad": 12,
    "grouped_gemm_fp8 gather": 46.25,
    "grouped_gemm_fp8 64x": 39,
    "grouped_gemm_fp8 128x": 42,
    "grouped_gemm fprop gather": 27,
    "grouped_gemm dgrad gather": 27,
    "grouped_gemm ": 22,
    "grouped_wgrad_fp8": 60,
    "grouped_wgrad": 25,
}
LENGTH_CEILINGS = {
    "quantize_rows_and_columns": 1400,
    "quantize_columns of codes": 1100,
    "quantize_columns": 850,
    "quantize_blocks": 950,
    "quantize_rows": 300,
    "swiglu_backward_fp8": 920,
    "swiglu_backward_recompute": 660,
    "swiglu_fp8": 800,
    "swiglu": 680,
    "add_bias": 420,
    "permute": 120,
    "tails": 260,
    "unpermute": 350,
    "route": 2400,
}
FAST_SUBSET = (
    "hopper_gemm_fp8",
    "hopper_gemm fprop",
    "hopper_wgrad accumulate",
    "quantize_rows",
    "gemm fprop 128x",
    "gemm_fp8 128x",
    "gemm_fp8 64x",
    "wgrad_fp8 128x",
    "swiglu_fp8",
    "route softmax",
)


OTHER_TRITON = "OTHER_TRITON"  # a folder with another version of Triton than the installed one


def compile_all(*arguments: str, environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Lines of `moe_kernels.aot`, in a process whose kernels are not interpreted."""
    command = [sys.executable, "-m", "moe_kernels.aot", "--json", *arguments]
    surroundings = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=surroundings)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(row: dict[str, Any], barriers: int = 1) -> None:
    """barriers: the most that a step of a Hopper form may have."""
    name = row["kernel"]
    assert row["spills"] == 0 and row["local"] == 0, name
    assert row["shared"] <= SHARED, name
    assert bool(row["atomics"]) == name.startswith("route"), name  # integers alone are added in any order
    if ceiling := next((n for start, n in LENGTH_CEILINGS.items() if name.startswith(start)), None):
        assert row["instructions"] <= ceiling, (name, row["instructions"])
        if name.startswith(("quantize", "swiglu")):  # all but scales, weights and group sizes in 128 bits
            narrow = sum(count for access, count in row["accesses"].items() if not access.endswith(".128"))
            assert narrow <= 8, (name, row["accesses"])
    if "gemm" in name or "wgrad" in name:
        check_product(row, barriers)


def check_product(row: dict[str, Any], barriers: int) -> None:
    name, fp8 = row["kernel"], "fp8" in row["kernel"]
    kind = "QGMMA.64x128x32.F32.E4M3.E4M3" if fp8 else "HGMMA"
    assert row["mma"] and all(mma.startswith(kind) and ".F32" in mma for mma in row["mma"]), (name, row["mma"])
    assert row["bulk_loads"] > 0, name
    ceiling = next(number for start, number in LOOP_CEILINGS.items() if name.startswith(start))
    assert row["other_per_mma"] <= ceiling, (name, row["other_per_mma"])
    if name.startswith("hopper"):
        # Groups of 128 threads wait for themselves: barriers of their own, none of the whole program's; registers moved
        # from the loading warp to those that multiply.
        own = [text.split(", ")[1:] == ["0x80"] for text in row["barriers"]]
        assert all(own) and 1 <= len(own) <= barriers and row["register_limits"], (name, row["barriers"])
        assert bool(row["multicasts"]) == (" pair" in name) and bool(row["row_copies"]) == (" gather" in name), name
    if fp8:
        # Four instructions make 128 of the sum; then every number goes into the fp32 total once.
        assert row["ffma_per_mma"] == 16, name
        assert not name.startswith("hopper") or row["waits"] == [0], name
    else:
        assert row["waits"] == [1], name


def test_kernels_for_hopper() -> None:
    rows = compile_all("--only", *FAST_SUBSET)
    assert len(rows) >= len(FAST_SUBSET)
    for row in rows:
        check(row)


@pytest.mark.slow
def test_every_kernel_and_tuning_entry_for_hopper() -> None:
    for row in compile_all():
        check(row)


@pytest.mark.slow
def test_every_kernel_and_tuning_entry_with_another_triton(tmp_path: Path) -> None:
    """3.9 is installed; GPU images have 3.6, which reads the same sources: same kernels, same ceilings."""
    if OTHER_TRITON not in os.environ:
        pytest.skip(
            f"{OTHER_TRITON} is not set: the folder of pip install --no-deps --target=FOLDER triton==3.6.0 (190 MB)"
        )
    folder = os.environ[OTHER_TRITON]
    version = next(Path(folder).glob("triton-*.dist-info")).name.split("-")[1]
    assert version.startswith("3.6."), version
    for row in compile_all(environment={"PYTHONPATH": folder, "TRITON_CACHE_DIR": str(tmp_path)}):
        check(row, barriers=2)  # 3.6 puts one on either side of a product that stays in flight


@pytest.mark.slow
def test_every_kernel_compiles_for_blackwell() -> None:
    for row in compile_all("--arch", "100"):
        product = "gemm" in row["kernel"] or "wgrad" in row["kernel"]
        assert all(name.startswith("UTC") for name in row["mma"]) and bool(row["mma"]) == product, row["kernel"]


def test_reading_of_machine_code() -> None:
    code = parse("""
.L_x_1:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR16], RZ, !UPT ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   FFMA R0, R1, R2, R3 ;
        /*0060*/              @!P0 BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/               @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0080*/                   STL [R1], R2 ;
        /*0090*/               @P1 BRA `(.L_x_1) ;
""")
    assert code.length == 10 and code.kinds["STL"] == 1 and code.accesses == {"LDG.E.128": 1}
    assert code.loop is not None and (code.loop.mma, code.loop.other, code.loop.waits) == (1, 5, (1,))
    assert code.loop.barriers == ("0x0",) and not code.loop.drains
    assert parse("/*0000*/ EXIT ;").loop is None


@pytest.mark.slow
@pytest.mark.skipif(bitcode() is None, reason="nvidia-nvshmem-cu13 is not installed: nothing to link")
def test_kernels_that_put_rows_link_with_nvshmem_for_hopper() -> None:
    """The functions that `test_nvshmem` runs: no function is left to find, and rows move in 128 bits."""
    rows = {row["kernel"]: row for row in compile_all("--only", "nvshmem")}
    assert set(rows) == {"nvshmem put", "nvshmem take"}
    for row in rows.values():
        assert row["spills"] == 0 and row["local"] == 0 and row["shared"] <= SHARED, row
    stores, loads = rows["nvshmem put"]["accesses"], rows["nvshmem take"]["accesses"]
    assert stores["STG.E.128.STRONG.SYS"] > 0, "NVSHMEM's own stores into another GPU's memory"
    assert stores["STG.E.128"] > 0 and loads["LDG.E.128.STRONG.GPU"] > 0 and loads["STG.E.128"] > 0
