"""Engine options: ranges and choices are checked, unknown names refused."""

from __future__ import annotations

import pytest

from quire.config import EngineConfig, SpeculativeOptions
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
        ({"kv_cache_memory_bytes": -1}, "--kv-cache-memory-bytes"),
    ],
)
def test_bad_options_say_what_to_change(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**options)


def test_speculative_options_come_from_one_object_or_from_flags() -> None:
    def options(**given: object) -> SpeculativeOptions | None:
        return EngineConfig.from_options(**given).speculation.options

    assert options() is None
    wanted = SpeculativeOptions(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    assert options(speculative_config=text) == wanted
    assert options(speculative_config={"prompt_lookup_max": 4}, spec_method="ngram", spec_tokens=3) == wanted
    older = options(speculative_model="[ngram]", num_speculative_tokens=3)
    assert older == SpeculativeOptions(method="ngram", num_speculative_tokens=3)
    assert older is not None
    assert older.lookup_range == (5, 5)
    assert wanted.lookup_range == (4, 4)
    assert options(speculative_config={"method": "deepseek_mtp"}) == SpeculativeOptions(method="mtp")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_config": "{"}, "must be a JSON object"),
        ({"speculative_config": "[1]"}, "must be a JSON object"),
        ({"speculative_config": {"method": "magic"}}, "Invalid enum value 'magic'"),
        ({"speculative_config": {"method": "ngram", "tree": 1}}, "unknown field `tree`"),
        (
            {"speculative_config": {"method": "eagle3", "tree_top_k": 4}},
            "tree_top_k is gone.*drafts are chains",
        ),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, ">= 1"),
        ({"speculative_config": {"rejection_sample_method": "synthetic"}}, "synthetic"),
        ({"speculative_config": {"method": "suffix"}, "spec_method": "ngram"}, "contradicts method"),
        ({"spec_tokens": 3, "num_speculative_tokens": 4}, "contradicts num_speculative_tokens"),
        ({"speculative_config": {"prompt_lookup_min": 5, "prompt_lookup_max": 2}}, "is more than"),
    ],
)
def test_speculative_options_that_are_wrong_or_disagree(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**given)
