"""Networks written in Python equal the models that Quire reads from a checkpoint with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.build import BuiltEngine, build_engine, build_temporary
from quire.config import EngineConfig
from quire.devices.cpu.backend import NativeBackend
from quire.errors import ConfigError
from quire.files import read_json
from quire.model.checkpoint import OpenedFiles
from quire.model.info import EngineLimits
from quire.model.parts.attention import AttentionConfig
from quire.model.parts.mlp import MLPConfig
from quire.model.shard import Shard
from quire.weights.checkpoint import open_checkpoint
from tensorrt_llm.builder import Builder
from tensorrt_llm.layers import MLP, Attention, Embedding, GatedMLP, LayerNorm, Linear, RmsNorm
from tensorrt_llm.lowering import open_network, source_of
from tensorrt_llm.module import Module, ModuleList
from tensorrt_llm.network import Network, Tensor, net_guard
from tests.models import load_model
from tests.test_convert import packed
from tests.tiny import write_checkpoint

Config = dict[str, Any]


def attention(config: Config, **changes: Any) -> Attention:
    return Attention(
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        attention_head_size=config["head_dim"],
        max_position_embeddings=config["max_position_embeddings"],
        rotary_embedding_base=config["rope_theta"],
        rotary_embedding_scaling=config.get("rope_scaling"),
        **{"bias": False, **changes},
    )


class Layer(Module):
    """The layer of Llama, and of Qwen 2 and 3 by their options."""

    def __init__(self, config: Config, **changes: Any) -> None:
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_layernorm = RmsNorm(size, eps), RmsNorm(size, eps)
        self.attention = attention(config, **changes)
        self.mlp = GatedMLP(size, config["intermediate_size"], config["hidden_act"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return self.mlp(self.post_layernorm(x)) + x


class Model(Module):
    def __init__(self, config: Config, layer: Callable[[int], Module]) -> None:
        self.embedding = Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = ModuleList(layer(i) for i in range(config["num_hidden_layers"]))
        self.ln_f: RmsNorm | LayerNorm = RmsNorm(config["hidden_size"], config["rms_norm_eps"])
        self.lm_head = Linear(config["hidden_size"], config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def fill(model: Any, directory: Path) -> None:
    """Give the layers the weights of a checkpoint with Llama's names."""
    tensors = open_checkpoint(directory)
    present = set(tensors.names())

    def put(layer: Any, *modules: str) -> None:
        for kind in ("weight", "bias"):
            names = [f"{module}.{kind}" for module in modules]
            if getattr(layer, kind, None) is not None and names[0] in present:
                getattr(layer, kind).value = np.concatenate([tensors.get(name) for name in names])

    put(model.embedding, "model.embed_tokens")
    put(model.ln_f, "model.norm")
    put(model.lm_head, "lm_head")
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        put(layer.input_layernorm, f"{prefix}input_layernorm")
        put(layer.post_layernorm, f"{prefix}post_attention_layernorm")
        put(layer.attention.qkv, *(f"{prefix}self_attn.{name}_proj" for name in "qkv"))
        put(layer.attention.dense, f"{prefix}self_attn.o_proj")
        for name in ("q", "k"):
            put(getattr(layer.attention, f"{name}_layernorm"), f"{prefix}self_attn.{name}_norm")
        put(layer.mlp.fc, f"{prefix}mlp.gate_proj")
        put(layer.mlp.gate, f"{prefix}mlp.up_proj")
        put(layer.mlp.proj, f"{prefix}mlp.down_proj")


def record(model: Module) -> Network:
    network = Network()
    with net_guard(network):
        model(network.add_input()).mark_output()
    return network


@pytest.mark.parametrize(
    ("family", "changes", "config"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"tie_word_embeddings": True}),
        ("llama", {}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("mistral", {"sliding_window": 24}, {}),
        ("qwen2", {"bias": True, "dense_bias": False}, {}),
        ("qwen3", {"qk_layernorm": True, "eps": 1e-5}, {}),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_network_packs_to_the_bytes_of_the_loaded_model(
    family: str, changes: Config, config: Config, ranks: int, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "model", family, "bfloat16", **config)
    config = read_json(directory / "config.json")
    model = Model(config, lambda i: Layer(config, **changes))
    fill(model, directory)
    opened, backend = open_network(record(model), "auto", None), NativeBackend(threads=1)
    for rank in range(ranks):
        mine = OpenedFiles(opened).load(backend, Shard(rank, ranks))
        wanted = load_model(directory, backend, shard=Shard(rank, ranks))
        assert packed(mine, backend) == packed(wanted, backend)
        assert [layer.mixer for layer in mine.spec.layers] == [layer.mixer for layer in wanted.spec.layers]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("network") / "model")


@pytest.fixture
def llama(checkpoint: Path) -> Model:
    config = read_json(checkpoint / "config.json")
    model = Model(config, lambda i: Layer(config))
    fill(model, checkpoint)
    return model


def test_an_engine_of_it_writes_what_the_checkpoint_writes(
    checkpoint: Path, llama: Model, tmp_path: Path
) -> None:
    network = record(llama)
    network.eos_token_ids = (read_json(checkpoint / "config.json")["eos_token_id"],)
    config = EngineConfig.from_options(tokenizer=str(checkpoint))
    build_engine(config, tmp_path / "engine", EngineLimits(max_seq_len=64), source_of(network, config))
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=3)
    answers = []
    for path in (checkpoint, tmp_path / "engine"):
        with LLM(str(path)) as llm:
            (output,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
            answers.append((output.outputs[0].text, output.outputs[0].logprobs))
    assert answers[0] == answers[1]


def test_its_weights_are_quantized_like_others(checkpoint: Path, llama: Model) -> None:
    config = EngineConfig.from_options(model=str(checkpoint), quantization="int8", dtype="bfloat16")
    mine = build_temporary(config, source=source_of(record(llama), config))
    wanted = build_temporary(config)
    assert (mine.directory / "weights.bin").read_bytes() == (wanted.directory / "weights.bin").read_bytes()
    assert mine.manifest.tensors == wanted.manifest.tensors


def test_it_is_divided_among_ranks(checkpoint: Path, llama: Model) -> None:
    options = {"model": str(checkpoint), "tokenizer": str(checkpoint), "tensor_parallel_size": 2}
    config = EngineConfig.from_options(**options)
    mine, wanted = build_temporary(config, source=source_of(record(llama), config)), build_temporary(config)
    for name in ("weights.bin", "weights.1.bin"):
        assert (mine.directory / name).read_bytes() == (wanted.directory / name).read_bytes()
    with LLM(str(mine.directory)) as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids


def test_a_checkpoint_may_take_the_place_of_layers(checkpoint: Path, tmp_path: Path) -> None:
    builder = Builder()
    network = builder.create_network()
    network.model = EngineConfig.from_options(model=str(checkpoint))
    engine = builder.build_engine(network, builder.create_builder_config(precision="bfloat16"))
    assert engine.manifest.dtype == "bfloat16"
    folder = engine.directory.parent
    engine.save(tmp_path / "saved")
    del engine
    assert not folder.exists()
    saved = BuiltEngine(tmp_path / "saved")
    saved.check(vocab_size=320, num_layers=3, num_heads=None)
    with pytest.raises(ConfigError, match="num_layers is 4, and the engine was built with 3"):
        saved.check(num_layers=4)


class Half(Module):
    """Two branches, with norms where `norms` says, added in the way that `kind` names."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.attention = Attention(hidden_size=32, num_attention_heads=2, position_embedding_type="alibi")
        self.mlp = MLP(32, 64, "gelu")
        self.a, self.b, self.c, self.d = (LayerNorm(32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.a, self.b, self.c, self.d
        if self.kind == "post":
            x = x + a(self.attention(x))
            return x + b(self.mlp(x))
        if self.kind == "sandwich":
            x = x + b(self.attention(a(x)))
            return x + d(self.mlp(c(x)))
        if self.kind == "sum":
            x = a(x + self.attention(x))
            return b(x + self.mlp(x))
        if self.kind == "parallel":
            y = a(x)
            return x + self.attention(y) + self.mlp(y)
        if self.kind == "parallel_two":
            return x + self.mlp(b(x)) + self.attention(a(x))
        if self.kind == "mixed":
            x = x + self.attention(a(x))
            return x + b(self.mlp(x))
        if self.kind == "swapped":
            x = x + self.mlp(a(x))
            return x + self.attention(b(x))
        y = a(x)
        return y + self.attention(b(x))


def small(kind: str, final: bool = True) -> Model:
    config = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    model = Model({**config, "tie_word_embeddings": False}, lambda i: Half(kind))
    model.ln_f = LayerNorm(32)
    rng = np.random.default_rng(0)
    for _, weight in model.named_parameters():
        weight.value = rng.standard_normal(weight.shape, dtype=np.float32).astype(ml_dtypes.bfloat16)
    return model


@pytest.mark.parametrize("kind", ["post", "sandwich", "sum", "parallel", "parallel_two"])
def test_norms_at_every_place_are_recognized(kind: str) -> None:
    opened = open_network(record(small(kind)), "auto", None)
    layer, norm = opened.spec.layers[0], opened.spec.norm
    assert (layer.placement, norm is not None and norm.kind) == (kind, "layer")
    assert isinstance(layer.mixer, AttentionConfig)
    assert isinstance(layer.mlp, MLPConfig)
    assert (layer.mixer.scores.alibi, layer.mixer.qkv_bias, layer.mlp.gated) == (1.0, True, False)
    model = OpenedFiles(opened).load(NativeBackend(threads=1))
    assert model.info.num_parameters == sum(np.prod(p.shape) for _, p in _used(small(kind)))


def _used(model: Model) -> list[tuple[str, Any]]:
    """The parameters of the layers that a kind calls."""
    kind = model.layers[0].kind  # type: ignore[attr-defined]
    norms = {"sandwich": "abcd", "parallel": "a"}.get(kind, "ab")
    unused = [f".{name}." for name in "abcd" if name not in norms]
    return [(name, p) for name, p in model.named_parameters() if not any(part in name for part in unused)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mixed", "layer 1 from the end has norms at places"),
        ("swapped", "not attention followed by an MLP"),
        ("detour", "does not add attention or an MLP to its own input"),
    ],
)
def test_another_shape_is_refused(kind: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_network(record(small(kind)), "auto", None)


def test_an_empty_network_is_refused() -> None:
    network = Network()
    with net_guard(network):
        pass
    with pytest.raises(ConfigError, match="the network is empty: call layers inside"):
        source_of(network, EngineConfig())
    with net_guard(network):
        network.add_input()
    with pytest.raises(ConfigError, match="has no result"):
        open_network(network, "auto", None)


def test_mistakes_are_named(llama: Model) -> None:
    network, other = Network(), Network()
    with pytest.raises(ConfigError, match="inside `with net_guard"):
        network.add_input()
    with net_guard(network), net_guard(other):
        with pytest.raises(ConfigError, match="of its own network"):
            network.add_input() + other.add_input()
        with pytest.raises(ConfigError, match="being recorded already"), net_guard(network):
            pass
    with pytest.raises(ConfigError, match=r"shape \[320, 48\] cannot hold \[1, 48\]"):
        llama.embedding.weight.value = np.zeros((1, 48), np.float32)
    with pytest.raises(ConfigError, match="must be float32, float16 or bfloat16"):
        llama.embedding.weight.value = np.zeros((320, 48))
    with pytest.raises(ConfigError, match="Module has no forward"):
        Module()()
    with pytest.raises(ConfigError, match="hidden_act must be one of silu"):
        MLP(8, 8, "swash")
    llama.layers[1].mlp.fc.weight._value = None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"layer 1: fc.weight has no value: .* \[96, 48\]"):
        open_network(record(llama), "auto", None)
    llama.layers[2].attention = attention({**read(), "rope_theta": 5.0}, bias=True)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="layers differ in the bias of qkv: False and True"):
        open_network(record(llama), "auto", None)


def read() -> Config:
    return {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }


def test_paths_name_the_weights(llama: Model) -> None:
    names = [name for name, _ in llama.named_parameters()]
    assert "layers.2.attention.qkv.weight" in names
    assert len(names) == 2 + 1 + 3 * 7
