"""What requests return."""

from quire import CompletionOutput, RequestOutput
from quire.client.vectors import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    ScoringOutput,
    VectorRequestOutput,
)

PoolingRequestOutput = VectorRequestOutput
EmbeddingRequestOutput = VectorRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = VectorRequestOutput[ClassificationOutput]
ScoringRequestOutput = VectorRequestOutput[ScoringOutput]

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]
