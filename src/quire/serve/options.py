"""The options of the server."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from quire.config import EngineConfig, option
from quire.errors import ConfigError
from quire.flags.table import ENGINE_OPTIONS, take_foreign
from quire.options import json_object
from quire.serve.web_options import WebConfig
from quire.text.formats.plugins import load_formats
from quire.text.formats.registry import reasoning_format, tool_format
from quire.text.formats.shapes import ReasoningFormat, ToolFormat
from quire.types import Pooling

log = logging.getLogger("quire")
UnknownFields = Literal["ignore", "refuse"]
ContentFormat = Literal["auto", "string", "openai"]
TARGET_STEP_TIME = 100.0
"""Milliseconds that a step of a server may take if nothing else is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(WebConfig):
    """How a model is served, beside what every server of HTTP has."""

    router_api_key: tuple[str, ...] = option(
        (), "Key of a router, which asks for clients of its own and may use /internal; repeat for several."
    )
    router_api_key_file: str | None = option(None, "File with more routers' keys, one per line.")
    served_model_name: tuple[str, ...] = option(
        (), "Name of the model in the API; repeat for aliases.", common=True
    )
    root_path: str = option("", "Path prefix that a proxy in front strips.")
    middleware: tuple[str, ...] = option(
        (), "ASGI middleware (module:Class), or a function (request, call_next), around every request."
    )
    disable_log_stats: bool = option(False, "Do not log throughput every ten seconds.")
    enable_log_requests: bool = option(False, "Log each finished request with its counts and times.")
    enable_log_outputs: bool = option(False, "With --enable-log-requests: log prompts and outputs too.")
    enable_log_deltas: bool = option(True, "With --enable-log-outputs: log the outputs of streams too.")
    max_log_len: int | None = option(None, "Most characters of a prompt or output in the log.", low=0)
    disable_fastapi_docs: bool = option(False, "Serve neither /docs nor /openapi.json.")
    enable_tokenizer_info_endpoint: bool = option(
        False, "Serve the tokenizer's configuration at /tokenizer_info."
    )
    enable_sleep_mode: bool = option(False, "Serve /sleep, /wake_up and /is_sleeping.")
    max_num_queued_reqs: int | None = option(
        16384, "Most requests waiting for their first step; further ones get a 503.", low=1
    )
    max_num_queued_tokens: int | None = option(
        4194304, "Most prompt tokens waiting for their first step; further requests get a 503.", low=1
    )
    request_timeout: float | None = option(
        None, "Seconds that a request may take before it is aborted with an error.", low=0.001
    )
    health_timeout: float = option(
        30.0, "Seconds without progress or reply after which the engine is unhealthy.", low=0.1
    )
    sse_keep_alive_interval: float = option(
        0.0, "Seconds of silence after which a stream sends a comment line; 0 sends none.", low=0
    )
    enable_prompt_tokens_details: bool = option(True, "Report the number of cached prompt tokens in `usage`.")
    enable_force_include_usage: bool = option(False, "End every stream with its usage.")
    enable_per_request_metrics: bool = option(
        False, "Report the times of a request in its answer (`metrics`)."
    )
    return_tokens_as_token_ids: bool = option(False, "Write tokens in logprobs as `token_id:N`.")
    response_role: str = option("assistant", "Role of the answers in chats.")
    tool_call_parser: str = option(
        "auto",
        "Format of the model's tool calls: hermes, llama3_json, ...; auto detects it from the chat template.",
    )
    reasoning_parser: str = option(
        "auto", "Format of the model's reasoning: qwen3, deepseek_r1, ..., none; auto detects it likewise."
    )
    tool_parser_plugin: str | None = option(
        None, "Python file whose FORMAT (a ToolFormat) --tool-call-parser may name."
    )
    reasoning_parser_plugin: str | None = option(
        None, "Python file whose FORMAT (a ReasoningFormat) --reasoning-parser may name."
    )
    exclude_tools_when_tool_choice_none: bool = option(
        True, "Leave tools out of the prompt if tool_choice is none."
    )
    default_chat_template_kwargs: str | dict[str, Any] | None = option(
        None, "JSON of template variables that requests may override, such as '{\"enable_thinking\": false}'."
    )
    chat_template_content_format: ContentFormat = option(
        "auto", "Content as the chat template reads it: string, openai (a list of parts), or auto."
    )
    enable_auto_tool_choice: bool = option(True, "Let the model choose whether to call offered tools.")
    unknown_fields: UnknownFields = option(
        "ignore",
        "Fields of requests that nobody knows: ignore names them in the header X-Ignored-Fields, refuse answers 400.",
    )
    trust_request_chat_template: bool = option(False, "Let requests bring their own chat_template.")
    pooling: Pooling | None = option(
        None, "How embeddings are pooled from hidden states; defaults to the model's own way, else the last."
    )
    lora_modules: tuple[str, ...] = option(
        (), 'Adapters to load: NAME=PATH, or JSON such as \'{"name": "a", "path": "b"}\'.'
    )
    allow_runtime_lora: bool = option(
        False, "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter; needs --admin-api-key."
    )
    lora_root: tuple[str, ...] = option(
        (), "Directory from which adapters may be loaded at run time; repeat for several."
    )
    lora_dir: str | None = option(
        None, "Directory whose adapters requests load by naming them as their model; needs --enable-lora."
    )
    lora_hub_ids: bool = option(True, "Let adapters that are loaded at run time be Hugging Face ids.")
    share_prefix_cache: bool = option(
        False, "Let requests with different API keys reuse each other's cached prefixes."
    )
    data_parallel_size: int = option(
        1,
        "Servers on this machine, each with its share of threads and memory, behind one address.",
        low=1,
        high=64,
    )
    models_file: str | None = option(
        None, "YAML file of models to serve: name, path, options, pin, weight of each.", short="--models"
    )
    models_dir: str | None = option(None, "Directory whose models are served.")
    models_preset: str | None = option(None, "llama.cpp's preset (INI) of models to serve.")
    models_max: int | None = option(None, "Most models that are loaded at once; 0: no bound.", low=0)
    models_memory: float | None = option(None, "GB of all loaded models; default as for one model.", low=0.01)
    models_turn: float = option(5.0, "Seconds that a busy model is kept while others wait.", low=0)
    models_idle: float | None = option(None, "Seconds after which an idle model is unloaded.", low=0)
    models_wait: float = option(120.0, "Seconds that a request waits for its model before a 503.", low=0.1)
    check: bool = option(False, "Start everything, say whether it is ready to serve, and exit.")

    def __post_init__(self) -> None:
        WebConfig.__post_init__(self)
        self._read_keys("router_api_key")
        tool_format(self.tool_call_parser, more=self.tool_plugins)
        reasoning_format(self.reasoning_parser, more=self.reasoning_plugins)
        _ = self.template_defaults
        if self.allow_runtime_lora and not self.admin_api_key:
            raise ConfigError(
                "--allow-runtime-lora needs --admin-api-key: it lets its callers load files for all"
            )
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name must not be empty")
        for limit in () if self.many else fields(self):
            if limit.name.startswith("models_") and getattr(self, limit.name) != limit.default:
                raise ConfigError(
                    f"--{limit.name.replace('_', '-')} needs --models, --models-dir or --models-preset"
                )

    @property
    def many(self) -> bool:
        """Whether options list several models."""
        return any((self.models_file, self.models_dir, self.models_preset))

    def router_keys(self) -> tuple[str, ...]:
        return self.router_api_key

    @property
    def tool_plugins(self) -> tuple[ToolFormat, ...]:
        """The formats of --tool-parser-plugin. ConfigError: the file cannot be loaded or has none."""
        return load_formats(self.tool_parser_plugin, ToolFormat, "--tool-parser-plugin")

    @property
    def reasoning_plugins(self) -> tuple[ReasoningFormat, ...]:
        return load_formats(self.reasoning_parser_plugin, ReasoningFormat, "--reasoning-parser-plugin")

    @property
    def template_defaults(self) -> dict[str, Any]:
        """Variables that every chat template sees unless the request sets them."""
        return json_object("--default-chat-template-kwargs", self.default_chat_template_kwargs)


def for_serving(config: EngineConfig) -> EngineConfig:
    """Give the engine's options the defaults of a server."""
    if config.scheduler.target_step_time is not None:
        return config
    return replace(config, scheduler=replace(config.scheduler, target_step_time=TARGET_STEP_TIME))


def split_options(options: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Split flat options (`port=1, block_size=32`) into the engine's and the server's; unknown names are errors."""
    names = {f.name for f in fields(ServerConfig)}
    for notice in take_foreign(options, names | ENGINE_OPTIONS):
        log.warning("%s", notice)
    server = {name: value for name, value in options.items() if name in names}
    engine = {name: value for name, value in options.items() if name not in names}
    return EngineConfig.from_options(**engine), ServerConfig(**server)
