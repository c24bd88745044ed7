"""The options of the server, and the YAML file that can hold them together with those of the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from quire.config import SECTIONS, EngineConfig, check_options, option
from quire.engine.log import LogFormat, LogLevel
from quire.errors import ConfigError
from quire.flags.arguments import integer
from quire.flags.foreign import take_foreign
from quire.flags.table import FOREIGN
from quire.text.formats.registry import reasoning_format, tool_format
from quire.types import Pooling

log = logging.getLogger("quire")
UnknownFields = Literal["ignore", "refuse"]
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
    served_model_name: tuple[str, ...] = option(
        (), "Name of the model in the API; repeat for aliases.", common=True
    )
    root_path: str = option("", "Path prefix that a proxy in front strips.")
    timeout_keep_alive: int = option(75, "Seconds that an idle connection is kept open.", low=1)
    ssl_keyfile: str | None = option(None, "File with the TLS key.")
    ssl_certfile: str | None = option(None, "File with the TLS certificate.")
    allowed_origins: tuple[str, ...] = option(("*",), "Origins that browsers may call from (CORS).")
    allowed_methods: tuple[str, ...] = option(("*",), "Methods that browsers may use (CORS).")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that browsers may send (CORS).")
    allow_credentials: bool = option(False, "Whether browsers may send cookies (CORS).")
    uvicorn_log_level: UvicornLogLevel = option("info", "Level of the web server's own log.")
    disable_uvicorn_access_log: bool = option(False, "Do not log a line for each HTTP request.")
    enable_log_requests: bool = option(False, "Log each finished request with its counts and times.")
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
    check: bool = option(False, "Validate the configuration and the memory plan, then exit.")

    def __post_init__(self) -> None:
        check_options(self)
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together: give both or neither")
        if not self.metrics_prefix.isidentifier():
            raise ConfigError(f"--metrics-prefix must be letters, digits and _, got {self.metrics_prefix!r}")
        tool_format(self.tool_call_parser)
        reasoning_format(self.reasoning_parser)
        for name in ("api_key", "served_model_name"):
            if not all(getattr(self, name)):
                raise ConfigError(f"--{name.replace('_', '-')} must not be empty")

    def api_keys(self) -> tuple[str, ...]:
        """All keys, including those of the file. Raises ConfigError if the file is unreadable or has no key."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = Path(self.api_key_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {self.api_key_file!r} cannot be read: {error}") from error
        keys = tuple(line.strip() for line in lines if line.strip())
        if not keys:
            raise ConfigError(f"--api-key-file {self.api_key_file!r} holds no key")
        return (*self.api_key, *keys)


def for_serving(config: EngineConfig) -> EngineConfig:
    """The engine's options with the defaults that a server has."""
    if config.scheduler.target_step_time is not None:
        return config
    return replace(config, scheduler=replace(config.scheduler, target_step_time=TARGET_STEP_TIME))


def split_options(options: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Split flat options (`port=1, block_size=32`) into the engine's and the server's; unknown names are errors."""
    for notice in take_foreign(options):
        log.warning("%s", notice)
    names = {f.name for f in fields(ServerConfig)}
    server = {name: value for name, value in options.items() if name in names}
    engine = {name: value for name, value in options.items() if name not in names}
    return EngineConfig.from_options(**engine), ServerConfig(**server)


def read_config(path: str) -> dict[str, Any]:
    """The options in a YAML file, by field name; keys may be written as flags (`max-model-len`).

    Raises ConfigError for a file that is not a map, an unknown key, or a value of the wrong type.
    """
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path!r} cannot be read: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path!r} must hold a map from option to value")
    types = _option_types()
    options: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name == "model_tag":
            name = "model"
        if name in FOREIGN:
            options[name] = value
            continue
        if name not in types:
            raise ConfigError(f"--config {path!r}: unknown option {key!r}")
        if name in options:
            raise ConfigError(f"--config {path!r}: option {key!r} is given twice")
        options[name] = _converted(path, str(key), types[name], value)
    return options


def _option_types() -> dict[str, Any]:
    types: dict[str, Any] = {"seed": int}
    for section in (*SECTIONS.values(), ServerConfig):
        types.update(get_type_hints(section))
    return types


def _integer(text: str) -> int | str:
    """A size such as 4k as a number; other text as it is."""
    try:
        return integer(text)
    except ValueError:
        return text


def _converted(path: str, key: str, hint: Any, value: Any) -> Any:
    """`value` as the field's type. A repeatable option takes a list or one value, and numbers as text."""
    if get_origin(hint) is tuple:
        items = value if isinstance(value, list) else [value]
        value = [str(item) if type(item) in (int, float) else item for item in items]
    if isinstance(value, str) and value[-1:].isalpha() and int in (hint, *get_args(hint)):
        value = _integer(value)
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--config {path!r}: {key}: {error}") from error
