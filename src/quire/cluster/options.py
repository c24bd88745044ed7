"""The options of `quire route`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.cluster.choice import Policy
from quire.config import option
from quire.errors import ConfigError
from quire.serve.web_options import WebConfig

POLICY_NAMES = {"cache_aware": "prefix", "power_of_two": "load", "consistent_hashing": "session"}
"""POLICY_NAMES are vLLM's and SGLang's, for policies that do the same here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig(WebConfig):
    """Options of `quire route`: replicas, the choice among them, and what happens when one fails."""

    replica: tuple[str, ...] = option(
        (), "Address of a replica, http://host:port or unix:/path; repeat for several.", common=True
    )
    worker_urls: tuple[str, ...] = option((), "The same by the name that vLLM's and SGLang's routers have.")
    replicas_file: str | None = option(
        None, "File of addresses, one a line, read again when it changes.", common=True
    )
    replicas_dns: str | None = option(
        None, "NAME:PORT whose addresses in DNS are replicas, such as a headless service.", common=True
    )
    router_api_key: tuple[str, ...] = option((), "Key that the replicas know as --router-api-key.")
    router_api_key_file: str | None = option(
        None, "File with that key, which keeps it out of the process list.", common=True
    )
    policy: Policy = option(
        "prefix",
        "prefix: least time to the first token, cached prefixes counted; load: the same without prefixes; session: one "
        "replica for X-Session-Id, user or prompt_cache_key; round_robin.",
        aliases=POLICY_NAMES,
        common=True,
    )
    max_requests: int = option(
        16384, "Most requests on their way or waiting for a replica; further ones get a 503.", low=1
    )
    failover_timeout: float = option(
        30.0, "Seconds that a request waits for a replica while none is up.", low=0, common=True
    )
    silence_timeout: float = option(
        3.0, "Seconds without a sign of life after which a stream goes on elsewhere.", low=0.5, common=True
    )
    failover_across: Literal["allow", "refuse"] = option(
        "allow",
        "Whether a stream may go on in another class of replicas if none of its own is up; it says so.",
        common=True,
    )
    verify_failover: float = option(
        0.0, "Share of moved streams that are run again and compared.", low=0, high=1
    )

    def __post_init__(self) -> None:
        WebConfig.__post_init__(self)
        self._add_keys("router_api_key")
        object.__setattr__(self, "replica", (*self.replica, *self.worker_urls))
        object.__setattr__(self, "worker_urls", ())
        if not (self.replica or self.replicas_file or self.replicas_dns):
            raise ConfigError(
                "name the replicas: --replica http://host:port, --replicas-file or --replicas-dns"
            )
        keys = self.router_api_key
        if len(keys) != 1 or not keys[0] or not (keys[0].isascii() and keys[0].isprintable()):
            raise ConfigError(
                "give one key, the replicas' own --router-api-key, by --router-api-key-file FILE or --router-api-key"
            )
        if self.replicas_dns is not None and not self.replicas_dns.rpartition(":")[2].isdecimal():
            raise ConfigError(f"--replicas-dns must look like NAME:PORT, got {self.replicas_dns!r}")
