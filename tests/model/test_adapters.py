"""Adapters as PEFT publishes them give PEFT's own logits, on every backend; broken ones are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.devices.protocol import Backend, Limits, ModelInput
from quire.devices.registry import make_backend
from quire.errors import ModelError
from quire.model.adapter import AdapterBase, build_adapter
from quire.model.info import Reading
from quire.model.shard import Shard
from quire.weights.adapter import open_adapter, table_rows
from quire.weights.checkpoint.safetensors import SafetensorsFile
from quire.weights.schemes import scheme
from tests.adapter_files import write_adapter
from tests.model.test_shard import native_peers
from tests.models import load_model
from tests.near import assert_near
from tests.shared import DATA, cases_of, needs
from tests.tiny import write_checkpoint

ADAPTERS = DATA / "adapters"
NAMES = sorted(path.parent.name for path in ADAPTERS.glob("*/adapter_config.json"))
INVALID = json.loads((ADAPTERS / "invalid" / "expected.json").read_text()) if ADAPTERS.is_dir() else {}
GROWN = "llama-added-tokens"
SPARE = 11  # tokens that there is room for: more than it adds
# Of each way in which an adapter can act, one: the slow backends run these.
FEW = (
    "llama-dora-r8",
    "gpt2-bias-all",
    "moe-experts-fused",
    "qwen3-embed-saved-tied",
    "qwen3-trainable-tokens-tied",
    GROWN,
)


class Model:
    """A base on a backend, with three slots."""

    def __init__(self, path: Path | str, backend: Backend, dtype: Any = "float32", **options: Any) -> None:
        self.loaded = load_model(path, backend, dtype, **options)
        cache = backend.kv_cache(self.loaded.spec.kv_spec("float32", self.loaded.shard), 16, 8)
        self.executable = backend.compile(self.loaded.graph, cache, Limits(128, 2, 96, 3))
        loaded = self.loaded
        assert loaded.names is not None
        facts = loaded.decoder, loaded.names, backend, loaded.dtype, loaded.open, loaded.shard
        self.base = AdapterBase(*facts)

    def adapt(self, folder: Path | str, slot: int = 1) -> None:
        self.executable.adapt(slot, build_adapter(self.base, open_adapter(Path(folder), 512)))

    def logits(self, tokens: list[int], slot: int = 1) -> Any:
        return self.run(tokens, slot).numpy().copy()

    def run(self, tokens: list[int], slot: int = 1, hidden: Any = None) -> Any:
        rows = np.arange(len(tokens), dtype=np.int32)
        table = np.arange(16, dtype=np.int32).reshape(1, -1)
        one = np.array([0, len(tokens)], np.int32), np.array([len(tokens)], np.int32), np.zeros(1, np.int32)
        ids, adapters = np.array(tokens, np.int32), np.array([slot], np.int32)
        wanted = rows if self.loaded.shard.ends else rows[:0]
        step = ModelInput(ids, rows, *one, table, wanted, hidden_TD=hidden, adapters_B=adapters)
        return self.executable.run(step)


class Ranks:
    """Two ranks of a base, which are threads."""

    def __init__(self, path: Path, peers: list[Any], spare: int, **shard: bool) -> None:
        self._threads = ThreadPoolExecutor(2)

        def load(rank: int) -> Model:
            backend = make_backend("native", 1, "auto")
            own = Shard(rank, 2, peers[rank], **shard)
            return Model(path, backend, shard=own, reading=Reading(spare_tokens=spare))

        self._models = list(self._threads.map(load, range(2)))

    def adapt(self, folder: Path) -> None:
        for model in self._models:
            model.adapt(folder)

    def logits(self, tokens: list[int]) -> Any:
        first, second = self._threads.map(lambda model: model.logits(tokens), self._models)
        assert np.array_equal(first, second)
        return first


class Stages:
    """A base in two stages."""

    def __init__(self, path: Path, spare: int) -> None:
        backend, reading = make_backend("native", 2, "auto"), Reading(spare_tokens=spare)
        self._models = [
            Model(path, backend, shard=Shard(stage=stage, stages=2), reading=reading) for stage in range(2)
        ]

    def adapt(self, folder: Path) -> None:
        for model in reversed(self._models):  # the engine's own first, which refuses what fits none
            model.adapt(folder)

    def logits(self, tokens: list[int]) -> Any:
        first, last = self._models
        first.run(tokens)
        return last.run(tokens, hidden=np.array(first.executable.hidden())).numpy().copy()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[str, int], Ranks]]:
    with ExitStack() as stack:
        yield cache(lambda name, spare: Ranks(ADAPTERS / name, stack.enter_context(native_peers(2)), spare))


@cache
def base(name: str, backend: str, spare: int = 0) -> Model:
    return Model(ADAPTERS / name, make_backend(backend, 2, "auto"), reading=Reading(spare_tokens=spare))


def check(name: str, make: Callable[[str, int], Model | Ranks], prompts: int) -> None:
    expected = json.loads((ADAPTERS / name / "expected.json").read_text())
    right = SafetensorsFile(ADAPTERS / name / "expected.safetensors")
    model = make(expected["base"], SPARE if name == GROWN else 0)
    model.adapt(ADAPTERS / name)
    for i, prompt in enumerate(expected["prompts"][:prompts]):
        logits, wanted = model.logits(prompt), right.get(f"logits_{i}")
        assert_near(logits[:, : wanted.shape[1]], wanted)
        assert np.all(logits[:, wanted.shape[1] :] == -np.inf)
        greedy = expected["greedy"][i]
        following = model.logits(prompt + greedy[:-1])[len(prompt) - 1 :]
        assert following.argmax(axis=1).tolist() == greedy


@pytest.mark.parametrize("name", cases_of(ADAPTERS, NAMES))
def test_logits_and_greedy_tokens_are_pefts(name: str) -> None:
    check(name, lambda path, spare: base(path, "native", spare), 3)


@pytest.mark.parametrize("name", cases_of(ADAPTERS, NAMES))
def test_two_ranks_give_them_too(name: str, ranks: Callable[[str, int], Ranks]) -> None:
    check(name, ranks, 1)


@pytest.mark.parametrize("name", cases_of(ADAPTERS, NAMES))
def test_two_stages_give_the_bits_of_one(name: str) -> None:
    made = []

    def make(path: str, spare: int) -> Stages:
        made.append((base(path, "native", spare), Stages(ADAPTERS / path, spare)))
        return made[0][1]

    check(name, make, 1)
    whole, stages = made[0]
    whole.adapt(ADAPTERS / name)
    tokens = list(range(1, 30))
    assert np.array_equal(stages.logits(tokens), whole.logits(tokens))


@pytest.mark.parametrize("name", cases_of(ADAPTERS, [name for name in NAMES if "moe" in name]))
def test_ranks_with_whole_experts_give_them_too(name: str) -> None:
    with native_peers(2) as peers:
        check(name, lambda path, spare: Ranks(ADAPTERS / path, peers, spare, whole_experts=True), 1)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", cases_of(ADAPTERS, [name for name in NAMES if name in FEW]))
def test_the_other_backends_give_them_too(name: str, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    check(name, lambda path, spare: base(path, backend, spare), 1)


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("name", cases_of(ADAPTERS, [*INVALID]))
def test_broken_adapters_are_refused_by_name(name: str, parted: bool) -> None:
    model: Model | Stages = base("base-llama", "reference")
    model, expected = Stages(ADAPTERS / "base-llama", 0) if parted else model, INVALID[name]
    if expected["verdict"] in ("accept", "bounded", "refuse-or-map"):
        model.adapt(ADAPTERS / "invalid" / name)
        return
    with pytest.raises(ModelError) as error:
        model.adapt(ADAPTERS / "invalid" / name)
    words = expected.get("mention", [])
    for word in [words] if isinstance(words, str) else words:
        assert word in str(error.value)


@needs(ADAPTERS)
def test_tokens_without_room_are_refused_by_name() -> None:
    for spare in (0, 7):
        with pytest.raises(ModelError, match="adds 8 tokens: start with --lora-extra-vocab-size 8"):
            base("base-llama", "reference", spare).adapt(ADAPTERS / GROWN)


def test_room_for_tokens_changes_no_bit_of_the_base(tiny_model: Callable[..., str]) -> None:
    backend = make_backend("native", 2, "auto")
    plain, roomy = (Model(tiny_model(), backend, reading=Reading(spare_tokens=spare)) for spare in (0, SPARE))
    tokens = list(range(1, 40))
    logits = roomy.logits(tokens, slot=-1)
    assert np.array_equal(logits[:, :-SPARE], plain.logits(tokens, slot=-1))
    assert np.all(logits[:, -SPARE:] == -np.inf)


@pytest.mark.parametrize("form", ["whole", "rows", "low rank"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_added_tokens_equal_a_checkpoint_that_has_them(tmp_path: Path, family: str, form: str) -> None:
    """The adapter's table, rows or low-rank changes over a model without them, beside a model of a larger table."""
    tied, added = family == "qwen3", 3
    path = write_checkpoint(tmp_path / "small", family, "float32", tie_word_embeddings=tied)
    tensors = load_file(Path(path) / "model.safetensors")
    rng, config = np.random.default_rng(0), json.loads((Path(path) / "config.json").read_text())
    names = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    vocab, width = tensors[f"{names[0]}.weight"].shape
    wanted, adapter = dict(tensors), {}
    about: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": names}
    for name in names:
        rows = rng.standard_normal((added, width)).astype(np.float32)
        table = np.concatenate([tensors[f"{name}.weight"], rows])
        wanted[f"{name}.weight"] = table
        if form == "rows":
            adapter[f"{name}.token_adapter.trainable_tokens_delta"] = rows
            about.setdefault("trainable_token_indices", {})[name] = list(range(vocab, vocab + added))
            continue
        low_rank = form == "low rank" and not tied
        adapter[f"{name}{'.base_layer' if low_rank else ''}.weight"] = table
        if low_rank:
            kind = "lora_embedding" if name.endswith("tokens") else "lora"
            shapes = (
                ((2, vocab + added), (width, 2)) if "embedding" in kind else ((2, width), (vocab + added, 2))
            )
            down, up = (rng.standard_normal(shape).astype(np.float32) * 0.3 for shape in shapes)
            end = "" if "embedding" in kind else ".weight"
            adapter[f"{name}.{kind}_A{end}"], adapter[f"{name}.{kind}_B{end}"] = down, up
            wanted[f"{name}.weight"] = table + ((up @ down).T if "embedding" in kind else up @ down)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(
        {f"base_model.model.{name}": v for name, v in adapter.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps(about))
    large = tmp_path / "large"
    shutil.copytree(path, large)
    save_file(wanted, large / "model.safetensors")
    (large / "config.json").write_text(json.dumps({**config, "vocab_size": vocab + added}))
    tokens = [5, vocab, 9, vocab + 2, vocab + 1, 7]
    for backend in ("native", "reference"):
        model = Model(path, make_backend(backend, 2, "auto"), reading=Reading(spare_tokens=4))
        model.adapt(folder)
        right = Model(large, make_backend(backend, 2, "auto")).logits(tokens, slot=-1)
        found = model.logits(tokens)
        assert np.abs(found[:, : vocab + added] - right).max() < 1e-4
        assert np.all(found[:, vocab + added :] == -np.inf)
    assert table_rows(folder) == vocab + added


def test_a_tied_head_that_is_saved_along_is_compared_with_the_embedding(tmp_path: Path) -> None:
    """PEFT saves lm_head.base_layer.weight beside a change of a tied head."""
    path = write_checkpoint(tmp_path / "model", "qwen3", "float32", tie_word_embeddings=True)
    table = load_file(Path(path) / "model.safetensors")["model.embed_tokens.weight"]
    rng, found = np.random.default_rng(0), []
    low = {f"lm_head.lora_{k}.weight": rng.standard_normal(s).astype(np.float32)
           for k, s in (("A", (2, table.shape[1])), ("B", (table.shape[0], 2)))}  # fmt: skip
    copies = ({}, {"lm_head.base_layer.weight": table}, {"lm_head.base_layer.weight": 2 * table})
    for number, copied in enumerate(copies):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(
            {f"base_model.model.{k}": v for k, v in (low | copied).items()},
            folder / "adapter_model.safetensors",
        )
        about = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["lm_head"]}
        (folder / "adapter_config.json").write_text(json.dumps(about))
        model = Model(path, make_backend("reference", 1, "auto"))
        model.adapt(folder)
        found.append(model.logits([1, 5, 9]))
        embedded = model.logits([1, 5, 9], slot=-1)
    assert np.array_equal(found[0], found[1])
    np.testing.assert_allclose(found[2] - found[0], embedded, rtol=1e-3, atol=1e-4)


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", "float32")
    folder = Path(write_adapter(tmp_path / "adapter", model, 0, rank=9))
    with pytest.raises(ModelError, match=r"rank 9 is above --max-lora-rank 8"):
        open_adapter(folder, 8)


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "a" * 5000, "(", "[" * 50])
def test_patterns_that_no_automaton_matches_are_refused(tmp_path: Path, pattern: str) -> None:
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
