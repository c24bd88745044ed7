"""`LLM`: text from prompts and conversations, in this process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from quire.client.outputs import OutputStream, RequestOutput
from quire.client.request_checks import prompt_ids
from quire.config import EngineConfig
from quire.fields import refusal
from quire.lazy import Lazy, lazy_methods
from quire.llm.options import EngineOptions, as_arguments, engine_config
from quire.llm.prompts import Message, Prompt, as_list, no_media
from quire.llm.running import Kwargs, RunningEngine, Sampling, Tqdm, push, raise_error
from quire.params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.client import beams
    from quire.client.beams import BeamSearchOutput, BeamSearchParams
    from quire.llm import arrays, pending
    from quire.llm.arrays import TokenArrays
    from quire.llm.chats import ChatMethods
    from quire.llm.operator_methods import OperatorMethods
    from quire.llm.pending import PendingOutput, PendingOutputs
    from quire.llm.pooling import PoolingMethods
    from quire.llm.programs import ProgramMethods
    from quire.llm.resumed import ResumeMethods
    from quire.logits_processor import ProcessorClass
    from quire.text.template import render
else:
    ChatMethods = lazy_methods(
        "quire.llm.chats",
        "ChatMethods",
        "chat _conversations enqueue_chat chat_token_ids switches_thinking chat_prompt _chat_prompts",
    )
    OperatorMethods = lazy_methods(
        "quire.llm.operator_methods",
        "OperatorMethods",
        "stats watch_steps get_metrics reset_prefix_cache reset_mm_cache sleep "
        "release_kv_cache_memory wake_up is_sleeping start_profile stop_profile collective_rpc "
        "apply_model add_lora remove_lora list_loras pin_lora",
    )
    PoolingMethods = lazy_methods(
        "quire.llm.pooling", "PoolingMethods", "encode reward embed classify score _texts _pooled _adapted"
    )
    ProgramMethods = lazy_methods(
        "quire.llm.programs", "ProgramMethods", "run_program _program_events end_session role_frames"
    )
    ResumeMethods = lazy_methods("quire.llm.resumed", "ResumeMethods", "resume")
    beams, pending = Lazy("quire.client.beams"), Lazy("quire.llm.pending")
    render, arrays = Lazy("quire.text.template.render"), Lazy("quire.llm.arrays")

L = TypeVar("L", bound="LLM")


class LLM(ChatMethods, PoolingMethods, ProgramMethods, OperatorMethods, ResumeMethods, RunningEngine):
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
        model: str | PathLike[str] = "",
        *,
        logits_processors: Sequence[str | ProcessorClass] | None = None,
        **options: Any,
    ) -> None:
        processors = logits_processors or ()
        classes = tuple(one for one in processors if not isinstance(one, str))
        names = tuple(one for one in processors if isinstance(one, str))
        given = {"model": model, "logits_processors": names, **options}
        with as_arguments():
            self._start(engine_config(given, self.defaults), classes)

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
        with as_arguments():
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

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the best sequences per prompt. `concurrency_limit` has no effect: all beams share batches."""
        if not isinstance(params, beams.BeamSearchParams):
            raise refusal("params", params, "BeamSearchParams")
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
        prompts = [prompt_ids(prompt) for prompt in as_list(prompts)]
        each = self._params_for(sampling_params, len(prompts))
        outputs = self.generate(prompts, each, False, lora_request)
        longest = max((len(p) for p in prompts), default=0)
        room = max((params.max_tokens or self.max_model_len for params in each), default=0)
        return arrays.token_arrays(outputs, min(longest + room, self.max_model_len), pad_id)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's generation_config.json."""
        return self._front.default_params()

    def default_params(self, **given: Any) -> SamplingParams:
        """Return the model's default sampling parameters, overridden by `given`."""
        return self._front.default_params(**given)
