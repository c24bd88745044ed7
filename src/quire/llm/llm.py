"""`LLM`: text from prompts and conversations, in this process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from quire.client.adapters import with_adapter
from quire.client.outputs import OutputStream, RequestOutput
from quire.config import EngineConfig
from quire.engine.local import LocalCall
from quire.errors import RequestError
from quire.lazy import Lazy
from quire.llm.arrays import TokenArrays, token_arrays
from quire.llm.options import EngineOptions, engine_config
from quire.llm.pooling import PoolingMethods
from quire.llm.programs import ProgramRunner
from quire.llm.prompts import Message, Prompt, as_list, no_media, rendered_of, salt_of, tokens_of
from quire.llm.running import Tqdm, push, raise_error
from quire.params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.client import beams
    from quire.client.beams import BeamSearchOutput, BeamSearchParams
    from quire.llm import pending
    from quire.llm.pending import PendingOutput, PendingOutputs
    from quire.logits_processor import ProcessorClass
    from quire.text.template import render
else:
    beams, pending = Lazy("quire.client.beams"), Lazy("quire.llm.pending")
    render = Lazy("quire.text.template.render")

Kwargs = Mapping[str, Any]
Sampling = SamplingParams | Sequence[SamplingParams]
L = TypeVar("L", bound="LLM")


class LLM(PoolingMethods, ProgramRunner):
    """A model ready to generate. Any number of threads may call it; their requests share one batch.

    An interrupt (Ctrl-C) ends the call that it hits and leaves the object usable. Use the object in a `with` block, or
    call `shutdown`, to free its memory early.

    `model` is a directory or a Hugging Face id; the default is the model inside the package. `logits_processors` are
    classes, or names of the form module:Class (`quire.logits_processor`). All other options are fields of
    `quire.config` (dtype, max_model_len, hf_overrides, max_num_seqs, gpu_memory_utilization, seed, ...), or options of
    vLLM that change nothing here; unknown ones raise ConfigError. A subclass may have other `defaults` than Quire.
    """

    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(
        self,
        model: str = "",
        *,
        logits_processors: Sequence[str | ProcessorClass] | None = None,
        **options: Any,
    ) -> None:
        processors = logits_processors or ()
        classes = tuple(one for one in processors if not isinstance(one, str))
        names = tuple(one for one in processors if isinstance(one, str))
        given = {"model": str(model), "logits_processors": names, **options}
        self._start(engine_config(given, self.defaults), classes)

    def _start(self, config: EngineConfig, processors: Sequence[ProcessorClass] = ()) -> None:
        super()._start(config, processors)
        self._enqueued: list[tuple[LocalCall, list[OutputStream]]] = []

    @cached_property
    def _pending(self) -> PendingOutputs:
        """Outputs that are collected beside the caller, made when the first is asked for."""
        made = pending.PendingOutputs()
        weakref.finalize(self, made.close)
        return made

    @classmethod
    def from_config(cls: type[L], config: EngineConfig) -> L:
        """Start an engine from options that are sorted already, such as the command line's."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    @classmethod
    def from_engine_args(cls: type[L], engine_args: EngineOptions, **ignored: Any) -> L:
        """Start an engine with the options of vLLM's `EngineArgs`. `ignored` are vLLM's other arguments."""
        return cls.from_config(engine_args.create_engine_config())

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Kwargs | None = None,
        mm_processor_kwargs: Kwargs | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt: a text, a list of token ids, or {"prompt": ...} / {"prompt_token_ids": ...}.

        Returns one RequestOutput per prompt, in order. If any prompt is refused, raises RequestError before any
        prompt runs. `use_tqdm` may be a class like tqdm.
        """
        no_media(mm_processor_kwargs)
        streams = self._whole(as_list(prompts), sampling_params, priority, tokenization_kwargs, lora_request)
        return self._run(streams, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling | None = None,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        use_tqdm: Tqdm = True,
        tokenization_kwargs: Kwargs | None = None,
        mm_processor_kwargs: Kwargs | None = None,
    ) -> list[str]:
        """Begin to continue prompts and return their request ids; `wait_for_completion` returns the results."""
        no_media(mm_processor_kwargs)
        return self._enqueue(
            self._whole(as_list(prompts), sampling_params, priority, tokenization_kwargs, lora_request)
        )

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Sampling | None = None,
        use_tqdm: Tqdm = True,
        **options: Any,
    ) -> list[str]:
        """Begin to answer conversations, as `enqueue` does prompts. `options` as in `chat`."""
        return self._enqueue(self._conversations(messages, sampling_params, **options))

    def wait_for_completion(self, output_type: Any = None, use_tqdm: Tqdm = True) -> list[RequestOutput]:
        """Return the results of everything that was enqueued, in order. If one fails, the rest is aborted."""
        pending, self._enqueued = self._enqueued, []
        found: list[RequestOutput] = []
        try:
            while pending:
                call, streams = pending.pop(0)
                found += self._finish(call, streams, use_tqdm)
        finally:
            for call, _ in pending:
                call.__exit__(None, None, None)
        return found

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Sampling | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Kwargs | None = None,
        mm_processor_kwargs: Kwargs | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template or the one given.

        `chat_template_content_format` is how the template wants content: "string", "openai" (a list of parts), or
        "auto": read from the template.
        """
        streams = self._conversations(
            messages,
            sampling_params,
            lora_request,
            priority,
            tokenization_kwargs,
            mm_processor_kwargs,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._run(streams, use_tqdm)

    def _conversations(
        self,
        messages: Sequence[Any],
        params: Sampling | None,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Kwargs | None = None,
        mm_processor_kwargs: Kwargs | None = None,
        **template: Any,
    ) -> list[OutputStream]:
        """Make the streams of conversations. `template` are options of `_chat_prompts`."""
        no_media(mm_processor_kwargs)
        prompts = self._chat_prompts(messages, **template)
        return self._whole(prompts, params, priority, tokenization_kwargs, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the best sequences per prompt. `concurrency_limit` has no effect: all beams share batches."""
        sampling = params.sampling_params()
        assert sampling.beam is not None
        outputs = self.generate(prompts, sampling, use_tqdm=use_tqdm, lora_request=lora_request)
        return [beams.beam_output(output, sampling.beam) for output in outputs]

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        continue_final_message: bool = False,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation and yield the RequestOutput each time it grows."""
        (prompt,) = self._chat_prompts(
            messages,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )
        return self.stream(prompt, sampling_params)

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt that `chat` computes for a conversation."""
        (prompt,) = self._chat_prompts(messages)
        tokens: list[int] = prompt["prompt_token_ids"]
        return tokens

    def _chat_prompts(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[dict[str, Any]]:
        """Render the prompts of one conversation or many. `chat_template_kwargs` prevail over the other variables."""
        options: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        template = None
        if chat_template is not None:
            if self._front.tokenizer is None:
                raise RequestError("chat needs a tokenizer: leave out skip_tokenizer_init", "messages")
            template = render.ChatTemplate.load(self._front.tokenizer, chat_template)
        prompts = []
        for conversation in conversations:
            rendered = self._front.render(
                list(conversation), template=template, content_format=chat_template_content_format, **options
            )
            tokens = self._front.encode(rendered.text, add_special_tokens=False)
            prompts.append({"prompt": rendered.text, "prompt_token_ids": tokens, "rendered": rendered})
        return prompts

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, lora_request: Any = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt and yield the RequestOutput each time it grows; stopping early aborts it.

        With `output_kind` DELTA it yields only the new part each time, with FINAL_ONLY once.
        """
        (stream,) = self._streams(
            [prompt], self._params_for(sampling_params, 1), None, lora_request=lora_request
        )
        return self._updates(stream)

    def _updates(self, stream: OutputStream) -> Iterator[RequestOutput]:
        kind = stream.request.sampling.output_kind
        with self._submit_streams([stream]) as call:
            for deltas in call:
                for delta in deltas:
                    push(call, stream, delta)
                raise_error(stream)
                if stream.finished or kind is not OutputKind.FINAL_ONLY:
                    yield stream.new_part() if kind is OutputKind.DELTA else stream.output
                if stream.finished:
                    return

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, lora_request: Any = None
    ) -> PendingOutput:
        """Begin to continue one prompt. RequestError if it is refused."""
        (stream,) = self._streams(
            [prompt], self._params_for(sampling_params, 1), None, lora_request=lora_request
        )
        return self._pending.add(stream, self._submit_streams)

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sampling | None = None,
        pad_id: int = 0,
        lora_request: Any = None,
    ) -> TokenArrays:
        """Continue prompts of token ids. Rows of the result have room for the longest prompt and `max_tokens`."""
        each = self._params_for(sampling_params, len(prompts))
        outputs = self.generate([list(p) for p in prompts], each, False, lora_request)
        longest = max((len(p) for p in prompts), default=0)
        room = max((params.max_tokens or self.max_model_len for params in each), default=0)
        return token_arrays(outputs, min(longest + room, self.max_model_len), pad_id)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's generation_config.json."""
        return self._front.default_params()

    def default_params(self, **given: Any) -> SamplingParams:
        """Return the model's default sampling parameters, overridden by `given`."""
        return self._front.default_params(**given)

    def _whole(
        self,
        prompts: Sequence[Prompt],
        params: Sampling | None,
        priority: Sequence[int] | None,
        tokenization_kwargs: Kwargs | None,
        lora_request: Any = None,
    ) -> list[OutputStream]:
        """Make the streams of prompts whose results are read at their end."""
        each = self._params_for(params, len(prompts), output_kind=OutputKind.FINAL_ONLY)
        return list(self._streams(prompts, each, priority, tokenization_kwargs, lora_request))

    def _streams(
        self,
        prompts: Sequence[Prompt],
        each: Sequence[SamplingParams],
        priority: Sequence[int] | None,
        tokenization_kwargs: Kwargs | None = None,
        lora_request: Any = None,
    ) -> Iterator[OutputStream]:
        adapters = self._adapters_of(lora_request, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts need as many priorities, got {len(priority)}", "priority"
            )
        for i, prompt in enumerate(prompts):
            text, tokens = tokens_of(self._front, prompt, tokenization_kwargs)
            request = self._front.request(
                self._new_id(),
                tokens,
                each[i],
                priority=priority[i] if priority else 0,
                salt=salt_of(prompt),
                rendered=rendered_of(prompt),
                clamp=True,
            )
            adapter = adapters[i]
            stream = self._front.stream(with_adapter(request, adapter, self._front.info), text)
            stream.output.lora_request = None if adapter is None else adapter.asked
            yield stream

    def _params_for(self, params: Sampling | None, count: int, **changes: Any) -> Sequence[SamplingParams]:
        """Make a checked copy for each prompt, with `changes`, so that later changes by the caller do no harm."""
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params.clone(**changes)] * count
        if len(params) != count:
            raise RequestError(
                f"{count} prompts need as many SamplingParams, got {len(params)}", "sampling_params"
            )
        return [one.clone(**changes) for one in params]

    def _enqueue(self, streams: list[OutputStream]) -> list[str]:
        self._enqueued.append((self._submit_streams(streams), streams))
        return [stream.request.id for stream in streams]

    def _run(self, streams: list[OutputStream], use_tqdm: Tqdm) -> list[RequestOutput]:
        return self._finish(self._submit_streams(streams), streams, use_tqdm)
