"""What a step is said to cost, beside formulas written out and draws that are counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from quire.devices.cpu.backend import NativeBackend
from quire.devices.protocol import KVLayer, KVSpec
from quire.engine.card import step_rates
from quire.model.cost import Attended, Cost, attended
from quire.model.families import read_model
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.indexer import IndexerConfig, KeysConfig
from quire.model.parts.part import Index
from quire.model.shard import WHOLE
from quire.sched.times import StepRates, StepTimes, StepWork
from tests.models import inspect_model, load_model
from tests.tiny import CHOOSING, CONFIG, STREAMS, write_checkpoint

D, V, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 48, 320, 3, 4, 2, 16
ATTENTION = D * (HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM * D  # weights of a layer


def test_a_dense_model_costs_two_operations_per_weight_and_token(tiny_model: Callable[..., str]) -> None:
    cost = load_model(tiny_model("llama"), NativeBackend(1)).cost
    weights = LAYERS * (ATTENTION + 3 * 96 * D)
    assert cost.dense_parameters == weights
    assert cost.routed_parameters == 0
    score_and_value = 4 * HEADS * HEAD_DIM
    visible = sum(range(1, 101))
    assert cost.prompt_operations(100) == 2 * (weights * 100 + V * D) + LAYERS * score_and_value * visible
    assert cost.decode_operations(100) == 2 * (weights + V * D) + LAYERS * score_and_value * 101
    assert cost.step_bytes(1) == cost.step_bytes(64) == cost.dense_bytes + cost.head_bytes


def test_a_mixture_reads_the_experts_that_its_batch_draws(tiny_model: Callable[..., str]) -> None:
    cost = load_model(tiny_model("qwen2_moe"), NativeBackend(1)).cost
    experts, drawn, size = 6, 2, 3 * 32 * D
    shared, router = 3 * 40 * D, 7 * D  # the shared expert's gate is one more row of the router
    assert (cost.experts, cost.drawn) == (experts, drawn)
    assert cost.routed_parameters == LAYERS * experts * size
    assert cost.dense_parameters == LAYERS * (ATTENTION + shared + router)
    active = LAYERS * (ATTENTION + shared + router + drawn * size)
    assert cost.prompt_operations(1) == 2 * (active + V * D) + LAYERS * 4 * HEADS * HEAD_DIM
    fixed = cost.dense_bytes + cost.head_bytes
    assert cost.step_bytes(1) == pytest.approx(fixed + cost.routed_bytes * drawn / experts)
    assert cost.step_bytes(1000) == pytest.approx(fixed + cost.routed_bytes)


@pytest.mark.parametrize("tokens", [1, 2, 8, 40])
def test_share_of_experts_is_that_of_even_draws(tokens: int) -> None:
    rng = np.random.default_rng(1)
    share = Cost(experts=64, drawn=8).routed_share(tokens)
    draws = [
        len({e for _ in range(tokens) for e in rng.choice(64, 8, replace=False).tolist()}) for _ in range(400)
    ]
    assert share == pytest.approx(np.mean(draws) / 64, abs=0.01)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("whole", [False, True])
def test_visible_positions_are_those_of_the_mask(window: int | None, chunk: int | None, whole: bool) -> None:
    if whole and chunk:
        pytest.skip("no encoder keeps to chunks")
    length, layer = 23, Attended(4, window, chunk, whole)
    q, k = np.arange(length)[:, None], np.arange(length)
    mask = (k <= q) | whole
    if window is not None:
        mask &= np.abs(q - k) < window
    if chunk is not None:
        mask &= q // chunk == k // chunk
    assert [layer.visible(p, length) for p in range(length)] == mask.sum(1).tolist()


@pytest.mark.parametrize("length", [3, 40, 200])
def test_a_query_costs_the_keys_that_it_scores_and_what_it_chose(length: int) -> None:
    """DeepSeek-V3.2's form, then V4's: a window, and entries of 4 positions of which 6 are chosen."""
    layer = Attended(100, index=Index(10, most=7), further=(1,))
    chosen, scored = sum(min(p + 1, 7) for p in range(length)), sum(range(1, length + 1))
    cost = Cost(layers=(layer, layer, Attended(3)))
    assert cost.prompt_operations(length) == 2 * (100 * chosen + 10 * scored) + 3 * scored
    kept = KVLayer(1, 8, value_dim=8), KVLayer(2, 4), KVLayer(1, 2, value_dim=2)
    spec = KVSpec(5, 2, 8, "float32", layers=(kept[0], kept[0], kept[1], kept[2], kept[2]))
    read = 2 * 32 * min(length + 1, 7) + (64 + 2 * 8) * (length + 1)
    assert cost.kv_bytes(length, spec) == read
    layer = Attended(100, 5, index=Index(10, 4, 6, entries=1), further=(4, 4, 0))
    seen = sum(min(p + 1, 5) + min((p + 1) // 4, 6) for p in range(length))
    scored = sum((p + 1) // 4 for p in range(length))
    assert Cost(layers=(layer,)).prompt_operations(length) == 100 * seen + 10 * scored
    assert layer.rows(length) == [(length + 1) // 4, min((length + 1) // 4, 6), 0]


def test_layers_that_share_a_choice_see_as_much_and_score_nothing(tmp_path: Path) -> None:
    config = inspect_model(write_checkpoint(tmp_path, "deepseek_v3")).spec
    assert isinstance(config, DecoderConfig)
    indexer = IndexerConfig(D, 3, KeysConfig(16), 5, 24)
    mixers = [
        replace(layer.mixer, **how)
        for layer, how in zip(config.layers, ({}, {"indexer": indexer}, {"shares": True}), strict=True)
    ]  # type: ignore[type-var]
    layers = tuple(replace(one, mixer=mixer) for one, mixer in zip(config.layers, mixers, strict=True))
    found = list(attended(replace(config, layers=layers), range(3), WHOLE))
    assert [layer.visible(30, 31) for layer in found] == [31, 5, 5]
    own = found[0].operations
    assert [layer.computed(30, 31) for layer in found] == [31 * own, 5 * own + 31 * 2 * 3 * 16, 5 * own]
    assert [layer.further for layer in found] == [(), (1,), ()]


CHOSEN = 4 * HEADS * HEAD_DIM * (3 * 4)


@pytest.mark.parametrize(
    ("config", "computed", "rows"),
    [
        (
            STREAMS["deepseek_v4"],
            [256 * 7, 256 * (7 + 3) + 2 * 4 * 12 * 7, 256 * (7 + 5), 256 * (7 + 3) + 2 * 4 * 12 * 7],
            [[], [3, 0, 7, 0], [5, 0], [3, 0, 7, 0]],
        ),
        (
            CHOOSING["minimax_m3"],
            [256 * 31, CHOSEN + 2 * 2 * 8 * 31, CHOSEN + 2 * 2 * 8 * 31],
            [[], [31], [31]],
        ),
        (
            CHOOSING["qwen4"],
            [0, CHOSEN + 2 * 6 * 16 * 7, 0, CHOSEN + 2 * 6 * 16 * 7],
            [[], [7, 0], [], [7, 0]],
        ),
    ],
)
def test_each_kind_of_choice_bounds_what_is_seen_after_30_tokens(
    config: dict[str, Any], computed: list[int], rows: list[list[int]]
) -> None:
    """A window of 7 and entries of 4, of which 3 are chosen, or of 6; 3 blocks of 4; 2 pools of 4 and the open one."""
    config = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    found = list(attended(read_model(config)[0], range(len(rows)), WHOLE))
    assert [layer.computed(30, 31) for layer in found] == computed
    assert [layer.rows(30) for layer in found] == rows


def test_windows_bound_what_decoding_reads(tiny_model: Callable[..., str]) -> None:
    model = load_model(tiny_model("gemma3"), NativeBackend(1))  # layers in turn: a window of 24, all
    spec = model.spec.kv_spec("float32")
    wide = [layer.mixer.scores.window is None for layer in model.spec.layers]
    per_layer = spec.bytes_per_token / spec.num_layers
    expected = per_layer * sum(301 if full else 24 for full in wide)
    assert model.cost.kv_bytes(300, spec) == expected
    assert 0 < sum(wide) < len(wide)


def test_recurrences_cost_what_their_states_hold(tmp_path: Path) -> None:
    """The delta rule decays and reads, changes, and reads each element of a state; a convolution has its taps."""
    model = load_model(write_checkpoint(tmp_path, "qwen3_5"), NativeBackend(1))
    cost, spec = model.cost, model.spec.kv_spec("float32")
    keys, values, key_dim, value_dim, taps, layers = 2, 4, 12, 10, 4, 2
    state, channels = values * key_dim * value_dim, 2 * keys * key_dim + values * value_dim
    assert cost.recurrent_operations == layers * 2 * (3 * state + taps * channels)
    assert cost.state_bytes == layers * 4 * (state + (taps - 1) * channels)
    attention = cost.kv_bytes(8, spec) - cost.kv_bytes(7, spec)
    assert cost.kv_bytes(7, spec) == cost.state_bytes + 8 * attention
    without = replace(cost, recurrent_operations=0)
    assert cost.prompt_operations(9) - without.prompt_operations(9) == 9 * cost.recurrent_operations
    assert cost.decode_operations(9) - without.decode_operations(9) == cost.recurrent_operations
    rates, plain = (step_rates(each, spec, 10.0, 100.0) for each in (cost, without))
    assert rates.token - plain.token == pytest.approx(cost.recurrent_operations / 100e9)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "qwen3_5"])
def test_steps_are_counted_as_the_plan_counts_them(family: str, tmp_path: Path) -> None:
    """Prompts alone and decoding sequences, at contexts where windows bind; an independent sum over positions."""
    model = load_model(write_checkpoint(tmp_path, family), NativeBackend(1))
    cost, spec = model.cost, model.spec.kv_spec("float32")
    rates = step_rates(cost, spec, 10.0, 100.0)
    times = StepTimes(rates)
    prompt = rates.counts(times.with_prompt(StepWork(), 0, 24, True))
    assert prompt[1] == pytest.approx(cost.prompt_operations(24), rel=0.1)
    for sequences, context in ((1, 5), (3, 11)):
        read, computed = rates.counts(StepWork(sequences, sequences, 0.0, sequences * context))
        expected = cost.step_bytes(sequences) + sequences * cost.kv_bytes(context, spec)
        assert read == pytest.approx(expected, rel=0.02)
        assert computed == pytest.approx(sequences * cost.decode_operations(context), rel=0.02)
    assert StepRates().counts(StepWork(3, 3, 0.0, 12)) == (0.0, 0.0)  # a model without counts
