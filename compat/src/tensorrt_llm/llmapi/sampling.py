"""`SamplingParams` of the LLM API."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import quire
from quire import BeamSearchParams, StructuredOutputsParams
from quire.errors import RequestError

# Fields that would change the output and that Quire lacks, with what to use.
_LACKING = {
    "bad_token_ids": "bad, or logit_bias of quire.SamplingParams",
    "embedding_bias": "logit_bias of quire.SamplingParams",
    "top_p_min": "top_p",
    "top_p_decay": "top_p",
    "top_p_reset_ids": "top_p",
    "beam_search_diversity_rate": "n",
    "beam_width_array": "best_of",
    "no_repeat_ngram_size": "repetition_penalty",
    "return_context_logits": "prompt_logprobs",
    "return_generation_logits": "logprobs",
    "return_encoder_output": "LLM.encode of Quire",
    "additional_model_outputs": "logprobs",
    "apply_batched_logits_processor": "logits_processor",
}


class LogitsProcessor(ABC):
    """Changes the logits of a request in place, before each token."""

    @abstractmethod
    def __call__(
        self,
        req_id: int,
        logits: Any,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """`logits` [1, beams, vocabulary]; `token_ids` are the output so far; the last two are None."""


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """The form that an output must have."""

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: Any = None

    def params(self) -> StructuredOutputsParams:
        schema = getattr(self.json, "model_json_schema", None)
        return StructuredOutputsParams(
            json=self.json if schema is None else schema(),
            regex=self.regex,
            grammar=self.grammar,
            json_object=self.json_object or None,
            structural_tag=self.structural_tag,
        )


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How a request is continued. Names and defaults are TensorRT-LLM's: 32 tokens, greedy unless told otherwise."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: Any = None
    lookahead_config: Any = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        if self.temperature is not None or self.top_k == 1:
            return self.temperature == 0 or self.top_k == 1
        return self.top_k is None and not self.top_p

    @property
    def tokenization(self) -> dict[str, Any]:
        """How the prompt becomes tokens."""
        return {
            "add_special_tokens": self.add_special_tokens,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
        }

    def params(self) -> quire.SamplingParams:
        """The same as Quire's parameters. RequestError names a field that would change the output and is not done."""
        for name, nearest in _LACKING.items():
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: use {nearest}", name)
        if not self.exclude_input_from_output:
            raise RequestError(
                "exclude_input_from_output must be true: prompt_token_ids has the input",
                "exclude_input_from_output",
            )
        if self.use_beam_search:
            return self._beams()
        if self.best_of not in (None, self.n):
            raise RequestError(
                f"best_of {self.best_of} without use_beam_search must equal n {self.n}", "best_of"
            )
        return quire.SamplingParams.from_optional(
            n=self.n,
            max_tokens=self.max_tokens,
            temperature=0.0 if self.greedy else self.temperature,
            top_k=self.top_k if not self.greedy else None,
            top_p=self.top_p or None,
            min_p=self.min_p,
            seed=self.seed,
            min_tokens=self.min_tokens,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            bad_words=self.bad,
            stop=self.stop,
            stop_token_ids=self._ends(),
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=_count(self.logprobs),
            prompt_logprobs=_count(self.prompt_logprobs),
            ignore_eos=self.ignore_eos,
            detokenize=self.detokenize,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            structured_outputs=None if self.guided_decoding is None else self.guided_decoding.params(),
            logits_processors=_processors(self.logits_processor),
        )

    def _ends(self) -> list[int]:
        return [
            *(self.stop_token_ids or ()),
            *([] if self.end_id is None or self.ignore_eos else [self.end_id]),
        ]

    def _beams(self) -> quire.SamplingParams:
        return BeamSearchParams(
            beam_width=self.best_of or self.n,
            num_return_sequences=self.n,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=0.0 if self.length_penalty is None else self.length_penalty,
            early_stopping={None: True, 1: True, 0: False}.get(self.early_stopping, "never"),
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=self._ends(),
            skip_special_tokens=self.skip_special_tokens,
        ).sampling_params()


def _count(logprobs: int | bool | None) -> int | None:
    """True asks for one, False for none."""
    return None if logprobs is None or logprobs is False else int(logprobs)


def _processors(given: Any) -> list[Callable[..., Any]] | None:
    """Functions of Quire's form: (output token ids, row of logits) -> row."""
    if given is None:
        return None
    each = given if isinstance(given, Sequence) else [given]
    return [_processor(one) for one in each]


def _processor(change: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor of PyTorch shares the row's memory; only a function that imported torch can want one."""

    def run(token_ids: Sequence[int], logits: Any) -> Any:
        torch = sys.modules.get("torch")
        row = torch.from_numpy(logits) if torch is not None and isinstance(logits, np.ndarray) else logits
        change(0, row[None, None], [list(token_ids)], None, None)  # [1, beams, vocabulary], changed in place
        return logits

    return run
