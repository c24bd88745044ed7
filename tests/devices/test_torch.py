"""The torch backend against the reference, each row alone, and from start to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.devices.graph import record
from quire.devices.ops import Attend, Embed, Linear, Route, SelectRows, StoreKV
from quire.devices.protocol import (
    Activation,
    Attention,
    KVDtype,
    KVSpec,
    Limits,
    Routing,
)
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.torch.backend import TorchBackend
from quire.errors import EngineError
from quire.weights.layouts import Int4, Int8
from quire.weights.schemes import Quantized, WeightType
from quire.weights.tensor import FloatDtype
from tests.devices.native_cases import apply_rows, gated, linear, native, normal, rows_step
from tests.devices.test_native_experts import mixture, routings
from tests.devices.test_native_linear import ACTIVATIONS
from tests.devices.test_native_plan import model, three_steps
from tests.exactness.requests import make_prompts
from tests.tiny import write_checkpoint

TORCH, REFERENCE = TorchBackend(1), ReferenceBackend()
BOTH = [TORCH, TorchBackend(1, at_once=True)]
TYPES: list[WeightType] = [
    "float32",
    "bfloat16",
    Quantized(Int8()),
    Quantized(Int4(32)),
    Quantized(Int4(64, False), "float"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "float16", "fp8_e4m3"])
def test_steps_equal_the_reference(dtype: FloatDtype, kv_dtype: KVDtype) -> None:
    want = three_steps(REFERENCE, dtype, kv_dtype)
    for backend in BOTH:
        exact = kv_dtype == "float32" and (dtype == "float32" or backend is TORCH)
        for a, b in zip(three_steps(backend, dtype, kv_dtype), want, strict=True):
            np.testing.assert_allclose(
                a, b, rtol=0, atol=2e-5 if exact else 2e-2 if backend is TORCH else 8e-2
            )


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from(TYPES),
    rows=st.integers(1, 9),
    outputs=st.integers(1, 90),
    columns=st.integers(1, 200),
    activation=st.sampled_from(ACTIVATIONS[1:]),
    seed=st.integers(0, 2**31),
)
def test_linear_equals_the_reference(
    dtype: WeightType, rows: int, outputs: int, columns: int, activation: Activation, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, w = normal(rng, rows, columns), normal(rng, outputs, columns) / np.float32(np.sqrt(columns))
    bias = normal(rng, outputs)
    near = 3e-5
    for backend in BOTH:
        if backend is not TORCH and dtype == "bfloat16":
            near = 0.06  # its activations are bfloat16 too
        got, want = (linear(b, x, w, dtype, bias=bias, activation=activation) for b in (backend, REFERENCE))
        np.testing.assert_allclose(got, want, rtol=near, atol=near)
        got, want = (gated(b, x, w, w[::-1], dtype, activation=activation) for b in (backend, REFERENCE))
        np.testing.assert_allclose(got, want, rtol=near, atol=near)


@settings(deadline=None, max_examples=40)
@given(routings(), st.booleans(), st.integers(1, 30), st.integers(0, 1000))
def test_routes_equal_the_reference(routing: Routing, corrected: bool, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = 2 * normal(rng, rows, routing.num_experts + routing.shared_gate)
    correction = 0.2 * normal(rng, routing.num_experts) if corrected else None
    chosen = routing.top_k + routing.shared
    *both, theirs = (
        apply_rows(backend, scores, lambda g, x: g(Route(x, routing, correction)), 2 * chosen)
        for backend in (*BOTH, REFERENCE)
    )
    for ours in both:
        np.testing.assert_array_equal(ours[:, :chosen], theirs[:, :chosen])
        np.testing.assert_allclose(ours[:, chosen:], theirs[:, chosen:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "biases"), [("silu", False), ("clamped_swiglu", True), ("clamped_silu", True)]
)
def test_experts_equal_the_reference(activation: Activation, biases: bool) -> None:
    x = normal(np.random.default_rng(1), 20, 40)
    *both, theirs = (
        apply_rows(b, x, mixture(b, "float32", activation, biases), 40) for b in (*BOTH, REFERENCE)
    )
    for ours in both:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "attention",
    [
        Attention(0.3, chunk=5),
        Attention(0.3, window=4, cap=2.0),
        Attention(0.3, ahead=3, window=6),
        Attention(0.3, slopes=np.array([0.5, 0.25], np.float32)),
        Attention(0.3, bias=np.array([[0.5, -1.0, 2.0], [0.25, 1.0, 0.0]], np.float32), window=5),
        Attention(0.3, sinks=np.array([1.5, -0.5], np.float32)),
    ],
    ids=["chunk", "window-cap", "ahead", "slopes", "bias-window", "sinks"],
)
def test_attention_equals_the_reference(attention: Attention) -> None:
    rng = np.random.default_rng(2)
    rows, qkv = 13, normal(rng, 13, (2 + 2) * 4)
    results = []
    for backend in (*BOTH, REFERENCE):
        table = backend.matrix([qkv], "float32")
        head = backend.matrix([np.ones((rows, 8), np.float32)], "float32")

        def hidden(g: Any, table: Any = table) -> Any:
            q = g(StoreKV(g(Embed(table)), 0, 2, None, None, None))
            return g(SelectRows(g(Attend(q, 0, 2, attention))))

        graph = record(hidden, lambda g, h, head=head: g(Linear(h, head)), rows, 8)
        kv = backend.kv_cache(KVSpec(1, 1, 4, "float32"), rows, 1)
        executable = backend.compile(graph, kv, Limits(rows, 1, rows))
        executable.run(rows_step(rows))
        results.append(executable.hidden().copy())
    np.testing.assert_allclose(results[0], results[2], rtol=0, atol=1e-5)
    np.testing.assert_allclose(results[1], results[2], rtol=0, atol=1e-5)


def test_a_row_alone_has_the_bits_it_has_in_any_batch() -> None:
    x, w = normal(np.random.default_rng(3), 40, 65), normal(np.random.default_rng(4), 130, 65)
    for dtype in TYPES:
        whole = linear(TORCH, x, w, dtype, activation="silu")
        for rows in (1, 3, 17):
            assert linear(TORCH, x[:rows], w, dtype, activation="silu").tobytes() == whole[:rows].tobytes()


@pytest.mark.parametrize("dtype", TYPES, ids=repr)
def test_export_and_restore_give_the_same_weight(dtype: WeightType) -> None:
    matrix = TORCH.matrix([normal(np.random.default_rng(5), 70, 9).T], dtype)
    about, data = TORCH.export(matrix)
    again = TORCH.restore(about, data)
    assert again.shape == matrix.shape
    assert again.rounding == matrix.rounding
    assert again.dequantize().tobytes() == matrix.dequantize().tobytes()
    kept = BOTH[1].matrix([normal(np.random.default_rng(5), 70, 9).T], dtype)
    assert BOTH[1].restore(*BOTH[1].export(kept)).values.equal(kept.values)
    row = torch.from_numpy(normal(np.random.default_rng(6), 70))
    assert again.times(row).equal(matrix.times(row))


def test_what_belongs_to_another_backend_is_refused() -> None:
    graph, spec = model(TORCH)
    with pytest.raises(EngineError, match="KV cache of NativeKVCache"):
        TORCH.compile(graph, native().kv_cache(spec, 4, 4), Limits(8, 1, 8))
    other, _ = model(native())
    executable = TORCH.compile(other, TORCH.kv_cache(spec, 8, 1), Limits(8, 1, 8))
    with pytest.raises(EngineError, match="weight of NativeMatrix"):
        executable.run(rows_step(8))
    own = TORCH.compile(graph, TORCH.kv_cache(spec, 8, 1), Limits(8, 1, 4))
    with pytest.raises(EngineError, match="limits"):
        own.run(rows_step(9))
    assert len(own.run(rows_step(8))) == 4
    assert len(own.logits(4, 4)) == 0
    for start, stop in ((0, 5), (7, 9)):
        with pytest.raises(EngineError, match="logit rows"):
            own.logits(start, stop)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_tokens_depend_on_the_request_alone_and_are_the_reference_s(family: str, tmp_path: Path) -> None:
    """Batched, in chunks and preempted as alone, bit for bit; greedy as the reference writes them."""
    path = str(write_checkpoint(tmp_path, family))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    prompts = [{"prompt_token_ids": p} for p in make_prompts()[:3]]

    def run(backend: str, group: list[Any], **options: Any) -> list[Any]:
        llm = LLM(path, backend=backend, batch_invariant=True, threads=2, max_model_len=128, **options)
        return [o.outputs[0] for o in llm.generate(group, params, use_tqdm=False)]

    alone = [run("torch", [prompt])[0] for prompt in prompts]
    assert run("torch", prompts, max_num_batched_tokens=19, num_gpu_blocks_override=9) == alone
    reference = run("reference", prompts)
    assert [o.token_ids for o in reference] == [o.token_ids for o in alone]
