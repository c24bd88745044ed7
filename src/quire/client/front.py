"""Makes Requests: tokenizes prompts, resolves defaults, refuses what cannot run.

Shared by `LLM` and the server, so that both accept and refuse the same. Knows text; no scheduler and no arrays.
"""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from quire.client.frames import frames_of
from quire.client.outputs import OutputStream
from quire.config import EngineConfig
from quire.engine.process import Started
from quire.errors import PromptTooLongError, RequestError
from quire.logits_processor import ProcessorClass
from quire.params import SamplingParams, StructuredOutputsParams, token_lists
from quire.program.frames import PLAIN, Frames
from quire.text.formats.registry import reasoning_format
from quire.text.formats.shapes import Place, ReasoningFormat
from quire.text.tokenizer import Tokenizer
from quire.types import SEED_MASK, ModelCard, Pooling, Request, ThinkingBudget

if TYPE_CHECKING:
    from quire.text.template.render import ChatTemplate


TOKENS_OF = {"logprobs": "logprob_token_ids", "prompt_logprobs": "prompt_logprob_token_ids"}
MAX_ASKED_TOKENS = 128
MAX_TURN = 256  # tokens at the end of a prompt that may tell whether it has begun the reasoning
# Texts up to this length are always tokenized; longer ones if they may fit into the model's length.
MAX_CHARACTERS = 1 << 20


class Front:
    """Makes Requests and their OutputStreams. Its only state is the source of unset seeds.

    `compile_grammar` turns a constraint into `Request.grammar`; if it is None, the caller of `request` does so.
    """

    def __init__(
        self,
        info: ModelCard,
        tokenizer: Tokenizer | None,
        load_template: Callable[[], ChatTemplate] | None,
        seed: int | None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._load_template = load_template
        self.compile_grammar: Callable[[StructuredOutputsParams], str] | None = None
        self.processors: tuple[ProcessorClass, ...] = ()  # those of the engine
        self.takes_functions = False  # requests may bring functions: the engine runs in this process
        self.processed_logprobs = False
        self.reasoning_parser = "auto"
        self.reasoning_plugins: tuple[ReasoningFormat, ...] = ()
        self.template_defaults: dict[str, Any] = {}  # variables of the chat template
        self.content_format = "auto"
        self.longest_text: int | None = None  # most tokens of a text that becomes a vector in parts
        self._seeds = random.Random(seed)

    @property
    def longest_input(self) -> int:
        """Most tokens that the model reads at once."""
        return min(self.info.max_model_len, self.info.max_input_len or self.info.max_model_len)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, loaded on first use, because only chats need it. ModelError if it is broken."""
        if self._load_template is None:
            return None
        template = self._load_template()
        template.content_format = self.content_format
        return template

    @cached_property
    def frames(self) -> Frames:
        """How the chat template frames messages."""
        if self.template is None or self.tokenizer is None:
            return PLAIN
        return frames_of(lambda messages: self.render(messages, add_generation_prompt=False), self.tokenizer)

    @property
    def renders_quickly(self) -> bool:
        """Whether the chat template took so little time before that it may be rendered on an event loop."""
        template = self.__dict__.get("template")  # not loaded for this
        return template is not None and template.quick

    def default_params(self, **given: Any) -> SamplingParams:
        """The model's default sampling parameters, overridden by `given`."""
        return SamplingParams(**{**self.info.defaults, **given})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > MAX_CHARACTERS and len(text) > self._most_characters:
            raise RequestError(
                f"the text has {len(text)} characters, more than fit into the model's maximum context length of "
                f"{self.info.max_model_len}: shorten it",
                "prompt",
            )
        return self._need_tokenizer().encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _most_characters(self) -> int:
        """No longer text fits into the model's length, unless the tokenizer drops a part of it."""
        longest = max(map(len, self._need_tokenizer().backend.get_vocab(with_added_tokens=True)))
        return min(longest * self.info.max_model_len, 8 * MAX_CHARACTERS)

    def render(
        self,
        messages: list[dict[str, Any]],
        chat_template: str | None = None,
        template: ChatTemplate | None = None,
        **options: Any,
    ) -> str:
        """A conversation rendered by `template` or the model's own; options as in `ChatTemplate.render`.

        `chat_template` is one that came with the request.
        """
        options = {**self.template_defaults, **options}
        if template is not None:
            return template.render(messages, **options)
        if self.template is None:
            raise RequestError(
                f"{self.info.name} has no chat template: pass --chat-template, or use completions", "messages"
            )
        template = self.template if chat_template is None else self.template.of_request(chat_template)
        return template.render(messages, **options)

    def request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        priority: int = 0,
        salt: str = "",
        add_special_tokens: bool = True,
        clamp: bool = False,
        place: Place | None = None,
    ) -> Request:
        """Check a prompt and its parameters against the model. Raises RequestError naming the field at fault.

        max_tokens is lowered to what fits after the prompt; more than the model's length is refused, unless `clamp`.
        `place` is where the prompt leaves the answer; None reads it from the prompt.
        """
        if not self.info.generates:
            raise RequestError(f"{self.info.name} makes vectors, not text: use embeddings, classes or scores")
        tokens = self.encode(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)
        self._check_tokens(tokens)
        self._check_params(params)
        params = self._for_processors(params)
        room = self._room(tokens)
        length = self.info.max_model_len
        if params.max_tokens is not None and params.max_tokens > length and not clamp:
            raise RequestError(
                f"max_tokens is {params.max_tokens}, but this model's maximum context length is {length} tokens, "
                f"prompt included: lower max_tokens to {room} or leave it out",
                "max_tokens",
            )
        constraint, compile_grammar = params.structured_outputs, self.compile_grammar
        choices = self._choices(params, room) if constraint is not None and constraint.select else ()
        grammar = None
        if constraint is not None and compile_grammar is not None and not choices:
            grammar = compile_grammar(constraint)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed & SEED_MASK
        return Request(
            id=request_id,
            tokens=tokens,
            sampling=params,
            seed=seed,
            max_tokens=min(params.max_tokens or room, room),
            eos_token_ids=() if params.ignore_eos else self.info.eos_token_ids,
            bad_words_token_ids=self._bad_words(params),
            adapter=adapter,
            priority=priority,
            salt=salt,
            arrival=time.time(),
            grammar=grammar,
            choices=choices,
            thinking=self._thinking(params, tokens, place),
            prediction=self._prediction(params),
            scored_from=_scored_from(params, len(tokens)),
        )

    def _for_processors(self, params: SamplingParams) -> SamplingParams:
        """The parameters, checked by the engine's processors; without drafts if Python reads each row."""
        if params.logits_processors and not self.takes_functions:
            raise RequestError(
                "logits_processors are functions of this process, and the engine runs in another: use LLM, or name a "
                "class by --logits-processors and steer it by extra_args",
                "logits_processors",
            )
        for kind in self.processors:
            if hasattr(kind, "validate_params"):
                try:
                    kind.validate_params(params)
                except ValueError as error:
                    raise RequestError(f"{kind.__name__}: {error}", "extra_args") from error
        if params.logits_processors or self.processors or (params.wants_logprobs and self.processed_logprobs):
            return msgspec.structs.replace(params, speculative_decoding=False)
        return params

    def _prediction(self, params: SamplingParams) -> tuple[int, ...]:
        """The predicted output as tokens; what does not fit the request's length is of no use."""
        prediction = params.prediction
        if not prediction or not params.speculative_decoding:
            return ()
        if not isinstance(prediction, str):
            for token in prediction:
                if token >= self.info.vocab_size:
                    raise RequestError(
                        f"prediction: token id {token} is outside the vocabulary (0 to {self.info.vocab_size - 1})",
                        "prediction",
                    )
            return tuple(prediction)
        return tuple(self.encode(prediction, add_special_tokens=False))

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """How the model sets its reasoning apart: the format of that name, or the one that its template uses."""
        name = self.reasoning_parser
        source = self.template.source if name == "auto" and self.template is not None else ""
        return reasoning_format(name, source, self.reasoning_plugins)

    def _thinking(
        self, params: SamplingParams, tokens: list[int], place: Place | None
    ) -> ThinkingBudget | None:
        """The bound on reasoning, if there is one and the output can still begin or go on with reasoning."""
        limit = params.thinking_token_budget
        if limit is None or place == "answer" or self.tokenizer is None:
            return None
        form = self.reasoning
        if form is None:
            return None
        begin, end = form.begin, form.end
        if form.channels is not None:
            channels = form.channels
            begin, end = (channels.channel + channels.reasoning + channels.message,), channels.ends
        if not end:
            return None
        if place is None:
            place = form.place(self.tokenizer.decode(tokens[-MAX_TURN:], skip_special_tokens=False))
        return None if place == "answer" else ThinkingBudget(limit, begin, end, place == "reasoning")

    def _room(self, tokens: list[int]) -> int:
        """How many tokens of output fit after the prompt. PromptTooLongError if none does."""
        count, longest = len(tokens), self.info.max_input_len
        if longest is not None and count > longest:
            raise PromptTooLongError(
                f"This engine's maximum context length is {longest} tokens of prompt, and the prompt has {count}: "
                "shorten it or build the engine with a larger --max-input-len",
                count,
                longest,
            )
        length = self.info.max_model_len
        if count >= length:
            raise PromptTooLongError(
                f"This model's maximum context length is {length} tokens, including at least one of output, and the "
                f"prompt has {count} tokens: shorten it or raise --max-model-len",
                count,
                length - 1,
            )
        return length - count

    def pooled(
        self,
        request_id: str,
        tokens: list[int],
        pooling: Pooling | None = None,
        priority: int = 0,
        salt: str = "",
        activate: bool = True,
        splits: bool = False,
    ) -> Request:
        """A request for one vector; `pooling` None means the model's own way, else the last hidden state.

        Without `activate`, an embedding is not scaled to length 1. With `splits`, a text that is too long is taken if
        options allow parts (`quire.client.chunks`).
        """
        self._check_tokens(tokens)
        longest = self.longest_text if splits and self.longest_text else self.longest_input
        if len(tokens) > longest:
            raise RequestError(
                f"the text has {len(tokens)} tokens, and this model takes at most {longest}: shorten it, or set "
                "truncate_prompt_tokens",
                "prompt",
            )
        return Request(
            id=request_id,
            tokens=tokens,
            sampling=SamplingParams(max_tokens=1),
            seed=0,
            max_tokens=1,
            priority=priority,
            arrival=time.time(),
            pooling=pooling or self.info.pooling or "last",
            salt=salt,
            activate=activate,
        )

    def pair(self, first: str, second: str) -> list[int]:
        """Two texts as one input of a classifier; the tokens of the second are in its segment."""
        tokens, kinds = self._need_tokenizer().encode_pair(first, second)
        size = self.info.segment_size
        return [token + size * kind for token, kind in zip(tokens, kinds, strict=True)]

    def truncated(self, tokens: list[int], limit: int | None, side: str | None = None) -> list[int]:
        """`limit` tokens (-1: as many as the model takes), cut on the `side` "left" or "right".

        By default the front is cut; of encoders' texts the end is, except for the last token.
        """
        if limit is None:
            return tokens
        keep = self.info.max_model_len if limit == -1 else limit
        if keep < 1:
            raise RequestError("truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens")
        if len(tokens) <= keep:
            return tokens
        if side is None:
            return tokens[-keep:] if self.info.generates else tokens[: keep - 1] + tokens[-1:]
        return tokens[-keep:] if side == "left" else tokens[:keep]

    def shortened(self, text: str, limit: int | None) -> str:
        """The text of the first `limit` tokens."""
        if limit is None:
            return text
        tokenizer = self._need_tokenizer()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return text if len(tokens) <= limit else tokenizer.decode(tokens[:limit])

    def stream(self, request: Request, prompt: str | None = None) -> OutputStream:
        return OutputStream(request, prompt, self.tokenizer)

    def _choices(self, params: SamplingParams, room: int) -> tuple[tuple[int, ...], ...]:
        """The choices of a selecting request as tokens that follow its prompt."""
        constraint = params.structured_outputs
        texts = constraint.choice if constraint is not None and constraint.choice is not None else ()
        rows = self._need_tokenizer().encode_batch(list(texts), add_special_tokens=False) if texts else []
        choices = tuple(map(tuple, rows))
        if params.n > 1:
            raise RequestError(
                f"select returns one answer, the most likely choice: n must be 1, got {params.n}", "n"
            )
        if any(not 0 < len(choice) < room for choice in choices):
            raise RequestError(
                f"select: every choice must have at least one token and fit into the {room - 1} that are left "
                "after the prompt",
                "structured_outputs",
            )
        return choices

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: pass token ids", "prompt")
        return self.tokenizer

    def _check_tokens(self, tokens: list[int]) -> None:
        if not tokens:
            raise RequestError("the prompt is empty: pass at least one token", "prompt")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.info.vocab_size:
                raise RequestError(
                    f"token id {token!r} is outside the vocabulary (0 to {self.info.vocab_size - 1})",
                    "prompt",
                )

    def _check_params(self, params: SamplingParams) -> None:
        vocab = self.info.vocab_size
        if params.min_tokens and params.allowed_token_ids is not None:
            ends = {*self.info.eos_token_ids, *(params.stop_token_ids or ())}
            if ends.issuperset(params.allowed_token_ids):
                raise RequestError(
                    "allowed_token_ids holds only tokens that end the output, which min_tokens forbids: allow others",
                    "allowed_token_ids",
                )
        for name, tokens in token_lists(params):
            for token in tokens:
                if token >= vocab:
                    raise RequestError(
                        f"{name}: token id {token} is outside the vocabulary (0 to {vocab - 1})", name
                    )
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name) or 0
            named = len(getattr(params, TOKENS_OF[name]) or ())
            if named > MAX_ASKED_TOKENS:
                raise RequestError(
                    f"{TOKENS_OF[name]} has {named} tokens, the most is {MAX_ASKED_TOKENS}", TOKENS_OF[name]
                )
            if (vocab if wanted == -1 else wanted) > self.info.max_logprobs:
                raise RequestError(
                    f"{name} asks for {wanted if wanted != -1 else 'all'} entries per token, the most is "
                    f"{self.info.max_logprobs} (--max-logprobs)",
                    name,
                )
        if self.tokenizer is None and params.structured_outputs is not None:
            raise RequestError("structured outputs need a tokenizer", "structured_outputs")
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError("stop strings and bad words need a tokenizer: use stop_token_ids", "stop")

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, at the start of a text and after a space, as in vLLM."""
        if not params.bad_words:
            return ()
        texts = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        rows = self._need_tokenizer().encode_batch(texts, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(row) for row in rows if row))


def _scored_from(params: SamplingParams, num_tokens: int) -> int:
    start = params.prompt_logprob_start or 0
    if start >= num_tokens:
        raise RequestError(
            f"prompt_logprob_start is {start}, but the prompt has {num_tokens} tokens", "prompt_logprob_start"
        )
    return max(0, start - 1)


class Maker(Protocol):
    """A module that makes the core of an engine and its front; tests replace it by a scripted one."""

    def start_core(self, config: EngineConfig) -> Started: ...
    def start_front(self, config: EngineConfig, info: ModelCard) -> Front: ...


def load_maker(name: str) -> Maker:
    """Import the maker module of that name."""
    return cast(Maker, importlib.import_module(name))
