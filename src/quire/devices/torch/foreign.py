"""Runs causal language models of `transformers` through that library's own code, over a paged KV cache.

The model is inspected by running it: once without memory (on torch's meta device) to see the shapes of its attention,
and once after loading, to compare what it computes over the cache with what it computes by itself. A model that mixes
tokens by other means than attention is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from quire.devices.foreign import ForeignModel
from quire.devices.formulas import Formulas
from quire.devices.graph import Graph, record
from quire.devices.ops import Op, Value
from quire.devices.protocol import (
    Attention,
    FloatDtype,
    KVCache,
    KVSpec,
    Limits,
    ModelInput,
)
from quire.devices.torch.attention import attend
from quire.devices.torch.backend import TorchBackend, own_cache
from quire.devices.torch.cache import DTYPES, TorchKVCache, TorchStep
from quire.devices.torch.run import TorchExecutable
from quire.errors import ModelError, QuireError
from quire.files import read_json
from quire.pretrained import check_directory, load_pretrained

# Two prompts of different lengths: if one sees the other's tokens or positions, its logits differ. Then they go on.
CHECKED = ((3, 1, 4, 1, 5, 9, 2), (6, 5, 3, 5))
CHECKED_STEPS = 4
PAGED = {
    "full_attention",
    "sliding_attention",
}  # kinds of layers whose states are keys and values by position
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25}  # of logits, if the largest is about 10
_names = itertools.count()
T = TypeVar("T")


class TransformersBackend(TorchBackend):
    """Runs the graphs that `TransformersModel` makes. The weights are the library's own."""

    caveat = (
        "runs through transformers' own code: slower than one of Quire's own families, and the last bits of its "
        "logits may depend on the other requests in a step"
    )

    @property
    def name(self) -> str:
        return f"transformers' own code, {self.threads} threads"

    def outline(self) -> TransformersBackend:
        return self

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> TorchExecutable:
        return TorchExecutable(graph, own_cache(kv), limits, self.threads, FORMULAS)

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        """Logits and activations. An estimate, since the library's code decides."""
        return 8 * max(graph.vocab_size * limits.max_logit_rows, 64 * 4096 * limits.max_tokens // 16)


@dataclass(frozen=True, slots=True)
class TransformersModel(ForeignModel):
    directory: Path

    def outline(self) -> Graph:
        return Graph((), 0, Value(0), Value(0), self.vocab_size, self.hidden_size)

    def load(self) -> Graph:
        paged = PagedAttention()
        config, _ = _config(self.directory, self.dtype)
        settings = {
            "config": config,
            "dtype": DTYPES[self.dtype],
            "attn_implementation": paged.name,
            "experts_implementation": "eager",  # handles every dtype
        }
        model = _made(
            partial(load_pretrained, AutoModelForCausalLM, self.directory, **settings), self.directory
        )
        split = _SplitModel(model, paged)
        graph = record(
            lambda g: g(RunLayers(split)),
            lambda g, hidden: g(RunHead(hidden, split)),
            self.vocab_size,
            self.hidden_size,
        )
        _made(partial(_check, self, model, paged, graph), self.directory)
        return graph


def open_model(directory: Path, dtype: str) -> ForeignModel:
    """Read config and shapes, without the weights. ModelError if the model cannot be served this way."""
    config, kept = _config(directory, dtype)
    paged = PagedAttention()
    with torch.device("meta"):
        options = {
            "attn_implementation": paged.name,
            "experts_implementation": "batched_mm",  # needs no data
        }
        model = _made(partial(_from_config, config, **options), directory)
    named = config.architectures or [type(model).__name__]
    if type(model).__name__ not in named:
        raise ModelError(
            f"{directory}: config.json names {named[0]}, and transformers makes {type(model).__name__} of it"
        )
    for base in type(model).__mro__:
        if (name := getattr(base, "main_input_name", "input_ids")) != "input_ids":
            raise ModelError(
                f"{directory}: {type(model).__name__} is the decoder of a model that reads {name}"
            )
    seen = _probe(model, paged, directory)
    generation = directory / "generation_config.json"
    settings: dict[str, Any] = read_json(generation) if generation.exists() else {}
    eos = settings.get("eos_token_id", getattr(config, "eos_token_id", None))
    num_parameters = sum(p.numel() for p in model.parameters())
    return TransformersModel(
        directory=directory,
        dtype=kept,
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        hidden_size=getattr(config, "hidden_size", 0),
        max_position=getattr(config, "max_position_embeddings", None) or 2048,
        num_layers=config.num_hidden_layers,
        num_kv_heads=max(s.num_kv_heads for s in seen.values()),
        head_dim=max(s.head_dim for s in seen.values()),
        num_parameters=num_parameters,
        weight_bytes=num_parameters * DTYPES[kept].itemsize,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        generation=settings,
    )


def _from_config(config: Any, **options: Any) -> Any:
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)  # type: ignore[no-untyped-call]


def _config(directory: Path, dtype: str) -> tuple[Any, FloatDtype]:
    """The model's configuration with its dtype set."""
    check_directory(directory)
    config = _made(lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False), directory)
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - PAGED
    if kinds:
        raise ModelError(
            f"{directory}: layers of kind {min(kinds)} keep what a paged cache of keys and values lacks"
        )
    own = "bfloat16" if config.dtype == torch.bfloat16 else "float32"
    kept: FloatDtype = "bfloat16" if (own if dtype == "auto" else dtype) == "bfloat16" else "float32"
    config.dtype = DTYPES[kept]
    # there is no padding; some models look for it in every step
    _made(partial(setattr, config, "pad_token_id", None), directory)
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(f"{directory}: attention_chunk_size is not supported through transformers")
    return config, kept


def _made(make: Callable[[], T], directory: Path) -> T:
    """The result of `make`, which runs transformers' code. That raises anything: all becomes ModelError."""
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


def _probe(model: Any, paged: PagedAttention, directory: Path) -> dict[int, LayerShape]:
    """Run two arbitrary tokens without memory, and return what reaches the attention of each layer."""
    config = model.config
    paged.seen = {}
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    _made(partial(model, input_ids=tokens, position_ids=tokens, use_cache=False), directory)
    seen, paged.seen = paged.seen, None
    if set(seen) != set(range(config.num_hidden_layers)):
        found = f"{len(seen)} of {config.num_hidden_layers} layers of {type(model).__name__}"
        raise ModelError(
            f"{directory}: {found} use attention that can be replaced; other states cannot be served"
        )
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and not any(s.window for s in seen.values()):
        raise ModelError(f"{directory}: {type(model).__name__} hides its sliding window from its attention")
    return seen


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
        """All sequences of the step as one row of tokens: [L, D]."""
        self._paged.step = step
        self._output = self._base(
            input_ids=step.tokens_T[None], position_ids=step.positions_T[None], use_cache=False
        )
        return self._output.last_hidden_state[0][step.logit_rows_L]

    def head(self, step: TorchStep, hidden_LD: Any) -> Any:
        """The model's own forward pass with `hidden_LD` in place of its layers' result: [L, V] float32."""
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
    """Generate from two prompts over the cache, and compare with each text by itself in transformers' own attention."""
    texts = [[token % info.vocab_size for token in prompt] for prompt in CHECKED]
    cache = TorchKVCache(
        KVSpec(info.num_layers, info.num_kv_heads, info.head_dim, "float32"), 2 * len(texts), 8, "cpu"
    )
    executable = TorchExecutable(graph, cache, Limits(32, 2, 32), torch.get_num_threads(), FORMULAS)
    done = [0] * len(texts)
    for _ in range(CHECKED_STEPS):
        found = executable.run(_checked_input(texts, done)).numpy()
        model.set_attn_implementation("eager")
        alone = [model(input_ids=torch.tensor([text]), use_cache=False).logits[0].float() for text in texts]
        model.set_attn_implementation(paged.name)
        wanted = torch.cat([rows[first:] for rows, first in zip(alone, done, strict=True)]).numpy()
        off = float(np.abs(found - wanted).max()) / max(1.0, float(np.abs(wanted).max()) / 10)
        if not off <= TOLERANCE[info.dtype]:
            raise ModelError(
                f"{info.directory}: {info.architecture} gives other logits over a paged cache than by itself (by "
                f"{off:.3g}): its layers see more than their attention shows"
            )
        done = [len(text) for text in texts]
        for text, rows in zip(texts, alone, strict=True):
            text.append(int(rows[-1].argmax()))


def _checked_input(texts: list[list[int]], done: list[int]) -> ModelInput:
    """A step of the tokens that are not `done`, with the logits of all of them."""
    lengths = [len(text) for text in texts]
    counts = np.subtract(lengths, done)
    return ModelInput(
        np.concatenate([np.array(text[first:], np.int32) for text, first in zip(texts, done, strict=True)]),
        np.concatenate([np.arange(*pair, dtype=np.int32) for pair in zip(done, lengths, strict=True)]),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        np.array(lengths, np.int32),
        np.arange(len(texts), dtype=np.int32),
        np.arange(2 * len(texts), dtype=np.int32).reshape(len(texts), 2),
        np.arange(int(counts.sum()), dtype=np.int32),
    )
