"""Mixtures of experts in the interpreter: choices, sorted pairs, sums. Values against float64, and bits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.kernels import experts, routing
from quire.devices.cuda.kernels.experts import Experts
from quire.devices.cuda.target import TARGETS
from quire.devices.formulas import route_row
from quire.devices.operands import Routing
from quire.weights.activations import round_int8
from tests.devices.cuda.test_packed import weight_of

RUN = InterpretedLauncher()
FLOAT64 = SimpleNamespace(
    xp=np,
    double=lambda x: np.asarray(x, np.float64),
    own=lambda x: np.asarray(x, np.float64),
    host=np.asarray,
    order=lambda x: np.argsort(x, kind="stable"),
    taken=lambda x, places: np.take_along_axis(x, np.asarray(places, np.int64), -1),
    activate=lambda kind, x: 1 / (1 + np.exp(-x)) if kind == "sigmoid" else np.log1p(np.exp(x)),
)


def drawn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape))).to(dtype)


def routed(scores: Any, about: Routing, **more: Any) -> tuple[Any, Any]:
    chosen = about.top_k + about.shared
    ids = torch.full((len(scores), chosen), -9, dtype=torch.int32)
    weights = torch.full((len(scores), chosen), torch.nan)
    routing.route(RUN, scores, about, ids, weights, **more)
    return ids, weights


@pytest.mark.parametrize(
    "about",
    [
        Routing(8, 2),
        Routing(12, 3, renormalize=True, scale=2.5),
        Routing(8, 2, softmax_after=True),
        Routing(20, 4, "sigmoid", num_groups=5, top_groups=2, group_sum=True, renormalize=True),
        Routing(24, 3, num_groups=4, top_groups=2),
        Routing(8, 3, "root_softplus", renormalize=True),
        Routing(8, 2, shared=True),
        Routing(8, 2, shared=True, shared_gate=True),
        Routing(8, 2, "sigmoid", softmax_after=True, correct_logits=True),
        Routing(16, 2, sparse_mixer=0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("corrected", [False, True])
def test_choices(about: Routing, corrected: bool) -> None:
    scores = drawn(6, about.num_experts + about.shared_gate)
    scores[1, 3] = scores[1, 5] = 2.0  # of equal ones, the lower id
    correction = drawn(about.num_experts, seed=3) if corrected and not about.sparse_mixer else None
    scales = torch.rand(about.num_experts) + 0.5 if corrected and not about.sparse_mixer else None
    ids, weights = routed(scores, about, correction=correction, weight_scales=scales)
    for row, own, shares in zip(scores, ids, weights, strict=True):
        added = [None if x is None else x.double().numpy() for x in (correction, scales)]
        wanted = np.array(route_row(FLOAT64, row.numpy(), about, *added))
        assert own.tolist() == wanted[: len(own)].tolist()
        assert np.allclose(shares, wanted[len(own) :], rtol=1e-5, atol=1e-6)


def test_experts_that_a_table_names() -> None:
    scores, about = drawn(3, 10), Routing(10, 2, "sigmoid", renormalize=True)
    given = torch.tensor([[4, 9], [0, 1], [7, 2]], dtype=torch.int32)
    ids, weights = routed(scores, about, given=given)
    assert torch.equal(ids, given)
    shares = torch.sigmoid(scores.double()).gather(1, given.long())
    assert torch.allclose(weights.double(), shares / shares.sum(1, keepdim=True), rtol=1e-5)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(4, 9), st.integers(0, 99))
@settings(max_examples=12)
def test_pairs_are_sorted_by_expert_and_stay_in_order(
    tokens: int, chosen: int, count: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    ids = torch.from_numpy(
        np.stack([draw.permutation(count)[:chosen] for _ in range(tokens)]).astype(np.int32)
    )
    table = torch.arange(count)  # the first has no weights
    most = tokens * chosen // 16 + min(tokens * chosen, count)
    counts, owners, pairs = (torch.full((n,), -7, dtype=torch.int32) for n in (count, most, most * 16))
    routing.sort_pairs(RUN, ids, table, counts, owners, pairs, 16)
    found: dict[int, list[int]] = {}
    for tile, expert in enumerate(owners.tolist()):
        own = pairs[tile * 16 : tile * 16 + 16].tolist()
        if expert >= 0:
            kept = [pair for pair in own if pair >= 0]
            assert kept
            assert own[len(kept) :] == [-1] * (16 - len(kept))
            found.setdefault(expert, []).extend(kept)
    flat = ids.reshape(-1).tolist()
    wanted = {e: [i for i, own in enumerate(flat) if own == e] for e in range(1, count) if e in flat}
    assert found == wanted
    assert counts.tolist() == [0, *(flat.count(e) for e in range(1, count))]


def inputs_of(columns: int, seed: int) -> Any:
    """An order of columns, and their factors."""
    draw = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(columns, generator=draw), torch.rand(columns, generator=draw) + 0.5])


class Mixture:
    """Experts of one or several inner widths; the last one may return its input."""

    def __init__(self, sizes: list[int], width: int, dtype: Any, **about: Any) -> None:
        gated, self.sizes, self.width = about.get("gated", True), sizes, width
        self.up: list[Any] = [None] * len(sizes)
        self.down: list[Any] = [None] * len(sizes)
        self.inputs = dict[tuple[str, int], Any]()
        self.kind, packs = about.pop("kind", None), ([None] * len(sizes), [None] * len(sizes))
        for i, size in enumerate(sizes):
            shapes = (size * (1 + gated), width), (width, size)
            for held, side, shape in zip(packs, (self.up, self.down), shapes, strict=True):
                if size and self.kind is None:
                    side[i] = drawn(*shape, dtype=dtype, seed=i if side is self.up else 9 + i)
                elif size:
                    held[i], side[i] = weight_of(*self.kind[:2], *shape, seed=i)
                    side[i] /= 16
                    for numbers in (held[i].scales, held[i].offsets):
                        if numbers is not None:
                            numbers.mul_(1 / 16)
        self.biases = about.pop("biases", False)
        largest = max(sizes)
        up_bias = drawn(len(sizes), largest * (1 + gated)) if self.biases else None
        down_bias = drawn(len(sizes), width) if self.biases else None
        self.held = Experts(
            *map(self.weights, (self.up, self.down), packs, (dtype, dtype)),
            torch.tensor(sizes, dtype=torch.int32), largest, about.pop("activation", "silu"), up_bias=up_bias,
            down_bias=down_bias, **about,
        )  # fmt: skip

    def weights(self, values: list[Any], packs: list[Any], dtype: Any) -> experts.Weights:
        if self.kind is None:
            return experts.Weights(experts.addresses(values, "cpu"), dtype)
        self.packs = [*getattr(self, "packs", []), packs]  # they must outlive their addresses
        first = next(pack for pack in packs if pack is not None)
        tables = [
            None
            if has is None
            else experts.addresses([None if p is None else p.tensors[i] for p in packs], "cpu")
            for i, has in enumerate(first.tensors)
        ]
        return experts.Weights(tables[0], first.form.number, first.form, *tables[1:], self.kind[2])

    def arrange(self) -> None:
        """Give inputs to the weights of all experts but the first."""
        for side, values in (("up", self.up), ("down", self.down)):
            held = [None if w is None or not e else inputs_of(w.shape[1], e) for e, w in enumerate(values)]
            self.inputs.update(((side, e), own) for e, own in enumerate(held) if own is not None)
            table = replace(getattr(self.held, side), inputs=experts.addresses(held, "cpu"))
            self.held = replace(self.held, **{side: table})

    def run(self, run: InterpretedLauncher, x: Any, ids: Any, weights: Any) -> Any:
        def poisoned(*shape: int, dtype: Any) -> Any:
            return torch.full(shape, torch.nan if dtype.is_floating_point else -7).to(dtype)

        room = experts.expert_scratch(run, x, ids.shape[1], self.held, self.width, poisoned)
        out = poisoned(len(x), self.width, dtype=x.dtype)
        experts.run_experts(run, x, ids, weights, self.held, room, out)
        return out

    def seen(self, x: Any, side: str, expert: int) -> Any:
        """What a product reads of its input."""
        if (side, expert) in self.inputs:
            order, factors = self.inputs[side, expert]
            x = x[order.long()] * factors
        if self.kind is None or not self.kind[2]:
            return x
        return torch.from_numpy(round_int8(x.float().numpy()[None])[0]).double()

    def answer(self, x: Any, ids: Any, weights: Any) -> Any:
        about, rows = self.held, []
        for t, own in enumerate(ids.tolist()):
            total = torch.zeros(self.width, dtype=torch.float64)
            for expert, share in zip(own, weights[t].double(), strict=True):
                y = x[t].double() * (share if about.weigh_inputs else 1.0)
                if self.sizes[expert]:
                    y = self.up[expert].double() @ self.seen(y, "up", expert)
                    if about.up_bias is not None:
                        y = y + about.up_bias[expert][: len(y)]
                    y = torch.nn.functional.silu(y[::2]) * y[1::2] if about.gated else torch.relu(y)
                    y = self.down[expert].double() @ self.seen(y, "down", expert)
                    y = y if about.down_bias is None else y + about.down_bias[expert]
                total += y * (1.0 if about.weigh_inputs else share)
            rows.append(total)
        return torch.stack(rows)


def chosen(tokens: int, count: int) -> Any:
    """Two of `count` experts for each token: int32 [T, 2]."""
    return torch.from_numpy(
        np.stack([np.random.default_rng(t).permutation(count)[:2] for t in range(tokens)]).astype(np.int32)
    )


def answered(mixture: Mixture, x: Any, close: float) -> tuple[Any, Any, Any]:
    """Experts and weights of rows, and what the kernels make of them, which is close to the right answer."""
    ids, weights = chosen(len(x), 4), torch.rand(len(x), 2) + 0.1
    wanted, out = mixture.answer(x, ids, weights), mixture.run(RUN, x, ids, weights)
    assert torch.allclose(out.double(), wanted, rtol=close, atol=close * float(wanted.abs().max()))
    return ids, weights, out


@pytest.mark.parametrize(
    ("sizes", "about"),
    [
        ([48, 48, 48, 48], {}),
        ([128] * 4, {"aligned": True}),
        ([40, 40, 24, 0], {"biases": True}),
        ([48] * 4, {"gated": False, "activation": "relu"}),
        ([48, 48, 48, 0], {"weigh_inputs": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixtures(sizes: list[int], about: dict, dtype: Any) -> None:
    mixture, x = Mixture(sizes, 128, dtype, **dict(about)), drawn(7, 128, dtype=dtype) / 8
    answered(mixture, x, 3e-2 if dtype == torch.bfloat16 else 1e-5)


PACKED = [
    ("int8", 0, True), ("int8", 32, False), ("int4", 32, True), ("int4 with zeros", 64, False), ("fp8", 0, False),
    ("e2m1", 16, False), ("int4 with offsets", 32, False), ("table", 64, False),
]  # fmt: skip


def closeness(kind: Any) -> float:
    return 2e-3 if kind[2] else 1e-5  # a number halfway may be rounded otherwise


@pytest.mark.parametrize("kind", PACKED, ids=str)
@pytest.mark.parametrize(
    ("sizes", "about"),
    [
        ([128] * 4, {"aligned": True}),
        ([48, 40, 24, 0], {"biases": True}),
        ([48, 48, 48, 0], {"weigh_inputs": True}),
    ],
    ids=str,
)
def test_mixtures_of_packed_weights(sizes: list[int], about: dict, kind: Any) -> None:
    answered(Mixture(sizes, 128, torch.float32, kind=kind, **about), drawn(7, 128) / 8, closeness(kind))


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kind", [None, *PACKED], ids=str)
def test_a_token_follows_no_batch(target: str, kind: Any) -> None:
    """Few and many tokens have tiles of their own; places in a tile and the order of choices do not matter."""
    run, mixture = InterpretedLauncher(TARGETS[target]), Mixture([48, 48, 80], 128, torch.bfloat16, kind=kind)
    x, weights = drawn(60, 128, dtype=torch.bfloat16), torch.rand(60, 2)
    ids = chosen(60, 3)
    every = mixture.run(run, x, ids, weights)
    few, many = (experts.expert_tile(run, count, 2, 3, mixture.held.up)[0] for count in (1, 60))
    assert few != many
    for rows in ([3], [59, 3]):
        alone = mixture.run(run, x[rows].clone(), ids[rows].clone(), weights[rows].clone())
        assert torch.equal(alone, every[rows])
    assert torch.equal(mixture.run(run, x[:4].clone(), ids[:4].flip(1), weights[:4].flip(1)), every[:4])


@pytest.mark.parametrize("kind", PACKED[1:4], ids=str)
@pytest.mark.parametrize("about", [{"biases": True}, {"weigh_inputs": True}], ids=str)
def test_experts_have_inputs_in_orders_of_their_own(about: dict, kind: Any) -> None:
    mixture, x = Mixture([48, 40, 24, 0], 128, torch.float32, kind=kind, **about), drawn(7, 128) / 8
    mixture.arrange()
    ids, weights, out = answered(mixture, x, closeness(kind))
    alone = mixture.run(RUN, x[5:6].clone(), ids[5:6].clone(), weights[5:6].clone())
    assert torch.equal(alone[0], out[5])


def test_routing_of_a_token_follows_no_batch() -> None:
    about, scores = Routing(20, 4, num_groups=5, top_groups=2, renormalize=True), drawn(5, 20)
    ids, weights = routed(scores, about)
    alone = routed(scores[3:4].clone(), about)
    assert torch.equal(alone[0][0], ids[3])
    assert torch.equal(alone[1][0], weights[3])
