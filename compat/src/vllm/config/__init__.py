"""Groups of options. Quire takes them as maps."""

from vllm.config.model import ModelConfig

CompilationConfig = dict
KVTransferConfig = dict
PoolerConfig = dict
ProfilerConfig = dict
SpeculativeConfig = dict
StructuredOutputsConfig = dict

__all__ = [
    "CompilationConfig",
    "KVTransferConfig",
    "ModelConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
]
