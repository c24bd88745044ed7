"""Splits texts longer than the model into requests, and joins the results of the parts.

As vLLM's chunked processing does it. A text that fits is one part, and its result is untouched.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from quire.types import Request


def split_long(requests: Sequence[Request], longest: int) -> list[list[Request]]:
    """Split each request into parts of at most `longest` tokens, in order."""
    return [_parts(request, longest) for request in requests]


def _parts(request: Request, longest: int) -> list[Request]:
    tokens = request.tokens
    if len(tokens) <= longest:
        return [request]
    return [
        msgspec.structs.replace(request, id=f"{request.id}-{start}", tokens=tokens[start : start + longest])
        for start in range(0, len(tokens), longest)
    ]


def joined(parts: Sequence[Request], vectors: Sequence[list[float]], is_embedding: bool) -> list[float]:
    """Join the result for a text: the mean of its parts' vectors, weighted by their tokens, or all token vectors.

    The mean of embeddings of length 1 is scaled to length 1 again.
    """
    if len(parts) == 1:
        return vectors[0]
    if parts[0].pooling == "all":
        return [x for vector in vectors for x in vector]
    rows = np.array(vectors, np.float64)
    mean = np.average(rows, axis=0, weights=[len(part.tokens) for part in parts])
    if is_embedding and np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-3):
        mean /= np.linalg.norm(mean) or 1.0
    return [float(x) for x in mean]
