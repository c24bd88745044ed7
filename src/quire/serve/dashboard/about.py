"""Describes the served model to the page: defaults, limits, and what its template takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire import __version__
from quire.engine.directory import SHIPPED_MODEL
from quire.lazy import Lazy
from quire.params import SamplingParams
from quire.serve.banner import example_call
from quire.serve.service import Service

if TYPE_CHECKING:
    from quire.engine import suggested
else:
    suggested = Lazy("quire.engine.suggested")

GREETING = "Shall I tell you a story?"
IDEAS = (
    "Tell me a story about a lighthouse keeper and a small boat.",
    "Tell me a story about a fox who finds a red ball.",
    "Tell me a story about the first snow.",
)
EFFORTS = ("low", "medium", "high")
# Sampling fields with the value that a request has if it says nothing.
DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)


def about_model(service: Service) -> dict[str, Any]:
    """Describe the served model as the page shows it."""
    front, info = service.front, service.front.info
    template = "" if front.template is None else front.template.source
    params: SamplingParams = front.default_params()
    found: dict[str, Any] = {
        "model": service.name,
        "version": __version__,
        "max_model_len": info.max_model_len,
        "parameters": info.num_parameters,
        "weight_bytes": info.weight_bytes,
        "max_logprobs": info.max_logprobs,
        "generates": info.generates,
        "scores": info.scores,
        "labels": list(info.labels),
        "chat": bool(template),
        "defaults": {name: getattr(params, name) for name in DEFAULTS},
        "thinking": front.template is not None and front.template.switches_thinking,
        "efforts": list(EFFORTS) if "reasoning_effort" in template else [],
    }
    if not info.generates:
        found["call"] = "Over HTTP: POST {} {}".format(*example_call(service))
    if info.name == SHIPPED_MODEL:
        found |= {"greeting": GREETING, "ideas": list(IDEAS), "advice": suggested.advice("quire serve")}
    return found
