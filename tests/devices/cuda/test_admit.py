"""Products by other kernels: which are admitted, at what sizes, and that a request's tokens stay what they were."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch

from quire.devices.cuda import admit
from quire.devices.cuda.admit import Admission, Product, Trial, chosen, judge, pieces
from quire.devices.cuda.arena import Arena
from quire.devices.cuda.backend import CudaBackend
from quire.devices.cuda.fuse import fused
from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.kernels import few, products
from quire.devices.cuda.kernels.packed import PackedWeight
from quire.devices.cuda.libraries import Form, Library, of_torch
from quire.devices.cuda.pack import CudaMatrix
from quire.devices.cuda.selfcheck import Checks, Verdict
from quire.devices.ops import GatedLinear, Linear
from quire.devices.protocol import Limits
from quire.devices.registry import make_backend
from quire.weights.schemes import scheme
from tests.devices.cuda.test_engine import REQUESTS, SMALL, answers, tokens
from tests.devices.cuda.test_products import drawn, near, poison
from tests.models import inspect_model, load_model
from tests.tiny import write_checkpoint

RUN = InterpretedLauncher()
BF16, SINGLE = torch.bfloat16, torch.float32
ASKED = [(tokens[:12], params) for tokens, params in REQUESTS[:2]]
TYPES = BF16, torch.float16, SINGLE
TRIED = [1, 8, 16, 17, 33]
Multiply = Callable[[Any, Any], Any]


def library(name: str, multiply: Multiply, types: tuple[Any, ...] = TYPES) -> Library:
    """One whose products are multiply(x, weight), rounded to the type of out."""

    def form(run: Any, weight: CudaMatrix, act: Any) -> Form:
        return Form(lambda x, out: out.copy_(multiply(x, weight.values)), types)

    return Library(name, "1", form)


def in_tiles(x: Any, weight: Any, width: int = 128) -> Any:
    """Sum in our order: float32 sums of tiles of K, each in float64."""
    total = torch.zeros(len(x), len(weight))
    for a, b in zip(x.split(width, 1), weight.split(width, 1), strict=True):
        total = (total.double() + a.double() @ b.double().T).float()
    return total


def wrong_once(x: Any, weight: Any) -> Any:
    found = in_tiles(x, weight)
    found[-1, -1] += 0.25 * (len(x) == 17)
    return found


def failing(x: Any, weight: Any) -> Any:
    raise RuntimeError("no such algorithm")


LIBRARIES = {
    "ours": library("ours", in_tiles),
    "steady": library("steady", partial(in_tiles, width=16)),
    "by rows": library("by rows", lambda x, w: in_tiles(x, w, 16 if len(x) > 20 else 32)),
    "once": library("once", wrong_once),
    "inaccurate": library("inaccurate", lambda x, w: 1.003 * in_tiles(x, w)),
    "coarse": library("coarse", lambda x, w: in_tiles(x.to(torch.float8_e4m3fn).float(), w)),
    "wrong": library("wrong", lambda x, w: -in_tiles(x, w)),
    "missing": library("missing", lambda x, w: torch.nan),
    "failing": library("failing", failing),
    "torch": Library("torch", torch.__version__, partial(of_torch, True)),
}


def weight_of(rows: int, columns: int, dtype: Any = SINGLE) -> CudaMatrix:
    return CudaMatrix((drawn(rows, columns, seed=5) / columns**0.5).to(dtype))


def product(
    weight: CudaMatrix, bias: Any = None, activation: str | None = None, gated: bool = False
) -> Product:
    return Product(RUN, weight, bias, activation, 0.0, gated)


@pytest.fixture
def some_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit, "SIZES", (1, 2, 4, 8, 17))


def test_libraries_are_admitted_by_their_bits() -> None:
    given = product(weight_of(24, 272))
    for every in (False, True):
        found = judge(given, LIBRARIES, (SINGLE, SINGLE, False), TRIED, True, every)
        assert found.pop("ours") == Verdict(True, True, tuple(TRIED))
        assert {name for name, one in found.items() if one.accurate} >= {"steady", "by rows"}
        assert not any(
            one.accurate for name, one in found.items() if name in ("wrong", "missing", "failing", "once")
        )
        assert not found["inaccurate"].accurate
        assert not found["coarse"].accurate
        assert {one.sizes for one in found.values()} == {()}, found
    others = {name: one for name, one in LIBRARIES.items() if name != "ours"}
    found = judge(given, others, (SINGLE, SINGLE, False), TRIED, True, True)
    assert found.pop("steady") == Verdict(True, False, tuple(TRIED))
    assert {one.sizes for one in found.values()} == {()}, found


def test_torch_on_the_cpu_has_other_bits_and_is_refused() -> None:
    """Its order of a sum follows the number of rows, as numpy's does, so it serves where bits may follow them."""
    given, about = product(weight_of(512, 1024)), (SINGLE, SINGLE, False)
    sizes = [1, 8, 64, 512]
    [exact] = judge(given, {"torch": LIBRARIES["torch"]}, about, sizes, True, True).values()
    assert exact == Verdict(True, False, ())
    [loose] = judge(given, {"torch": LIBRARIES["torch"]}, about, sizes, False, True).values()
    assert loose == Verdict(True, False, tuple(sizes))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, SINGLE])
@pytest.mark.parametrize(
    ("activation", "gated", "plain"), [("silu", True, False), ("relu2", False, False), (None, False, True)]
)
def test_what_runs_is_compared_with_its_end(dtype: Any, activation: Any, gated: bool, plain: bool) -> None:
    given = product(weight_of(48, 272, dtype), None if plain else drawn(48), activation, gated)
    some = {name: LIBRARIES[name] for name in ("ours", "once", "wrong")}
    found = judge(given, some, (dtype, dtype, not gated and not plain), [1, 8, 17, 65], True, True)
    assert {name: one.sizes for name, one in found.items()} == {
        "ours": (1, 8, 17, 65),
        "once": (),
        "wrong": (),
    }


def test_a_library_without_float32_sums_is_rounded_before_its_end() -> None:
    given = product(weight_of(48, 272, BF16), drawn(48), "silu", gated=True)
    half = {"half": library("half", in_tiles, (BF16,))}
    assert judge(given, half, (BF16, BF16, False), TRIED, True, False)["half"] == Verdict(True, False, ())
    assert judge(given, half, (BF16, BF16, False), TRIED, True, True)["half"] == Verdict(
        True, False, tuple(TRIED)
    )


def test_a_weight_without_values_admits_nothing() -> None:
    found = judge(
        product(CudaMatrix(torch.zeros(8, 32))),
        {"ours": LIBRARIES["ours"]},
        (SINGLE, SINGLE, False),
        [1, 8],
        True,
        True,
    )
    assert found["ours"].sizes == ()


def test_time_chooses_among_bits() -> None:
    ours = {1: 1.0, 64: 1.0, 2048: 1.0}

    def trial(*times: float, **about: bool) -> Trial:
        return Trial(
            dict(zip(ours, times, strict=True)), **{"accurate": True, "equal": True, "steady": True, **about}
        )

    quick, slow, other = trial(2.0, 0.5, 0.5), trial(1.0, 0.9, 0.4), trial(0.1, 0.1, 0.1, equal=False)
    loose = trial(0.01, 0.01, 0.01, equal=False, steady=False)
    given = {"quick": quick, "slow": slow, "other": other, "loose": loose}
    assert chosen(given, ours, True, False) == {"quick": [64], "slow": [2048]}
    assert chosen(given, ours, True, True) == {"other": [1, 64, 2048]}
    assert chosen(given, ours, False, False) == {"loose": [1, 64, 2048]}
    # Decoding counts most: one that is slower there does not replace ours.
    assert chosen({"other": trial(1.2, 1.2, 0.1, equal=False)}, ours, True, True) == {}
    assert chosen({"wrong": trial(0.1, 0.1, 0.1, accurate=False)}, ours, False, True) == {}


def test_rows_are_computed_at_sizes_that_were_tried() -> None:
    form = Form(lambda x, out: None, TYPES)
    forms = dict.fromkeys((1, 8, 512, 2048), form)

    def found(rows: int, exact: bool, whole: bool) -> list[tuple[int, bool]]:
        given = [*pieces(rows, forms, exact, whole)]
        assert [0, *(stop for _, stop, _ in given)] == [*(start for start, _, _ in given), rows]
        return [(stop - start, one is form) for start, stop, one in given]

    assert found(8, True, False) == [(8, True)]
    assert found(9, True, False) == [(9, False)]
    assert found(5000, True, False) == [(2048, True), (2048, True), (512, True), (392, False)]
    assert found(520, True, False) == [(512, True), (8, True)]
    assert found(11, True, True) == [(8, True), (1, True), (1, True), (1, True)]
    assert found(9, False, False) == [(9, True)]
    assert found(3000, False, False) == [(3000, False)]


def admitted(tmp_path: Path, names: list[str], exact: bool = True, every: bool = True) -> Admission:
    return Admission(
        [LIBRARIES[name] for name in names], Checks(tmp_path / "kernels.json", exact), exact, every
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "qwen3", "bfloat16", **{**SMALL, "num_hidden_layers": 1})


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, some_sizes: None) -> Callable[[Admission | None], None]:
    """Let the interpreter's backends have an admission."""
    return lambda admission: monkeypatch.setattr(Admission, "of", lambda *about: admission)


def test_tokens_stay_what_they_were(
    tmp_path: Path,
    checkpoint: Path,
    given: Callable[[Admission | None], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    given(None)
    wanted = answers(checkpoint, ASKED, device="interpreter")
    given(admitted(tmp_path, ["ours", "steady", "by rows", "wrong"]))
    with caplog.at_level(logging.INFO, "quire.devices"):
        assert answers(checkpoint, ASKED, device="interpreter") == wanted
    assert "ours serves" in caplog.text
    assert "wrong cannot compute" in caplog.text
    [verdicts] = msgspec.json.decode(
        (tmp_path / "kernels.json").read_bytes(), type=dict[str, dict[str, Verdict]]
    ).values()
    assert {name.partition(" for ")[0] for name, one in verdicts.items() if one.sizes} == {"ours"}


@pytest.mark.parametrize("ends", [False, True])
def test_a_library_is_tried_once_also_if_that_ends_the_process(
    tmp_path: Path, checkpoint: Path, some_sizes: None, ends: bool
) -> None:
    seen: list[int] = []

    def multiply(x: Any, weight: Any) -> Any:
        seen.append(len(x))
        if ends:
            raise SystemExit
        return in_tiles(x, weight)

    def start() -> None:
        backend: Any = make_backend(threads=1, device="interpreter")
        checks = Checks(tmp_path / "kernels.json", True)
        backend.admission = Admission([library("one", multiply)], checks, exact=True, every=False)
        loaded = load_model(checkpoint, backend)
        cache = backend.kv_cache(inspect_model(checkpoint).kv_spec("bfloat16"), 4, 16)
        backend.compile(loaded.graph, cache, Limits(16, 4, 8))

    for _ in range(9 * ends):
        with contextlib.suppress(SystemExit):
            start()
    start()
    tried = len(seen)
    assert tried
    start()
    assert len(seen) == tried


def test_a_steady_library_serves_all_rows_or_none(
    tmp_path: Path, checkpoint: Path, given: Callable[[Admission | None], None]
) -> None:
    given(admitted(tmp_path, ["steady"]))
    together = answers(checkpoint, ASKED, device="interpreter")
    chunked = answers(
        checkpoint, ASKED, device="interpreter", max_num_batched_tokens=7, enable_prefix_caching=False
    )
    alone = [answers(checkpoint, [one], device="interpreter")[0] for one in ASKED]
    assert together == chunked
    assert together == alone
    verdicts = Checks(tmp_path / "kernels.json", True)
    [known] = [verdicts.of(key) for key in msgspec.json.decode((tmp_path / "kernels.json").read_bytes())]
    assert any(one.sizes and not one.exact for one in known.values())


def test_without_invariance_the_engine_serves_by_forms_for_few_rows(
    checkpoint: Path, some_sizes: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "quire.devices"):
        found = answers(checkpoint, ASKED, device="interpreter", batch_invariant=False)
    assert "tokens of a request may depend on the requests beside it" in caplog.text
    assert "vectors serves" in caplog.text
    assert len(tokens(found)[0][0][0]) == 5


@pytest.mark.parametrize("dtype", [BF16, torch.float16, SINGLE])
@pytest.mark.parametrize("shape", [(1, 40, 512), (4, 130, 768), (17, 24, 1056)])
def test_forms_for_few_rows_compute_the_product(dtype: Any, shape: tuple[int, int, int]) -> None:
    count, rows, columns = shape
    x, weight = drawn(count, columns, dtype=dtype), drawn(rows, columns, dtype=dtype, seed=1)
    bias, residual, wanted = (
        drawn(rows),
        drawn(count, rows, dtype=dtype, seed=2),
        x.double() @ weight.double().T,
    )
    parts = few.slices(RUN, weight)
    assert parts > 1
    for multiply, number in (
        (few.multiply_slices, parts),
        (few.multiply_slices, 4),
        (few.multiply_vectors, 1),
    ):
        sums, out = poison(count, number, rows), poison(count, rows, dtype=dtype)
        multiply(RUN, x, weight, sums)
        assert near(sums.double().sum(1).float(), wanted)
        few.end(RUN, sums, out, bias, "relu", residual)
        assert near(out, torch.relu(wanted + bias) + residual)
        assert near(sums[:, 0].float(), wanted) == (number == 1)


@pytest.mark.parametrize("gated", [False, True])
def test_the_end_of_sums_has_the_bits_of_the_product(gated: bool) -> None:
    x, weight, bias = drawn(5, 48, dtype=BF16), drawn(72, 48, dtype=BF16, seed=1), drawn(72)
    sums, wanted, out = poison(5, 72), *(poison(5, 36 if gated else 72, dtype=BF16) for _ in range(2))
    products.linear(RUN, x, weight, sums)
    if gated:
        products.gated(RUN, x, weight, wanted, "clamped_swiglu", bias)
    else:
        products.linear(RUN, x, weight, wanted, bias, "gelu_tanh", out_residual := drawn(5, 72, dtype=BF16))
    residual = None if gated else out_residual
    few.end(RUN, sums[:, None], out, bias, "clamped_swiglu" if gated else "gelu_tanh", residual, 0.0, gated)
    assert torch.equal(out, wanted)


def test_copies_of_weights_are_counted(tmp_path: Path, checkpoint: Path, some_sizes: None) -> None:
    """As long as they may come to be: all at a first start, those that serve later."""
    alive: list[weakref.ref[Any]] = []

    def copying(name: str, factor: float) -> Library:
        def form(run: Any, weight: CudaMatrix, act: Any) -> Form | None:
            if weight.packed is None:
                return None
            copy = PackedWeight(
                weight.packed.form,
                weight.packed.columns,
                *(None if tensor is None else tensor.clone() for tensor in weight.packed.tensors),
            )
            alive.extend(weakref.ref(tensor) for tensor in copy.tensors if tensor is not None)
            return Form(lambda x, out: out.copy_(factor * in_tiles(x, copy.values())), TYPES)

        return Library(name, "1", form, lambda weight: 0 if weight.packed is None else weight.nbytes)

    checks, limits = Checks(tmp_path / "kernels.json", False), Limits(16, 4, 8)
    libraries = [copying("right", 1.0), copying("wrong", -1.0), LIBRARIES["failing"]]
    admission = Admission(libraries, checks, exact=False, every=False)
    spec, backend = (
        inspect_model(checkpoint).kv_spec("bfloat16"),
        make_backend(threads=1, device="interpreter"),
    )
    assert isinstance(backend, CudaBackend)
    backend.admission = admission
    asked = scheme("int8", activations="float", rounds=True)
    loaded = load_model(checkpoint, backend, quantized=asked)
    graph = fused(loaded.graph, False)
    weights = [op.weight for op in graph.ops if isinstance(op, (Linear, GatedLinear))]
    packed = [w for w in weights if isinstance(w, CudaMatrix) and w.packed is not None]
    assert len(packed) >= 4
    size, most = sum(w.nbytes for w in packed), max(w.shape[0] * w.shape[1] for w in packed)
    key = admission.key(torch.device("cpu"), "interpreter")

    def room() -> int:
        return admission.room(graph, Arena(graph, spec, limits), spec, limits, key) - admit.ROOM

    assert room() == 2 * size + admit.CODE * most
    executable = backend.compile(loaded.graph, backend.kv_cache(spec, 4, 16), limits)
    assert room() == size + admit.CODE * most
    assert sum(tensor.nbytes for ref in alive if (tensor := ref()) is not None) == size
    assert executable is not None
    found = []
    for given in (libraries[:1], libraries[2:]):
        far = make_backend(threads=1, device="sm_90")
        assert isinstance(far, CudaBackend)
        far.admission = Admission(given, Checks(None, False), exact=False, every=False)
        found.append(far.outline().workspace_bytes(loaded.graph, spec, limits))
    assert found[0] - found[1] == size + admit.CODE * most


def test_options_say_what_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    checks = Checks(None, True)
    assert Admission.of("none", checks, True) is None
    auto, every = Admission.of("auto", checks, True), Admission.of("all", checks, True)
    assert auto is not None
    assert every is not None
    assert [one.name for one in auto.libraries] == ["torch"]
    assert (auto.every, every.every) == (False, True)
    assert {one.name for one in every.libraries} >= {"torch"}
    loose = Admission.of("none", checks, False)
    assert loose is not None
    assert [one.name for one in loose.libraries] == ["slices", "vectors"]
    assert "--no-batch-invariant" in caplog.text


class Graph:
    """A graph of torch on a GPU that counts."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.replays = refuses, 0

    def __enter__(self) -> None:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")

    def __exit__(self, *about: object) -> None: ...

    def replay(self) -> None:
        self.replays += 1


def test_seconds_are_those_of_replays_and_what_cannot_be_captured_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, done, gpu = Graph(False), list[int](), SimpleNamespace(type="cuda")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return [7.0, 5.0, 5.0, 90.0, 5.0][graph.replays - 1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda given, capture_error_mode: given)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert admit.seconds(lambda: done.append(1), gpu) == pytest.approx(0.001)
    assert len(done) == 6  # once to compile, then captured
    graph.refuses = True
    with pytest.raises(RuntimeError, match="not permitted"):
        admit.seconds(lambda: None, gpu)


def test_a_device_that_captures_nothing_admits_nothing(
    tmp_path: Path,
    checkpoint: Path,
    some_sizes: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(work: Any, device: Any) -> float:
        raise RuntimeError("no capture")

    monkeypatch.setattr(admit, "seconds", refused)
    backend: Any = make_backend(threads=1, device="interpreter")
    backend.admission = admitted(tmp_path, ["ours"])
    cache = backend.kv_cache(inspect_model(checkpoint).kv_spec("bfloat16"), 4, 16)
    backend.compile(load_model(checkpoint, backend).graph, cache, Limits(16, 4, 8))
    assert "no library computes Linear(" in caplog.text
