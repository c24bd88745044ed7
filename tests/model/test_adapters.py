"""Adapters as PEFT publishes them give PEFT's own logits, on every backend; broken ones are refused by name."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.devices.protocol import Backend, Limits, ModelInput
from quire.devices.registry import make_backend
from quire.errors import ModelError
from quire.model.adapter import AdapterBase, build_adapter
from quire.model.load import load_model
from quire.weights.adapter import open_adapter
from quire.weights.checkpoint.safetensors import SafetensorsFile
from quire.weights.schemes import scheme
from tests.adapter_files import write_adapter
from tests.tiny import write_checkpoint

DATA = Path(__file__).parents[3] / "shared" / "data" / "adapters"
NAMES = sorted(path.parent.name for path in DATA.glob("*/adapter_config.json"))
INVALID = json.loads((DATA / "invalid" / "expected.json").read_text()) if DATA.is_dir() else {}
GROWN = "llama-added-tokens"
# Of each way in which an adapter can act, one: the slow backends run these.
FEW = (
    "llama-dora-r8",
    "gpt2-bias-all",
    "moe-experts-fused",
    "qwen3-embed-saved-tied",
    "qwen3-trainable-tokens-tied",
)


class Model:
    """A base on a backend, with three slots."""

    def __init__(self, path: Path | str, backend: Backend, dtype: Any = "float32", **options: Any) -> None:
        self.loaded = load_model(path, backend, dtype, **options)
        cache = backend.kv_cache(self.loaded.spec.kv_spec("float32"), 16, 8)
        self.executable = backend.compile(self.loaded.graph, cache, Limits(128, 2, 96, 3))
        loaded = self.loaded
        assert loaded.names is not None
        self.base = AdapterBase(loaded.spec, loaded.names, loaded.weights, backend, loaded.dtype, loaded.open)

    def adapt(self, folder: Path | str, slot: int = 1) -> None:
        self.executable.adapt(slot, build_adapter(self.base, open_adapter(Path(folder), 512)))

    def logits(self, tokens: list[int], slot: int = 1) -> Any:
        rows = np.arange(len(tokens), dtype=np.int32)
        table = np.arange(16, dtype=np.int32).reshape(1, -1)
        one = np.array([0, len(tokens)], np.int32), np.array([len(tokens)], np.int32), np.zeros(1, np.int32)
        ids, adapters = np.array(tokens, np.int32), np.array([slot], np.int32)
        step = ModelInput(ids, rows, *one, table, rows, adapters_B=adapters)
        return self.executable.run(step).numpy().copy()


@cache
def base(name: str, backend: str) -> Model:
    return Model(DATA / name, make_backend(backend, 2, "auto"))


def check(name: str, backend: str, prompts: int) -> None:
    expected = json.loads((DATA / name / "expected.json").read_text())
    right = SafetensorsFile(DATA / name / "expected.safetensors")
    model = base(expected["base"], backend)
    model.adapt(DATA / name)
    for i, prompt in enumerate(expected["prompts"][:prompts]):
        assert np.abs(model.logits(prompt) - right.get(f"logits_{i}")).max() < 1e-4
        greedy = expected["greedy"][i]
        following = model.logits(prompt + greedy[:-1])[len(prompt) - 1 :]
        assert following.argmax(axis=1).tolist() == greedy


@pytest.mark.parametrize("name", [name for name in NAMES if name != GROWN])
def test_logits_and_greedy_tokens_are_pefts(name: str) -> None:
    check(name, "native", 3)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", [name for name in NAMES if name in FEW])
def test_the_other_backends_give_them_too(name: str, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    check(name, backend, 1)


@pytest.mark.parametrize("name", INVALID)
def test_broken_adapters_are_refused_by_name(name: str) -> None:
    model, expected = base("base-llama", "reference"), INVALID[name]
    if expected["verdict"] in ("accept", "bounded", "refuse-or-map"):
        model.adapt(DATA / "invalid" / name)
        return
    with pytest.raises(ModelError) as error:
        model.adapt(DATA / "invalid" / name)
    words = expected.get("mention", [])
    for word in [words] if isinstance(words, str) else words:
        assert word in str(error.value)


@pytest.mark.skipif(GROWN not in NAMES, reason="needs the adapters in shared/data")
def test_a_grown_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="added tokens are not supported"):
        base("base-llama", "reference").adapt(DATA / GROWN)


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", "float32")
    folder = Path(write_adapter(tmp_path / "adapter", model, 0, rank=9))
    with pytest.raises(ModelError, match=r"rank 9 is above --max-lora-rank 8"):
        open_adapter(folder, 8)


@pytest.mark.parametrize("pattern", ["(a+)+$", ".*.*.*x", "a" * 400, "(", "[" * 50])
def test_patterns_that_may_take_long_are_refused(tmp_path: Path, pattern: str) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", "float32")
    folder = Path(write_adapter(tmp_path / "adapter", model, 0, rank_pattern={pattern: 4}))
    with pytest.raises(ModelError, match="rank_pattern"):
        open_adapter(folder, 8)


def test_the_digest_follows_content_and_not_the_place(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", "float32")
    first = Path(write_adapter(tmp_path / "a", model, 0))
    shutil.copytree(first, tmp_path / "b")
    other = Path(write_adapter(tmp_path / "c", model, 1))
    scaled = Path(write_adapter(tmp_path / "d", model, 0, lora_alpha=3))
    digests = [open_adapter(path, 8).digest for path in (first, tmp_path / "b", other, scaled)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_float_adapters_act_over_quantized_bases(tmp_path: Path, quantization: Any) -> None:
    """The change of the logits is that of the float base within the error of the base."""
    path = write_checkpoint(tmp_path / "model", "qwen3", "float32", hidden_size=64)
    folder = write_adapter(tmp_path / "adapter", path, 0, rank=8)
    tokens = list(range(5, 40))
    from_float = Model(path, make_backend("native", 2, "auto"))
    from_codes = Model(path, make_backend("native", 2, "auto"), quantized=scheme(quantization))
    changes = []
    for model in (from_float, from_codes):
        model.adapt(folder)
        changes.append(model.logits(tokens) - model.logits(tokens, slot=-1))
    assert np.abs(changes[0]).max() > 0.5
    assert np.corrcoef(changes[0].ravel(), changes[1].ravel())[0, 1] > 0.85
