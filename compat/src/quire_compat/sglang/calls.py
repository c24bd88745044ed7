"""SGLang's own calls: the body of /generate, the requests that it asks for, and their results.

Shared by the server and by the engine in Python. Names are those of SGLang 0.5.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from quire.client.logprobs import Logprob, likeliest
from quire.client.outputs import CompletionOutput, OutputStream
from quire.errors import RequestError
from quire.params import SamplingParams, StructuredOutputsParams

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Start = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
Texts = str | list[str]
# One value for all prompts, or a list with one for each.
Each = Any
MAX_PROMPTS = 4096
DEFAULT_MAX_NEW_TOKENS = 128
# (log-probability or None, token id, its text if asked for)
Entry = tuple[float | None, int, str | None]


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's sampling_params. Their defaults are SGLang's, not the model's own."""

    max_new_tokens: Count | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: Count = 0
    stop: Texts | None = None
    stop_token_ids: list[Count] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: Count = 1
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    custom_params: dict[str, Any] | None = None

    @property
    def constrained_by(self) -> str | None:
        """Name the field that constrains the output, if one does. RequestError if two do."""
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(f"{given[0]} and {given[1]} both constrain the output: give one", given[1])
        return given[0] if given else None


CONSTRAINTS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /generate: `text` or `input_ids`, one prompt or a list. Fields of type Each hold one value or a list."""

    text: Texts | None = None
    input_ids: list[Any] | None = None
    sampling_params: Sampling | list[Sampling] | None = None
    rid: Texts | None = None
    return_logprob: Each = False
    logprob_start_len: Each = -1
    top_logprobs_num: Each = 0
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    lora_path: Each = None
    priority: int | None = None
    cache_salt: Each = None
    extra_key: Each = None


class EncodeBody(msgspec.Struct, kw_only=True):
    """Arguments of `Engine.encode`: `text` or `input_ids`, one or a list."""

    text: Texts | None = None
    input_ids: list[Any] | None = None
    rid: Texts | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a call: one prompt, its parameters, and the log-probabilities that its result shows.

    `start` is the first prompt position with a log-probability; None shows no log-probabilities at all. `scores_only`:
    the result has no output tokens.
    """

    prompt: str | list[int]
    params: SamplingParams
    rid: str | None
    start: int | None
    top: int
    asked: tuple[int, ...]
    with_text: bool
    scores_only: bool
    constrained_by: str | None
    adapter: str | None
    salt: str


def prompts_of(text: Texts | None, input_ids: list[Any] | None) -> tuple[list[str | list[int]], bool]:
    """Read the prompts of a body; True if it has one that is not in a list. RequestError."""
    if (text is None) == (input_ids is None):
        raise RequestError("give either text or input_ids", "text")
    if isinstance(text, str):
        return [text], True
    if text is not None:
        found: list[str | list[int]] = list(text)
    elif input_ids and all(isinstance(token, int) for token in input_ids):
        return [list(input_ids)], True
    else:
        found = list(input_ids or ())
    if not 0 < len(found) <= MAX_PROMPTS:
        raise RequestError(f"a call takes 1 to {MAX_PROMPTS} prompts, got {len(found)}", "text")
    if text is None and not all(isinstance(row, list) for row in found):
        raise RequestError("input_ids must be token ids, or lists of them", "input_ids")
    return found, False


def parts_of(body: GenerateBody) -> tuple[list[Part], bool]:
    """Read the parts of a call, one a prompt; True if its result is one object. RequestError."""
    prompts, single = prompts_of(body.text, body.input_ids)
    count = len(prompts)
    sampling = body.sampling_params or Sampling()
    each = sampling if isinstance(sampling, list) else [sampling] * count
    if len(each) != count:
        raise RequestError(
            f"{count} prompts need as many sampling_params, got {len(each)}", "sampling_params"
        )
    rids = [body.rid] if single else ids_of(body.rid, count)
    columns = zip(
        prompts,
        each,
        rids,
        _spread("return_logprob", body.return_logprob, count, bool),
        _spread("logprob_start_len", body.logprob_start_len, count, int),
        _spread("top_logprobs_num", body.top_logprobs_num, count, int),
        _rows(body.token_ids_logprob, count),
        _spread("lora_path", body.lora_path, count, str),
        _spread("cache_salt", body.cache_salt, count, str),
        _spread("extra_key", body.extra_key, count, str),
        strict=True,
    )
    parts = []
    for prompt, one, rid, wanted, start, top, tokens, adapter, salt, key in columns:
        shown = _Shown(bool(wanted), -1 if start is None else start, top or 0, tuple(tokens or ()))
        parts.append(_part(prompt, one, rid, shown, body.return_text_in_logprobs, adapter, (salt, key)))
    return parts, single and parts[0].params.n == 1


@dataclass(frozen=True, slots=True)
class _Shown:
    """Log-probabilities that a caller asks for."""

    wanted: bool
    start: int
    top: int
    asked: tuple[int, ...]


def _part(
    prompt: str | list[int],
    sampling: Sampling,
    rid: Any,
    shown: _Shown,
    with_text: bool,
    adapter: str | None,
    salts: tuple[str | None, str | None],
) -> Part:
    given: dict[str, Any] = {}
    if shown.wanted:
        given = {"logprobs": shown.top, "flat_logprobs": True, "logprob_token_ids": shown.asked or None}
    if shown.wanted and shown.start >= 0:
        given["prompt_logprobs"] = shown.top
        given["prompt_logprob_start"] = shown.start
        given["prompt_logprob_token_ids"] = shown.asked or None
    scores_only = sampling.max_new_tokens == 0
    params = sampling_params(sampling, **given)
    start = shown.start if shown.wanted else None
    salt = "\0".join(filter(None, salts))
    return Part(
        prompt, params, rid, start, shown.top, shown.asked, with_text, scores_only, sampling.constrained_by,
        adapter, salt,
    )  # fmt: skip


def sampling_params(given: Sampling, **more: Any) -> SamplingParams:
    """Translate the parameters to vLLM's names. RequestError."""
    field = given.constrained_by
    constraint = None
    if field is not None:
        constraint = StructuredOutputsParams(**{CONSTRAINTS[field]: getattr(given, field)})
    limit = given.max_new_tokens
    return SamplingParams.from_optional(
        max_tokens=1 if limit == 0 else limit,  # the step that scores a prompt also samples a token
        min_tokens=min(given.min_new_tokens, 1) if limit == 0 else given.min_new_tokens,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty,
        n=given.n,
        structured_outputs=constraint,
        ignore_eos=given.ignore_eos,
        skip_special_tokens=given.skip_special_tokens,
        spaces_between_special_tokens=given.spaces_between_special_tokens,
        include_stop_str_in_output=given.no_stop_trim,
        logit_bias=given.logit_bias,
        seed=given.sampling_seed,
        stream_interval=given.stream_interval,
        extra_args=given.custom_params,
        **more,
    )


def ids_of(rid: Texts | None, count: int) -> list[str | None]:
    """Make the ids of a batch: as given, or of one prefix. RequestError for a wrong number."""
    if rid is None:
        return [None] * count
    if isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(count)]
    if len(rid) != count:
        raise RequestError(f"{count} prompts need as many rids, got {len(rid)}", "rid")
    return list(rid)


def _spread(name: str, value: Any, count: int, kind: type) -> list[Any]:
    """Spread a value over `count` prompts. RequestError for another number of values, or another type."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise RequestError(f"{count} prompts need as many values of {name}, got {len(values)}", name)
    if not all(one is None or isinstance(one, kind) for one in values):
        raise RequestError(f"{name} must be of type {kind.__name__}, or a list of it", name)
    return values


def _rows(asked: list[Any] | None, count: int) -> list[Any]:
    """Token ids for each of `count` prompts, from one list or a list of lists. RequestError."""
    if asked is None or all(isinstance(token, int) for token in asked):
        return [asked] * count
    return _spread("token_ids_logprob", asked, count, list)


def result(part: Part, stream: OutputStream, index: int, fingerprint: str = "") -> dict[str, Any]:
    """Report one sample as SGLang does, with the server's `system_fingerprint` beside it."""
    request, sample = stream.request, stream.output.outputs[index]
    rid = part.rid or request.id
    tokens = [] if part.scores_only else list(sample.token_ids)
    meta = {
        "id": rid if part.params.n == 1 else f"{rid}_{index}",
        "finish_reason": _finish(part, sample),
        "prompt_tokens": len(request.tokens),
        "completion_tokens": len(tokens),
        "cached_tokens": stream.output.num_cached_tokens,
        "weight_version": "default",
        "e2e_latency": max(0.0, time.time() - request.arrival),
    }
    if fingerprint:
        meta["system_fingerprint"] = fingerprint
    if part.start is not None:
        meta |= _logprobs(part, stream, sample, len(tokens))
    return {"text": "" if part.scores_only else sample.text, "output_ids": tokens, "meta_info": meta}


def first_of(parts: Sequence[Part]) -> list[int]:
    """Number the first sample of each prompt among the samples of all."""
    return [sum(part.params.n for part in parts[:place]) for place in range(len(parts))]


def _finish(part: Part, sample: CompletionOutput) -> dict[str, Any] | None:
    kind = sample.finish_reason
    if kind is None:
        return None
    if part.scores_only:
        return {"type": "length", "length": 0}
    if kind == "length":
        return {"type": "length", "length": len(sample.token_ids)}
    if kind == "stop":
        return {"type": "stop", "matched": matched(sample)}
    return {"type": kind, "message": "the request was aborted" if kind == "abort" else kind}


def matched(sample: CompletionOutput) -> int | str | None:
    """Return the text or token that stopped a sample; at the end of the sequence that is its token."""
    ended = sample.token_ids[-1] if sample.token_ids else None
    return ended if sample.stop_reason is None else sample.stop_reason


def _logprobs(part: Part, stream: OutputStream, sample: CompletionOutput, count: int) -> dict[str, Any]:
    """Log-probabilities of the prompt from `part.start` on, whose first is None, and of the output."""
    prompt = stream.request.tokens
    scored: list[Any] = []
    if part.start is not None and part.start >= 0 and stream.output.prompt_logprobs is not None:
        scored = [None, *stream.output.prompt_logprobs[part.start + 1 :]]
    made: Sequence[dict[int, Logprob]] = list(sample.logprobs or ())[:count]
    places = (("input", prompt[len(prompt) - len(scored) :], scored), ("output", sample.token_ids, made))
    found: dict[str, Any] = {}
    for name, tokens, entries in places:
        pairs = list(zip(tokens, entries, strict=False))
        found[f"{name}_token_logprobs"] = [
            (None, token, stream.token_text(token) if part.with_text else None)
            if entry is None
            else _entry(part, token, entry[token])
            for token, entry in pairs
        ]
        if part.top:
            found[f"{name}_top_logprobs"] = [_top(part, entry) for _, entry in pairs]
        if part.asked and name == "output":
            found["output_token_ids_logprobs"] = [_asked(part, entry) for _, entry in pairs]
    if part.asked:
        asked = stream.output.prompt_token_id_logprobs
        rows = [] if asked is None else [None, *asked[(part.start or 0) + 1 :]]
        found["input_token_ids_logprobs"] = [_asked(part, row) for row in rows]
    return found


def _entry(part: Part, token: int, found: Logprob) -> Entry:
    return found.logprob, token, found.decoded_token if part.with_text else None


def _top(part: Part, entry: dict[int, Logprob] | None) -> list[Entry] | None:
    if entry is None:
        return None
    return [_entry(part, token, entry[token]) for token in likeliest(entry, part.top)]


def _asked(part: Part, entry: dict[int, Logprob] | None) -> list[Entry] | None:
    if entry is None:
        return None
    return [_entry(part, token, entry[token]) for token in part.asked if token in entry]
