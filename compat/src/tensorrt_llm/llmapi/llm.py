"""`LLM` of the LLM API."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import quire
from quire import RequestOutput
from quire.build import build_engine
from quire.config import EngineConfig
from quire.errors import ConfigError
from tensorrt_llm.builder import BuildConfig
from tensorrt_llm.llmapi.configs import CudaGraphConfig, KvCacheConfig, LoraConfig, drafting
from tensorrt_llm.llmapi.sampling import SamplingParams
from tensorrt_llm.options import SERVING
from tensorrt_llm.quantization import QuantConfig

Params = SamplingParams | quire.SamplingParams
GROUPS: dict[str, Callable[..., Any]] = {
    "cuda_graph_config": CudaGraphConfig,
    "kv_cache_config": KvCacheConfig,
    "lora_config": LoraConfig,
    "quant_config": QuantConfig,
    "build_config": BuildConfig,
    "speculative_config": drafting,
}


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """TensorRT-LLM's options of an engine as Quire's. ConfigError for one that would change a result."""
    options = dict(given)
    if options.pop("use_cuda_graph", None) is False or options.get("cuda_graph_config", ...) is None:
        options["enforce_eager"] = True
    for name, make in GROUPS.items():
        group = options.pop(name, None)
        try:
            group = make(**group) if isinstance(group, Mapping) else group
            options |= {} if group is None else group.options()
        except (TypeError, AttributeError, ConfigError) as error:
            raise ConfigError(f"{name}: {error}") from error
    return {"gpu_memory_utilization": 0.9, **SERVING.translated(options)}


class LLM(quire.LLM):
    """A model ready to generate: a Hugging Face id, a checkpoint, a converted one, or an engine directory."""

    def __init__(self, model: str | Path, tokenizer: Any = None, **options: Any) -> None:
        """`options` are TensorRT-LLM's, or Quire's."""
        tokenizer = getattr(tokenizer, "name_or_path", tokenizer)
        own = engine_options({"tokenizer": None if tokenizer is None else str(tokenizer), **options})
        super().__init__(str(model), **own)

    def generate(  # type: ignore[override]
        self,
        inputs: Any,
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        **ignored: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt, whose output is returned, or a list of them. A prompt is text or token ids."""
        single = isinstance(inputs, (str, Mapping)) or (len(inputs) > 0 and isinstance(inputs[0], int))
        prompts = [inputs] if single else list(inputs)
        given = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(prompts)
        params = [one or SamplingParams() for one in given]
        kwargs = next((one.tokenization for one in params if isinstance(one, SamplingParams)), None)
        outputs = super().generate(
            prompts, [_own(one) for one in params], use_tqdm, lora_request, tokenization_kwargs=kwargs
        )
        return outputs[0] if single else outputs

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Params | None = None,
        lora_request: Any = None,
        streaming: bool = False,
        **ignored: Any,
    ) -> Any:
        """Begin to continue one prompt. Await the result, call `result()`, or iterate over it as it grows."""
        return self.submit(inputs, _own(sampling_params or SamplingParams()), lora_request)

    def save(self, engine_dir: str | Path) -> None:
        """Build an engine of the model into a directory."""
        config = self.config
        own = EngineConfig(model=config.model, device=config.device, parallel=config.parallel)
        build_engine(own, Path(engine_dir))

    @property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()


def _own(params: Params) -> quire.SamplingParams:
    return params.params() if isinstance(params, SamplingParams) else params
