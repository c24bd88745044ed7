"""The fields of POST /v1/programs. Its steps describe themselves (quire/steps.py)."""

from __future__ import annotations

from quire.client.programs import ProgramCall
from quire.serve.fields.common import DRAW, LABELS, MODEL, OTHERS_IGNORED, OTHERS_REFUSED
from quire.serve.fields.shapes import Fields, Refused
from quire.serve.openai.protocol import CacheSalt, Int32, Name, RequestId


class ProgramRequest(ProgramCall, kw_only=True):
    """POST /v1/programs."""

    model: Name | None = None
    priority: Int32 = 0
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None


PROGRAMS = Fields(
    path="/v1/programs",
    body=ProgramRequest,
    taken={
        **MODEL,
        "steps": "the steps of the first lane",
        "lanes": "steps of other lanes of a session, by their names",
        "sampling": "defaults of all gens",
        "session": "go on from a state that was kept",
        "keep": "keep the state after the call; the answer names its session",
        "stream": "send events as they happen",
        **{name: DRAW[name] for name in ("priority", "cache_salt", "request_id")},
    },
    ignored={**LABELS, **OTHERS_IGNORED},
    refused={
        **OTHERS_REFUSED,
        **{name: Refused("begin with a text or role step") for name in ("prompt", "messages")},
    },
)
