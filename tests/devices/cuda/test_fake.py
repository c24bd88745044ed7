"""Steps over GPU tensors without values: nothing is read by the host, and nothing mixes devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import msgspec
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire import SamplingParams
from quire.devices.choices import Choices
from quire.devices.cuda import aot, copies, loading, sampler
from quire.devices.cuda.backend import CudaBackend
from quire.devices.cuda.kernels import experts
from quire.devices.cuda.launch import Launch
from quire.devices.cuda.target import TARGETS
from quire.devices.protocol import KVDtype, Limits
from quire.devices.sampling import SlotSampling
from quire.engine.plan import tapped
from tests.devices.cuda.test_graphs import BLOCK, OPEN, Sequences
from tests.models import inspect_model, load_model
from tests.tiny import write_checkpoint

GPU = torch.device("cuda:0")


class NothingLaunched:
    """Launches nothing, and checks that tensors are the GPU's."""

    def __init__(self) -> None:
        self.target, self.launched = TARGETS["sm_90"], list[str]()

    def __call__(self, launch: Launch) -> None:
        self.launched.append(launch.kernel.fn.__name__)
        for name, value in launch.args.items():
            if isinstance(value, torch.Tensor):
                assert value.device == GPU, (self.launched[-1], name)


class Unsent(loading.Ring):
    """Brings no values of weights to the GPU."""

    def sent(self, values: Any) -> Any:
        dtype = values.dtype if isinstance(values, torch.Tensor) else loading._dtype(values)
        return torch.empty(tuple(values.shape), dtype=dtype, device=GPU)

    def send(self, array: Any, out: Any) -> None:
        pass


class ByOperations(TorchFunctionMode):
    """Indexes tensors of a GPU by operations: torch's own way asks the driver, which is not here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and args[0].device == GPU:
            view, places = self._view(*args)
            return torch.ops.aten.index.Tensor(view, places) if places else view
        if func is torch.Tensor.__setitem__ and args[0].device == GPU:
            view, places = self._view(*args[:2])
            value = args[2] if isinstance(args[2], torch.Tensor) else torch.full((), args[2], device=GPU)
            args, func = (view, places, value), torch.ops.aten.index_put_
            if not places:
                args, func = (view, value), torch.Tensor.copy_
        if func is torch.Tensor.copy_:
            func = torch.ops.aten.copy_
        return func(*args, **(kwargs or {}))

    def _view(self, x: Any, key: Any) -> tuple[Any, list[Any]]:
        """The view that slices and numbers of a key give, and the tensors among its places."""
        keys, at, places = key if isinstance(key, tuple) else (key,), 0, list[Any]()
        for number, part in enumerate(keys):
            if part is None:
                x = x.unsqueeze(at)
            elif part is Ellipsis:
                at = x.ndim - sum(other is not None for other in keys[number + 1 :]) - 1
            elif isinstance(part, slice):
                x = torch.ops.aten.slice.Tensor(x, at, part.start, part.stop, part.step or 1)
            elif isinstance(part, int):
                x, at = x.select(at, part), at - 1
            else:
                places += [*[None] * (at - len(places)), torch.as_tensor(part)]
            at += 1
        return x, places


class Watched(TorchDispatchMode):
    """Refuses operations that read a GPU's values, that mix devices, and that copy what is not pinned to a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a step reads a value of the device"
        made = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        of_host = [x for x in given if x.device != GPU and x.ndim]
        results = {x.device for x in tree_leaves(made) if isinstance(x, torch.Tensor)}
        if any(x.device == GPU for x in given):
            assert not of_host, f"{func} mixes devices"
            assert results <= {GPU}, f"{func} copies to the host"
        elif GPU in results:
            assert all(hasattr(x, "was_pinned") for x in of_host), (
                f"{func} copies to the GPU, but not by `sent`"
            )
        return made


class Drawn:
    """Tokens that arrive when the GPU is done: zeros."""

    def __init__(self, tensor: Any) -> None:
        self._shape = tensor.shape

    def result(self) -> Any:
        return np.zeros(self._shape, np.int32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU without values."""

    def pin_memory(self: Any) -> Any:
        self.was_pinned = True
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *about, **options: nullcontext())
    monkeypatch.setattr(sampler, "Fetched", Drawn)
    monkeypatch.setattr(
        experts, "addresses", lambda given, device: torch.zeros(len(given), dtype=torch.int64, device=GPU)
    )
    with ByOperations(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def computed(model: Path, cache_type: KVDtype, adapted: bool) -> tuple[NothingLaunched, Any]:
    """Compute steps of a model, large and small, and draw their tokens."""
    backend = CudaBackend(None, Choices())
    backend._device, backend._ring, backend._run = GPU, Unsent(GPU), (launcher := NothingLaunched())
    backend._last_tokens = torch.zeros(64, dtype=torch.int32, device=GPU)
    info, loaded = inspect_model(model), load_model(model, backend)
    spec = info.kv_spec(cache_type)
    stateful = bool(spec.bytes_per_state(0))
    cache = backend.kv_cache(spec, 64, BLOCK, *((8, OPEN) if stateful else ()))
    executable = backend.compile(tapped(loaded, (0,)), cache, Limits(64, 4, 4, int(adapted), graphs=(4, 8)))
    if adapted:
        executable.adapt(0, next(aot.adapters(loaded.graph)))
    drawing, sequences = backend.sampler(info.spec.vocab_size), Sequences(info.spec.vocab_size)
    for slot, params in enumerate(
        (SamplingParams(temperature=0), SamplingParams(seed=1, top_k=5, top_p=0.9))
    ):
        drawing.set(slot, SlotSampling(1, params, [1] * (40, 3)[slot]))
    with Watched():
        for counts in ({0: 40, 1: 3}, {0: 1, 1: 1}, {1: 1, 0: 1}, {0: 5, 1: 1}):
            slots = [*counts]
            ends = np.cumsum([*counts.values()])
            inputs = sequences.step(counts, (ends - 1).tolist(), stateful)
            if adapted:
                inputs = msgspec.structs.replace(inputs, adapters_B=np.array([-1, 0], np.int32))
            if ends[-1] == 2:
                inputs = msgspec.structs.replace(inputs, unseen_U2=np.array([[0, slots[0]]], np.int32))
            logits = executable.run(inputs)
            assert logits.tensor.shape == (2, info.spec.vocab_size)
            executable.taps()
            drawing.sample(logits, slots, [sequences.lengths[slot] for slot in slots])
    return launcher, executable


CASES: list[tuple[str, KVDtype, bool]] = [
    ("qwen3", "bfloat16", False),
    ("qwen2", "int8", True),
    ("mixtral", "fp8_e4m3", False),
    ("deepseek_v3", "bfloat16", False),
    ("qwen3_5", "int8", False),
    ("zamba2", "bfloat16", False),
    ("deepseek_v32", "fp8_e5m2", False),
]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("family", "cache_type", "adapted"), CASES)
def test_a_step_on_a_gpu_reads_nothing_back(
    tmp_path: Path, family: str, cache_type: KVDtype, adapted: bool
) -> None:
    launcher, executable = computed(write_checkpoint(tmp_path, family, "bfloat16"), cache_type, adapted)
    assert {"attention", "sampled"} <= {*launcher.launched}
    version = executable._adapters.version if adapted else None
    assert {*executable._graphs._replays} == {
        (part, size, version, 0) for part, size in (("body", 4), ("body", 8), ("head", 4))
    }


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "read", [lambda x: x[0].item(), lambda x: x.cpu(), lambda x: x.tolist(), lambda x: x.numpy()]
)
def test_what_reads_a_gpu_is_refused(read: Any) -> None:
    x = torch.zeros(3, device=GPU)
    with Watched(), pytest.raises((AssertionError, RuntimeError, TypeError)):
        read(x)


@pytest.mark.usefixtures("gpu")
def test_copies_to_a_gpu_are_sent() -> None:
    numbers = np.zeros(3, np.int32)
    with Watched():
        assert copies.sent(numbers, GPU).device == GPU
        with pytest.raises(AssertionError, match="not by `sent`"):
            torch.from_numpy(np.ones(3)).to(GPU)
