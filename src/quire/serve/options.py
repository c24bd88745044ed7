"""The options of the server."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from quire.config import EngineConfig, check_options, json_object, option
from quire.engine.log import LogFormat, LogLevel
from quire.errors import ConfigError
from quire.flags.foreign import ENGINE_OPTIONS, take_foreign
from quire.serve.callers import Keys
from quire.serve.keys import keys_in, keys_of_environment
from quire.sockets import is_local
from quire.text.formats.plugins import load_formats
from quire.text.formats.registry import reasoning_format, tool_format
from quire.text.formats.shapes import ReasoningFormat, ToolFormat
from quire.types import Pooling

log = logging.getLogger("quire")
UnknownFields = Literal["ignore", "refuse"]
ContentFormat = Literal["auto", "string", "openai"]
TARGET_STEP_TIME = 100.0
"""Milliseconds that a step of a server may take if nothing else is asked for."""

UvicornLogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, who may use it, and how much it accepts."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.", common=True)
    port: int = option(8000, "TCP port; 0 picks a free one.", low=0, high=65535, common=True)
    uds: str | None = option(None, "Listen on this Unix socket instead of host and port.")
    api_key: tuple[str, ...] = option((), "Key that requests must send; repeat for several.", common=True)
    api_key_file: str | None = option(None, "File with more keys, one per line.")
    admin_api_key: tuple[str, ...] = option(
        (), "Key of an operator, whose requests may act on all users; repeat for several."
    )
    admin_api_key_file: str | None = option(None, "File with more operators' keys, one per line.")
    served_model_name: tuple[str, ...] = option(
        (), "Name of the model in the API; repeat for aliases.", common=True
    )
    root_path: str = option("", "Path prefix that a proxy in front strips.")
    timeout_keep_alive: int = option(75, "Seconds that an idle connection is kept open.", low=1)
    ssl_keyfile: str | None = option(None, "File with the TLS key.")
    ssl_certfile: str | None = option(None, "File with the TLS certificate.")
    ssl_ca_certs: str | None = option(None, "File with the CA certificates that sign clients'.")
    ssl_cert_reqs: int = option(
        0, "Clients' certificates: 0 not asked for, 1 optional, 2 required.", low=0, high=2
    )
    ssl_ciphers: str | None = option(None, "TLS ciphers (before TLS 1.3), in OpenSSL's notation.")
    enable_ssl_refresh: bool = option(False, "Load the TLS files again when they change.")
    h11_max_incomplete_event_size: int = option(65536, "Largest head of a request, in bytes.", low=1024)
    h11_max_header_count: int = option(256, "Most headers of a request.", low=1)
    middleware: tuple[str, ...] = option(
        (), "ASGI middleware (module:Class), or a function (request, call_next), around every request."
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins that browsers may call from (CORS); all if there is an API key, else the server's own alone.",
    )
    allowed_methods: tuple[str, ...] = option(("*",), "Methods that browsers may use (CORS).")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that browsers may send (CORS).")
    allow_credentials: bool = option(False, "Whether browsers may send cookies (CORS).")
    uvicorn_log_level: UvicornLogLevel = option("info", "Level of the web server's own log.")
    disable_uvicorn_access_log: bool = option(False, "Do not log a line for each HTTP request.")
    disable_log_stats: bool = option(False, "Do not log throughput every ten seconds.")
    enable_log_requests: bool = option(False, "Log each finished request with its counts and times.")
    enable_log_outputs: bool = option(False, "With --enable-log-requests: log prompts and outputs too.")
    enable_log_deltas: bool = option(True, "With --enable-log-outputs: log the outputs of streams too.")
    max_log_len: int | None = option(None, "Most characters of a prompt or output in the log.", low=0)
    log_config_file: str | None = option(
        None, "JSON file for logging.config.dictConfig, instead of --log-format."
    )
    disable_access_log_for_endpoints: str | None = option(
        None, "Paths without access log lines, separated by commas, such as /health,/metrics."
    )
    disable_fastapi_docs: bool = option(False, "Serve neither /docs nor /openapi.json.")
    enable_tokenizer_info_endpoint: bool = option(
        False, "Serve the tokenizer's configuration at /tokenizer_info."
    )
    enable_sleep_mode: bool = option(False, "Serve /sleep, /wake_up and /is_sleeping.")
    log_format: LogFormat = option("text", "Log lines as text or as JSON.")
    log_level: LogLevel = option("info", "Lowest level that is logged.", common=True)
    max_num_queued_reqs: int | None = option(
        16384, "Most requests waiting for their first step; further ones get a 503.", low=1
    )
    max_num_queued_tokens: int | None = option(
        4194304, "Most prompt tokens waiting for their first step; further requests get a 503.", low=1
    )
    max_body_bytes: int = option(33554432, "Largest request body, in bytes.", low=1024)
    request_timeout: float | None = option(
        None, "Seconds that a request may take before it is aborted with an error.", low=0.001
    )
    shutdown_timeout: float = option(
        30.0,
        "Seconds that running requests have to finish after SIGTERM; 0 aborts them at once.",
        low=0,
        common=True,
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
    enable_request_id_headers: bool = option(True, "Add an X-Request-Id header to answers.")
    return_tokens_as_token_ids: bool = option(False, "Write tokens in logprobs as `token_id:N`.")
    response_role: str = option("assistant", "Role of the answers in chats.")
    tool_call_parser: str = option(
        "auto",
        "Format of the model's tool calls: hermes, llama3_json, ...; auto detects it from the chat template.",
    )
    reasoning_parser: str = option(
        "auto",
        "Format of the model's reasoning: qwen3, deepseek_r1, ..., none; auto detects it likewise.",
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
    metrics_prefix: str = option("quire", "Prefix of every metric's name; vllm fits existing dashboards.")
    lora_modules: tuple[str, ...] = option(
        (), 'Adapters to load: NAME=PATH, or JSON such as \'{"name": "a", "path": "b"}\'.'
    )
    allow_runtime_lora: bool = option(
        False, "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter; needs --admin-api-key."
    )
    lora_root: tuple[str, ...] = option(
        (), "Directory from which adapters may be loaded at run time; repeat for several."
    )
    lora_hub_ids: bool = option(True, "Let adapters that are loaded at run time be Hugging Face ids.")
    share_prefix_cache: bool = option(
        False, "Let requests with different API keys reuse each other's cached prefixes."
    )
    check: bool = option(False, "Start everything, say whether it is ready to serve, and exit.")

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("api_key", "admin_api_key"):  # a file such as <(...) can be read once
            flag, path = f"--{name.replace('_', '-')}-file", getattr(self, f"{name}_file")
            object.__setattr__(self, name, (*getattr(self, name), *keys_in(flag, path)))
            object.__setattr__(self, f"{name}_file", None)
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together: give both or neither")
        if not self.metrics_prefix.isidentifier():
            raise ConfigError(f"--metrics-prefix must be letters, digits and _, got {self.metrics_prefix!r}")
        tool_format(self.tool_call_parser, more=self.tool_plugins)
        reasoning_format(self.reasoning_parser, more=self.reasoning_plugins)
        _ = self.template_defaults
        if (self.ssl_ca_certs or self.ssl_cert_reqs or self.ssl_ciphers) and not self.ssl_certfile:
            raise ConfigError("--ssl-ca-certs, --ssl-cert-reqs and --ssl-ciphers need --ssl-certfile")
        if self.allow_runtime_lora and not self.admin_api_key:
            raise ConfigError(
                "--allow-runtime-lora needs --admin-api-key: it lets its callers load files for all"
            )
        for name in ("api_key", "admin_api_key", "served_model_name"):
            if not all(getattr(self, name)):
                raise ConfigError(f"--{name.replace('_', '-')} must not be empty")

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

    def api_keys(self) -> tuple[str, ...]:
        """Return users' keys; without any, those of the environment, as they are secrets."""
        return tuple(self.api_key) or keys_of_environment()

    def keys(self) -> Keys:
        """Make the table of users' and operators' keys."""
        loopback = self.uds is None and is_local(self.host)
        return Keys(self.api_keys(), self.admin_api_key, private=not self.allowed_origins, loopback=loopback)


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
