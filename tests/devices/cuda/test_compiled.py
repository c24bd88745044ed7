"""The compiler accepts every kernel for old and new GPUs; tiles fit, spill nothing, and use the unit meant for them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

from bench.visit.catalog import CASES, compile_case
from quire.devices.cuda.target import TARGETS, target_named, target_of
from quire.devices.cuda.tiles import ATTENTION, BY_TOKEN, LATENT
from quire.errors import ConfigError

COLD = "float32"  # products without tensor cores are for small models and for tests

MATRIX_UNIT = {"attention", "product", "expert_product"}
ARRAY = "turned_angles"  # the cosine of a large number needs an array in memory


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_compiles_and_fits(case: str, target: str) -> None:
    family = TARGETS[target].family
    least = min(other.shared_bytes for other in TARGETS.values() if other.family == family)
    for found in compile_case(case, target):
        assert found.shared_bytes <= least, found
        assert found.registers <= 255, found
        assert not found.spilled or COLD in case or found.kernel == ARRAY, found
        if (
            found.kernel in MATRIX_UNIT and COLD not in case and "latent" not in case
        ):  # latents: 16 rows always
            assert found.instruction == {"ampere": "mma.sync", "hopper": "wgmma"}[family], found


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
