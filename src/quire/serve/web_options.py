"""The options of a process that serves HTTP: where it listens, who may use it, what it logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config import check_options, option
from quire.engine.log import LogFormat, LogLevel
from quire.errors import ConfigError
from quire.serve.callers import Keys
from quire.serve.keys import keys_in, keys_of_environment
from quire.sockets import is_local

UvicornLogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """Where a server listens, who may use it, and how much it accepts."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.", common=True)
    port: int = option(8000, "TCP port; 0 picks a free one.", low=0, high=65535, common=True)
    uds: str | None = option(None, "Listen on this Unix socket instead of host and port.")
    api_key: tuple[str, ...] = option((), "Key that requests must send; repeat for several.", common=True)
    api_key_file: str | None = option(None, "File with more keys, one per line.")
    admin_api_key: tuple[str, ...] = option(
        (), "Key of an operator, whose requests may act on all users; repeat for several."
    )
    admin_api_key_file: str | None = option(None, "File with more operators' keys, one per line.")
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
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins that browsers may call from (CORS); all if there is an API key, else the server's own alone.",
    )
    allowed_methods: tuple[str, ...] = option(("*",), "Methods that browsers may use (CORS).")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that browsers may send (CORS).")
    allow_credentials: bool = option(False, "Whether browsers may send cookies (CORS).")
    uvicorn_log_level: UvicornLogLevel = option("info", "Level of the web server's own log.")
    disable_uvicorn_access_log: bool = option(False, "Do not log a line for each HTTP request.")
    log_config_file: str | None = option(
        None, "JSON file for logging.config.dictConfig, instead of --log-format."
    )
    disable_access_log_for_endpoints: str | None = option(
        None, "Paths without access log lines, separated by commas, such as /health,/metrics."
    )
    log_format: LogFormat = option("text", "Log lines as text or as JSON.")
    log_level: LogLevel = option("info", "Lowest level that is logged.", common=True)
    max_body_bytes: int = option(33554432, "Largest request body, in bytes.", low=1024)
    shutdown_timeout: float = option(
        30.0,
        "Seconds that running requests have to finish after SIGTERM; 0 aborts them at once.",
        low=0,
        common=True,
    )
    enable_request_id_headers: bool = option(True, "Add an X-Request-Id header to answers.")
    metrics_prefix: str = option("quire", "Prefix of every metric's name; vllm fits existing dashboards.")

    def __post_init__(self) -> None:
        check_options(self)
        self._read_keys("api_key", "admin_api_key")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together: give both or neither")
        if (self.ssl_ca_certs or self.ssl_cert_reqs or self.ssl_ciphers) and not self.ssl_certfile:
            raise ConfigError("--ssl-ca-certs, --ssl-cert-reqs and --ssl-ciphers need --ssl-certfile")
        if not self.metrics_prefix.isidentifier():
            raise ConfigError(f"--metrics-prefix must be letters, digits and _, got {self.metrics_prefix!r}")

    def _read_keys(self, *names: str) -> None:
        """Add the keys of files to options, which must not be empty."""
        for name in names:
            self._add_keys(name)
            if not all(getattr(self, name)):
                raise ConfigError(f"--{name.replace('_', '-')} must not be empty")

    def _add_keys(self, name: str) -> None:
        flag, path = f"--{name.replace('_', '-')}-file", getattr(self, f"{name}_file")
        object.__setattr__(self, name, (*getattr(self, name), *keys_in(flag, path)))
        object.__setattr__(self, f"{name}_file", None)  # a file such as <(...) can be read once

    def api_keys(self) -> tuple[str, ...]:
        """Return users' keys; without any, those of the environment, as they are secrets."""
        return tuple(self.api_key) or keys_of_environment()

    def router_keys(self) -> tuple[str, ...]:
        """Return the keys of routers in front of this server."""
        return ()

    def keys(self) -> Keys:
        """Make the table of users', operators' and routers' keys."""
        loopback, private = self.uds is None and is_local(self.host), not self.allowed_origins
        return Keys(self.api_keys(), self.admin_api_key, private, loopback, self.router_keys())
