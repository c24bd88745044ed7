"""Reads a Hugging Face config.json key by key and refuses what nobody read. Knows no family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError

# Keys that never change the result of inference, by what they are about.
HARMLESS_BY_TOPIC = {
    "bookkeeping": "architectures model_type torch_dtype dtype transformers_version "
    "_name_or_path name_or_path auto_map tokenizer_class is_llama_config "
    "transformers.js_config unsloth_version unsloth_fixed",
    "training": "embedding_dropout residual_dropout layerdrop init_std attn_pdrop dropout activation_dropout "
    "hidden_dropout_prob attention_probs_dropout_prob classifier_dropout router_aux_loss_coef aux_loss_alpha "
    "seq_aux router_jitter_noise initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop "
    "gradient_checkpointing output_router_logits tf_legacy_loss use_bfloat16",
    "execution": "reorder_and_upcast_attn slow_but_exact use_cache pretraining_tp chunk_size_feed_forward "
    "torchscript _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled attn_implementation "
    "_experts_implementation cache_implementation",
    "outputs": "output_attentions output_hidden_states output_scores return_dict return_dict_in_generate",
    "tokens": "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id "
    "forced_bos_token_id forced_eos_token_id bos_token eos_token pad_token "
    "model_max_length max_sequence_length",
    "sampling": "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids "
    "num_return_sequences encoder_no_repeat_ngram_size remove_invalid_values suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty",
    "other tasks": "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
    "finetuning_task id2label label2id num_labels problem_type prefix task_specific_params",
}
HARMLESS = frozenset(key for keys in HARMLESS_BY_TOPIC.values() for key in keys.split())

# Keys that change the result unless they hold one of these values; null is always such a value.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
    "logit_scale": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
}


class ConfigReader:
    """A view of one JSON object that remembers which keys were read. `where` begins each message."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self._unread = set(values)
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key is present, be it null."""
        return key in self._values

    def get(self, key: str) -> Any:
        """The value as it is, None where absent; counts as read."""
        self._unread.discard(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, high: int = 1 << 31) -> int:
        """An integer in 1..high. Absent or null takes the default; without one the key is required."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise self.wrong(key, value, f"an integer from 1 to {high}")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """An integer >= 0."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(key, value, "an integer >= 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number >= 0."""
        value = self.optional_number(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, value, "a number")
        if not math.isfinite(value) or value < 0:
            raise self.wrong(key, value, "finite and not negative")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def expect(self, key: str, *values: object) -> None:
        """Refuse any value but these; absent or null is the first."""
        value = self.get(key)
        if value is not None and value not in values:
            raise self.wrong(key, value, " or ".join(repr(v) for v in values))

    def finish(
        self, harmless: frozenset[str] = HARMLESS, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
    ) -> None:
        """Raise ModelError for keys that nobody read, unless harmless, null, or at a neutral value."""
        for key in sorted(self._unread - harmless):
            value = self._values[key]
            if value is not None and value not in neutral.get(key, ()):
                raise ModelError(
                    f"{self.where}: {key} = {_short(value)} is not understood and may change results; "
                    "remove the key only if you know that the weights do not depend on it"
                )

    def wrong(self, key: str, value: object, must: str) -> ModelError:
        return ModelError(f"{self.where}: {key} must be {must}, got {_short(value)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
