"""The compiler accepts every kernel for old and new GPUs; tiles fit, spill nothing, and use the unit meant for them.

takes.json holds what each takes: `python -m tests.devices.cuda.test_compiled` writes it after a change of them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import triton

from bench.visit.catalog import CASES, compile_case
from quire.devices.cuda.jit import Compiled, in_loops
from quire.devices.cuda.target import TARGETS, target_named, target_of
from quire.devices.cuda.tiles import ATTENTION, BY_TOKEN, LATENT
from quire.errors import ConfigError

TAKES = Path(__file__).with_name("takes.json")
OLD = triton.__version__ < "3.7"  # which does not know Blackwell's products of bytes
COLD = "float32"  # products without tensor cores are for small models and for tests

MATRIX_UNIT = {"attention", "product", "expert_product"}
UNITS = {"sm_90": "wgmma", "sm_100": "tcgen05.mma"}  # of the others: mma.sync
BYTES = {"sm_90": "s8", "sm_100": "i8"}  # what they call products of bytes; of the others: s8
ONCE = ("gated, 64 tokens", "sm_120")  # one register is put aside before the loop, and taken back after it
BY_ELEMENT = "scanned"  # a program reads rows of heads, whose columns lie side by side in a warp

HOT = [
    "linear, 1 tokens",
    "linear, 4096 tokens",
    "gated, 64 tokens",
    "int8 by int8, 4096 tokens",
    "int4 in groups of 64, 1 tokens",
    "FP8 weights in groups of 128, 1 tokens",
    "experts, 8192 tokens",
    "forms for few rows, and ends",
    "attention, few queries",
    "attention, many queries",
    "attention over FP8, few queries",
]
"""HOT cases are compiled for every architecture, the others for an old and a new one."""
COMPILED = [
    (case, target)
    for target in TARGETS
    for case in (CASES if target in ("sm_80", "sm_90") else HOT)
    if target != "sm_86"  # code of sm_80
]
compiled = cache(compile_case)


def takes(found: list[Compiled]) -> dict[str, list[int]]:
    """The most registers, spilled bytes and bytes of shared memory by kernel."""
    most: dict[str, list[int]] = {}
    for one in found:
        given = one.registers, one.spilled, one.shared_bytes
        most[one.kernel] = [*map(max, most.get(one.kernel, given), given)]
    return most


@pytest.mark.parametrize(("case", "target"), COMPILED)
def test_a_kernel_compiles_and_fits(case: str, target: str) -> None:
    limit = TARGETS["sm_86" if target == "sm_80" else target].shared_bytes
    for found in compiled(case, target):
        assert found.shared_bytes <= limit, found
        assert found.registers <= 255, found
        assert found.programs >= 1, found
        spilled = found.spilled - 8 * ((case, target) == ONCE)
        assert spilled <= 0 or COLD in case, found
        assert not found.narrow or found.kernel == BY_ELEMENT, found
        if (
            found.kernel in MATRIX_UNIT and COLD not in case and "latent" not in case
        ):  # latents: 16 rows always
            unit, _, number = found.instruction.partition(" ")
            if target == "sm_100" and "by int8" in case and OLD:
                assert (unit, number) == ("mma.sync", "s8"), found
                continue
            assert unit == UNITS.get(target, "mma.sync"), found
            if "by int8" in case:
                assert number == BYTES.get(target, "s8"), found


@pytest.mark.parametrize(("case", "target"), COMPILED)
def test_a_tile_takes_what_is_written(case: str, target: str) -> None:
    written = json.loads(TAKES.read_text())
    if written["triton"] != triton.__version__:
        pytest.skip("another compiler takes other registers")
    for kernel, found in takes(compiled(case, target)).items():
        most = written["takes"][target][case][kernel]
        assert all(one <= other for one, other in zip(found, most, strict=True)), (kernel, found, most)


def test_loads_of_loops_are_those_between_a_label_and_the_branch_back() -> None:
    loop = "$L__BB0_1:\nld.global.b8 b;\n@%p1 bra $L__BB0_2;\nst c;"
    assert in_loops(f"ld.global.b16 a;\n{loop}\n@%p2 bra $L__BB0_1;\n$L__BB0_2:\nret;") == loop


def test_what_orders_a_sum_is_the_same_for_all_sizes() -> None:
    for tiles in [
        *(kinds for sizes in ATTENTION.values() for kinds in sizes.values()),
        *BY_TOKEN.values(),
        *LATENT.values(),
    ]:
        assert tiles.few.keys == tiles.many.keys


def test_unknown_targets_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--target must be one of sm_80, .* got 'sm_70'"):
        target_named("sm_70")
    with pytest.raises(ConfigError, match=r"capability 7\.5; --device cuda needs one of 80"):
        target_of(7, 5)
    assert target_of(9, 0) == TARGETS["sm_90"]


def write() -> None:
    """Write what every kernel takes, a line for each case."""
    rows: dict[str, list[str]] = {target: [] for _, target in COMPILED}
    for case, target in COMPILED:
        rows[target].append(f"   {json.dumps(case)}: {json.dumps(takes(compiled(case, target)))}")
    parts = (f'  "{target}": {{\n' + ",\n".join(lines) + "\n  }" for target, lines in rows.items())
    TAKES.write_text(
        f'{{\n "triton": "{triton.__version__}",\n "takes": {{\n' + ",\n".join(parts) + "\n }\n}\n"
    )


if __name__ == "__main__":
    write()
