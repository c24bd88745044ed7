"""Makes Requests: tokenizes prompts, resolves defaults, refuses what cannot run.

Shared by `LLM` and the server, so that both accept and refuse the same. Knows text; no scheduler and no arrays.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from quire.client.outputs import OutputStream
from quire.client.request_checks import (
    check_ids,
    check_params,
    check_possible,
    check_tokens,
    for_processors,
    prompt_ids,
    room_after,
    scored_from,
)
from quire.errors import RequestError
from quire.lazy import Lazy
from quire.params import SamplingParams, StructuredOutputsParams
from quire.text.tokenizer import Tokenizer
from quire.types import SEED_MASK, UNKNOWN_MODEL, ModelCard, Pooling, Request, ThinkingBudget

if TYPE_CHECKING:
    from quire.client import frames, thinking
    from quire.logits_processor import ProcessorClass
    from quire.program import frames as plain
    from quire.program.frames import Frames
    from quire.text.formats import registry
    from quire.text.formats.shapes import Place, ReasoningFormat
    from quire.text.stop_strings import Narrow
    from quire.text.template.render import ChatTemplate, Rendered
else:
    frames, plain = Lazy("quire.client.frames"), Lazy("quire.program.frames")
    registry, thinking = Lazy("quire.text.formats.registry"), Lazy("quire.client.thinking")


S = TypeVar("S")
T = TypeVar("T")

# Texts up to MAX_CHARACTERS are always tokenized; longer ones if they may fit into the model's length.
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
        self.tokenizer = tokenizer
        self.info = info
        self._load_template = load_template
        self.compile_grammar: Callable[[StructuredOutputsParams], str] | None = None
        self.processors: tuple[ProcessorClass, ...] = ()  # the engine's
        self.takes_functions = False  # requests may bring functions: the engine runs in this process
        self.processed_logprobs = False
        self.reasoning_parser = "auto"
        self.reasoning_plugins: tuple[ReasoningFormat, ...] = ()
        self.template_defaults: dict[str, Any] = {}  # variables of the chat template
        self.content_format = "auto"
        self.longest_text: int | None = None  # most tokens of a text that becomes a vector in parts
        self.activates = True  # whether vectors have their last step unless a request says otherwise
        self._seeds = random.Random(seed)
        # By name, of the last source: prompts of a call share it.
        self._made: dict[str, tuple[object, Any]] = {}

    @property
    def info(self) -> ModelCard:
        """The model's card; here model and tokenizer meet."""
        return self._info

    @info.setter
    def info(self, card: ModelCard) -> None:
        known = card is not UNKNOWN_MODEL
        self._info = self.tokenizer.meet(card) if known and self.tokenizer is not None else card

    @property
    def longest_input(self) -> int:
        """The most tokens that the model reads at once."""
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
        """The frames that the chat template puts around messages."""
        if self.template is None or self.tokenizer is None:
            return plain.PLAIN
        return frames.frames_of(
            lambda messages: self.render(messages, add_generation_prompt=False).text, self.tokenizer
        )

    @property
    def renders_quickly(self) -> bool:
        """Whether the chat template last rendered fast enough to run on an event loop."""
        template = self.__dict__.get("template")  # not loaded for this
        return template is not None and template.quick

    def default_params(self, **given: Any) -> SamplingParams:
        """Make the model's default sampling parameters, overridden by `given`."""
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
        """Upper bound on the characters of a text that fits, unless the tokenizer drops a part of it."""
        longest = max(map(len, self._need_tokenizer().backend.get_vocab(with_added_tokens=True)))
        return min(longest * self.info.max_model_len, 8 * MAX_CHARACTERS)

    def render(
        self,
        messages: list[dict[str, Any]],
        chat_template: str | None = None,
        template: ChatTemplate | None = None,
        **options: Any,
    ) -> Rendered:
        """Render a conversation by `template` or the model's own; options as in `ChatTemplate.render_prompt`.

        `chat_template` is one that came with the request.
        """
        options = {**self.template_defaults, **options}
        if template is not None:
            return template.render_prompt(messages, **options)
        if self.template is None:
            other = "pass --chat-template, or use completions" if self.info.generates else "it makes vectors"
            raise RequestError(f"{self.info.name} has no chat template: {other}", "messages")
        template = self.template if chat_template is None else self.template.of_request(chat_template)
        return template.render_prompt(messages, **options)

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
        rendered: Rendered | None = None,
        marks: tuple[int, ...] = (),
    ) -> Request:
        """Check a prompt and its parameters against the model. Raises RequestError naming the field at fault.

        max_tokens is lowered to what fits after the prompt; more than the model's length is refused, unless `clamp`.
        `place` is where the prompt leaves the answer; None reads it from the turn of the `rendered` conversation, else
        from the end of the prompt.
        """
        if not self.info.generates:
            raise RequestError(f"{self.info.name} makes vectors, not text: use embeddings, classes or scores")
        tokens = self.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt_ids(prompt)
        check_tokens(tokens, self.info)
        check_params(params, self.info, self.tokenizer is not None)
        params = for_processors(params, self.processors, self.takes_functions, self.processed_logprobs)
        room = room_after(tokens, self.info)
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
        bad_words = self._bad_words(params)
        check_possible(params, bad_words, self.info)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed & SEED_MASK
        return Request(
            id=request_id,
            tokens=tokens,
            sampling=params,
            seed=seed,
            max_tokens=min(params.max_tokens or room, room),
            eos_token_ids=() if params.ignore_eos else self.info.eos_token_ids,
            bad_words_token_ids=bad_words,
            adapter=adapter,
            priority=priority,
            salt=salt,
            arrival=time.time(),
            grammar=grammar,
            choices=choices,
            thinking=self._thinking(params, tokens, place, rendered),
            prediction=self._prediction(params),
            scored_from=scored_from(params, len(tokens)),
            marks=marks,
        )

    def _prediction(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokenize the predicted output, cut to the request's length."""
        prediction = params.prediction
        if not prediction or not params.speculative_decoding:
            return ()
        return self._once("prediction", prediction, self._predicted)

    def _predicted(self, prediction: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prediction, str):
            prediction = self.encode(prediction, add_special_tokens=False)
        else:
            check_ids("prediction", prediction, self.info.vocab_size)
        return tuple(prediction[: self.info.max_model_len])

    def _once(self, name: str, source: S, make: Callable[[S], T]) -> T:
        """Make something of a source that does not change, once for all prompts of a call."""
        known = self._made.get(name)
        if known is None or known[0] is not source:
            known = self._made[name] = source, make(source)
        made: T = known[1]
        return made

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of the model's reasoning: the one that options name, or that its template uses."""
        name = self.reasoning_parser
        source = self.template.source if name == "auto" and self.template is not None else ""
        return registry.reasoning_format(name, source, self.reasoning_plugins)

    def _thinking(
        self, params: SamplingParams, tokens: list[int], place: Place | None, rendered: Rendered | None
    ) -> ThinkingBudget | None:
        limit = params.thinking_token_budget
        if limit is None or place == "answer" or self.tokenizer is None or self.reasoning is None:
            return None
        if rendered is not None:
            place = self.reasoning.place(rendered.turn, rendered.continued)
        return thinking.thinking_budget(limit, self.reasoning, self.tokenizer, tokens, place)

    def pooled(
        self,
        request_id: str,
        tokens: list[int],
        pooling: Pooling | None = None,
        priority: int = 0,
        salt: str = "",
        activate: bool | None = None,
        splits: bool = False,
    ) -> Request:
        """Make a request for one vector; `pooling` None means the model's own way, else the last hidden state.

        If `activate` is false, an embedding is not scaled to length 1; None is as options say. With `splits`, a text
        that is too long is taken if options allow parts (`quire.client.chunks`).
        """
        check_tokens(tokens, self.info)
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
            activate=self.activates if activate is None else activate,
        )

    def pair(self, first: str, second: str) -> list[int]:
        """Encode two texts as one input of a classifier; the second text's tokens are in segment 1."""
        tokens, kinds = self._need_tokenizer().encode_pair(first, second)
        size = self.info.segment_size
        return [token + size * kind for token, kind in zip(tokens, kinds, strict=True)]

    def truncated(self, tokens: list[int], limit: int | None, side: str | None = None) -> list[int]:
        """Cut to `limit` tokens (-1: as many as the model takes) on the `side` "left" or "right".

        By default the front is cut; of encoders' texts the end is, except for the last token.
        """
        if limit is None:
            return tokens
        if limit > (longest := max(self.info.max_model_len, self.longest_text or 0)):
            raise RequestError(
                f"truncate_prompt_tokens must be at most the model's maximum context length of {longest}",
                "truncate_prompt_tokens",
            )
        keep = self.info.max_model_len if limit == -1 else limit
        if keep < 1:
            raise RequestError("truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens")
        if len(tokens) <= keep:
            return tokens
        if side is None:
            return tokens[-keep:] if self.info.generates else tokens[: keep - 1] + tokens[-1:]
        return tokens[-keep:] if side == "left" else tokens[:keep]

    def shortened(self, text: str, limit: int | None) -> str:
        """Cut a text to its first `limit` tokens."""
        if limit is None:
            return text
        tokenizer = self._need_tokenizer()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return text if len(tokens) <= limit else tokenizer.decode(tokens[:limit])

    def stream(
        self, request: Request, prompt: str | None = None, stops: Narrow | None = None
    ) -> OutputStream:
        return OutputStream(request, prompt, self.tokenizer, stops)

    def _choices(self, params: SamplingParams, room: int) -> tuple[tuple[int, ...], ...]:
        """Tokenize the choices of a selecting request as they follow its prompt."""
        constraint = params.structured_outputs
        texts = constraint.choice if constraint is not None and constraint.choice is not None else ()
        choices = self._once("choices", texts, self._rows)
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

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Tokenize each bad word, at the start of a text and after a space, as in vLLM."""
        if not params.bad_words:
            return ()
        return self._once("bad_words", params.bad_words, self._words)

    def _words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        rows = self._rows([text for word in words for text in (word, " " + word.lstrip())], drop=True)
        return tuple(dict.fromkeys(row for row in rows if row))

    def _rows(self, texts: Sequence[str], drop: bool = False) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self._need_tokenizer().encode_batch(texts, False, drop)))
