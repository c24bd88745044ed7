"""Groups of options of `LLM`: each knows what it means in Quire's options."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from quire.errors import ConfigError


class Group:
    """Options that mean nothing here, whatever they are."""

    def __init__(self, **options: Any) -> None:
        self.given = options

    def options(self) -> dict[str, Any]:
        return {}


class CalibConfig(Group):
    """How to calibrate."""


class DynamicBatchConfig(Group):
    """How batches are tuned."""


class ExtendedRuntimePerfKnobConfig(Group):
    """Choices of kernels."""


class MoeConfig(Group):
    """Kernels of experts."""


class SchedulerConfig(Group):
    """The order of requests."""


class TorchCompileConfig(Group):
    """What to compile."""


class CapacitySchedulerPolicy(str, Enum):
    """Policies of a scheduler."""

    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"
    STATIC_BATCH = "STATIC_BATCH"


class _Fields:
    """The fields of a dataclass that are set, as options."""

    def options(self) -> dict[str, Any]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in found.items() if value is not None}


@dataclass(kw_only=True)
class KvCacheConfig(_Fields):
    """The KV cache. `max_tokens` bounds it, beside or in place of a share of the free memory."""

    enable_block_reuse: bool | None = None
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    dtype: str | None = None
    tokens_per_block: int | None = None
    max_attention_window: Any = None
    sink_token_length: int | None = None
    host_cache_size: int | None = None
    onboard_blocks: bool | None = None
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int | None = None
    enable_partial_reuse: bool | None = None
    copy_on_partial_reuse: bool | None = None
    max_gpu_total_bytes: int | None = None

    def options(self) -> dict[str, Any]:
        found = super().options()
        if "dtype" in found:
            found["kv_cache_dtype"] = found.pop("dtype")
        if "max_tokens" in found:
            size = found.setdefault("tokens_per_block", 16)
            found["num_gpu_blocks_override"] = -(-found.pop("max_tokens") // size)
        return found


@dataclass(kw_only=True)
class CudaGraphConfig(_Fields):
    """The sizes of the steps that a GPU captures: a list, or their most. None in place of a config captures none."""

    batch_sizes: Sequence[int] | None = None
    max_batch_size: int | None = None
    enable_padding: bool | None = None

    def options(self) -> dict[str, Any]:
        sizes, most = self.batch_sizes or [], self.max_batch_size or 0
        if not isinstance(sizes, (list, tuple)) or any(
            type(one) is not int or one < 0 for one in (*sizes, most)
        ):
            raise ConfigError("batch_sizes must be a list of numbers, and max_batch_size a number")
        if sizes and most not in (0, max(sizes)):
            raise ConfigError("give batch_sizes or max_batch_size, and not both")
        found: dict[str, Any] = {"cudagraph_capture_sizes": tuple(map(str, sizes))} if sizes else {}
        found |= {"max_cudagraph_capture_size": most} if most else {}
        return found | ({"enable_padding": "false"} if self.enable_padding is False else {})


@dataclass(kw_only=True)
class LoraConfig(_Fields):
    """Adapters beside the model."""

    lora_dir: Any = None
    lora_target_modules: Any = None
    lora_ckpt_source: str | None = None
    max_lora_rank: int | None = None
    max_loras: int | None = None
    max_cpu_loras: int | None = None

    def options(self) -> dict[str, Any]:
        own = ("max_lora_rank", "max_loras", "max_cpu_loras")
        return {"enable_lora": True} | {
            name: getattr(self, name) for name in own if getattr(self, name) is not None
        }


class _Drafting:
    """A way to draft: `method` of vLLM's names, and a draft model or head if it has one."""

    method = ""

    def __init__(
        self,
        max_draft_len: int | None = None,
        speculative_model_dir: Any = None,
        speculative_model: Any = None,
        **options: Any,
    ) -> None:
        self.given = {"method": self.method, **options}
        model = speculative_model_dir or speculative_model
        for name, value in (("num_speculative_tokens", max_draft_len), ("model", model and str(model))):
            if value is not None:
                self.given[name] = value

    def options(self) -> dict[str, Any]:
        return {"speculative_config": self.given}


class DraftTargetDecodingConfig(_Drafting):
    """A smaller model drafts."""

    method = "draft_model"


class MedusaDecodingConfig(_Drafting):
    """Medusa's heads draft."""

    method = "medusa"

    def __init__(self, max_draft_len: int | None = None, medusa_choices: Any = None, **options: Any) -> None:
        """`medusa_choices` is a tree, and changes nothing: drafts are chains, with the same output."""
        super().__init__(max_draft_len, **options)


class EagleDecodingConfig(_Drafting):
    """EAGLE's head drafts: version 3 unless told otherwise."""

    method = "eagle3"

    def __init__(
        self, max_draft_len: int | None = None, eagle3_one_model: bool = True, **options: Any
    ) -> None:
        super().__init__(max_draft_len, **options)


class MTPDecodingConfig(_Drafting):
    """Further layers of the model itself draft."""

    method = "mtp"

    def __init__(self, num_nextn_predict_layers: int | None = None, **options: Any) -> None:
        super().__init__(num_nextn_predict_layers, **options)


class NGramDecodingConfig(_Drafting):
    """Repetitions of the text draft."""

    method = "ngram"

    def __init__(
        self,
        max_draft_len: int | None = None,
        max_matching_ngram_size: int | None = None,
        prompt_lookup_num_tokens: int | None = None,
        is_keep_all: bool = True,
        is_use_oldest: bool = True,
        is_public_pool: bool = False,
    ) -> None:
        size = {} if max_matching_ngram_size is None else {"prompt_lookup_max": max_matching_ngram_size}
        super().__init__(max_draft_len or prompt_lookup_num_tokens, **size)


DRAFTING = {
    "NGram": NGramDecodingConfig,
    "Eagle": EagleDecodingConfig,
    "Eagle3": EagleDecodingConfig,
    "MTP": MTPDecodingConfig,
    "Medusa": MedusaDecodingConfig,
    "Draft_Target": DraftTargetDecodingConfig,
}


class _Given(Group):
    """Quire's own keys of speculation, which are vLLM's."""

    def options(self) -> dict[str, Any]:
        return {"speculative_config": self.given}


def drafting(decoding_type: str | None = None, **options: Any) -> Any:
    """A way to draft by its name, or by Quire's keys if there is none. ConfigError for another name."""
    if decoding_type is None:
        return _Given(**options)
    if decoding_type not in DRAFTING:
        raise ConfigError(f"decoding_type must be one of {', '.join(DRAFTING)}, got {decoding_type!r}")
    return DRAFTING[decoding_type](**options)
