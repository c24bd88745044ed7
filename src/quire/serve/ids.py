"""Ids that depend on the request alone."""

from __future__ import annotations

import hashlib
import re

REQUEST_ID = re.compile(r"^[A-Za-z0-9_.:-]{1,128}$")
ROUTE = "x-quire-route"


def derived(*parts: object) -> str:
    """Make 32 hex digits of `parts`: the same on every server."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:32]
