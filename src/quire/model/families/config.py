"""Read a Hugging Face config.json key by key and refuse every key that nobody read. Knows no family."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError

# Keys that never change the result of inference, by topic.
HARMLESS_BY_TOPIC = {
    "bookkeeping": "architectures model_type torch_dtype dtype transformers_version "
    "_name_or_path name_or_path auto_map tokenizer_class is_llama_config "
    "transformers.js_config unsloth_version unsloth_fixed "
    "is_matryoshka matryoshka_dimensions",
    "training": "embedding_dropout residual_dropout layerdrop init_std attn_pdrop dropout activation_dropout "
    "hidden_dropout_prob attention_probs_dropout_prob classifier_dropout router_aux_loss_coef aux_loss_alpha "
    "seq_aux router_jitter_noise initializer_range attention_dropout hidden_dropout expert_dropout resid_pdrop "
    "embd_pdrop gradient_checkpointing output_router_logits tf_legacy_loss use_bfloat16",
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
# Numbers outside LEAST to MOST are not settings of a model, and float32 could not hold what follows from them.
LEAST, MOST = 1e-30, 1e30
MAX_INTEGER = (1 << 31) - 1
HARMLESS = frozenset(key for keys in HARMLESS_BY_TOPIC.values() for key in keys.split())

# NEUTRAL keys change the result unless they hold one of these values. An unread null never does.
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
    """A view of one JSON object that remembers which keys were read. `where` begins each message.

    `spellings` lists the names that a key may have in the file, separated by spaces; a key that is not listed has its
    own. Names that disagree are refused. `defaults` are the values of absent keys. Null is a value, not an absent
    key: each method says what it does with one.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        defaults: Mapping[str, Any] | None = None,
        spellings: Mapping[str, str] | None = None,
    ) -> None:
        self._values = dict(values)
        self._unread = set(values)
        self._defaults, self._spellings = defaults or {}, spellings or {}
        self._objects: dict[str, ConfigReader] = {}
        self._whole = False
        self.where = where

    def given(self, key: str) -> str | None:
        """Return the name under which the file has the key, even if null; None where it is absent."""
        found = [name for name in self._spellings.get(key, key).split() if name in self._values]
        if any(self._values[name] != self._values[found[0]] for name in found[1:]):
            raise ModelError(f"{self.where}: {' and '.join(found)} differ; keep one of them")
        self._unread.difference_update(found)
        return found[0] if found else None

    def get(self, key: str) -> Any:
        """Read the value as it is, or the default; counts as read."""
        name = self.given(key)
        return self._defaults.get(key) if name is None else self._values[name]

    def known(self, key: str) -> bool:
        """Whether the key is given or has a default."""
        return key in self._defaults or self.given(key) is not None

    def skip(self, keys: str) -> None:
        """Count the keys, separated by spaces, as read: the model's code does not use them."""
        self._unread.difference_update(keys.split())

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER) -> int:
        """Read an integer in low..high. Null is refused, as is an absent key without a default."""
        value = self.optional_integer(key, default, low=low, high=high)
        if value is None:
            raise self._missing(key, f"an integer from {low} to {high}")
        return value

    def optional_integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER
    ) -> int | None:
        """Read an integer in low..high, or null."""
        value = self._value(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, value, f"an integer from {low} to {high}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Read an integer >= 0. Null is refused."""
        return self.integer(key, default, low=0)

    def number(self, key: str, default: float | None = None) -> float:
        """Read a number from LEAST to MOST, or 0. Null is refused."""
        value = self.optional_number(key, default)
        if value is None:
            raise self._missing(key, "a number")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Read a number from LEAST to MOST. Null is refused."""
        value = self.number(key, default)
        if value == 0:
            raise self.wrong(key, value, "greater than 0")
        return value

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """Read a number from LEAST to MOST, or 0, or null."""
        value = self._value(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, value, "a number")
        if value != 0 and not LEAST <= value <= MOST:
            raise self.wrong(key, value, f"finite: 0, or from {LEAST} to {MOST}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Read true or false; null is false, as it is where Python tests it."""
        value = self._value(key, default)
        if value is None:
            if self.given(key) is None:
                raise self._missing(key, "true or false")
            return False
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def expect(self, key: str, *values: object) -> None:
        """Refuse any value but these. An absent key is accepted."""
        if self.given(key) is not None and self.get(key) not in values:
            raise self.wrong(key, self.get(key), " or ".join(repr(v) for v in values))

    def expect_all(self, values: Mapping[str, object], *others: object) -> None:
        """Refuse, by key, any value but the one given, or one of `others`. Absent keys are accepted."""
        for key, value in values.items():
            self.expect(key, value, *others)

    def section(self, key: str, *, whole: bool = False) -> ConfigReader | None:
        """Make a reader of the object under the key, finished with this one. Null counts as absent.

        `whole`: the object is a config, with all the keys that change nothing.
        """
        name = self.given(key)
        value = self._values[name] if name is not None else None
        value = self._defaults.get(key) if value is None else value
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        if key not in self._objects:
            self._objects[key] = ConfigReader(value, f"{self.where}: {name or key}")
            self._objects[key]._whole = whole
        return self._objects[key]

    def derived(self, values: Mapping[str, Any]) -> ConfigReader:
        """Make a reader with `values` in place of the file's; what it reads counts as read here."""
        reader = copy.copy(self)
        reader._values = {**self._values, **values}
        return reader

    def keys(self) -> frozenset[str]:
        return frozenset(self._values)

    def values(self) -> Mapping[str, Any]:
        return self._values

    def finish(
        self, harmless: frozenset[str] = HARMLESS, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
    ) -> None:
        """Raise ModelError for keys that nobody read, unless harmless, null, or at a neutral value.

        Objects that were read are finished too: in them only null is neutral.
        """
        for key in sorted(self._unread - harmless):
            value = self._values[key]
            if value is not None and value not in neutral.get(key, ()):
                raise ModelError(
                    f"{self.where}: {key} = {_short(value)} is not understood and may change results; "
                    "remove the key only if you know that the weights do not depend on it"
                )
        for inner in self._objects.values():
            if inner._whole:
                inner.finish()
            else:
                inner.finish(frozenset(), {})

    def wrong(self, key: str, value: object, must: str) -> ModelError:
        return ModelError(f"{self.where}: {self.given(key) or key} must be {must}, got {_short(value)}")

    def _value(self, key: str, default: Any) -> Any:
        if self.given(key) is None and key not in self._defaults:
            return default
        return self.get(key)

    def _missing(self, key: str, must: str) -> ModelError:
        if self.given(key) is not None:
            return self.wrong(key, None, must)
        name = self._spellings.get(key, key).split()[0]
        return ModelError(f"{self.where}: {name} is missing")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
