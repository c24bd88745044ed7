"""Engine options: ranges and choices are checked, unknown names refused."""

from __future__ import annotations

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError


def test_flat_options_find_their_sections() -> None:
    config = EngineConfig.from_options(model="m", block_size=32, max_num_seqs=4, threads=2, seed=5)
    assert (config.model.model, config.cache.block_size, config.scheduler.max_num_seqs) == ("m", 32, 4)
    assert (config.device.threads, config.seed) == (2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 8}, "unknown option: block_sise"),
        ({"block_size": 0}, "--block-size must be at least 1"),
        ({"block_size": 6, "kv_cache_dtype": "int8"}, "--block-size that is a multiple of 4, got 6"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization must be at most 1.0"),
        ({"dtype": "float8"}, "--dtype must be one of auto"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy must be one of fcfs, priority"),
        ({"trust_remote_code": True}, "never runs code"),
        ({"kv_cache_memory_bytes": -1}, "--kv-cache-memory-bytes"),
    ],
)
def test_bad_options_say_what_to_change(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**options)
