"""The LLM API: a model, ready to generate."""

from quire import CompletionOutput, LoRARequest, RequestError, RequestOutput
from tensorrt_llm.builder import BuildConfig
from tensorrt_llm.llmapi.configs import (
    CalibConfig,
    CapacitySchedulerPolicy,
    CudaGraphConfig,
    DraftTargetDecodingConfig,
    DynamicBatchConfig,
    EagleDecodingConfig,
    ExtendedRuntimePerfKnobConfig,
    KvCacheConfig,
    LoraConfig,
    MedusaDecodingConfig,
    MoeConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SchedulerConfig,
    TorchCompileConfig,
)
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.sampling import GuidedDecodingParams, SamplingParams
from tensorrt_llm.quantization import QuantAlgo, QuantConfig

__all__ = [
    "LLM",
    "BuildConfig",
    "CalibConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "CudaGraphConfig",
    "DraftTargetDecodingConfig",
    "DynamicBatchConfig",
    "EagleDecodingConfig",
    "ExtendedRuntimePerfKnobConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LoRARequest",
    "LoraConfig",
    "MTPDecodingConfig",
    "MedusaDecodingConfig",
    "MoeConfig",
    "NGramDecodingConfig",
    "QuantAlgo",
    "QuantConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TorchCompileConfig",
]
