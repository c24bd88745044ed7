"""`quire route`: one address for many replicas, until it is told to stop."""

from __future__ import annotations

from quire.cli import Command
from quire.cluster.options import RouteConfig
from quire.cluster.route import route
from quire.flags.table import vllm_flags


def run(options: RouteConfig) -> None:
    if status := route(options):
        raise SystemExit(status)


COMMAND = Command(run, RouteConfig, uses=frozenset(), foreign=lambda: vllm_flags("route"))
