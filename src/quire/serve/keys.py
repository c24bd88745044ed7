"""Keys of servers, as operators and clients give them: by option, by file, by variable of the environment."""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import ConfigError

KEY_VARIABLES = ("QUIRE_API_KEY", "VLLM_API_KEY")


def keys_in(flag: str, path: str | None) -> tuple[str, ...]:
    """Read the keys in a file, one on each line. ConfigError: it is unreadable or has none."""
    if path is None:
        return ()
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path!r} cannot be read: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"{flag} {path!r} holds no key")
    return keys


def keys_of_environment() -> tuple[str, ...]:
    """Read the keys in KEY_VARIABLES."""
    return tuple(os.environ[name] for name in KEY_VARIABLES if os.environ.get(name))


def client_key(key: str | None, path: str | None) -> str | None:
    """Choose the key that a client sends: that of --api-key or the first of --api-key-file, else the environment's.

    Raises ConfigError if both are given, or for a key that no HTTP header can hold.
    """
    if key is not None and path is not None:
        raise ConfigError("pass --api-key or --api-key-file, not both")
    found = key or next(iter((*keys_in("--api-key-file", path), *keys_of_environment())), None)
    if found and not (found.isascii() and found.isprintable()):
        raise ConfigError(
            "--api-key, --api-key-file: the key has characters other than ASCII's printable ones"
        )
    return found


def key_advice(key: str | None) -> str:
    """Say what a person at a terminal changes when a server refuses `key`."""
    if key:
        return f"the server does not take the key of --api-key, --api-key-file or {KEY_VARIABLES[0]}: give another"
    return (
        f"the server needs a key: give --api-key-file FILE, --api-key KEY or the variable {KEY_VARIABLES[0]}"
    )
