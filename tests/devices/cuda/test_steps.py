"""A whole step as launches: compiled for real targets over tensors without values, so nothing in it reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import numpy as np
import torch

from quire.devices.choices import Choices
from quire.devices.cuda.aot import RecordingLauncher
from quire.devices.cuda.arena import Arena
from quire.devices.cuda.backend import CudaBackend
from quire.devices.cuda.cache import CudaKVCache, _independent
from quire.devices.cuda.jit import compile_launch
from quire.devices.cuda.target import TARGETS
from quire.devices.graph import last_reads, record
from quire.devices.ops import Add, Embed, Linear, Normalize, SelectRows, Tap, Value, operands
from quire.devices.protocol import KVSpec, Limits, ModelInput, Norm
from quire.model.info import AS_IT_IS, Asked
from quire.model.load import open_files
from quire.weights.hub import find_model
from tests.models import inspect_model
from tests.tiny import write_checkpoint


def row(*values: int) -> Any:
    return np.array(values, np.int32)


STEP = ModelInput(
    row(1, 2, 3), row(4, 5, 9), row(0, 2, 3), row(6, 10), row(1, 0), row(0, 0, 3, 5).reshape(2, 2), row(1, 2)
)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_step_compiles_without_a_gpu_and_reads_nothing_back(tmp_path: Path, target: str) -> None:
    shape = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = write_checkpoint(tmp_path, "qwen3", "bfloat16", **shape)
    backend = CudaBackend(None, Choices()).outline()
    backend._run = launcher = RecordingLauncher(TARGETS[target])
    files = open_files(find_model(str(model)), Asked("auto", None, AS_IT_IS))
    spec = inspect_model(model).kv_spec("bfloat16")
    executable = backend.compile(
        files.outline(backend).graph, backend.kv_cache(spec, 8, 64), Limits(32, 4, 8)
    )
    logits = executable.run(STEP).tensor
    assert logits.device.type == "meta"
    assert logits.dtype == torch.float32
    every = [compile_launch(launch, TARGETS[target]) for launch in launcher.launches.values()]
    names = [compiled.metadata.name for compiled in every]
    assert {"gather", "norm", "product", "turned_angles", "rope_store", "attention"} <= set(names)
    assert all(compiled.metadata.shared <= TARGETS[target].shared_bytes for compiled in every)


def test_values_that_live_together_lie_apart() -> None:
    backend, rng = CudaBackend(None, Choices()), np.random.default_rng(0)

    def weight(rows: int, columns: int) -> Any:
        return backend.matrix([rng.random((rows, columns), np.float32)], "float32")

    norm = Norm("rms", np.ones(32, np.float32), None, 1e-5)

    def hidden(g: Any) -> Any:
        x = g(Embed(weight(50, 32)))
        for _ in range(4):
            y = g(Linear(g(Normalize(x, norm)), weight(96, 32)))
            x = g(Add(x, g(Linear(y, weight(32, 96)))))
        return g(SelectRows(g(Tap(x))))

    graph = record(hidden, lambda g, x: g(Linear(x, weight(50, 32))), 50, 32)
    spec, limits = KVSpec(1, 1, 16, "float32"), Limits(20, 2, 4)
    arena, dropped = Arena(graph, spec, limits), last_reads(graph)
    ends = {}
    for index in range(len(graph.ops)):
        ends |= dict.fromkeys(dropped[index], index)
    spans = []
    for index, place in enumerate(arena.places):
        if not isinstance(graph.ops[index], Tap):
            rows = 4 if index >= graph.body else 20
            spans.append(
                (
                    index,
                    ends.get(Value(index), len(graph.ops)),
                    place.begin,
                    place.begin + rows * place.width * 4,
                )
            )
    for i, (begin, end, low, high) in enumerate(spans):
        for other_begin, _, other_low, other_high in spans[i + 1 :]:
            assert other_begin > end or other_low >= high or other_high <= low, (begin, other_begin)
    assert arena.nbytes < sum(high - low for _, _, low, high in spans)
    tapped = next(index for index, op in enumerate(graph.ops) if isinstance(op, Tap))
    x = arena.places[operands(graph.ops[tapped])[0]]
    assert all(place.begin != x.begin for place in arena.places[tapped + 1 :])


def test_copies_of_blocks_keep_their_order() -> None:
    copies = [(1, 2), (2, 3), (5, 2), (4, 6), (4, 7), (7, 1)]
    spec = KVSpec(2, 2, 16, "int8")
    cache = CudaKVCache(spec, 8, 16, torch.device("cpu"))
    for layer in cache.layers:
        for side in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            side.copy_(torch.arange(8).reshape(8, *[1] * (side.ndim - 1)).expand(side.shape))
    cache.copy_blocks(copies)
    wanted = list(range(8))
    for source, destination in copies:
        wanted[destination] = wanted[source]
    for layer in cache.layers:
        for side in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            assert side.reshape(8, -1)[:, -1].tolist() == wanted
    assert [len(batch) for batch in _independent(copies)] == [1, 4, 1]
