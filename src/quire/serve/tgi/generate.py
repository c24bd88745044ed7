"""TGI's /generate, /generate_stream and /info."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire import __version__
from quire.client.logprobs import likeliest
from quire.client.outputs import CompletionOutput, Logprob, OutputStream
from quire.params import SamplingParams, StructuredOutputsParams
from quire.serve.call import Call, Piece, Prompt
from quire.serve.errors import HttpError, invalid
from quire.serve.fields.tgi import TGI_GENERATE
from quire.serve.openapi import add_get, json_response
from quire.serve.service import Service
from quire.serve.stream import event
from quire.serve.tgi.protocol import (
    Details,
    Generated,
    Grammar,
    Parameters,
    PrefillToken,
    StreamDetails,
    StreamEvent,
    TgiRequest,
    Token,
)

DEFAULT_MAX_NEW_TOKENS = 100
MAX_BEST_OF = 20
_ENDS = {"stop": "eos_token", "length": "length"}
# TGI's status and name for those of OpenAI's API.
_ERRORS = {
    400: (422, "validation"),
    503: (429, "overloaded"),
    500: (424, "generation"),
    504: (424, "generation"),
}
_encode = msgspec.json.Encoder().encode


async def generate(service: Service, http: HttpRequest) -> TgiAnswer:
    """POST /generate: the whole text."""
    return await _generate(service, http, streams=False)


async def generate_stream(service: Service, http: HttpRequest) -> TgiAnswer:
    """POST /generate_stream: an event for each token."""
    return await _generate(service, http, streams=True)


async def generate_either(service: Service, http: HttpRequest) -> TgiAnswer:
    """POST /: as the body's `stream` says. A whole answer is a list of one."""
    answer = await _generate(service, http, streams=False)
    answer.listed = True
    return answer


async def _generate(service: Service, http: HttpRequest, streams: bool) -> TgiAnswer:
    """Read, check and queue a call. Raises HttpError, RequestError or OverloadedError."""
    body = await service.read(http, TGI_GENERATE)
    given = body.parameters
    streams = streams or body.stream
    if streams and (given.best_of or 1) > 1:
        raise invalid("best_of ranks whole samples: use /generate", "parameters.best_of", "invalid_value")
    if streams and given.decoder_input_details:
        raise invalid(
            "decoder_input_details is not for streams", "parameters.decoder_input_details", "invalid_value"
        )
    if (given.best_of or 1) > MAX_BEST_OF:
        raise invalid(f"best_of must be at most {MAX_BEST_OF}", "parameters.best_of", "invalid_value")
    model = service.check_model(given.adapter_id)
    call_id = service.new_id("tgi-", http)

    def make() -> list[Prompt]:
        front = service.front
        tokens = front.truncated(front.encode(body.inputs), given.truncate)
        params = _params(given, streams)
        request = front.request(service.next_request_id(call_id), tokens, params, clamp=True)
        return [Prompt(request, body.inputs, "parameters.grammar" if given.grammar else None)]

    made = await service.work(http, make)
    return TgiAnswer(service, await service.start(http, call_id, made, model), body, streams)


def _params(given: Parameters, streams: bool) -> SamplingParams:
    """The same parameters under vLLM's names. RequestError."""
    draws = given.do_sample or any(
        value is not None for value in (given.temperature, given.top_k, given.top_p)
    )
    if given.temperature is not None and given.temperature <= 0:
        raise invalid("temperature must be positive; leave it out to take the likeliest token",
                      "parameters.temperature", "invalid_value")  # fmt: skip
    shown = given.details or streams
    return SamplingParams.from_optional(
        n=given.best_of,
        max_tokens=given.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        temperature=given.temperature if draws else 0.0,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed,
        repetition_penalty=given.repetition_penalty,
        frequency_penalty=given.frequency_penalty,
        stop=given.stop,
        include_stop_str_in_output=True,
        logprobs=(given.top_n_tokens or 0) if shown or (given.best_of or 1) > 1 else None,
        prompt_logprobs=0 if given.decoder_input_details else None,
        structured_outputs=None if given.grammar is None else _constraint(given.grammar),
    )


def _constraint(grammar: Grammar) -> StructuredOutputsParams:
    value = grammar.value
    if grammar.type == "regex":
        if not isinstance(value, str):
            raise invalid("a regex is a text", "parameters.grammar.value", "invalid_type")
        return StructuredOutputsParams(regex=value)
    if grammar.type == "json_schema" and isinstance(value, dict):
        value = value.get("schema", {})
    return StructuredOutputsParams(json=value)


class TgiAnswer:
    """Writes a call as TGI does."""

    def __init__(self, service: Service, call: Call, body: TgiRequest, streaming: bool) -> None:
        self.call, self.streaming = call, streaming
        self._service, self._body, self._given = service, body, body.parameters
        self._count = 0  # tokens sent
        self.listed = False  # a whole answer is a list of one

    def whole(self) -> bytes:
        (stream,) = self.call.streams
        ranked = sorted(stream.output.outputs, key=lambda sample: sample.mean_logprob, reverse=True)
        found = self._generated(stream, ranked[0])
        if found.details is not None and len(ranked) > 1:
            found.details.best_of_sequences = [
                msgspec.to_builtins(self._sequence(stream, sample)) for sample in ranked[1:]
            ]
        return _encode([found] if self.listed else found)

    def _generated(self, stream: OutputStream, sample: CompletionOutput) -> Generated:
        before = self._body.inputs if self._given.return_full_text else ""
        details = self._details(stream, sample) if self._given.details else None
        return Generated(before + sample.text, details)

    def _sequence(self, stream: OutputStream, sample: CompletionOutput) -> dict[str, Any]:
        details = msgspec.to_builtins(self._details(stream, sample))
        return {"generated_text": sample.text, **details}

    def _details(self, stream: OutputStream, sample: CompletionOutput) -> Details:
        entries = list(sample.logprobs or ())
        tokens = [self._token(token, entry) for token, entry in zip(sample.token_ids, entries, strict=False)]
        prefill = []
        if self._given.decoder_input_details:
            scores = stream.output.prompt_logprobs or [None]
            prefill = [
                PrefillToken(token, stream.token_text(token) or "", entry[token].logprob if entry else None)
                for token, entry in zip(stream.request.tokens, scores, strict=False)
            ]
        top = [self._top(entry) for entry in entries] if self._given.top_n_tokens else []
        return Details(_ending(sample), len(sample.token_ids), self._given.seed, prefill, tokens, top)

    def _token(self, token: int, entry: dict[int, Logprob]) -> Token:
        tokenizer, found = self._service.front.tokenizer, entry[token]
        special = tokenizer is not None and tokenizer.is_special(token)
        return Token(token, found.decoded_token or "", found.logprob, special)

    def _top(self, entry: dict[int, Logprob]) -> list[Token]:
        return [self._token(token, entry) for token in likeliest(entry, self._given.top_n_tokens or 0)]

    def step(self, pieces: list[Piece]) -> bytes:
        """One event per token; the last one, or one without a token if the output ended without, has the text."""
        (stream,) = self.call.streams
        parts: list[bytes] = []
        for piece in pieces:
            chunk = piece.chunk
            found = [
                self._event(token, entry)
                for token, entry in zip(chunk.token_ids, list(chunk.logprobs or ()), strict=False)
            ]
            if chunk.finish_reason is not None:
                found = found or [StreamEvent(self._count, Token(-1, "", None, True))]
                self._close(found[-1], stream)
            parts += map(event, found)
        return b"".join(parts)

    def _event(self, token: int, entry: dict[int, Logprob]) -> StreamEvent:
        self._count += 1
        top = self._top(entry) if self._given.top_n_tokens else []
        return StreamEvent(self._count, self._token(token, entry), top_tokens=top)

    def _close(self, found: StreamEvent, stream: OutputStream) -> None:
        (sample,) = stream.output.outputs
        before = self._body.inputs if self._given.return_full_text else ""
        found.generated_text = before + sample.text
        found.details = StreamDetails(
            _ending(sample), len(sample.token_ids), self._given.seed, len(stream.request.tokens)
        )

    def end(self) -> bytes:
        return b""

    def error_event(self, error: HttpError) -> bytes:
        return b"data: " + error_answer(error)[1] + b"\n\n"


def _ending(sample: CompletionOutput) -> str:
    if isinstance(sample.stop_reason, str):
        return "stop_sequence"
    return _ENDS.get(sample.finish_reason or "", sample.finish_reason or "")


def error_answer(error: HttpError) -> tuple[int, bytes]:
    """The status and body of an error as TGI has them."""
    status, kind = _ERRORS.get(error.status, (error.status, "validation"))
    return status, _encode({"error": error.info.message, "error_type": kind})


def add_tgi(app: FastAPI, service: Service) -> None:
    """Add /info."""
    add_get(app, "/info", functools.partial(_info, service), dict[str, Any], "The model and its limits (TGI)")


async def _info(service: Service) -> Response:
    engine, info = service.engine.config, service.front.info
    longest = info.max_model_len
    about = {
        "model_id": service.name,
        "model_sha": None,
        "model_dtype": engine.model.dtype,
        "model_device_type": "cpu",
        "model_pipeline_tag": "text-generation" if info.generates else "feature-extraction",
        "max_concurrent_requests": service.config.max_num_queued_reqs,
        "max_best_of": MAX_BEST_OF,
        "max_stop_sequences": 16,
        "max_input_tokens": info.max_input_len or longest - 1,
        "max_total_tokens": longest,
        "validation_workers": 1,
        "max_client_batch_size": 1,
        "router": "quire",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
    return json_response(about)
