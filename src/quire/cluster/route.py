"""The router: one address for many replicas. Bodies pass untouched; what acts on one replica does not pass at all."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import uvloop
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.cluster.choice import Choice
from quire.cluster.options import RouteConfig
from quire.cluster.relay import Relay, Request
from quire.cluster.replicas import Replicas
from quire.cluster.tally import Tally
from quire.engine import garbage
from quire.engine.log import set_up_logging
from quire.errors import EngineError
from quire.hooks import ENDPOINTS as ENTRY_POINTS
from quire.hooks import load_hooks
from quire.serve import banner
from quire.serve.app import guard, with_dialects
from quire.serve.bodies import read_body
from quire.serve.errors import not_found, unavailable
from quire.serve.extensions import configure_logging
from quire.serve.native.control import for_operators
from quire.serve.openapi import json_response
from quire.serve.system_limits import check_limits
from quire.serve.threads import within
from quire.serve.tls import check_tls
from quire.serve.web import Job, WebServer, listening, url_of

log = logging.getLogger("quire.route")

MODELS_SECONDS = 5.0


class Router(WebServer):
    """The router: the replicas, the counts, the requests that run on replicas, and what it answers itself."""

    def __init__(self, config: RouteConfig, listener: socket.socket) -> None:
        self.replicas = Replicas(Choice(config.policy, first=random.randrange(1 << 16)), config)
        self.tally = Tally(config.metrics_prefix, self._gauges)
        self.live: set[Relay] = set()
        self._options, self._draining = config, False
        super().__init__(self._app(), config, listener)
        self.background.append(self.replicas.run)

    def _app(self) -> Starlette:
        posts = [endpoint.path for endpoint in with_dialects(load_hooks(ENTRY_POINTS))]
        gets = {
            "/v1/programs": self._forward,
            "/v1/models": self._models,
            "/v1/models/{model_id:path}": self._forward,
            "/health": self._health,
            "/ping": self._health,
            "/version": self._version,
            "/metrics": self._metrics,
            "/replicas": self._listed,
        }
        app = Starlette(
            routes=[
                *(Route(path, self._forward, methods=["POST"]) for path in posts),
                *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
                *(Route(path, self._take_out, methods=["POST"]) for path in ("/drain", "/undrain")),
            ]
        )
        for_operators(app, "/replicas", "/drain", "/undrain")
        guard(app, self._options, lambda *answer: self.tally.answers.labels(*answer).inc())
        return app

    # --- as a server

    @property
    def num_live(self) -> int:
        return len(self.live)

    def drain(self) -> None:
        self._draining = True

    def abort(self) -> None:
        for relay in [*self.live]:
            relay.fail(EngineError("the router was stopped before this request finished: send it again"))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("serving the replicas' models at %s", url_of(self._options, self.listener))
        banner.log_reach(log, self._options)

    def _gauges(self) -> Mapping[str, Mapping[str, float]]:
        return {
            "replicas": Counter(member.state for member in self.replicas.members.values()),
            "running": {"requests": len(self.live)},
            "longest_silence_seconds": {"streams": self.replicas.longest_silence},
        }

    # --- endpoints

    async def _forward(self, http: HttpRequest) -> Response:
        """Pass a request on to a replica."""
        body = await read_body(http, self._options.max_body_bytes) if http.method == "POST" else b""
        if self._draining:
            self.tally.count("refusals", "draining")
            raise unavailable("the router is shutting down: send this request to another")
        if len(self.live) >= self._options.max_requests:
            self.tally.count("refusals", "full")
            raise unavailable(f"{len(self.live)} requests are on their way (--max-requests): try again later")
        return Relay(Request(http.scope, body), self.replicas, self.tally, self._options, self.live)

    async def _models(self, http: HttpRequest) -> Response:
        """Join the models of all classes of replicas."""
        up = [member for member in self.replicas.members.values() if member.state == "up"]
        kinds = {(member.kind, *sorted(member.models)): member for member in up}
        headers = [pair for pair in http.scope["headers"] if pair[0] == b"anthropic-version"]
        asking = [
            within(MODELS_SECONDS, member.upstream.whole(member.message("GET /v1/models", headers)))
            for member in kinds.values()
        ]
        found: dict[str, Any] = {}
        cards: dict[str, Any] = {}
        for told in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(told, BaseException):
                log.warning("a replica does not list its models: %r", told)
            elif told[0] == 200:
                found = {**msgspec.json.decode(told[1]), **found}
                cards = {**{card["id"]: card for card in msgspec.json.decode(told[1])["data"]}, **cards}
        if not found:
            raise unavailable("no replica is up: try again later", 5)
        found["data"] = [*cards.values()]
        if "last_id" in found:
            found["last_id"] = found["data"][-1]["id"]
        return json_response(found)

    async def _health(self, http: HttpRequest) -> Response:
        if self._draining or not self.replicas.any_up:
            raise unavailable("the router is shutting down" if self._draining else "no replica is up")
        return Response()

    async def _version(self, http: HttpRequest) -> Response:
        return json_response({"version": __version__})

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(generate_latest(self.tally.registry), media_type="text/plain; version=0.0.4")

    async def _listed(self, http: HttpRequest) -> Response:
        """List the replicas, for operators."""
        return json_response([member.describe() for member in self.replicas.members.values()])

    async def _take_out(self, http: HttpRequest) -> Response:
        """Let a replica run its requests to their ends, and send it no new ones; or send it some again."""
        given = http.query_params.get("replica", "")
        drained = http.url.path.endswith("/drain")
        member = self.replicas.drain(int(given), drained) if given.isdecimal() else None
        if member is None:
            raise not_found(
                f"no replica {given[:20]!r}: GET /replicas lists their numbers", "replica", "not_found"
            )
        return json_response(member.describe())


def route(config: RouteConfig, *jobs: Job) -> int:
    """Route until a signal, beside `jobs`; returns the exit status.

    SIGTERM: no new requests, and running ones have their time.
    """
    check_limits()
    garbage.collect_rarely()
    set_up_logging(config.log_format, config.log_level)
    configure_logging(config)
    return uvloop.run(_route(config, jobs))


async def _route(config: RouteConfig, jobs: tuple[Job, ...]) -> int:
    check_tls(config)
    config.keys()
    with listening(config) as listener:
        router = Router(config, listener)
        router.background += jobs
        return await router.run()
