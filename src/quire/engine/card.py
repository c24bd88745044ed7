"""What a model is to others: its card for callers (sizes, limits, defaults), and for the scheduler, what steps cost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from quire.config import ModelConfig
from quire.devices.protocol import KVSpec
from quire.engine.plan import EnginePlan
from quire.errors import ModelError, RequestError
from quire.files import read_json
from quire.model.cost import Attended, Cost
from quire.model.info import ModelInfo
from quire.params import SamplingParams
from quire.sched.times import StepRates
from quire.types import ModelCard

# DEFAULT_PARAMS are the keys of generation_config.json that Quire uses; others configure searches that it lacks.
DEFAULT_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def card_of(plan: EnginePlan) -> ModelCard:
    """Make the card of a planned engine's model."""
    memory, spec, config = plan.memory, plan.model.spec, plan.config
    most, head = config.model.max_logprobs, plan.model.pooling
    longest = plan.model.limits.max_seq_len or spec.max_position
    return ModelCard(
        name=plan.name,
        max_model_len=memory.max_model_len,
        max_input_len=plan.model.limits.max_input_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=plan.model.eos_token_ids,
        max_logprobs=most if most >= 0 else spec.vocab_size,
        spare_tokens=config.lora.spare_tokens,
        defaults=_default_params(config.model, plan.model, memory.max_model_len),
        generates=spec.has_head and not spec.bidirectional,
        pooling=config.model.pooling or (None if head is None else head.rows),
        scores=None if head is None else head.scores,
        labels=() if head is None else head.labels,
        segment_size=spec.vocab_size // spec.segments if spec.segments > 1 else 0,
        num_parameters=plan.model.num_parameters,
        weight_bytes=memory.weights,
        grows=memory.max_model_len < longest and not config.model.disable_sliding_window,
        dimensions=_dimensions(config.model, plan.model),
        recurrent=memory.rows is not None,
    )


def _dimensions(config: ModelConfig, found: ModelInfo) -> tuple[int, ...] | None:
    """Read to which lengths vectors may be cut, as config.json and --hf-overrides say."""
    path = found.directory / "config.json"
    given = {**(read_json(path) if path.is_file() else {}), **config.config_changes}
    listed = given.get("matryoshka_dimensions")
    if isinstance(listed, list):
        return tuple(size for size in listed if type(size) is int)
    return () if given.get("is_matryoshka") else None


def _default_params(config: ModelConfig, found: ModelInfo, longest: int) -> dict[str, Any]:
    """Read sampling defaults from the model's generation_config.json, as vLLM takes them; "vllm" means none.

    ModelError names the file if a value is wrong.
    """
    if config.generation_config == "vllm":
        return config.generation_changes
    generation, where = found.generation, found.directory
    if config.generation_config != "auto":
        where = Path(config.generation_config)
        generation = read_json(where / "generation_config.json")
    own = {name: generation[name] for name in DEFAULT_PARAMS if generation.get(name) is not None}
    if "max_new_tokens" in own:
        own["max_tokens"] = own.pop("max_new_tokens")
    try:
        checked = SamplingParams(**own)
    except (RequestError, TypeError) as error:
        where = where / "generation_config.json" if where.is_dir() else where
        raise ModelError(f"{where}: {error}; mend the file, or pass --generation-config vllm") from error
    if "max_tokens" in own:
        own["max_tokens"] = min(checked.max_tokens or longest, longest)
    return {**own, **config.generation_changes}


def step_rates(cost: Cost, kv: KVSpec, read_gbs: float, gflops: float) -> StepRates:
    """Compute the seconds of each part of a step at these limits. A model without counts gets StepRates' defaults."""
    if not cost.dense_parameters:
        return StepRates()
    byte, operation = 1e-9 / read_gbs, 1e-9 / gflops
    attention = sum(layer.operations for layer in cost.layers)
    spans: Counter[int | None] = Counter()
    for layer in cost.layers:
        spans[_span(layer)] += layer.operations
    return StepRates(
        read=byte * (cost.dense_bytes + cost.head_bytes),
        routed=byte * cost.routed_bytes,
        miss=1.0 - cost.drawn / cost.experts,
        token=operation * cost.token_operations,
        output=operation * 2.0 * cost.head_parameters,
        pair=operation * attention,
        position=byte * kv.bytes_per_token,
        state=byte * cost.state_bytes,
        byte=byte,
        operation=operation,
        spans=tuple((count / attention, span) for span, count in spans.items()) if attention else (),
    )


def _span(layer: Attended) -> int | None:
    """Bound the positions that a query of the layer sees."""
    index = layer.index
    chosen = None if index is None or index.entries is not None else index.most
    bounds = [bound for bound in (layer.window, layer.chunk, chosen) if bound is not None]
    return min(bounds, default=None)
