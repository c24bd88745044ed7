"""`quire bench quality`: the loss by quantized weights or a quantized KV cache, against the model in float32.

Both models read the same text in windows, and every next-token distribution is compared: perplexity of each, the
divergence KL(float32 || configured), and how often both agree on the likeliest token.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.bench.report import Report
from quire.cli import Command, Options
from quire.config import EngineConfig, option
from quire.devices.protocol import Array, Executable, FloatArray, Limits, ModelInput, StateInput
from quire.engine.directory import load_tokenizer, model_directory
from quire.engine.plan import kv_dtype, make_backend
from quire.engine.source import find_files
from quire.errors import ConfigError
from quire.flags.uses import MEASURING
from quire.progress import Told, progress, untold
from quire.weights.schemes import weights_name
from quire.weights.source import quantization_method

log = logging.getLogger("quire")

MAX_TEXT = 64 << 20  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions(Options):
    """Options of `quire bench quality`."""

    base: str | None = option(
        None,
        "The float model that a quantized checkpoint was made of; by default the model itself, in float32.",
    )
    text: str = option("", "File of UTF-8 text that the model was not trained on.")
    window: int = option(256, "Tokens of a window; each token sees those before it.", low=2)
    max_tokens: int = option(8192, "Most tokens of the text to read.", low=2)
    output_json: str | None = option(None, "Write the figures to this JSON file.", writes="file")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Sums over predicted tokens: negative log-likelihoods in nats, divergences, and where the two agree."""

    base_nll: float
    own_nll: float
    kl: Array
    agreed: int

    @property
    def count(self) -> int:
        return len(self.kl)


def run(config: EngineConfig, options: QualityOptions) -> None:
    tokens = _tokens(config, options)
    method = quantization_method(model_directory(config.model))
    if options.base is None and method is not None:
        log.warning(
            "the model is quantized by %s: without --base it is compared with itself, decoded, which says nothing of "
            "what quantizing cost",
            method,
        )
    base = replace(
        config,
        model=replace(
            config.model,
            model=config.model.model if options.base is None else options.base,
            dtype="float32",
            quantization="auto",
            quantization_pure=False,
            quantization_activations="auto",
        ),
        cache=replace(config.cache, kv_cache_dtype="float32"),
    )
    readers = _reader(base, options.window), _reader(config, options.window)
    info = find_files(config.model).info
    states = info.kv_spec("float32").bytes_per_state(0) > 0
    with progress("quality", len(tokens) - 1, "tokens") as told:
        found = compare(*readers, tokens, options.window, told, states)
    weights, name = weights_name(info.quantized, info.dtype), config.model.model or info.directory.name
    report = Report(
        f"{name}: {weights} weights, {kv_dtype(config, info.dtype)} KV cache, {found.count} tokens"
    )
    report.row("perplexity_float32", "perplexity in float32", math.exp(found.base_nll / found.count), "")
    report.row("perplexity", "perplexity", math.exp(found.own_nll / found.count), "")
    report.row("kl_mean", "KL divergence, mean", float(found.kl.mean()), "nats")
    report.row("kl_p99", "KL divergence, 99th percentile", float(np.quantile(found.kl, 0.99)), "nats")
    report.row("top1_agreement", "same likeliest token", 100 * found.agreed / found.count, "%")
    report.show(options.output_json)


def compare(
    base: Executable, own: Executable, tokens: Array, window: int, told: Told = untold, states: bool = False
) -> Divergence:
    """Run both models, perhaps with recurrent `states`, over `tokens` [T], in windows that do not see each other."""
    base_nll = own_nll = 0.0
    divergences, agreed = [], 0
    for step, targets in _windows(tokens, window, states):
        told(len(targets))
        p, q = _log_softmax(base.run(step).numpy()), _log_softmax(own.run(step).numpy())
        rows = np.arange(len(targets))
        base_nll -= float(p[rows, targets].sum())
        own_nll -= float(q[rows, targets].sum())
        divergences.append(np.maximum(0, (np.exp(p) * (p - q)).sum(axis=1)))
        agreed += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
    return Divergence(base_nll, own_nll, np.concatenate(divergences), agreed)


def _windows(tokens: Array, window: int, states: bool) -> Iterator[tuple[ModelInput, Array]]:
    """Yield one step per window, and the tokens that its rows should predict."""
    for start in range(0, len(tokens) - 1, window):
        inputs = np.ascontiguousarray(tokens[start : start + window][: len(tokens) - 1 - start])
        count = len(inputs)
        numbers = np.arange(count, dtype=np.int32)
        ends, lengths = np.array([0, count], np.int32), np.array([count], np.int32)
        zero, table = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
        begun = StateInput(zero, zero, lengths, np.zeros((0, 3), np.int32)) if states else None
        step = ModelInput(inputs, numbers, ends, lengths, zero, table, numbers, states=begun)
        yield step, tokens[start + 1 : start + 1 + count]


def _log_softmax(logits_LV: FloatArray) -> Array:
    x = logits_LV.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def _reader(config: EngineConfig, window: int) -> Executable:
    """Compile the configured model to compute a window in one step with all its logits. The cache is one block."""
    files = find_files(config.model)
    info = files.info
    backend = make_backend(config.device, info)
    with progress(f"loading {info.directory}", info.weight_bytes) as told:
        model = files.load(backend, told=told)
    spec = info.kv_spec(kv_dtype(config, info.dtype))
    cache = backend.kv_cache(spec, 1, window, int(spec.bytes_per_state(0) > 0))
    return backend.compile(model.graph, cache, Limits(window, 1, window))


def _tokens(config: EngineConfig, options: QualityOptions) -> Array:
    if not options.text:
        raise ConfigError("name a text to read: quire bench quality MODEL --text FILE")
    path = Path(options.text)
    try:
        if path.stat().st_size > MAX_TEXT:
            raise ConfigError(f"--text {path} is larger than {MAX_TEXT} bytes; pass a part of it")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from error
    tokens = load_tokenizer(config.model).encode(text)[: options.max_tokens]
    if len(tokens) < 2:
        raise ConfigError(f"--text {path} is too short: {len(tokens)} tokens")
    return np.array(tokens, np.int32)


COMMAND = Command(run, QualityOptions, arguments=("model",), uses=MEASURING)
