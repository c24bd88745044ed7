"""`system_fingerprint`: the class of servers that give the same answers, byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.serve.ids import derived

if TYPE_CHECKING:
    from quire.serve.service import Service

ANSWER_OPTIONS = (
    "served_model_name", "enable_prompt_tokens_details", "enable_force_include_usage", "return_tokens_as_token_ids",
    "response_role", "tool_call_parser", "reasoning_parser", "tool_parser_plugin", "reasoning_parser_plugin",
    "exclude_tools_when_tool_choice_none", "default_chat_template_kwargs", "chat_template_content_format",
    "enable_auto_tool_choice", "unknown_fields", "trust_request_chat_template", "pooling",
)  # fmt: skip
"""ANSWER_OPTIONS change what answers say."""


class Fingerprints:
    """The classes of the models that a server serves: of what their engine computes, and how answers are written."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: dict[str, tuple[str, str]] = {}  # by model, with the digest of the adapter

    def of(self, model: str) -> str:
        """Name the class for the model, or the adapter, of that name."""
        service = self._service
        adapter = None if model in service.names else service.adapters.loaded.find(model)
        digest = "" if adapter is None else adapter.digest
        known = self._known.get(model)
        if known is None or known[0] != digest:
            info, config = service.front.info, service.config
            sizes = (info.max_model_len, info.max_logprobs, sorted(info.defaults.items()))
            options = [repr(getattr(config, name)) for name in ANSWER_OPTIONS]
            made = derived(service.identity, *options, sizes, digest)
            known = self._known[model] = digest, f"fp_{made[:16]}"
        return known[1]
