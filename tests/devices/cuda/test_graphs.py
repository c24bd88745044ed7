"""Graphs of steps: padded and replayed steps have the bits of others, whatever their sequences do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import SamplingParams
from quire.devices import ops, selection
from quire.devices.adapters import Adapter, Change, Up
from quire.devices.choices import Choices
from quire.devices.cuda import graphs, run
from quire.devices.cuda.adapters import CHANGEABLE
from quire.devices.cuda.arena import Arena
from quire.devices.cuda.backend import GRAPH
from quire.devices.cuda.fuse import fused
from quire.devices.cuda.graphs import Graphs
from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.target import INTERPRETER, TARGETS, Target
from quire.devices.cuda.tiles import AttentionTile, Shape
from quire.devices.cuda.work import WorkShape, work_list
from quire.devices.protocol import Limits, ModelInput, StateInput
from quire.devices.registry import make_backend
from quire.engine.plan import tapped
from quire.errors import ConfigError, EngineError
from quire.model.shard import WHOLE
from tests.devices.cuda.test_engine import COMMON, SMALL, answers
from tests.devices.cuda.test_recurrent import FAMILIES as RECURRENT
from tests.models import inspect_model, load_model
from tests.tiny import write_checkpoint

BLOCK, COLUMNS, OPEN = 16, 20, 2


class Sequences:
    """Sequences in slots, whose steps are made by the number of tokens that each takes."""

    def __init__(self, vocab: int) -> None:
        self.rng, self.vocab = np.random.default_rng(0), vocab
        self.lengths, self.opened = [0] * 4, [0] * 4
        self.table = np.zeros((4, COLUMNS), np.int32)
        self.blocks = iter(self.rng.permutation(64))

    def states(self, counts: dict[int, int]) -> StateInput:
        """States that leave up to OPEN of their tokens for later, and are marked half-way."""
        rows, marks = np.array([*counts], np.int32), []
        opened = np.array([self.opened[slot] for slot in counts], np.int32)
        kept = np.array(
            [count - min(count - 1, slot % (OPEN + 1)) for slot, count in counts.items()], np.int32
        )
        for b, (slot, count) in enumerate(counts.items()):
            self.opened[slot] = count - kept[b]
            if count > 2:
                marks.append((b, kept[b] // 2, 4 + slot))
        return StateInput(rows, opened, kept, np.array(marks, np.int32).reshape(-1, 3))

    def step(self, counts: dict[int, int], rows: list[int], stateful: bool = False) -> ModelInput:
        states = self.states(counts) if stateful else None
        appended, positions = [], []
        for slot, count in counts.items():
            before, after = self.lengths[slot], self.lengths[slot] + count
            positions += range(before, after)
            for column in range(-(-before // BLOCK), -(-after // BLOCK)):
                self.table[slot, column] = next(self.blocks)
                appended.append((slot, column, self.table[slot, column]))
            self.lengths[slot] = after
        slots = np.array([*counts], np.int32)
        ends = np.array([self.lengths[slot] for slot in counts], np.int32)
        return ModelInput(
            self.rng.integers(0, self.vocab, len(positions)).astype(np.int32), np.array(positions, np.int32),
            np.cumsum([0, *counts.values()]).astype(np.int32), ends, slots, self.table.copy(), np.array(rows, np.int32),
            appended_C3=np.array(appended, np.int32).reshape(-1, 3), states=states,
        )  # fmt: skip


STEPS: list[tuple[dict[int, int], list[int]]] = [
    ({0: 40}, [39]),  # larger than any graph
    ({1: 5}, []),
    ({1: 2, 0: 4}, [1, 2, 3, 4, 5]),
    ({0: 1, 1: 1, 2: 6}, [0, 1, 7]),
    ({2: 1, 1: 1, 0: 1}, [0, 1, 2]),
    ({3: 3, 2: 1}, [2, 3]),
    ({0: 1, 2: 1, 3: 1, 1: 1}, [0, 1, 2, 3]),
    ({2: 5, 0: 1, 3: 1}, [4, 5, 6]),
]


def drawn_adapter(graph: Any, seed: int, kinds: tuple[type[Any], ...]) -> Adapter:
    """An adapter of some operations; its rank is one of four."""
    rng, changes, norms = np.random.default_rng(seed), {}, {}
    for op in graph.ops:
        if isinstance(op, kinds) and isinstance(op, ops.Normalize):
            norms[op.path] = msgspec.structs.replace(op.norm, weight=op.norm.weight * 2)
            continue
        if isinstance(op, kinds):
            rows, columns = op.table.shape[::-1] if isinstance(op, ops.Embed) else op.weight.shape
            down, up = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((2, columns), (rows, 2)))
            changes[op.path] = Change(down, (Up(up, 0, 0),))
    return Adapter(changes, norms)


def outputs(
    model: Path,
    sizes: tuple[int, ...],
    target: Any = INTERPRETER,
    steps: Any = STEPS,
    adapted: Any = None,
    kinds: Any = (), ahead: int = 0, shard: Any = WHOLE, change: Callable[[Any], None] = bool,
) -> tuple[list[Any], Any]:  # fmt: skip
    """The bytes of each step's logits, hidden states and taps; memory is poisoned between steps.

    `ahead` sizes are captured before. `adapted` gives a step's adapters by slot of its sequences; adapters, of
    operations of some kinds, change before the last two steps. The target may be a launcher, and `change` takes the
    executable before its first step.
    """
    backend: Any = make_backend(threads=1, device="interpreter")
    backend._run = InterpretedLauncher(target) if isinstance(target, Target) else target
    info, loaded = inspect_model(model), load_model(model, backend, shard=shard)
    spec = info.kv_spec("fp8_e5m2", shard)
    stateful = bool(spec.bytes_per_state(0))
    cache = backend.kv_cache(spec, 64, BLOCK, *((8, OPEN) if stateful else ()))
    kept = [side for layer in cache.layers for side in (layer.keys, layer.values) if side is not None]
    kept += [side for layer in cache.states for state in layer for side in (state.rows, state.waiting)]
    for side in kept:
        side.zero_()
    executable = backend.compile(
        tapped(loaded, (0,)), cache, Limits(320, 4, 4, 0 if adapted is None else 2, graphs=sizes)
    )
    sequences, found = Sequences(info.spec.vocab_size), []
    change(executable)
    assert all(executable.prepare(sequences.table) for _ in range(ahead))
    backend._last_tokens[3] = 65
    for number, (counts, rows) in enumerate(steps):
        if adapted is not None and number in (0, len(steps) - 2):
            executable.adapt(0, drawn_adapter(loaded.graph, number, kinds))
            executable.adapt(1, drawn_adapter(loaded.graph, number + 1, (ops.Linear,)))
        executable._memory.fill_(255)
        for padded in executable._padded.values():
            padded._numbers.fill_(1 << 30)
        inputs = sequences.step(counts, rows, stateful)
        if 3 in counts and counts[3] == 1:
            place = inputs.cu_q_B1[list(counts).index(3)]
            inputs = msgspec.structs.replace(inputs, unseen_U2=np.array([[place, 3]], np.int32))
        slots_B = np.array([(adapted or {}).get(slot, -1) for slot in counts], np.int32)
        if slots_B.max() >= 0 and number:
            inputs = msgspec.structs.replace(inputs, adapters_B=slots_B)
        logits = [executable.run(inputs).numpy().tobytes()]
        if len(rows) > 4:
            logits.append(executable.logits(1, 5).numpy().tobytes())
        taps = [np.asarray(tap).tobytes() for tap in executable.taps()]
        found.append([logits, np.asarray(executable.hidden()).tobytes(), *taps])
    return [*found, *(side.view(torch.uint8).numpy().tobytes() for side in kept)], executable


HYBRIDS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"num_hidden_layers": 2},
    **{family: {} for family in RECURRENT},
    "qwen4": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "ple_layer_ids": [1],
    },
}
"""HYBRIDS have states or choices of keys, which take long: their steps are fewer."""


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral", "deepseek_v3", *HYBRIDS])
def test_replayed_steps_have_the_bits_of_others(tmp_path: Path, family: str) -> None:
    steps = STEPS[1:6] if family in HYBRIDS else STEPS
    model = write_checkpoint(tmp_path, family, "bfloat16", **HYBRIDS.get(family, {"num_hidden_layers": 2}))
    found, executable = outputs(model, (2, 4, 8, 16), steps=steps)
    assert sorted(executable._padded) == [4, 8]
    graphs = {("body", 4, None, 0), ("body", 8, None, 0), ("head", 4, None, 0)}
    assert graphs <= {*executable._graphs._replays}
    wanted, _ = outputs(model, (), steps=steps)
    assert found == wanted


@pytest.mark.parametrize("kinds", [(ops.Linear, ops.GatedLinear), CHANGEABLE], ids=["products", "tables too"])
def test_steps_with_adapters_are_replayed_for_any_of_them(tmp_path: Path, kinds: Any) -> None:
    model = write_checkpoint(tmp_path, "qwen2", "bfloat16", num_hidden_layers=1)
    given: dict[str, Any] = {
        "steps": [*STEPS[1:6], *STEPS[3:5]],
        "adapted": {0: 1, 2: 0, 3: 1},
        "kinds": kinds,
    }
    found, executable = outputs(model, (2, 4, 8, 16), **given)
    version = executable._adapters.version
    assert {graph[2] for graph in executable._graphs._replays} == {None, version}
    changed = [op for op in executable._graph.ops if isinstance(op, kinds)]
    assert version == len(changed) + (kinds == CHANGEABLE)  # other products change in place
    assert outputs(model, (), **given)[0] == found
    assert outputs(model, (), steps=given["steps"])[0] != found


def test_a_size_is_captured_anew_behind_steps_with_fewer_logit_rows(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen2", "bfloat16", num_hidden_layers=1)
    steps = [({1: 5}, [4]), ({0: 2, 2: 4}, [0, 1, 3, 5]), ({1: 6}, [1, 2, 3]), ({0: 3, 3: 2}, [2, 4])]
    given: dict[str, Any] = {"steps": steps, "adapted": {0: 1, 2: 0, 3: 1}}
    given["kinds"] = (ops.Linear, ops.Normalize)
    assert outputs(model, (2, 4, 8), **given)[0] == outputs(model, (), **given)[0]


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_sizes_are_captured_before_steps_come(tmp_path: Path, family: str) -> None:
    model, sizes = write_checkpoint(tmp_path, family, "bfloat16"), (2, 4, 8)
    wanted, first = outputs(model, sizes, steps=STEPS[1:5])
    found, executable = outputs(model, sizes, steps=STEPS[1:5], ahead=2)
    assert found == wanted
    assert [*executable._padded] == [8, 4]  # the largest first
    assert {*first._graphs._replays} == {*executable._graphs._replays}
    table = np.zeros((4, COLUMNS), np.int32)
    assert [executable.prepare(table) for _ in range(2)] == [True, False]
    assert ("body", 2, None, 0) in executable._graphs._replays
    assert not outputs(model, (), steps=STEPS[1:2])[1].prepare(table)


def test_operations_of_the_host_lie_between_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_checkpoint(tmp_path, "mixtral", "bfloat16", num_hidden_layers=1)
    known, slow, calls = run.encode, (ops.Attend, ops.Route, ops.SelectRows), set[Any]()

    def encode(graph: Any, recorder: Any) -> Any:
        wrong = [i for i, op in enumerate(graph.ops) if isinstance(op, slow)]
        found = known(graph, recorder, wrong)
        calls.update(found[i] for i in wrong)
        return found

    monkeypatch.setattr(run, "encode", encode)
    monkeypatch.setattr(run, "needs_host", lambda call, step: call in calls)
    wanted, _ = outputs(model, (), steps=STEPS[1:5])
    found, executable = outputs(model, (2, 4, 8, 16), steps=STEPS[1:5])
    assert found == wanted
    assert {graph[1:] for graph in executable._graphs._replays if graph[0] == "body"} == {
        (size, None, piece) for size in (4, 8) for piece in (0, 2, 4, 6)
    }


def test_split_attention_is_replayed_and_what_does_not_fit_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path, "llama", "bfloat16", num_hidden_layers=1, num_key_value_heads=1)
    wide, steps = msgspec.structs.replace(INTERPRETER, processors=16), [({0: 300}, [299]), *STEPS[1:]]
    wanted, _ = outputs(model, (), steps=steps)
    found, executable = outputs(model, (4, 8), wide, steps)
    assert found == wanted
    [[shape, work]] = executable._padded[4]._works.items()
    assert work.split is not None
    monkeypatch.setattr(run, "CLOSED_STATES", shape.state_bytes(16))
    assert outputs(model, (4, 8), wide, steps)[0] == wanted


@pytest.mark.parametrize("processors", [1, 7, 132])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4000)), min_size=1, max_size=12),
    st.sampled_from([(8, 1), (8, 8), (1, 1), (32, 8)]),
    st.sampled_from([0, 100]),
)
def test_lists_have_room_for_all_steps_of_their_size(
    processors: int, sequences: list[tuple[int, int]], heads: tuple[int, int], window: int
) -> None:
    shape = WorkShape(*heads, AttentionTile(16, 32, Shape()), window)
    counts = np.array([count for count, _ in sequences])
    cu_q, kv_len = (
        np.cumsum([0, *counts]).astype(np.int32),
        np.array([sum(one) for one in sequences], np.int32),
    )
    work = work_list(cu_q, kv_len, shape, processors)
    padded = work.padded(shape, int(counts.sum()), processors)  # ValueError: they have more items
    for rows, found in zip(work.lists, padded.lists, strict=True):
        assert (found[: len(rows)] == rows).all()
        assert (found[len(rows) :] == -1).all()


@pytest.mark.parametrize(
    "options",
    [{}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}}],
    ids=["plain", "drafts"],
)
def test_an_engine_answers_alike_with_graphs_and_without(tmp_path: Path, options: dict[str, Any]) -> None:
    model = write_checkpoint(tmp_path, "llama", "bfloat16", **SMALL)
    requests = [
        (COMMON, SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)),
        (COMMON[:20], SamplingParams(seed=1, max_tokens=6, logprobs=1, ignore_eos=True)),
        (list(b"abcabcabc"), SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)),
    ]
    own: dict[str, Any] = {"device": "interpreter", "max_num_batched_tokens": 24, **options}
    wanted = answers(model, requests, enforce_eager=True, **own)
    assert answers(model, requests, cudagraph_capture_sizes=[1, 4, 16, 24], **own) == wanted


def test_options_choose_the_steps_to_capture() -> None:
    cases = {
        (4, 8): (False, (), None),
        (1,): (False, ("2", "1"), 1),
        (4,): (False, (), 4),
        (): (True, ("8",), None),
    }
    for sizes, options in cases.items():
        assert selection.captured(Choices(graphs=(4, 8)), *options).graphs == sizes
    with pytest.raises(
        ConfigError, match="--cudagraph-capture-sizes must be numbers of tokens from 1 to 8192, got 0"
    ):
        selection.captured(Choices(), False, ("0",), None)


def test_memory_for_graphs_is_planned_for_gpus_that_are_elsewhere(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama", "bfloat16")
    found = {}
    for sizes in ((), (4, 8)):
        backend = make_backend(threads=1, device="sm_90")
        graph, spec = load_model(model, backend).graph, inspect_model(model).kv_spec("bfloat16")
        found[sizes] = backend.workspace_bytes(graph, spec, Limits(48, 4, 4, graphs=sizes))
    assert found[()] > run.CLOSED_STATES
    assert found[4, 8] - found[()] == 4 * GRAPH


def test_memory_for_graphs_follows_what_they_hold(tmp_path: Path) -> None:
    model, limits = write_checkpoint(tmp_path, "mixtral", "bfloat16"), Limits(48, 4, 4, 2, graphs=(4, 8))
    backend = make_backend(threads=1, device="sm_90")
    graph, spec = load_model(model, backend).graph, inspect_model(model).kv_spec("bfloat16")
    found = [
        backend.workspace_bytes(graph, spec, msgspec.structs.replace(limits, graphs=sizes))
        for sizes in ((), (4, 8))
    ]
    beside = Arena(fused(graph, True), spec, limits).beside
    assert found[1] - found[0] == 8 * GRAPH + beside * 8 // 48


def test_a_captured_step_may_not_read_the_device() -> None:
    made = Graphs((4,), InterpretedLauncher(), torch.device("cpu"))
    x, out = torch.ones(3), torch.zeros(3)

    def add() -> None:
        out.copy_(x * 2 + 1)

    def read() -> None:
        x.fill_(x[0].item())

    made.launch(("sum",), add)
    x.fill_(5.0)
    made.launch(("sum",), lambda: pytest.fail("captured twice"))
    assert out.tolist() == [11.0] * 3
    with pytest.raises(EngineError, match="reads a value of the device"):
        made.launch(("read",), read)


def test_a_gpu_that_captures_nothing_computes_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused:
        def __init__(self, *about: Any, **options: Any) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Refused)
    made, done = Graphs((4, 8), InterpretedLauncher(TARGETS["sm_90"]), torch.device("cpu")), list[int]()
    made._capture = graphs._captured
    assert [made.size_of(count) for count in (0, 1, 4, 5, 8, 9)] == [0, 4, 4, 8, 8, 0]
    with caplog.at_level(logging.WARNING):
        made.launch(("a",), lambda: done.append(1))
        made.launch(("a",), lambda: done.append(1))
    assert done == [1, 1]
    assert "kernels are launched one by one: operation not permitted" in caplog.text
    assert made.size_of(1) == 4  # as the other ranks pad it, which may have graphs
