"""`SamplingConfig`: how a batch of token ids is continued."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quire import BeamSearchParams, SamplingParams
from quire.errors import ConfigError, RequestError


@dataclass(slots=True)
class SamplingConfig:
    """Names and defaults are TensorRT-LLM's: greedy unless top_k, top_p or num_beams say otherwise.

    Only `end_id` ends a sequence. Fields that Quire lacks are refused unless they have the value that means nothing.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_new_tokens: int = 20
    num_beams: int = 1
    num_return_sequences: int | None = None
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.0
    min_p: float = 0.0
    random_seed: int | None = None
    min_length: int = 1
    length_penalty: float = 1.0
    early_stopping: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_words_list: Any = None
    bad_words_list: Any = None
    output_sequence_lengths: bool = False
    return_dict: bool = False
    output_cum_log_probs: bool = False
    output_log_probs: bool = False
    use_beam_hyps: bool = True
    max_attention_window_size: int | None = None
    sink_token_length: int | None = None
    top_p_decay: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    beam_search_diversity_rate: float = 0.0
    no_repeat_ngram_size: int | None = None

    def with_changes(self, changes: dict[str, Any]) -> "SamplingConfig":
        """A copy with other values. ConfigError for a name that is none of the fields, unless it asks for nothing."""
        known = {field.name for field in fields(self)}
        asked = {
            name: value for name, value in changes.items() if name in known or value not in (None, False)
        }
        if unknown := sorted(asked.keys() - known):
            raise ConfigError(f"SamplingConfig has no {unknown[0]}; it has {', '.join(sorted(known))}")
        return replace(self, **asked)

    def params(self) -> SamplingParams:
        """The same as Quire's parameters. RequestError names a field that would change the output and is not done."""
        for name in (
            "max_attention_window_size",
            "sink_token_length",
            "top_p_decay",
            "top_p_min",
            "top_p_reset_ids",
            "beam_search_diversity_rate",
            "no_repeat_ngram_size",
            "bad_words_list",
        ):
            if getattr(self, name):
                raise RequestError(f"{name} of SamplingConfig is not supported: leave it out", name)
        ends = self._ends()
        count = self.num_return_sequences or self.num_beams
        if self.num_beams > 1:
            return BeamSearchParams(
                beam_width=self.num_beams,
                num_return_sequences=count,
                max_tokens=self.max_new_tokens,
                length_penalty=self.length_penalty,
                early_stopping={0: False, 1: True}.get(self.early_stopping, "never"),
                repetition_penalty=self.repetition_penalty,
                min_tokens=self._least(),
                stop_token_ids=ends,
                ignore_eos=self.end_id is not None,
            ).sampling_params()
        return SamplingParams(
            n=count,
            max_tokens=self.max_new_tokens,
            min_tokens=self._least(),
            temperature=self.temperature if self.top_k != 1 else 0.0,
            top_k=self.top_k if self.top_k != 1 else 0,
            top_p=self.top_p or 1.0,
            min_p=self.min_p,
            seed=self.random_seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop_token_ids=ends,
            ignore_eos=self.end_id is not None,
            logprobs=0 if self.output_cum_log_probs or self.output_log_probs else None,
            detokenize=False,
        )

    def _least(self) -> int:
        return self.min_length if self.min_length > 1 else 0

    def _ends(self) -> Sequence[int]:
        """The tokens that end a sequence: end_id, and stop words of one token."""
        words = [list(word) for word in self.stop_words_list or ()]
        if any(len(word) != 1 or not isinstance(word[0], int) for word in words):
            raise RequestError(
                "stop_words_list of SamplingConfig may hold words of one token, such as [[13]]; for others use "
                "SamplingParams(stop=...) of LLM",
                "stop_words_list",
            )
        own = [] if self.end_id is None else [self.end_id]
        return [*own, *(word[0] for word in words)]
