"""Beam search with vLLM's names: parameters and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.client.logprobs import Logprob
from quire.client.outputs import RequestOutput
from quire.params import BeamRules, SamplingParams, StructuredOutputsParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A search for the most likely sequences. Names follow vLLM's BeamSearchParams and transformers' generate.

    `early_stopping` None is vLLM's search; False, True and "never" are transformers' (`BeamRules`). `temperature` is
    accepted and has no effect, as in vLLM. `num_return_sequences` defaults to `beam_width`. Groups with a
    `diversity_penalty` search for different sequences (`BeamRules`).
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    early_stopping: bool | Literal["never"] | None = None
    num_return_sequences: int | None = None
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    stop_token_ids: Sequence[int] = ()
    structured_outputs: StructuredOutputsParams | None = None
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    no_repeat_ngram_size: int = 0

    def sampling_params(self) -> SamplingParams:
        """Make the search into a request's parameters. RequestError names a value that is not allowed."""
        rules = BeamRules(
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            num_beam_groups=self.num_beam_groups,
            diversity_penalty=self.diversity_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
        )
        return SamplingParams(
            n=self.num_return_sequences or self.beam_width,
            beam=rules,
            max_tokens=self.max_tokens,
            logprobs=0,
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            bad_words=self.bad_words,
            allowed_token_ids=self.allowed_token_ids,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            structured_outputs=self.structured_outputs,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence. `tokens` begin with the prompt, as in vLLM; `score` is what the search ranks by."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    score: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_output(output: RequestOutput, rules: BeamRules) -> BeamSearchOutput:
    """Make the result of a request with `SamplingParams.beam`. Sequences that a search could not fill are left out."""
    found = BeamSearchOutput()
    for sample in output.outputs:
        if not sample.token_ids:
            continue
        total, ended = sample.cumulative_logprob or 0.0, sample.finish_reason == "stop"
        score = rules.score(total, len(output.prompt_token_ids), len(sample.token_ids), ended)
        found.sequences.append(
            BeamSearchSequence(
                [*output.prompt_token_ids, *sample.token_ids],
                sample.logprobs or [],
                total,
                score,
                sample.text,
                sample.finish_reason,
                sample.stop_reason,
            )
        )
    return found
