"""Kernels ahead of time: all that an engine launches is in a build, and the driver gets what the compiler expects."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

from triton.runtime.jit import mangle_type

from bench.visit.catalog import CASES
from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.build import EVERYTHING
from quire.config import EngineConfig
from quire.devices.cuda import admit, cubins, jit
from quire.devices.cuda.admit import Admission
from quire.devices.cuda.aot import RecordingLauncher, prepare, sizes
from quire.devices.cuda.backend import CudaBackend
from quire.devices.cuda.cubins import Loaded, cubin, gpu_launcher
from quire.devices.cuda.kernels import norm
from quire.devices.cuda.launch import TYPES, Launch, described, ordered, signature
from quire.devices.cuda.libraries import Form, Library
from quire.devices.cuda.selfcheck import Checks
from quire.devices.cuda.target import TARGETS
from quire.engine.plan import plan_files
from quire.errors import ConfigError, ModelError
from tests.adapter_files import write_adapter
from tests.devices.cuda.drivers import FakeDriver, product, several
from tests.devices.cuda.test_engine import BLOCKS, JSON, SMALL
from tests.tiny import write_checkpoint

SM90 = TARGETS["sm_90"]
REQUESTS: list[tuple[bytes, SamplingParams]] = [
    (b"Once upon a time there was a dog that ran", SamplingParams(temperature=0, max_tokens=4, logprobs=1)),
    (b"abcabcabcabc", SamplingParams(seed=1, n=2, top_k=9, max_tokens=4, prompt_logprobs=1)),
    (b"{", SamplingParams(seed=3, max_tokens=3, structured_outputs=StructuredOutputsParams(json=JSON))),
]
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}}


class Spy:
    """Interprets with the tiles of a GPU, and lists what is launched."""

    target = SM90

    def __init__(self) -> None:
        self.seen = dict[str, Launch]()

    def __call__(self, launch: Launch) -> None:
        if 0 not in launch.grid:
            self.seen[described(launch)] = launch
        jit.InterpretedLauncher(SM90)(launch)


def planned(**options: Any) -> Any:
    """A backend of builds for sm_90 that knows the graphs of a model."""
    config = EngineConfig.from_options(device="cuda", **options)
    plan = plan_files(replace(config, device=replace(config.device, device="sm_90")), None, EVERYTHING)
    return plan.backend


def built(**options: Any) -> set[str]:
    """The kernels that a build of a model holds."""
    backend = planned(**options)
    backend.record(options.get("block_size", 64))
    return {described(launch) for launch in backend.recorded.launches.values()}


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [
        ("qwen3", SMALL, DRAFTS),
        ("qwen2", {**SMALL, "num_hidden_layers": 1}, {"spec_method": "draft_model", "spec_tokens": 2}),
        ("deepseek_v3", {"num_hidden_layers": 2}, {"kv_cache_dtype": "int8"}),
        ("qwen3_next", {}, DRAFTS),
        (
            "llama",
            {**SMALL, "num_hidden_layers": 1},
            {"enable_lora": True, "max_loras": 2, "quantization": "int8"},
        ),
    ],
)
def test_a_build_holds_all_that_an_engine_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, config: Any, options: dict[str, Any]
) -> None:
    model, spy = write_checkpoint(tmp_path / "model", family, "bfloat16", **config), Spy()
    given: dict[str, Any] = {
        **BLOCKS,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "model": str(model),
        **options,
    }
    adapters: list[Any] = [None] * len(REQUESTS)
    if "spec_method" in options:
        given["spec_model"] = str(model)
    if "enable_lora" in options:
        paths = [write_adapter(tmp_path / str(dora), model, 1, rank=5, dora=dora) for dora in (False, True)]
        adapters[:2] = [LoRARequest(str(i), i + 1, path) for i, path in enumerate(paths)]
    monkeypatch.setattr(CudaBackend, "_launcher", lambda self, artifacts: spy)
    with LLM(device="interpreter", **given) as llm:
        prompts = [{"prompt_token_ids": list(text)} for text, _ in REQUESTS]
        llm.generate(prompts, [params for _, params in REQUESTS], use_tqdm=False, lora_request=adapters)
    monkeypatch.undo()
    assert len(spy.seen) > 8
    assert sorted(spy.seen.keys() - built(**given)) == []


def test_a_build_holds_what_libraries_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spy = write_checkpoint(tmp_path / "model", "qwen2", "bfloat16", **SMALL), Spy()
    given: dict[str, Any] = {**BLOCKS, "max_num_seqs": 6, "max_num_batched_tokens": 48, "model": str(model)}

    def form(run: Any, weight: Any, act: Any) -> Form:
        def multiply(x: Any, out: Any) -> None:
            out.copy_(x.float() @ weight.values.float().T)

        return Form(multiply, (torch.float32,))

    admission = Admission([Library("one", "1", form)], Checks(None, False), exact=False, every=False)
    monkeypatch.setattr(admit, "SIZES", (1, 8, 17))
    monkeypatch.setattr(Admission, "of", lambda *about: admission)
    monkeypatch.setattr(CudaBackend, "_launcher", lambda self, artifacts: spy)
    with LLM(device="interpreter", **given) as llm:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2), use_tqdm=False)
    monkeypatch.undo()
    assert any(key.startswith("few.ended") for key in spy.seen)
    assert sorted(spy.seen.keys() - built(**given)) == []


@pytest.mark.parametrize("parallel", [{}, {"exact_across_ranks": True}, {"enable_expert_parallel": True}])
def test_a_rank_s_kernels_are_recorded_without_the_other_ranks(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    model = write_checkpoint(tmp_path, "qwen2_moe", "bfloat16", num_hidden_layers=2)
    options = {"model": str(model), "max_num_batched_tokens": 8, "max_num_seqs": 2}
    alone, share = built(**options), built(**options, tensor_parallel_size=2, **parallel)
    names = {key.partition("(")[0] for key in alone}
    assert names - {"elementwise.added"} <= {key.partition("(")[0] for key in share} | {"norm.norm"}
    assert share - alone


def test_sizes_lie_on_both_sides_of_every_power_of_two() -> None:
    assert sizes(9) == [1, 2, 3, 4, 5, 8, 9]
    assert sizes(7) == [1, 2, 3, 4, 5, 7]


READ: dict[str, Any] = {
    "u64": ctypes.c_uint64, "u32": ctypes.c_int32, "b32": ctypes.c_int32, "f32": ctypes.c_float, "b64": ctypes.c_uint64
}  # fmt: skip


def parameters(ptx: str) -> list[str]:
    """The types of a compiled kernel's parameters: how the compiler itself says that it will be called."""
    return re.findall(r"\.param \.(\w+)", ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))])


def read(places: int, types: list[str]) -> list[Any]:
    """Arguments at addresses."""
    addresses = (ctypes.c_void_p * len(types)).from_address(places)
    return [READ[kind].from_address(place).value for kind, place in zip(types, addresses, strict=True)]


def recorded(case: Callable[[Any], None]) -> list[Launch]:
    run = RecordingLauncher(SM90)
    case(run)
    return list(run.launches.values())


@pytest.mark.parametrize(
    "case",
    [
        "linear, 64 tokens",
        "attention, few queries",
        "sampling",
        "rope and store",
        "routing",
        "rows",
        "adapters",
    ],
)
def test_the_driver_gets_the_arguments_that_the_compiled_kernel_declares(case: str) -> None:
    """The oracle is the entry that the compiler writes: parameters in order, with their sizes."""
    for launch in recorded(CASES[case]):
        made, driver = jit.compile_launch(launch, SM90), FakeDriver()
        code, about = cubin(launch, SM90)
        assert code == made.asm["cubin"]
        types = parameters(made.asm["ptx"])
        args = {  # each at a place of its own
            name: torch.empty(1, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in launch.args.items()
        }
        launch, loaded = replace(launch, args=args), Loaded(driver, code, about)
        loaded(launch)
        [(_, grid, threads, shared, places)] = driver.launched
        assert (grid, threads, shared) == (launch.grid, 32 * made.metadata.num_warps, made.metadata.shared)
        given = [value for _, value in ordered(launch) if value is not None]
        assert len(types) == len(given) + 2
        for kind, value in zip(types, given, strict=False):
            assert (kind == "f32") == isinstance(value, float)
            assert (kind == "u64") >= isinstance(value, torch.Tensor)
        expected = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in given]
        assert read(places, types) == [*(pytest.approx(value) for value in expected), 0, 0]


def test_types_are_named_as_the_compiler_names_them() -> None:
    for dtype, name in TYPES.items():
        assert mangle_type(torch.empty(1, dtype=dtype, device="meta")) == f"*{name}"
    x, out, weight = torch.empty(3, 48)[:, 1:], torch.empty(3, 47), torch.empty(47)
    by = norm.NormTensors("rms", weight, None, 1e-5)
    [launch] = recorded(lambda run: norm.normalize(run, x, out, by))
    kinds = dict(zip((name for name, _ in ordered(launch)), signature(launch), strict=True))
    assert kinds.items() >= {
        "x": "*fp32", "weight": "*fp32:16", "bias": None, "out": "*fp32:16", "width": "i32", "x_stride": "i32:16",
        "out_stride": "i32", "eps": "fp32",
    }.items()  # fmt: skip
    for value, kind in ((1 << 31, "i64:16"), (-(1 << 31), "i32:16"), (7, "i32")):
        assert signature(replace(launch, args={"width": value})) == [kind]


FEW = partial(product, 3)


def artifacts(folder: Path, case: Any = FEW, **changes: Any) -> Path:
    """An engine directory's artifacts: those of a case, by default a product for steps of few tokens."""
    made = cubins.Artifacts(folder / "engine" / "artifacts", {**cubins.about_of(SM90), **changes}, "")
    for launch in recorded(case):
        code, about = cubin(launch, SM90)
        made.add(described(launch), code, msgspec.to_builtins(about))
    made.save()
    return made.folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "kernels"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are compiled meanwhile."""
    names, compile_launch = list[str](), jit.compile_launch

    def counted(launch: Launch, target: Any) -> Any:
        names.append(described(launch))
        return compile_launch(launch, target)

    monkeypatch.setattr(jit, "compile_launch", counted)
    return names


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins, "missing", lambda *names: [name for name in names if name == "triton"])


def test_a_directory_s_kernels_are_loaded_once_and_launched_without_a_compiler(
    tmp_path: Path, cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, driver = artifacts(tmp_path), FakeDriver()
    compiled.clear()
    without_triton(monkeypatch)
    run = gpu_launcher(SM90, folder, driver)
    for tokens in (1, 2, 16, 0):
        product(tokens, run)
    [(code, name, shared)] = driver.loaded
    assert code in [path.read_bytes() for path in folder.iterdir()]
    assert name == "product"
    assert shared > cubins.FREE_SHARED
    assert [grid for _, grid, *_ in driver.launched] == [(2, 1, 1)] * 3
    assert compiled == []
    assert not cache.exists()
    with pytest.raises(
        ConfigError, match=r"lacks the kernel products\.product.*: run `quire build .*--target sm_90 -o DIR`"
    ):
        product(17, run)


def test_what_a_directory_lacks_is_compiled_by_the_same_compiler_alone(
    tmp_path: Path, cache: Path, compiled: list[str]
) -> None:
    run = gpu_launcher(SM90, artifacts(tmp_path), FakeDriver())
    compiled.clear()
    product(17, run)
    product(18, run)
    assert len(compiled) == 1
    other = gpu_launcher(SM90, artifacts(tmp_path, triton="3.6.0"), FakeDriver())
    with pytest.raises(ConfigError, match="lacks the kernel"):  # its bits may be others
        product(17, other)


def test_a_second_start_compiles_nothing(cache: Path, compiled: list[str]) -> None:
    for start in range(2):
        driver = FakeDriver()
        product(3, gpu_launcher(SM90, None, driver))
        assert len(compiled) == 1, start
        assert len(driver.launched) == 1


def compiled_as(code: bytes) -> Any:
    """What the compiler would return."""
    facts = {"name": "kernel", "shared": 0, "global_scratch_size": 0, "profile_scratch_size": 0}
    return SimpleNamespace(metadata=SimpleNamespace(**facts), asm={"cubin": code})


def test_a_first_start_compiles_all_that_a_model_launches_and_a_second_one_looks_at_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[str]()

    def compile_launch(launch: Launch, target: Any) -> Any:
        made.append(described(launch))
        return compiled_as(made[-1].encode())

    monkeypatch.setattr(jit, "compile_launch", compile_launch)
    model = write_checkpoint(tmp_path / "model", "llama", "bfloat16", **SMALL)
    options = {"model": str(model), "max_num_batched_tokens": 16, "max_num_seqs": 4}
    backend = planned(**options)
    expected = built(**options)
    for wanted in (expected, set[str]()):
        made.clear()
        prepare(gpu_launcher(SM90, None, FakeDriver()), backend.planned, 64, backend.choices)
        assert {*made} == wanted
    prepare(gpu_launcher(SM90, None, FakeDriver()), backend.planned, 16, backend.choices)
    assert made
    assert all("BLOCK=16" in key for key in made)
    made.clear()
    ahead = planned(**options, kv_cache_dtype="int8")
    prepare(gpu_launcher(SM90, None, FakeDriver()), ahead.planned, 64, ahead.choices)
    assert any("*i8:16" in key for key in made)
    assert not expected & {*made}


def test_kernels_are_compiled_while_weights_are_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, loaded = list[str](), threading.Event()

    def compile_launch(launch: Launch, target: Any) -> Any:
        assert loaded.wait(60)
        made.append(described(launch))
        return compiled_as(made[-1].encode())

    monkeypatch.setattr(jit, "compile_launch", compile_launch)
    model = write_checkpoint(tmp_path / "model", "llama", "bfloat16", **SMALL)
    options = {"model": str(model), "max_num_batched_tokens": 16, "max_num_seqs": 4}
    ahead, expected = planned(**options), built(**options)
    backend = CudaBackend(None, ahead.choices)
    backend._gpu, backend._run = "cuda:0", gpu_launcher(SM90, None, FakeDriver())
    backend.planned += ahead.planned
    for _ in range(2):
        backend.matrix([np.ones((4, 64), np.float32)], "bfloat16")
    assert not made
    loaded.set()
    assert backend._compiling is not None
    backend._compiling.result(60)
    assert sorted(made) == sorted(expected)
    prepare(backend._run, backend.planned, 64, backend.choices)  # type: ignore[arg-type]
    assert len(made) == len(expected)


def test_a_damaged_cache_is_compiled_again_and_never_loaded(
    cache: Path, compiled: list[str], caplog: Any
) -> None:
    product(3, gpu_launcher(SM90, None, FakeDriver()))
    [folder] = cache.iterdir()
    [path] = [path for path in folder.iterdir() if path.name != "manifest.json"]
    right = path.read_bytes()
    path.write_bytes(right[:-1] + b"?")
    driver = FakeDriver()
    product(3, gpu_launcher(SM90, None, driver))
    assert [code for code, *_ in driver.loaded] == [right]
    assert len(compiled) == 2
    assert "compiling it again" in caplog.text
    (folder / "manifest.json").write_bytes(b"{}")
    product(3, gpu_launcher(SM90, None, FakeDriver()))
    assert len(compiled) == 3
    assert path.read_bytes() == right


def test_a_cache_is_bounded(cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        made = cubins.Artifacts(cache / str(number), {}, "")
        made.add("key", b"x" * 100, {})
        made.save()
        os.utime(made.folder / "manifest.json", (number, number))
    monkeypatch.setattr(cubins, "MOST_CACHED", 1)
    run = gpu_launcher(SM90, None, FakeDriver())
    product(3, run)
    product(17, run)
    kept = {path.name for path in cache.iterdir()}
    assert len(kept) == cubins.MOST_CACHES
    assert {"5", "11"} <= kept
    assert "4" not in kept
    [own] = [path for path in cache.iterdir() if not path.name.isdigit()]
    assert len([*own.iterdir()]) == 2
    assert len(compiled) == 2


def test_a_cache_that_cannot_be_written_costs_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quire").write_text("a file in its place")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    driver = FakeDriver()
    product(3, gpu_launcher(SM90, None, driver))
    assert len(driver.launched) == 1


@pytest.mark.parametrize(
    ("changes", "release", "message"),
    [
        ({"target": "sm_80"}, 13_000, "engine was built for sm_80, and the GPU is sm_90: run `quire build"),
        ({}, 12_080, r"kernels for CUDA 13\.\d+, and the driver is for 12\.8: update the driver"),
        ({"toolkit": "new"}, 13_000, "manifest.json.*run `quire build"),
    ],
)
def test_directories_of_others_are_refused_in_a_line(
    tmp_path: Path, changes: dict[str, Any], release: int, message: str
) -> None:
    folder = artifacts(tmp_path, **changes)
    with pytest.raises((ConfigError, ModelError), match=message) as found:
        gpu_launcher(SM90, folder, FakeDriver(release))
    assert "\n" not in str(found.value)


def test_a_directory_of_another_version_is_compiled_anew_or_refused(
    tmp_path: Path, cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    folder = artifacts(tmp_path, sources="0" * 64)
    compiled.clear()
    product(3, gpu_launcher(SM90, folder, FakeDriver()))
    assert len(compiled) == 1
    assert "another version of Quire" in caplog.text
    without_triton(monkeypatch)
    with pytest.raises(ConfigError, match="built by another version of Quire: run `quire build"):
        gpu_launcher(SM90, folder, FakeDriver())


def test_what_the_driver_refuses_is_a_line(tmp_path: Path) -> None:
    run = gpu_launcher(SM90, artifacts(tmp_path), FakeDriver(refuses=True))
    with pytest.raises(
        ConfigError, match=r"driver refuses products.product.*NO_BINARY.*: update it, or run `quire build"
    ):
        product(3, run)


def test_damage_is_found_before_the_driver_sees_it(tmp_path: Path) -> None:
    folder, driver = artifacts(tmp_path), FakeDriver()
    [path] = [path for path in folder.iterdir() if path.name != "manifest.json"]
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(ModelError, match=r"altered .*; run `quire build"):
        product(3, gpu_launcher(SM90, folder, driver))
    assert driver.loaded == []


def test_without_cuda_bindings_triton_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins, "missing", lambda *names: [name for name in names if name == "cuda"])
    assert isinstance(gpu_launcher(SM90, None), jit.JitLauncher)
    monkeypatch.setattr(cubins, "missing", lambda *names: [*names])
    with pytest.raises(ConfigError, match=r"launched by cuda-bindings: pip install 'quire-llm\[cuda\]'"):
        gpu_launcher(SM90, artifacts(tmp_path))


WITHOUT_TRITON = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else found(name, package)
sys.modules["triton"] = None
from pathlib import Path
from types import SimpleNamespace
from quire.devices.cuda.backend import CudaBackend
from quire.devices.cuda.cubins import gpu_launcher
from quire.devices.cuda.target import TARGETS
from tests.devices.cuda.drivers import FakeDriver, several
driver = FakeDriver()
several(gpu_launcher(TARGETS["sm_90"], Path(sys.argv[1]), driver))
print(*[name for name, *_ in driver.launched])
"""


def test_a_process_without_triton_launches_what_was_built(tmp_path: Path) -> None:
    folder = artifacts(tmp_path, several)
    command = [sys.executable, "-c", WITHOUT_TRITON, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["product", "norm", "gather", "added", "sampled"], result.stderr
