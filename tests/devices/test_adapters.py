"""Adapters beside products, in every instruction set: as the reference computes them, and each row as it is alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quire.devices.adapters import Adapter, Change, Up
from quire.devices.graph import record
from quire.devices.ops import Add, Embed, GatedLinear, Linear, Normalize, Route, RunExperts, SelectRows
from quire.devices.protocol import Backend, Expert, KVSpec, Limits, ModelInput, Norm, Routing
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import EngineError
from tests.devices.native_cases import ISAS, int32, native, normal

D, INNER, V, SLOTS = 40, 56, 70, 4
SPEC = KVSpec(num_layers=1, num_kv_heads=2, head_dim=16, dtype="float32")


class Made:
    """A small model with every kind of product, and adapters that change all of them."""

    def __init__(self, backend: Backend, dtype: Any = "float32") -> None:
        rng = np.random.default_rng(0)

        def matrix(out: int, width: int) -> Any:
            return backend.matrix([normal(rng, out, width) * np.float32(width**-0.5)], dtype)

        self.backend = backend
        self.table, self.head = matrix(V, D), backend.head([normal(rng, V, D)], dtype)
        self.norm = Norm("rms", normal(rng, D) * 0.2 + 1, None, 1e-5)
        self.wide = Norm("layer", normal(rng, D) * 0.2 + 1, normal(rng, D), 1e-5)
        self.inner, self.outer = matrix(INNER, D), matrix(D, INNER)
        self.gated = backend.gated_matrix(normal(rng, INNER, D), normal(rng, INNER, D), dtype)
        self.bias, self.gated_bias = normal(rng, INNER), normal(rng, 2 * INNER)
        self.router = matrix(3, D)
        self.experts = tuple(
            Expert(
                backend.gated_matrix(normal(rng, INNER, D), normal(rng, INNER, D), dtype),
                None,
                matrix(D, INNER),
                normal(rng, D),
                path=f"experts.{e}",
            )
            for e in range(3)
        )
        self.graph = record(self.hidden, lambda g, h: g(Linear(h, self.head, path="head")), V, D)
        cache = backend.kv_cache(SPEC, 8, 8)
        self.executable: Any = backend.compile(self.graph, cache, Limits(64, 8, 64, SLOTS))

    def hidden(self, g: Any) -> Any:
        x = g(Embed(self.table, 0.5, "table"))
        y = g(Linear(g(Normalize(x, self.norm, "norm")), self.inner, self.bias, "gelu", path="inner"))
        x = g(Linear(y, self.outer, residual=x, path="outer"))
        normed = g(Normalize(x, self.wide, "wide"))
        y = g(GatedLinear(normed, self.gated, "silu", self.gated_bias, path="gated"))
        x = g(Add(x, g(Linear(y, self.outer, path="outer")), 0.5))
        routes = g(Route(g(Linear(normed, self.router, path="router")), Routing(3, 2)))
        return g(SelectRows(g(Add(x, g(RunExperts(normed, routes, self.experts, "silu")), 0.5))))

    def adapter(self, seed: int, rank: int) -> Adapter:
        rng = np.random.default_rng(seed)

        def change(matrix: Any, *starts: int, gain: bool = False, shift: bool = False) -> Change:
            out, width = matrix.shape
            bounds = [*starts, out]
            ups = [
                Up(normal(rng, stop - start, rank) * np.float32(0.4), i * rank, start)
                for i, (start, stop) in enumerate(pairwise(bounds))
            ]
            down = normal(rng, rank * len(ups), width) * np.float32(width**-0.5)
            return Change(
                down,
                tuple(ups),
                normal(rng, out) * np.float32(0.2) + 1 if gain else None,
                normal(rng, out) if shift else None,
            )

        odd = bool(seed % 2)
        changes = {
            "inner": change(self.inner, 0, gain=odd),
            "outer": change(self.outer, 0, 13, gain=odd, shift=not odd),
            "gated": change(self.gated, 0, INNER, gain=not odd, shift=odd),
            "router": change(self.router, 0),
            "experts.1.gate_up": change(self.experts[1].up, 0, gain=odd),
            "experts.2.down": change(self.experts[2].down, 0, shift=odd),
        }
        if odd:
            changes["head"] = change(self.head, 0)
        if seed == 2:
            whole = self.backend.matrix([normal(rng, V, D)], "float32")
            changes["head"] = Change(weight=whole)
        table = Change(
            normal(rng, rank, V), (Up(normal(rng, D, rank), 0, 0),), normal(rng, D) if odd else None
        )
        norms = {"norm": Norm("rms", normal(rng, D), None, 1e-5)} if odd else {}
        return Adapter({**changes, "table": table}, norms)

    def load(self) -> Made:
        for slot, rank in enumerate((1, 4, 17, 33)):
            assert self.executable.adapt(slot, self.adapter(slot, rank)) > 0
        return self


def step(lengths: list[int], adapters: list[int] | None, seed: int = 3) -> ModelInput:
    """Sequences of so many tokens, each with its own token ids, all of whose rows are read."""
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    tokens = np.random.default_rng(seed).integers(0, V, cu[-1]).astype(np.int32)
    slots, table = np.arange(len(lengths), dtype=np.int32), np.arange(8, dtype=np.int32).reshape(8, 1)
    rows = np.arange(cu[-1], dtype=np.int32)
    given = None if adapters is None else int32(*adapters)
    return ModelInput(tokens, positions, cu, int32(*lengths), slots, table, rows, adapters_B=given)


MIX = [5, 1, 8, 2, 1, 7, 3], [0, -1, 2, 3, 1, 3, -1]


@pytest.mark.parametrize("isa", ISAS)
def test_native_adapters_equal_the_references(isa: str) -> None:
    right = Made(ReferenceBackend()).load().executable.run(step(*MIX)).numpy()
    found = Made(native(isa)).load().executable.run(step(*MIX)).numpy()
    assert np.abs(found - right).max() < 2e-4 * np.abs(right).max()
    base = Made(ReferenceBackend()).executable.run(step(MIX[0], None)).numpy()
    changed = np.abs(base - right).max(axis=1) > 0.1
    assert changed.tolist() == np.repeat(np.array(MIX[1]) >= 0, MIX[0]).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS)
def test_each_row_is_what_it_is_alone(isa: str, dtype: str) -> None:
    """Poisoned memory, one thread or two: a sequence's bits depend on its own adapter alone."""
    made, lengths, adapters = Made(native(isa), dtype).load(), *MIX
    made.executable._plan.poison()
    together = made.executable.run(step(lengths, adapters)).numpy().copy()
    plain = Made(native(isa, threads=1), dtype)
    mixed, start = step(lengths, adapters), 0
    for length, adapter in zip(lengths, adapters, strict=True):
        one = step([length], [adapter])
        alone = ModelInput(mixed.tokens_T[start : start + length], *list_of(one)[1:])
        engine = made.executable if adapter >= 0 else plain.executable
        engine._plan.poison()
        assert engine.run(alone).numpy().tobytes() == together[start : start + length].tobytes()
        start += length


def list_of(inputs: ModelInput) -> list[Any]:
    return [getattr(inputs, name) for name in inputs.__struct_fields__]


def test_greedy_rows_know_the_largest_logit_of_their_adapter() -> None:
    made = Made(native()).load()
    whole = made.executable.run(step(*MIX)).numpy().copy()
    fields = list_of(step(*MIX))
    fields[ModelInput.__struct_fields__.index("greedy")] = True
    greedy = made.executable.run(ModelInput(*fields))
    sampler = native().sampler(V)
    del sampler
    for row, best in enumerate(greedy.best.tolist()):
        assert best in (-1, int(whole[row].argmax()))
        if best == -1:
            assert greedy.values[row].tobytes() == whole[row].tobytes()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_slot_without_an_adapter_is_refused(backend: str) -> None:
    made = Made(native() if backend == "native" else ReferenceBackend())
    made.executable.adapt(1, made.adapter(1, 2))
    with pytest.raises(EngineError, match="no adapter in slot 2"):
        made.executable.run(step([1, 1], [1, 2]))
    with pytest.raises(EngineError, match=r"outside 0\.\.3"):
        made.executable.adapt(4, made.adapter(1, 2))
    made.executable.adapt(1, None)
    with pytest.raises(EngineError, match="no adapter in slot 1"):
        made.executable.run(step([1, 1], [1, -1]))


def test_changes_that_do_not_fit_are_refused() -> None:
    made = Made(native())
    down, up = np.zeros((2, D), np.float32), np.zeros((INNER, 2), np.float32)
    for change in (
        Change(down[:, 1:].copy(), (Up(up, 0, 0),)),
        Change(down, (Up(up, 1, 0),)),
        Change(down, (Up(up, 0, 1),)),
        Change(down, (Up(up, 0, 0),), gain=np.ones(D, np.float32)),
        Change(weight=made.backend.matrix([np.zeros((INNER, D), np.float32)], "float32")),
    ):
        with pytest.raises(EngineError):
            made.executable.adapt(0, Adapter({"inner": change}))
    with pytest.raises(EngineError, match="does not compute"):
        made.executable.adapt(0, Adapter({"norm": Change()}))
