"""TLS of the server: checks the files before anything is loaded, and loads them again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from quire.errors import ConfigError
from quire.serve.web_options import WebConfig

log = logging.getLogger("quire.serve")
REFRESH_SECONDS = 1.0


def check_tls(config: WebConfig) -> None:
    """Raise ConfigError if the TLS options cannot be used."""
    if config.ssl_certfile is None:
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {error}") from error
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs!r} cannot be used: {error}") from error
    try:
        context.set_ciphers(config.ssl_ciphers or "DEFAULT")
    except ssl.SSLError as error:
        raise ConfigError(f"--ssl-ciphers {config.ssl_ciphers!r} cannot be used: {error}") from error


async def refresh_tls(config: WebConfig, context: ssl.SSLContext) -> None:
    """Load certificate and key into `context` whenever one of the files has changed. Never returns."""
    assert config.ssl_certfile is not None
    seen = _times(config)
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        now = _times(config)
        if now == seen:
            continue
        try:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            log.warning("the TLS files have changed and cannot be loaded yet: %s", error)
        else:
            seen = now
            log.info("the TLS files were loaded again")


def _times(config: WebConfig) -> list[int]:
    """When the files were changed, 0 for one that is missing."""
    paths = [Path(name) for name in (config.ssl_certfile, config.ssl_keyfile) if name is not None]
    return [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]
