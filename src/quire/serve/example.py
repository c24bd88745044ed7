"""A first call of a server: its path and body, which log and page advise."""

from __future__ import annotations

import json
from typing import Any

from quire.serve.service import Service

TEXT = "Once upon a time"


def example_call(service: Service) -> tuple[str, str]:
    """Choose an endpoint that the served model answers, and write a body for it."""
    info = service.front.info
    fields: dict[str, Any] = {"input": TEXT}
    if info.generates and service.front.template is not None:
        path, fields = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    elif info.generates:
        path, fields = "/v1/completions", {"prompt": TEXT}
    elif info.scores and len(info.labels) < 2:
        path, fields = "/v1/rerank", {"query": TEXT, "documents": ["there was a dog", "the train is late"]}
    elif info.scores:
        path = "/classify"
    else:
        path = "/pooling" if info.pooling == "all" else "/v1/embeddings"
    return path, json.dumps({"model": service.name, **fields})
