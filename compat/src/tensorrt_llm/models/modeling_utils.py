"""What all models share."""

from tensorrt_llm.models import PretrainedModel
from tensorrt_llm.quantization import QuantAlgo, QuantConfig

__all__ = ["PretrainedModel", "QuantAlgo", "QuantConfig"]
