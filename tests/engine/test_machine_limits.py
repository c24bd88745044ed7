"""The machine's limits beside what steps read and compute: given, measured, or unknown."""

from __future__ import annotations

import pytest

from quire.config import EngineConfig
from quire.engine.start import start_core
from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.types import Request


@pytest.mark.parametrize(("given", "known"), [(None, None), ("50,1e3", (5e10, 1e12)), ("measure", ...)])
def test_steps_are_counted_beside_the_limits(given: str | None, known: object) -> None:
    config = EngineConfig.from_options(max_model_len=64, threads=1, machine_limits=given)
    started = start_core(config)
    core = started.core
    core.add(Request(id="a", tokens=[1, 2, 3], sampling=SamplingParams(max_tokens=4), seed=0, max_tokens=4))
    while core.has_work:
        core.step()
    stats = core.stats()
    cost = started.report.cost
    steps = 4 * cost.step_bytes(1)
    assert steps <= stats.read_bytes <= 1.01 * steps + 4 * cost.kv_bytes(7, started.report.kv_spec)
    expected = cost.prompt_operations(3) + sum(cost.decode_operations(context) for context in (3, 4, 5))
    assert stats.operations == pytest.approx(expected, rel=0.02)
    assert stats.step_seconds > 0
    if known is ...:
        assert stats.limits is not None
        assert min(stats.limits) > 1e8
    else:
        assert stats.limits == known


@pytest.mark.parametrize("given", ["", "5", "5,6,7", "0,5", "nan,4", "inf,4", "fast"])
def test_other_limits_are_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match="--machine-limits"):
        EngineConfig.from_options(machine_limits=given)
