"""Reads what a router tells of a request that it passes on."""

from __future__ import annotations

import re

import msgspec

from quire.serve.errors import HttpError, invalid
from quire.serve.ids import REQUEST_ID, ROUTE
from quire.types import SEED_MASK, Request

MOST_PREFIX = 4096
_NAME = re.compile(r"^[0-9a-f]{16}$")
SEED_STRIDE = 1 << 32
"""SEED_STRIDE lies between the seeds of a call's prompts, whose samples count on from each."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The header X-Quire-Route: who asks, what the router drew, and whether another replica may go on.

    `owner` is a digest of the client's key, `prefix` the digests of the body's first blocks of text.
    """

    id: str
    created: int
    seed: int | None = None
    owner: str = ""
    resumable: bool = False
    prefix: tuple[str, ...] = ()


_route = msgspec.json.Decoder(Route)


def read_route(header: str) -> Route:
    """Read the header of a router. HttpError 400: it is malformed."""
    try:
        return check_route(_route.decode(header))
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _malformed(str(error)) from error


def check_route(route: Route) -> Route:
    """Return the route. HttpError 400: it is not what a router sends."""
    if len(route.prefix) > MOST_PREFIX or not all(map(_NAME.match, route.prefix)):
        raise _malformed("prefix has names of 16 hex digits")
    if not REQUEST_ID.match(route.id) or len(route.owner) > 128 or not 0 <= route.created < 1 << 40:
        raise _malformed("id, owner or created is not what a router sends")
    return route


def _malformed(why: str) -> HttpError:
    return invalid(f"X-Quire-Route is malformed: {why}", ROUTE, "invalid_value")


def seeded(request: Request, seed: int, place: int) -> Request:
    """Seed prompt number `place` of a call, unless its body names a seed."""
    gens = tuple(seeded(gen, seed, number) for number, gen in enumerate(request.gens))
    drawn = request.seed if request.sampling.seed is not None else (seed + place * SEED_STRIDE) & SEED_MASK
    return msgspec.structs.replace(request, seed=drawn, gens=gens)
