"""How a request samples."""

from quire import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.params import GuidedDecodingParams, RepetitionDetectionParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
