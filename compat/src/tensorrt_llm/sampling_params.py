"""How a request samples."""

from tensorrt_llm.llmapi.sampling import GuidedDecodingParams, LogitsProcessor, SamplingParams

__all__ = ["GuidedDecodingParams", "LogitsProcessor", "SamplingParams"]
