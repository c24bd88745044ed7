"""Runs language models of `transformers` through that library's own code, over a paged KV cache.

The class is the one that `architectures` names: a model that also sees or hears is loaded whole, and gets text alone.
It is inspected by running it: once without memory (on torch's meta device) to see the shapes of its attention and what
its cache holds, and once after loading, to compare what it computes over the cache with what it computes by itself. A
model that mixes tokens by other means than attention is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from quire.devices.foreign import ForeignModel
from quire.devices.formulas import Formulas
from quire.devices.graph import Graph, record
from quire.devices.ops import Op, Value
from quire.devices.protocol import Attention, FloatDtype, IntArray, KVCache, KVSpec, Limits, ModelInput
from quire.devices.torch.attention import attend
from quire.devices.torch.backend import TorchBackend, own_cache
from quire.devices.torch.cache import DTYPES, TorchKVCache, TorchStep
from quire.devices.torch.run import TorchExecutable
from quire.errors import ModelError, QuireError
from quire.files import read_json
from quire.pretrained import check_directory, load_pretrained

CHECKED = 13, 10  # least tokens of the two texts that are checked
CHECKED_STEPS = 4  # the last of these tokens are computed one by one
CHECKED_WORK = 2**38  # tokens times parameters: the most that a check of more tokens may cost
# LONGER are words in the names of fields that say after how many tokens layers differ.
LONGER = "window", "block", "chunk", "pool"
PLACEHOLDERS = "_token_id", "_token_index"
# PAGED are kinds of layers whose states are keys and values by position; KEPT are their caches, and no subclass.
PAGED = {"full_attention", "sliding_attention"}
KEPT = DynamicLayer, DynamicSlidingWindowLayer
# ROPES_BY_LENGTH turn a token by the longest sequence of its step.
ROPES_BY_LENGTH = {"dynamic", "longrope"}
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25}  # of logits, if the largest is about 10
_names = itertools.count()
T = TypeVar("T")


class TransformersBackend(TorchBackend):
    """Runs the graphs that `TransformersModel` makes. The weights are the library's own."""

    @property
    def name(self) -> str:
        return f"transformers' own code, {self.threads} threads"

    @property
    def caveat(self) -> str:
        return (
            "runs through transformers' own code: slower than one of Quire's own families, and the last bits of its "
            "logits may depend on the other requests in a step"
        )

    def outline(self) -> TransformersBackend:
        return self

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> TorchExecutable:
        return TorchExecutable(graph, own_cache(kv), limits, self.threads, FORMULAS)

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        """Count logits and activations. An estimate, since the library's code decides."""
        return 8 * max(graph.vocab_size * limits.max_logit_rows, 64 * 4096 * limits.max_tokens // 16)


@dataclass(frozen=True, slots=True)
class TransformersModel(ForeignModel):
    directory: Path

    def outline(self) -> Graph:
        return Graph((), 0, Value(0), Value(0), self.vocab_size, self.hidden_size)

    def load(self) -> Graph:
        paged = PagedAttention()
        kind, config, _ = _kind(self.directory, self.dtype)
        # The experts' eager implementation handles every dtype.
        settings = {"attn_implementation": paged.name, "experts_implementation": "eager"}
        settings |= {"config": config, "dtype": DTYPES[self.dtype]}
        model = _made(partial(load_pretrained, kind, self.directory, **settings), self.directory)
        split = _SplitModel(model, paged)
        sizes = self.vocab_size, self.hidden_size
        graph = record(lambda g: g(RunLayers(split)), lambda g, x: g(RunHead(x, split)), *sizes)
        _made(partial(_check, self, model, paged, graph), self.directory)
        return graph


def open_model(directory: Path, dtype: str) -> ForeignModel:
    """Read config and shapes, without the weights. ModelError if the model cannot be served this way."""
    kind, config, kept = _kind(directory, dtype)
    text, paged = config.get_text_config(decoder=True), PagedAttention()
    options = {"attn_implementation": paged.name, "experts_implementation": "batched_mm"}  # needs no data
    make = kind.from_config if kind is AutoModelForCausalLM else kind._from_config
    with torch.device("meta"):
        model = _made(partial(make, config, **options), directory)
    for base in type(model).__mro__:
        if (name := getattr(base, "main_input_name", "input_ids")) != "input_ids":
            raise ModelError(
                f"{directory}: {type(model).__name__} is the decoder of a model that reads {name}"
            )
    seen, vocab_size = _probe(model, paged, directory)
    generation = directory / "generation_config.json"
    settings: dict[str, Any] = read_json(generation) if generation.exists() else {}
    eos = settings.get("eos_token_id", getattr(text, "eos_token_id", None))
    num_parameters = sum(p.numel() for p in model.parameters())
    return TransformersModel(
        directory=directory,
        dtype=kept,
        architecture=type(model).__name__,
        vocab_size=vocab_size,
        hidden_size=getattr(text, "hidden_size", 0),
        max_position=getattr(text, "max_position_embeddings", None) or 2048,
        num_layers=text.num_hidden_layers,
        num_kv_heads=max(s.num_kv_heads for s in seen.values()),
        head_dim=max(s.head_dim for s in seen.values()),
        num_parameters=num_parameters,
        weight_bytes=num_parameters * DTYPES[kept].itemsize,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        generation=settings,
    )


def _kind(directory: Path, dtype: str) -> tuple[Any, Any, FloatDtype]:
    """Find the library's class for the model, its configuration with its dtype set, and that dtype."""
    check_directory(directory)
    config = _made(lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False), directory)
    text = config.get_text_config(decoder=True)
    kind: Any = AutoModelForCausalLM
    for name in config.architectures or ():
        kind = _made(partial(getattr, transformers, name, None), directory)
        if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.can_generate()):
            raise ModelError(f"{directory}: {name} is not a class of transformers that generates text")
        config = config if isinstance(config, kind.config_class or ()) else text
        if not isinstance(config, kind.config_class or ()):
            raise ModelError(f"{directory}: {name} is not made of a config of model_type {config.model_type}")
    _check_fields(directory, config, text)
    own = "bfloat16" if text.dtype == torch.bfloat16 else "float32"
    kept: FloatDtype = "bfloat16" if (own if dtype == "auto" else dtype) == "bfloat16" else "float32"
    config.dtype = text.dtype = DTYPES[kept]
    # there is no padding; some models look for it in every step
    _made(partial(setattr, text, "pad_token_id", None), directory)
    return kind, config, kept


def _check_fields(directory: Path, config: Any, text: Any) -> None:
    """Raise ModelError if a field says that the model keeps more than keys and values, or that a step's tokens meet."""
    kinds = set(getattr(text, "layer_types", None) or ()) - PAGED
    if kinds:
        raise ModelError(
            f"{directory}: layers of kind {min(kinds)} keep what a paged cache of keys and values lacks"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{directory}: {config.model_type} reads its prompt by an encoder")
    if getattr(text, "attention_chunk_size", None) is not None:
        raise ModelError(f"{directory}: attention_chunk_size is not supported through transformers")
    for name, value in _fields(text):
        if name == "rope_type" and value in ROPES_BY_LENGTH:
            raise ModelError(f"{directory}: rope_type {value} is not supported through transformers")


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    """List all fields of a configuration and of the objects in it."""
    waiting: list[Any] = [config.to_dict()]
    while waiting:
        for name, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            else:
                yield str(name), value


def _made(make: Callable[[], T], directory: Path) -> T:
    """Return the result of `make`, which runs transformers' code. That raises anything: all becomes ModelError."""
    try:
        return make()
    except QuireError:
        raise
    except Exception as error:
        raise ModelError(
            f"{directory}: transformers cannot run this model: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The attention of one layer."""

    num_kv_heads: int
    head_dim: int
    window: int | None


def _probe(model: Any, paged: PagedAttention, directory: Path) -> tuple[dict[int, LayerShape], int]:
    """Run more tokens than any layer treats alike, without memory: what reaches each attention, and the vocabulary."""
    text, made = model.config.get_text_config(decoder=True), type(model).__name__
    paged.seen = {}
    tokens = torch.zeros(1, _longest(text) + 1, dtype=torch.long, device="meta")
    run = partial(model, input_ids=tokens, position_ids=torch.zeros_like(tokens))
    _made(partial(run, use_cache=False), directory)
    seen, paged.seen = paged.seen, {}
    output = _made(partial(run, use_cache=True), directory)
    paged.seen = None
    if set(seen) != set(range(text.num_hidden_layers)):
        found = f"{len(seen)} of {text.num_hidden_layers} layers of {made}"
        raise ModelError(
            f"{directory}: {found} use attention that can be replaced; other states cannot be served"
        )
    for kept in (value for value in output.values() if isinstance(value, Cache)):
        own = type(kept) is DynamicCache
        if other := {type(layer) for layer in kept.layers} - set(KEPT) if own else {type(kept)}:
            names = ", ".join(sorted(kind.__name__ for kind in other))
            raise ModelError(f"{directory}: {made} keeps {names}, which holds more than keys and values")
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True) and not any(s.window for s in seen.values()):
        raise ModelError(f"{directory}: {made} hides its sliding window from its attention")
    return seen, output.logits.shape[-1]


def _longest(text: Any) -> int:
    """Find the largest number of tokens that a field names as one window, block, chunk or pool."""
    return max(
        value
        for name, value in (*_fields(text), ("block", CHECKED[0]))
        if isinstance(value, int) and any(word in name for word in LONGER)
    )


class PagedAttention:
    """Replaces a model's attention: reads and writes the cache of the current step."""

    def __init__(self) -> None:
        self.name = f"quire_paged_{next(_names)}"
        self.seen: dict[int, LayerShape] | None = None
        self.step: TorchStep | None = None
        AttentionInterface.register(self.name, self)

    def __call__(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: Any = None,
        **options: Any,
    ) -> tuple[Any, None]:
        """query [1, N, T, H], key and value [1, G, T, H] -> [1, T, N, H], as transformers' AttentionInterface asks."""
        layer, window = module.layer_idx, options.get("sliding_window")
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        if self.seen is not None:
            dim = max(key.shape[3], value.shape[3])
            self.seen[layer] = LayerShape(key.shape[1], dim, window)
            return out, None
        step = self.step
        assert step is not None
        keys, values = (
            side[layer][:, : new.shape[1], : new.shape[3]]
            for side, new in ((step.cache.keys, key), (step.cache.values, value))
        )
        keys[step.places_T] = key[0].transpose(0, 1).to(keys.dtype)
        values[step.places_T] = value[0].transpose(0, 1).to(values.dtype)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        attention = Attention(scale, window=window, cap=options.get("softcap"))
        sinks = options.get("s_aux")
        for seq in step.sequences:
            first = 0 if window is None else max(0, seq.start - window + 1)
            places = seq.places[first:]
            out[0, seq.begin : seq.end] = attend(
                query[0, :, seq.begin : seq.end].transpose(0, 1).float(),
                keys[places].float(),
                values[places].float(),
                first,
                seq.start,
                attention,
                None if sinks is None else sinks.float(),
            ).to(out.dtype)
        return out, None


class _SplitModel:
    """A model's forward pass in two operations: its layers, and its head on chosen rows."""

    def __init__(self, model: Any, paged: PagedAttention) -> None:
        self._model, self._base, self._paged = model, model.base_model, paged
        self._output: Any = None

    def hidden(self, step: TorchStep) -> Any:
        """Compute the hidden states of the step's logit rows, its sequences as one row of tokens: [L, D]."""
        self._paged.step = step
        self._output = self._base(
            input_ids=step.tokens_T[None], position_ids=step.positions_T[None], use_cache=False
        )
        return self._output.last_hidden_state[0][step.logit_rows_L]

    def head(self, step: TorchStep, hidden_LD: Any) -> Any:
        """Run the model's own forward pass with `hidden_LD` in place of its layers' result: [L, V] float32."""
        output = dataclasses.replace(self._output, last_hidden_state=hidden_LD[None])
        self._base.forward = lambda *args, **options: output
        try:
            tokens = step.tokens_T.new_zeros(1, len(hidden_LD))
            return self._model(input_ids=tokens, use_cache=False).logits[0].float()
        finally:
            del self._base.forward


class RunLayers(Op[T], frozen=True, eq=False):
    """The final hidden states of the logit rows, by another library's code: [L, D]."""

    model: _SplitModel


class RunHead(Op[T], frozen=True, eq=False):
    """The logits [L, V] of hidden states [L, D], by another library's code."""

    hidden: T
    model: _SplitModel


FORMULAS: Formulas = {
    RunLayers: lambda step, op: op.model.hidden(step),
    RunHead: lambda step, op: op.model.head(step, op.hidden),
}


@torch.inference_mode()
def _check(info: TransformersModel, model: Any, paged: PagedAttention, graph: Graph) -> None:
    """Run texts over the cache, in pieces and side by side, and compare with each alone in transformers' attention."""
    config = model.config
    longest = min(
        _longest(config.get_text_config(decoder=True)) + CHECKED_STEPS, CHECKED_WORK // info.num_parameters
    )
    special = {
        v
        for k, v in _fields(config)
        if k.endswith(PLACEHOLDERS) and type(v) is int and 0 <= v < info.vocab_size
    }
    lengths = max(CHECKED[0], longest), max(CHECKED[1], len(special) + CHECKED_STEPS)
    draw = np.random.default_rng(0)
    texts = [draw.integers(info.vocab_size, size=length, dtype=np.int32) for length in lengths]
    texts[1][: len(special)] = sorted(special)
    blocks = -(-max(lengths) // 8)
    spec = KVSpec(info.num_layers, info.num_kv_heads, info.head_dim, "float32")
    cache = TorchKVCache(spec, 2 * blocks, 8, "cpu")
    limits = Limits(sum(lengths), 2, sum(lengths))
    executable = TorchExecutable(graph, cache, limits, torch.get_num_threads(), FORMULAS)
    model.set_attn_implementation("eager")
    alone = [model(input_ids=torch.tensor(text[None]), use_cache=False).logits[0].float() for text in texts]
    # as it generates by itself a model may see its prompt in another way, e.g. all of it at once
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    prompt = torch.tensor(texts[1][None])
    settings = {
        "max_new_tokens": 1,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    alone[1][-1] = made.logits[0][0].float()
    model.set_attn_implementation(paged.name)
    ends = [[length // 2, *range(length - CHECKED_STEPS, length + 1)] for length in lengths]
    done = [0, 0]
    for stop in zip(*ends, strict=True):
        found = executable.run(_checked_input(texts, done, stop, blocks)).numpy()
        wanted = np.concatenate([rows[a:b].numpy() for rows, a, b in zip(alone, done, stop, strict=True)])
        off = float(np.abs(found - wanted).max()) / max(1.0, float(np.abs(wanted).max()) / 10)
        if not off <= TOLERANCE[info.dtype]:
            raise ModelError(
                f"{info.directory}: {info.architecture} gives other logits over a paged cache than by itself (by "
                f"{off:.3g}): its layers see more than their attention shows"
            )
        done = list(stop)


def _checked_input(
    texts: list[IntArray], done: Sequence[int], stop: Sequence[int], blocks: int
) -> ModelInput:
    """Make a step of the tokens from `done` to `stop`, with the logits of all of them."""
    counts = np.subtract(stop, done)
    return ModelInput(
        np.concatenate([text[a:b] for text, a, b in zip(texts, done, stop, strict=True)]),
        np.concatenate([np.arange(*pair, dtype=np.int32) for pair in zip(done, stop, strict=True)]),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        np.array(stop, np.int32),
        np.arange(len(texts), dtype=np.int32),
        np.arange(blocks * len(texts), dtype=np.int32).reshape(len(texts), blocks),
        np.arange(int(counts.sum()), dtype=np.int32),
    )
