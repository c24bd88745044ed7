"""Goes on with outputs that were stopped before their end, on this engine or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.client.continuation import resumed
from quire.client.outputs import CompletionOutput, RequestOutput
from quire.errors import RequestError
from quire.llm.running import RunningEngine, Sampling, Tqdm
from quire.types import Delta, FinishReason, Request, Usage


class ResumeMethods(RunningEngine):
    """Resumes requests."""

    def resume(
        self,
        outputs: RequestOutput | Sequence[RequestOutput],
        sampling_params: Sampling | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Go on with outputs whose samples have not all ended, as if they had not been stopped.

        `sampling_params` are those that the outputs were made with; give their seed. Samples that have ended stay as
        they are. Log-probabilities are not resumed. RequestError: an output cannot come from these parameters.
        """
        given = [outputs] if isinstance(outputs, RequestOutput) else list(outputs)
        prompts: list[Any] = [
            {"prompt_token_ids": one.prompt_token_ids, "prompt": one.prompt} for one in given
        ]
        streams = self._whole(prompts, sampling_params, None, None, lora_request)
        for stream, output in zip(streams, given, strict=True):
            request = stream.request
            if request.sampling.wants_logprobs or request.sampling.scores_prompt:
                raise RequestError("resume: log-probabilities are not resumed: leave them out", "logprobs")
            if len(output.outputs) > request.sampling.n:
                raise RequestError(
                    f"resume: {len(output.outputs)} samples, and n is {request.sampling.n}", "n"
                )
            past = [_delta(request, output, sample) for sample in output.outputs if sample.token_ids]
            stream.request = resumed(stream, past)
        self._run([stream for stream in streams if not stream.finished], use_tqdm)
        return [stream.output for stream in streams]


def _delta(request: Request, output: RequestOutput, sample: CompletionOutput) -> Delta:
    """Report what a sample has made. A stop string ends it again by its text."""
    tokens, reason = list(sample.token_ids), sample.finish_reason
    usage = Usage(len(request.tokens), output.num_cached_tokens, len(tokens))
    delta = Delta(request.id, sample.index, tokens, usage)
    if reason is not None and not isinstance(sample.stop_reason, str):
        delta.finish_reason, delta.stop_reason = FinishReason(reason), sample.stop_reason
        delta.complete = sample.stop_reason is None and tokens[-1] not in request.eos_token_ids
    return delta
