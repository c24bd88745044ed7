"""TensorRT-LLM's names for Quire: engines, builders, runners and the LLM API."""

from tensorrt_llm import builder, functional, layers, llmapi, models, network, quantization, runtime
from tensorrt_llm.builder import BuildConfig, Builder, build
from tensorrt_llm.functional import Tensor
from tensorrt_llm.llmapi import LLM, SamplingParams
from tensorrt_llm.logger import logger
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.models import (
    BloomForCausalLM,
    CohereForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    FalconForCausalLM,
    GemmaForCausalLM,
    GPTForCausalLM,
    GPTJForCausalLM,
    GPTNeoXForCausalLM,
    LLaMAForCausalLM,
    OPTForCausalLM,
    Phi3ForCausalLM,
    PhiForCausalLM,
    QWenForCausalLM,
)
from tensorrt_llm.module import Module
from tensorrt_llm.network import Network, net_guard
from tensorrt_llm.parameter import Parameter
from tensorrt_llm.version import __version__

__all__ = [
    "LLM",
    "BloomForCausalLM",
    "BuildConfig",
    "Builder",
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconForCausalLM",
    "GPTForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "GemmaForCausalLM",
    "LLaMAForCausalLM",
    "Mapping",
    "Module",
    "Network",
    "OPTForCausalLM",
    "Parameter",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "QWenForCausalLM",
    "SamplingParams",
    "Tensor",
    "__version__",
    "build",
    "builder",
    "functional",
    "layers",
    "llmapi",
    "logger",
    "models",
    "net_guard",
    "network",
    "quantization",
    "runtime",
]
