"""Models by their classes: checkpoints, to convert or to build."""

from pathlib import Path
from typing import Any

from quire.build import describe_model
from quire.config import EngineConfig
from quire.convert import convert_checkpoint
from quire.errors import ConfigError, ModelError
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.network import Network
from tensorrt_llm.options import CONVERTING
from tensorrt_llm.quantization import QuantConfig


class PretrainedModel:
    """A checkpoint, its types, and the ranks that it is divided among. Weights are read when it is built."""

    architectures: tuple[str, ...] = ()

    def __init__(self, config: EngineConfig, mapping: Mapping) -> None:
        self.config, self.mapping = config, mapping

    @classmethod
    def from_hugging_face(
        cls,
        hf_model_dir: str | Path | None = None,
        dtype: str = "auto",
        mapping: Mapping | None = None,
        quant_config: QuantConfig | None = None,
        *,
        model_dir: str | Path | None = None,
        hf_model_or_dir: str | Path | None = None,
        **options: Any,
    ) -> "PretrainedModel":
        """A Hugging Face checkpoint. ModelError if it is not of this class."""
        paths = [str(path) for path in (hf_model_dir, model_dir, hf_model_or_dir) if path is not None]
        if len(paths) != 1:
            raise ConfigError("from_hugging_face takes one checkpoint: hf_model_dir or model_dir")
        return cls._open(paths[0], dtype, mapping, quant_config, options)

    @classmethod
    def from_checkpoint(
        cls, ckpt_dir: str | Path, rank: int = 0, config: Any = None, **options: Any
    ) -> "PretrainedModel":
        """A converted checkpoint, or any other."""
        return cls._open(str(ckpt_dir), "auto", None, None, options)

    @classmethod
    def _open(
        cls,
        path: str,
        dtype: str,
        mapping: Mapping | None,
        quant: QuantConfig | None,
        options: dict[str, Any],
    ) -> "PretrainedModel":
        mapping = mapping or Mapping()
        own = CONVERTING.translated(options) | (quant.options() if quant is not None else {})
        config = EngineConfig.from_options(
            model=path, dtype=dtype, tensor_parallel_size=mapping.tp_size, **own
        )
        found = describe_model(config).spec.architecture
        if cls.architectures and found not in cls.architectures:
            raise ModelError(
                f"{path} is a {found}, not one of {cls.__name__}: {', '.join(cls.architectures)}"
            )
        return cls(config, mapping)

    def save_checkpoint(self, output_dir: str | Path, save_config: bool = True) -> None:
        """Convert the share of this rank, with the description beside it, which is always written."""
        convert_checkpoint(self.config, Path(output_dir), ranks=[self.mapping.rank])

    def to_trt(self, network: Network) -> None:
        """Make this checkpoint the content of a network."""
        network.model = self.config


class LLaMAForCausalLM(PretrainedModel):
    """Llama and the models that share its code in TensorRT-LLM."""

    architectures = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")


class QWenForCausalLM(PretrainedModel):
    """Qwen 2, 3 and their mixtures."""

    architectures = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


class GPTForCausalLM(PretrainedModel):
    """GPT-2 and StarCoder 2."""

    architectures = ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "Starcoder2ForCausalLM")


class GPTJForCausalLM(PretrainedModel):
    """GPT-J."""

    architectures = ("GPTJForCausalLM",)


class GPTNeoXForCausalLM(PretrainedModel):
    """GPT-NeoX and Pythia."""

    architectures = ("GPTNeoXForCausalLM",)


class OPTForCausalLM(PretrainedModel):
    """OPT."""

    architectures = ("OPTForCausalLM",)


class BloomForCausalLM(PretrainedModel):
    """BLOOM."""

    architectures = ("BloomForCausalLM",)


class FalconForCausalLM(PretrainedModel):
    """Falcon."""

    architectures = ("FalconForCausalLM",)


class GemmaForCausalLM(PretrainedModel):
    """Gemma 1 to 3."""

    architectures = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")


class PhiForCausalLM(PretrainedModel):
    """Phi 1 and 2."""

    architectures = ("PhiForCausalLM",)


class Phi3ForCausalLM(PretrainedModel):
    """Phi 3."""

    architectures = ("Phi3ForCausalLM",)


class CohereForCausalLM(PretrainedModel):
    """Command R."""

    architectures = ("CohereForCausalLM", "Cohere2ForCausalLM")


class DeepseekV2ForCausalLM(PretrainedModel):
    """DeepSeek V2."""

    architectures = ("DeepseekV2ForCausalLM",)


class DeepseekV3ForCausalLM(PretrainedModel):
    """DeepSeek V3."""

    architectures = ("DeepseekV3ForCausalLM",)


# TensorRT-LLM's second names of these classes.
MistralForCausalLM = MixtralForCausalLM = LLaMAForCausalLM
MODEL_MAP = {name: cls for cls in PretrainedModel.__subclasses__() for name in cls.architectures}

__all__ = [
    "MODEL_MAP",
    "BloomForCausalLM",
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconForCausalLM",
    "GPTForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "GemmaForCausalLM",
    "LLaMAForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "OPTForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "PretrainedModel",
    "QWenForCausalLM",
]
