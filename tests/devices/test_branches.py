"""Branches of trees of drafts: their logits are bit for bit those of a chain, on every backend and kind of cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.devices.cpu.backend import NativeBackend
from quire.devices.protocol import Backend, KVDtype, Limits, ModelInput
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import EngineError
from tests.devices.native_cases import int32
from tests.devices.test_native_plan import V, model

CONTEXT = 5  # tokens before the step; blocks have 4
MAIN, BRANCH, DEEPER = [9, 20, 21, 22], [30, 31], [40, 41, 42]
BACKENDS: dict[str, Any] = {"native": lambda: NativeBackend(2), "reference": ReferenceBackend}


def torch_backend() -> Backend:
    return pytest.importorskip("quire.devices.torch.backend").TorchBackend(1)


def run(backend: Backend, kv_dtype: KVDtype, inputs: ModelInput, copies: list[tuple[int, int]]) -> np.ndarray:
    """The logits of a step after a prefill of CONTEXT tokens in slot 0."""
    graph, spec = model(backend, "float32", kv_dtype)
    cache = backend.kv_cache(spec, 24, 4)
    executable: Any = backend.compile(graph, cache, Limits(24, 4, 24))
    positions = np.arange(CONTEXT, dtype=np.int32)
    executable.run(
        ModelInput(
            positions, positions, int32(0, CONTEXT), int32(CONTEXT), int32(0), inputs.block_table_SM, int32()
        )
    )
    cache.copy_blocks(copies)
    found: np.ndarray = executable.run(inputs).numpy().copy()
    return found


def chain(tokens: list[int]) -> ModelInput:
    count = len(tokens)
    positions = np.arange(CONTEXT, CONTEXT + count, dtype=np.int32)
    rows = np.arange(count, dtype=np.int32)
    table = np.arange(8, dtype=np.int32).reshape(1, 8)
    return ModelInput(
        int32(*tokens), positions, int32(0, count), int32(CONTEXT + count), int32(0), table, rows
    )


def tree() -> tuple[ModelInput, list[tuple[int, int]]]:
    """MAIN at positions 5 to 8, BRANCH after its second token at 7 and 8, DEEPER after BRANCH's first at 8 to 10."""
    table = np.zeros((3, 8), np.int32)
    table[0, :4] = 0, 1, 2, 3
    table[1, :3] = 0, 10, 11  # position 7 is in block 1
    table[2, :3] = 0, 10, 12  # position 8 begins block 2
    positions = int32(5, 6, 7, 8, 7, 8, 8, 9, 10)
    inputs = ModelInput(
        int32(*MAIN, *BRANCH, *DEEPER),
        positions,
        int32(0, 4, 6, 9),
        int32(9, 9, 11),
        int32(0, 1, 2),
        table,
        np.arange(9, dtype=np.int32),
        echoes_E2=np.array([(0, 1), (1, 1)], np.int32),
    )
    return inputs, [(1, 10)]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", [*BACKENDS, "torch"])
def test_branches_equal_chains(name: str, kv_dtype: KVDtype) -> None:
    backend = torch_backend() if name == "torch" else BACKENDS[name]()
    found = run(backend, kv_dtype, *tree())
    paths = {
        (0, 1, 2, 3): MAIN,
        (0, 1, 4, 5): MAIN[:2] + BRANCH,
        (0, 1, 4, 6, 7, 8): MAIN[:2] + BRANCH[:1] + DEEPER,
    }
    for rows, tokens in paths.items():
        wanted = run(backend, kv_dtype, chain(tokens), [])
        if name == "native":
            assert found[list(rows)].tobytes() == wanted.tobytes()
        else:
            np.testing.assert_allclose(found[list(rows)], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("echo", [(9, 1), (-1, 1), (0, 3), (8, 0)])
@pytest.mark.parametrize("name", BACKENDS)
def test_bad_echoes_are_refused(name: str, echo: tuple[int, int]) -> None:
    inputs, copies = tree()
    bad = ModelInput(
        inputs.tokens_T, inputs.positions_T, inputs.cu_q_B1, inputs.kv_len_B, inputs.slots_B, inputs.block_table_SM,
        inputs.logit_rows_L, echoes_E2=np.array([echo], np.int32),
    )  # fmt: skip
    with pytest.raises(EngineError):
        run(BACKENDS[name](), "float32", bad, copies)
    assert max(MAIN + BRANCH + DEEPER) < V
