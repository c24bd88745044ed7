"""`LLM`: offline inference in this process, with vLLM's names."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quire.client.outputs import OutputStream, RequestOutput
from quire.client.scoring import plan_scores
from quire.client.start import start_front
from quire.client.vectors import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    ScoringOutput,
    VectorRequestOutput,
    probabilities,
    shortened,
)
from quire.config import EngineConfig
from quire.engine.local import LocalCall, LocalEngine
from quire.engine.start import begin_start, finish_start
from quire.errors import QuireError, RequestError
from quire.lazy import Lazy
from quire.params import OutputKind, SamplingParams
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, EngineStats, FinishReason, Pooling, Request

if TYPE_CHECKING:
    from rich import progress
else:
    progress = Lazy("rich.progress")

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = dict[str, Any]


class LLM:
    """A model ready to generate. Any number of threads may call it; their requests share one batch.

    An interrupt (Ctrl-C) ends the call that it hits and leaves the object usable. Use the object in a `with` block, or
    call `shutdown`, to free its memory early.

    `model` is a directory or a Hugging Face id; the default is the model inside the package. All other options are
    fields of `quire.config` (dtype, max_model_len, block_size, max_num_seqs, max_num_batched_tokens,
    enable_prefix_caching, gpu_memory_utilization, kv_cache_memory_bytes, seed, num_gpu_blocks_override, threads, ...);
    unknown ones raise ConfigError.
    """

    def __init__(self, model: str = "", *, skip_tokenizer_init: bool = False, **options: Any) -> None:
        self._start(EngineConfig.from_options(model=str(model), **options), skip_tokenizer_init)

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """An engine from options that are sorted already, such as the command line's."""
        llm = cls.__new__(cls)
        llm._start(config, False)
        return llm

    def _start(self, config: EngineConfig, skip_tokenizer: bool) -> None:
        started, model = begin_start(config)
        with started.report.phase("tokenizer"):  # in parallel with the check of a built engine's weights
            self._front = start_front(config, started.info, skip_tokenizer, config.seed)
        finish_start(started, model)
        self.config = config
        self.report = started.report
        self._core = started.core
        self._engine = LocalEngine(started.core)
        self._close = weakref.finalize(self, self._engine.close)
        self._grammars = started.grammars
        self._front.compile_grammar = started.grammars.check
        self._ids = itertools.count()

    def shutdown(self) -> None:
        """Stop the engine. Running calls, and later ones, raise EngineError."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    @property
    def threads(self) -> int:
        return self.report.threads

    @property
    def vocab_size(self) -> int:
        return self._front.info.vocab_size

    @property
    def name(self) -> str:
        return self._front.info.name

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt: a text, a list of token ids, or {"prompt": ...} / {"prompt_token_ids": ...}.

        Returns one RequestOutput per prompt, in order. If any prompt is refused, raises RequestError before any
        prompt runs.
        """
        items = _as_list(prompts)
        each = _final_only(self._params_for(sampling_params, len(items)))
        return self._run(list(self._streams(items, each, priority)), use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[VectorRequestOutput[EmbeddingOutput]]:
        """One vector per text, pooled as the model prescribes or by `pooling` (last, mean, cls)."""
        if self._front.info.scores is not None:
            raise RequestError(f"{self.name} is a classifier: use classify or score")
        rows = self._vectors(self._texts(prompts, truncate_prompt_tokens), pooling)
        if dimensions is not None and rows and not 1 <= dimensions <= len(rows[0].outputs.data):
            raise RequestError(f"dimensions must be from 1 to {len(rows[0].outputs.data)}", "dimensions")
        return [
            VectorRequestOutput(
                row.request_id, EmbeddingOutput(shortened(row.outputs.data, dimensions)), row.prompt_token_ids
            )
            for row in rows
        ]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None
    ) -> list[VectorRequestOutput[PoolingOutput]]:
        """The model's raw vector for each text: an embedding, or a classifier's outputs before its softmax."""
        return self._vectors(self._texts(prompts, None), pooling)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None
    ) -> list[VectorRequestOutput[ClassificationOutput]]:
        """Probabilities of a classifier's labels, per text."""
        info = self._front.info
        if info.scores is None:
            raise RequestError(f"{self.name} is not a classifier: it has no labels")
        found = []
        for row in self._vectors(self._texts(prompts, truncate_prompt_tokens), None):
            probs = probabilities(row.outputs.data, info.scores)
            label = info.labels[probs.index(max(probs))]
            found.append(
                VectorRequestOutput(row.request_id, ClassificationOutput(probs, label), row.prompt_token_ids)
            )
        return found

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str]
    ) -> list[VectorRequestOutput[ScoringOutput]]:
        """Relevance of the second texts to the first: by a classifier of pairs with one output, or by the cosine of
        embeddings. A single first text is paired with every second one; otherwise both sides pair up in order.
        """
        seconds = [text_2] if isinstance(text_2, str) else list(text_2)
        firsts = [text_1] if isinstance(text_1, str) else list(text_1)
        scoring = plan_scores(self._front, self._new_id, firsts, seconds)
        scores = scoring.scores(self._compute(scoring.requests))
        return [
            VectorRequestOutput(
                scoring.requests[scoring.pairs[i][-1]].id, ScoringOutput(score), scoring.tokens(i)
            )
            for i, score in enumerate(scores)
        ]

    def _new_id(self) -> str:
        return str(next(self._ids))

    def _texts(self, prompts: Prompt | Sequence[Prompt], limit: int | None) -> list[list[int]]:
        read = [_read_prompt(prompt) for prompt in _as_list(prompts)]
        tokens = [self._front.encode(text or "") if ids is None else ids for text, ids in read]
        return [self._front.truncated(ids, limit) for ids in tokens]

    def _vectors(
        self, texts: Sequence[list[int]], pooling: Pooling | None
    ) -> list[VectorRequestOutput[PoolingOutput]]:
        requests = [self._front.pooled(self._new_id(), tokens, pooling) for tokens in texts]
        vectors = self._compute(requests)
        return [
            VectorRequestOutput(request.id, PoolingOutput(vector), request.tokens)
            for request, vector in zip(requests, vectors, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts = [
            self._chat_prompt(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        each = _final_only(self._params_for(sampling_params, len(prompts)))
        return self._run(list(self._streams(prompts, each, None)), use_tqdm)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        continue_final_message: bool = False,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation and yield the RequestOutput each time it grows."""
        more = {"continue_final_message": True, "add_generation_prompt": False}
        prompt = self._chat_prompt(messages, **(more if continue_final_message else {}))
        return self.stream(prompt, sampling_params)

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that `chat` computes for a conversation."""
        tokens: list[int] = self._chat_prompt(messages)["prompt_token_ids"]
        return tokens

    def _chat_prompt(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        text = self._front.render(list(messages), **options)
        return {"prompt": text, "prompt_token_ids": self._front.encode(text, add_special_tokens=False)}

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt and yield the RequestOutput each time it grows; stopping early aborts it.

        With `output_kind` DELTA it yields only the new part each time, with FINAL_ONLY once.
        """
        (stream,) = self._streams([prompt], self._params_for(sampling_params, 1), None)
        kind = stream.request.sampling.output_kind
        with self._engine.submit([stream.request]) as call:
            for deltas in call:
                for delta in deltas:
                    _push(call, stream, delta)
                _raise_error(stream)
                if stream.finished or kind is not OutputKind.FINAL_ONLY:
                    yield stream.new_part() if kind is OutputKind.DELTA else stream.output
                if stream.finished:
                    return

    def get_tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of the model's generation_config.json."""
        return self._front.default_params()

    def default_params(self, **given: Any) -> SamplingParams:
        """The model's default sampling parameters, overridden by `given`."""
        return self._front.default_params(**given)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no running request uses."""
        self._engine.ask(lambda core: core.reset_prefix_cache())

    def stats(self) -> EngineStats:
        """The engine's counters and gauges now."""
        return self._engine.ask(lambda core: core.stats())

    @property
    def max_model_len(self) -> int:
        return self._front.info.max_model_len

    def _streams(
        self,
        prompts: Sequence[Prompt],
        each: Sequence[SamplingParams],
        priority: Sequence[int] | None,
    ) -> Iterator[OutputStream]:
        if priority is not None and len(priority) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts need as many priorities, got {len(priority)}", "priority"
            )
        for i, prompt in enumerate(prompts):
            text, tokens = _read_prompt(prompt)
            body = tokens if tokens is not None else text or ""
            request = self._front.request(
                self._new_id(), body, each[i], priority=priority[i] if priority else 0, clamp=True
            )
            yield self._front.stream(request, text)

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(
                f"{count} prompts need as many SamplingParams, got {len(params)}", "sampling_params"
            )
        return params

    def _run(self, streams: list[OutputStream], use_tqdm: bool) -> list[RequestOutput]:
        """Wait until all are finished. If one fails, abort the rest."""
        by_id = {s.request.id: s for s in streams}
        show = _progress(len(streams), use_tqdm)
        with self._engine.submit([s.request for s in streams]) as call:
            for deltas in call:
                for delta in deltas:
                    stream = by_id[delta.request_id]
                    if _push(call, stream, delta) and stream.finished:
                        _raise_error(stream)
                        show()
        return [s.output for s in streams]

    def _compute(self, requests: Sequence[Request]) -> list[list[float]]:
        """Run pooled requests and return their vectors in order. QuireError if one fails."""
        vectors: dict[str, list[float]] = {}
        with self._engine.submit(requests) as call:
            for deltas in call:
                for delta in deltas:
                    if delta.finish_reason is FinishReason.ERROR:
                        raise QuireError(f"request {delta.request_id} failed: {delta.error}")
                    if delta.embedding is not None:
                        vectors[delta.request_id] = delta.embedding
        return [vectors[request.id] for request in requests]


def _push(call: LocalCall, stream: OutputStream, delta: Delta) -> bool:
    """Pass a delta on; end a sample whose text contains a stop string. False if the sample had already ended."""
    pushed = False
    for part in stream.parts(delta):
        chunk = stream.push(part)
        if chunk is None:
            break
        pushed = True
        if chunk.abort:
            call.abort(delta.request_id, delta.index)
    return pushed


def _final_only(each: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
    """The same parameters, without reports of every token."""
    made = {id(params): msgspec.structs.replace(params, output_kind=OutputKind.FINAL_ONLY) for params in each}
    return [made[id(params)] for params in each]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or many: a list of ints is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not prompts:
        return []
    if isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _read_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """(text, token ids) of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise RequestError(
                f"a prompt may contain prompt or prompt_token_ids, got {sorted(prompt)}", "prompt"
            )
        tokens = prompt.get("prompt_token_ids")
        return prompt.get("prompt"), None if tokens is None else list(tokens)
    return None, list(prompt)


def _raise_error(stream: OutputStream) -> None:
    if stream.output.error is not None:
        raise QuireError(f"request {stream.request.id} failed: {stream.output.error}")


def _progress(total: int, enabled: bool) -> Callable[[], None]:
    """A progress bar on stderr that counts finished requests; returns its update function."""
    if not enabled or total < 2:
        return lambda: None
    columns = progress.Progress.get_default_columns()
    bar = progress.Progress(*columns, progress.TextColumn("{task.completed}/{task.total}"), transient=True)
    task = bar.add_task("generating", total=total)
    bar.start()

    def advance() -> None:
        bar.advance(task)
        if bar.finished:
            bar.stop()

    return advance
