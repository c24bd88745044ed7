"""How weights are quantized: TensorRT-LLM's algorithms."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from quire.errors import ConfigError


class QuantAlgo(str, Enum):
    """Algorithms by name."""

    W8A16 = "W8A16"
    W4A16 = "W4A16"
    W4A16_AWQ = "W4A16_AWQ"
    W4A16_GPTQ = "W4A16_GPTQ"
    W8A8_SQ_PER_CHANNEL = "W8A8_SQ_PER_CHANNEL"
    W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"
    FP8 = "FP8"
    FP8_PER_CHANNEL_PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"
    NVFP4 = "NVFP4"
    INT8 = "INT8"
    NO_QUANT = "NO_QUANT"


# Quire's names of what a conversion or a build rounds weights to; awq and gptq ask for a checkpoint of that kind.
WEIGHTS = {
    "W8A16": "int8wo",
    "W4A16": "int4wo",
    "W4A16_AWQ": "awq",
    "W4A16_GPTQ": "gptq",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "NVFP4": "nvfp4",
    "NO_QUANT": "auto",
}
CACHE = {"INT8": "int8", "FP8": "fp8", "NO_QUANT": "auto"}


@dataclass(slots=True)
class QuantConfig:
    """The types of weights, and of the KV cache."""

    quant_algo: QuantAlgo | str | None = None
    kv_cache_quant_algo: QuantAlgo | str | None = None
    group_size: int = 128

    def options(self) -> dict[str, Any]:
        """The same as options of Quire. ConfigError for an algorithm that has to be calibrated."""
        found = {}
        for name, known, algo in (
            ("quantization", WEIGHTS, self.quant_algo),
            ("kv_cache_dtype", CACHE, self.kv_cache_quant_algo),
        ):
            if algo is not None:
                value = known.get(algo.value if isinstance(algo, QuantAlgo) else str(algo))
                if value is None:
                    raise ConfigError(
                        f"{algo} is not supported here: take {', '.join(known)}, or calibrate with `quire quantize`"
                    )
                found[name] = value
        return found
