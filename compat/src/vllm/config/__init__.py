"""Groups of options. Quire takes them as maps."""

CompilationConfig = dict
KVTransferConfig = dict
PoolerConfig = dict
ProfilerConfig = dict
SpeculativeConfig = dict
StructuredOutputsConfig = dict

__all__ = [
    "CompilationConfig",
    "KVTransferConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
]
