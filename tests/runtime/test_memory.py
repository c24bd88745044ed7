"""The KV cache is sized from free memory, never beyond it, and what cannot fit is refused with figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import CacheConfig
from quire.errors import ConfigError
from quire.runtime.memory import MemoryNeed, MemoryPlan, plan_memory
from quire.runtime.states import count_sequences
from quire.state_rows import StateRows

NEED = MemoryNeed(
    weights=1000,
    workspace=200,
    kv_bytes_per_token=10,
    max_model_len=64,
    max_model_len_is_given=True,
    max_num_seqs=4,
)


def test_no_more_than_is_useful() -> None:
    plan = plan_memory(CacheConfig(block_size=16), NEED, 1_000_000)
    assert (plan.num_blocks, plan.num_tokens, plan.max_model_len) == (16, 256, 64)
    assert plan.total == 1000 + 200 + 16 * 160


@given(
    st.integers(1, 100_000),
    st.integers(1, 64),
    st.floats(0.01, 1.0),
    st.integers(0, 20_000),
    st.integers(1, 200),
    st.booleans(),
)
def test_never_beyond_what_is_free(
    available: int, block_size: int, share: float, weights: int, length: int, given_len: bool
) -> None:
    need = replace(NEED, weights=weights, max_model_len=length, max_model_len_is_given=given_len)
    try:
        plan = plan_memory(CacheConfig(block_size=block_size, gpu_memory_utilization=share), need, available)
    except ConfigError:
        return
    assert plan.total <= available * share + 1
    assert plan.max_model_len <= plan.num_tokens
    assert plan.max_model_len == length or (not given_len and plan.max_model_len < length)


def test_a_shorter_context_where_the_user_did_not_ask_for_one() -> None:
    need = replace(NEED, max_model_len=10_000, max_model_len_is_given=False)
    plan = plan_memory(CacheConfig(), need, 10_000)
    assert plan.max_model_len == plan.num_tokens < 10_000


@pytest.mark.parametrize(
    ("cache", "available", "message"),
    [
        (CacheConfig(), 1100, "do not fit in"),
        (CacheConfig(kv_cache_memory_bytes=320), 100_000, "max_model_len = 64"),
        (CacheConfig(num_gpu_blocks_override=3), 100_000, "--num-gpu-blocks-override 3"),
        (CacheConfig(num_gpu_blocks_override=5000), 100_000, "ask for less"),
        (CacheConfig(kv_cache_memory_bytes=10**9), 100_000, "ask for less"),
        (CacheConfig(gpu_memory_utilization=0.01), 100_000, "--gpu-memory-utilization"),
    ],
)
def test_what_cannot_fit_is_refused(cache: CacheConfig, available: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(cache, NEED, available)


def test_one_block_must_fit_even_if_no_length_was_asked_for() -> None:
    need = replace(NEED, max_model_len_is_given=False)
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        plan_memory(CacheConfig(kv_cache_memory_bytes=100), need, 100_000)


STATES = replace(NEED, kv_bytes_per_token=10, bytes_per_state=lambda num_open: 700, max_num_seqs=4)


def running(plan: MemoryPlan) -> int:
    assert plan.rows is not None
    return plan.rows.num_running


def snapshots(plan: MemoryPlan) -> int:
    assert plan.rows is not None
    return plan.rows.num_rows - plan.rows.num_running


@given(st.integers(1, 100_000), st.integers(1, 3000), st.floats(0, 0.9), st.booleans(), st.integers(0, 10))
def test_states_snapshots_and_blocks_never_take_more_than_is_free(
    available: int, row: int, share: float, given_len: bool, per_token: int
) -> None:
    need = replace(
        STATES,
        bytes_per_state=lambda num_open: row,
        max_model_len_is_given=given_len,
        kv_bytes_per_token=per_token,
    )
    cache = CacheConfig(state_cache_fraction=share, gpu_memory_utilization=1.0)
    try:
        plan = plan_memory(cache, need, available)
    except ConfigError:
        return
    assert plan.total <= available
    assert 1 <= running(plan) <= need.max_num_seqs
    assert snapshots(plan) * row <= share * available
    assert plan.num_tokens >= plan.max_model_len
    assert count_sequences(plan, plan.max_model_len) >= 1
    assert plan.rows is not None
    assert plan.rows.num_snapshots == snapshots(plan)


def test_snapshots_take_their_share_and_none_without_prefix_caching() -> None:
    plan = plan_memory(CacheConfig(kv_cache_memory_bytes=40_000), STATES, 1_000_000)
    assert snapshots(plan) == 4  # 64 tokens each
    assert plan_memory(CacheConfig(state_cache_fraction=0.0), STATES, 1_000_000).rows == StateRows(
        4, 4, 4, nbytes=700
    )
    plan = plan_memory(CacheConfig(enable_prefix_caching=False), STATES, 1_000_000)
    assert (snapshots(plan), running(plan)) == (0, 4)


def test_a_state_that_does_not_fit_is_refused_with_its_size_and_the_option() -> None:
    with pytest.raises(
        ConfigError, match=r"state of one sequence takes 700 bytes.*--kv-cache-memory-bytes 600"
    ):
        plan_memory(CacheConfig(kv_cache_memory_bytes=600), STATES, 1_000_000)
    with pytest.raises(ConfigError, match="--state-cache-fraction"):
        plan_memory(CacheConfig(kv_cache_memory_bytes=900), STATES, 1_000_000)


def test_blocks_that_take_no_memory_are_as_many_as_the_rows_can_use() -> None:
    plan = plan_memory(CacheConfig(), replace(STATES, kv_bytes_per_token=0), 1_000_000)
    assert plan.num_blocks >= 4 * 4
    assert plan.rows is not None
    assert plan.total == 1200 + plan.rows.num_rows * 700


def test_small_states_are_kept_in_each_block() -> None:
    large = plan_memory(CacheConfig(), STATES, 1_000_000).rows
    assert large is not None
    assert not large.in_each_block
    small = plan_memory(CacheConfig(), replace(STATES, bytes_per_state=lambda num_open: 600), 1_000_000)
    assert small.rows is not None
    assert small.rows.in_each_block
    assert snapshots(small) == small.num_blocks
