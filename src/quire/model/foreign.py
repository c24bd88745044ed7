"""Runs any causal language model of `transformers` through its own modelling code, over a paged KV cache. Needs torch.

Knows torch and transformers; knows no scheduler. The model is found out about by running it: once without memory (on
torch's meta device) to see the shapes that its attention has, and once when it is loaded, to compare what it computes
over the cache with what it computes by itself. A model that mixes tokens by other means than attention is refused.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from quire.devices.host import HostLogits
from quire.devices.protocol import (
    Backend,
    FloatArray,
    FloatDtype,
    KVCache,
    KVDtype,
    KVSpec,
    Limits,
    ModelInput,
)
from quire.errors import ConfigError, ModelError
from quire.model.load import ModelInfo

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Two prompts of different lengths, so that one that sees the other's tokens or positions shows.
CHECKED = ((3, 1, 4, 1, 5, 9, 2), (6, 5, 3, 5))
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25}  # of logits, where the largest is about 10
_names = itertools.count()


@dataclass(frozen=True, slots=True)
class ForeignShape:
    """What the engine must know of the model's shape."""

    architecture: str
    vocab_size: int
    max_position: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_table_parameters: int

    def kv_spec(self, dtype: KVDtype) -> KVSpec:
        if dtype == "int8":
            raise ConfigError(
                "--kv-cache-dtype int8 is for Quire's own families; this model runs through transformers"
            )
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, dtype)


def inspect_foreign(directory: Path, dtype: str) -> ModelInfo:
    """Config and shapes, without reading weights. ModelError where the model cannot be served this way."""
    config, kept = _config(directory, dtype)
    paged = PagedAttention()
    with torch.device("meta"):
        options = {
            "attn_implementation": paged.name,
            "experts_implementation": "batched_mm",
        }  # no data needed
        model = _made(partial(_from_config, config, **options), directory)
    named = config.architectures or [type(model).__name__]
    if type(model).__name__ not in named:
        raise ModelError(
            f"{directory}: config.json names {named[0]}, and transformers makes {type(model).__name__} of it"
        )
    shape = _probe(model, paged, directory)
    count = sum(p.numel() for p in model.parameters())
    generation = directory / "generation_config.json"
    settings: dict[str, Any] = json.loads(generation.read_text()) if generation.exists() else {}
    eos = settings.get("eos_token_id", config.eos_token_id)
    return ModelInfo(
        directory=directory,
        spec=shape,
        dtype=kept,
        num_parameters=count,
        weight_bytes=count * TYPES[kept].itemsize,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        generation=settings,
    )


def _from_config(config: Any, **options: Any) -> Any:
    return AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]


def _from_pretrained(directory: Path, **options: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False, **options)
    return model.eval()


def _config(directory: Path, dtype: str) -> tuple[Any, FloatDtype]:
    """The model's configuration with its dtype set."""
    config = _made(lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False), directory)
    config = config.get_text_config()
    own = "bfloat16" if config.dtype == torch.bfloat16 else "float32"
    kept: FloatDtype = "bfloat16" if (own if dtype == "auto" else dtype) == "bfloat16" else "float32"
    config.dtype = TYPES[kept]
    config.pad_token_id = None  # there is no padding; some models look for it in every step
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(f"{directory}: attention_chunk_size is not supported through transformers")
    return config, kept


def _made(make: Any, directory: Path) -> Any:
    """What `make` makes; transformers' refusals as ModelError."""
    try:
        return make()
    except (ValueError, OSError, KeyError, AttributeError, ImportError) as error:
        raise ModelError(f"{directory}: transformers cannot make this model: {error}") from error


def _probe(model: Any, paged: PagedAttention, directory: Path) -> ForeignShape:
    """Run two tokens that mean nothing, and look at what reaches attention."""
    config = model.config
    paged.seen = {}
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        model(input_ids=tokens, position_ids=tokens, use_cache=False)
    except (RuntimeError, TypeError, IndexError, NotImplementedError) as error:
        raise ModelError(
            f"{directory}: {type(model).__name__} cannot be run over a paged cache: {error}"
        ) from error
    seen, paged.seen = paged.seen, None
    if set(seen) != set(range(config.num_hidden_layers)):
        found = f"{len(seen)} of {config.num_hidden_layers} layers of {type(model).__name__}"
        raise ModelError(
            f"{directory}: {found} use attention that can be replaced; other states cannot be served"
        )
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and not any(s.window for s in seen.values()):
        raise ModelError(f"{directory}: {type(model).__name__} hides its sliding window from its attention")
    tables = {
        id(t.weight): t.weight.numel() for t in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    return ForeignShape(
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        max_position=getattr(config, "max_position_embeddings", None) or 2048,
        num_layers=config.num_hidden_layers,
        num_kv_heads=max(s.num_kv_heads for s in seen.values()),
        head_dim=max(s.head_dim for s in seen.values()),
        num_table_parameters=sum(tables.values()),
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """The attention of one layer."""

    num_kv_heads: int
    head_dim: int
    window: int | None


class TorchKVCache:
    """Keys and values [blocks, block_size, G, H] of each layer."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, block_size
        shape = (spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.keys, self.values = (torch.empty(shape, dtype=TYPES[spec.dtype]) for _ in range(2))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            for side in (self.keys, self.values):
                side[:, destination] = side[:, source]


class PagedAttention:
    """What takes the place of a model's attention: reads and writes the cache as the step in hand says."""

    def __init__(self) -> None:
        self.name = f"quire_paged_{next(_names)}"
        self.seen: dict[int, Seen] | None = None
        self._cache: TorchKVCache | None = None
        self._slots_T = torch.empty(0, dtype=torch.long)
        self._seqs: list[tuple[int, int, int, Any]] = []
        AttentionInterface.register(self.name, self)

    def begin(self, inputs: ModelInput, cache: TorchKVCache) -> None:
        """Set the step: where each token's key and value go, and which blocks each sequence reads."""
        size = cache.block_size
        cu_q, kv_len = inputs.cu_q_B1.tolist(), inputs.kv_len_B.tolist()
        places, self._seqs, self._cache = [], [], cache
        for b, slot in enumerate(inputs.slots_B.tolist()):
            blocks = inputs.block_table_SM[slot, : -(-kv_len[b] // size)].astype(np.int64)
            positions = inputs.positions_T[cu_q[b] : cu_q[b + 1]].astype(np.int64)
            places.append(blocks[positions // size] * size + positions % size)
            self._seqs.append((cu_q[b], cu_q[b + 1], kv_len[b], torch.from_numpy(blocks)))
        self._slots_T = torch.from_numpy(np.concatenate(places))

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
        if self.seen is not None:
            dim = max(key.shape[3], value.shape[3])
            self.seen[layer] = Seen(key.shape[1], dim, window)
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
        assert self._cache is not None
        keys, values = (
            side[layer].flatten(0, 1)[:, : new.shape[1], : new.shape[3]]
            for side, new in ((self._cache.keys, key), (self._cache.values, value))
        )
        keys[self._slots_T] = key[0].transpose(0, 1).to(keys.dtype)
        values[self._slots_T] = value[0].transpose(0, 1).to(values.dtype)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        for begin, end, length, blocks in self._seqs:
            first = 0 if window is None else max(0, length - (end - begin) - window + 1)
            rows = (blocks[:, None] * self._cache.block_size + torch.arange(self._cache.block_size)).flatten()
            rows = rows[first:length]
            out[0, begin:end] = _attend(
                query[0, :, begin:end].float() * scale,
                keys[rows].float(),
                values[rows].float(),
                torch.arange(first, length)[None] - torch.arange(length - (end - begin), length)[:, None],
                options,
            ).to(out.dtype)
        return out, None


def _attend(query: Any, keys: Any, values: Any, distance_QK: Any, options: dict[str, Any]) -> Any:
    """query [N, Q, H], keys and values [K, G, H] -> [Q, N, H]. `distance_QK`: key's position less query's."""
    groups = query.shape[0] // keys.shape[1]
    keys, values = (x.transpose(0, 1).repeat_interleave(groups, 0) for x in (keys, values))
    scores = query @ keys.transpose(1, 2)
    if options.get("softcap") is not None:
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    hidden = distance_QK > 0
    if options.get("sliding_window") is not None:
        hidden |= distance_QK <= -options["sliding_window"]
    scores = scores.masked_fill(hidden, -torch.inf)
    sinks = options.get("s_aux")
    if sinks is not None:
        column = sinks.float().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
        return (torch.cat((scores, column), 2).softmax(2)[:, :, :-1] @ values).transpose(0, 1)
    return (scores.softmax(2) @ values).transpose(0, 1)


class ForeignModel:
    """A model of `transformers`, loaded. The backend's kernels are not used."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.weight_bytes = self.step_bytes = info.weight_bytes
        self._paged = PagedAttention()
        self._model: Any = None

    def load(self) -> ForeignModel:
        """Read the weights, and check that the model computes over the cache what it computes alone."""
        config, _ = _config(self.info.directory, self.info.dtype)
        directory = self.info.directory
        settings = {
            "config": config,
            "dtype": TYPES[self.info.dtype],
            "attn_implementation": self._paged.name,
            "experts_implementation": "eager",  # any type of numbers
        }
        self._model = _made(partial(_from_pretrained, directory, **settings), directory)
        self._check()
        return self

    def wait(self) -> None:
        """`load` has done all."""

    def workspace_bytes(self, backend: Backend, kv_spec: KVSpec, limits: Limits) -> int:
        """Logits and activations: a guess, for the model's own code decides."""
        widest = 4 * max(
            self.info.spec.vocab_size * limits.max_logit_rows, 64 * 4096 * limits.max_tokens // 16
        )
        return 2 * widest

    def kv_cache(self, backend: Backend, spec: KVSpec, num_blocks: int, block_size: int) -> TorchKVCache:
        return TorchKVCache(spec, num_blocks, block_size)

    def compile(self, backend: Backend, kv: KVCache, limits: Limits) -> ForeignExecutable:
        assert isinstance(kv, TorchKVCache)
        torch.set_num_threads(backend.threads)
        return ForeignExecutable(self._model, self._paged, kv, limits)

    @torch.inference_mode()
    def _check(self) -> None:
        """Two prompts in one step over the cache, against each by itself in transformers' own attention."""
        spec = self.info.spec
        cache = TorchKVCache(spec.kv_spec("float32"), len(CHECKED), 8)
        prompts = [[token % spec.vocab_size for token in prompt] for prompt in CHECKED]
        lengths = np.array([len(p) for p in prompts], np.int32)
        executable = ForeignExecutable(self._model, self._paged, cache, Limits(32, 2, 32))
        found = executable.run(
            ModelInput(
                np.concatenate([np.array(p, np.int32) for p in prompts]),
                np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
                lengths,
                np.arange(len(prompts), dtype=np.int32),
                np.arange(len(prompts), dtype=np.int32)[:, None],
                np.arange(sum(lengths), dtype=np.int32),
            )
        )
        self._model.set_attn_implementation("eager")
        alone = [self._model(input_ids=torch.tensor([p]), use_cache=False).logits[0].float() for p in prompts]
        self._model.set_attn_implementation(self._paged.name)
        wanted = torch.cat(alone).numpy()
        off = float(np.abs(found.numpy() - wanted).max()) / max(1.0, float(np.abs(wanted).max()) / 10)
        if not off <= TOLERANCE[self.info.dtype]:
            raise ModelError(
                f"{self.info.directory}: {spec.architecture} gives other logits over a paged cache than by itself (by "
                f"{off:.3g}): its layers see more than their attention shows"
            )


class ForeignExecutable:
    """A forward pass through the model's own code: all sequences of a step in one row of tokens."""

    def __init__(self, model: Any, paged: PagedAttention, kv: TorchKVCache, limits: Limits) -> None:
        self._model, self._paged, self._kv, self._limits = model, paged, kv, limits
        self._inputs: ModelInput | None = None
        self._hidden: Any = None
        model.base_model.register_forward_hook(self._keep_hidden)

    def _keep_hidden(self, module: Any, args: Any, output: Any) -> None:
        self._hidden = output[0][0]

    def run(self, inputs: ModelInput) -> HostLogits:
        self._inputs = inputs
        return self.logits(0, min(len(inputs.logit_rows_L), self._limits.max_logit_rows))

    @torch.inference_mode()
    def logits(self, start: int, stop: int) -> HostLogits:
        """Rows beyond the first come from another pass over the same step, which writes the same keys and values."""
        assert self._inputs is not None
        inputs = self._inputs
        self._paged.begin(inputs, self._kv)
        rows = torch.from_numpy(inputs.logit_rows_L[start:stop].astype(np.int64))
        output = self._model(
            input_ids=torch.from_numpy(inputs.tokens_T.astype(np.int64))[None],
            position_ids=torch.from_numpy(inputs.positions_T.astype(np.int64))[None],
            use_cache=False,
            logits_to_keep=rows if len(rows) else 1,
        )
        logits: FloatArray = output.logits[0, : len(rows)].float().numpy()
        return HostLogits(np.ascontiguousarray(logits))

    def hidden(self) -> FloatArray:
        assert self._inputs is not None
        rows = torch.from_numpy(self._inputs.logit_rows_L.astype(np.int64))
        hidden: FloatArray = self._hidden[rows].float().numpy()
        return hidden
