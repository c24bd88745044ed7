"""Service: what all endpoints share, the engine, the front that makes requests, model names, bodies, draining."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from quire.client.adapters import with_adapter
from quire.client.client import AsyncEngine
from quire.client.grammar_check import GrammarChecker
from quire.client.metrics import Metrics
from quire.client.requests import Front
from quire.errors import RequestError
from quire.lazy import Lazy
from quire.serve.adapters import Adapters
from quire.serve.bodies import check_values, read_body
from quire.serve.call import Call, Prompt
from quire.serve.errors import ErrorInfo, HttpError, not_found, unavailable, unsupported
from quire.serve.fields.accept import accept
from quire.serve.fields.shapes import Body, Fields
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.openai.structured import at_field
from quire.serve.options import ServerConfig
from quire.serve.stream import HandedBackError, Running
from quire.serve.threads import Threads
from quire.serve.tools import Formats, Offer, offer_of
from quire.types import Request

if TYPE_CHECKING:
    from quire.serve import fingerprints, routed
    from quire.serve.fingerprints import Fingerprints
    from quire.serve.resumption import Resumption
    from quire.serve.routed import Route
else:
    fingerprints, routed = Lazy("quire.serve.fingerprints"), Lazy("quire.serve.routed")

T = TypeVar("T")
_decode = msgspec.json.Decoder().decode

VECTOR_BYTES = 1024  # a vector in an answer costs about as much as VECTOR_BYTES of a body


class Service:
    """One served model. While `draining`, new requests are refused and running ones may finish."""

    def __init__(
        self, engine: AsyncEngine, front: Front, config: ServerConfig, grammars: GrammarChecker
    ) -> None:
        self.engine = engine
        self.grammars = grammars
        self.front = front
        self.config = config
        self.created = int(time.time())
        self.adapters = Adapters(engine, config)
        self.formats = Formats.of(front, config)
        front.reasoning_parser, front.reasoning_plugins = config.reasoning_parser, config.reasoning_plugins
        self.identity = ""  # of the engine
        self.draining = False
        self.load: Callable[[], bytes] = bytes  # as routers are told
        self.on_prefix: Callable[[Sequence[str], int], int] | None = None  # told what routers name
        self._resumable: set[Running] = set()
        self.background: list[Callable[[], Coroutine[Any, Any, None]]] = []  # run for the life of the server
        self._numbers = itertools.count()
        self.threads = Threads()

    @property
    def metrics(self) -> Metrics:
        return self.engine.metrics

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model in the API."""
        return self.config.served_model_name or (self.front.info.name,)

    @property
    def name(self) -> str:
        """The name of the model in answers."""
        return self.names[0]

    @property
    def healthy(self) -> bool:
        return self.engine.healthy and not self.draining

    def check_model(self, name: str | None) -> str:
        """Find the name for the answer, of the model or of an adapter; 404 if there is no such model."""
        if name is None or name in self.names:
            return name or self.name
        adapters = [one.name for one in self.adapters.loaded.all]
        if name in adapters:
            return name
        raise not_found(
            f"The model `{name}` does not exist; this server has {', '.join((*self.names, *adapters))}.",
            "model",
            "model_not_found",
        )

    def fingerprint(self, model: str) -> str:
        """Name the class of servers that answer for a model as this one does (`system_fingerprint`)."""
        return self._fingerprints.of(model)

    @cached_property
    def _fingerprints(self) -> Fingerprints:
        return fingerprints.Fingerprints(self)

    def offer(self, body: ChatRequest) -> Offer:
        """Read the tools that a chat offers. 400 if they are malformed or the choice is disabled."""
        offer = offer_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        if offer.choice == "auto" and not self.config.enable_auto_tool_choice:
            raise unsupported("tool_choice", "auto is disabled (--no-enable-auto-tool-choice)")
        return offer

    def new_id(self, prefix: str, http: HttpRequest, given: str | None = None) -> str:
        """Choose the call's public id: from the body, from X-Request-Id, or a new one."""
        return f"{prefix}{given or http.state.request_id}"

    async def read(self, http: HttpRequest, fields: Fields[Body]) -> Body:
        """Read the body as a struct, by the endpoint's table of fields. Raises HttpError 400, 408, 413 or 415."""
        # A web page may send JSON under another type, or none, without asking the server first.
        unsaid = "" if "origin" in http.headers else "application/json"
        kind = http.headers.get("content-type", unsaid).partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            message = "the body must be application/json"
            raise HttpError(415, ErrorInfo(message, "invalid_request_error", None, "invalid_type"))
        data = await read_body(http, self.config.max_body_bytes)
        http.state.body_size = len(data)
        strict = self.config.unknown_fields == "refuse"

        def decode() -> tuple[Body, list[str]]:
            check_values(data)
            return accept(fields, _decode(data), self._template_words, strict)

        found, ignored = await self.threads.run(len(data), decode)
        for name in ignored:
            self.notice(http, name)
        model = getattr(found, "model", None)
        if self.config.lora_dir is not None and model not in self.names:
            await self.adapters.bring(model, http.state.owner)
        return found

    @cached_property
    def _template_words(self) -> frozenset[str]:
        """Names that the chat template may read from a message."""
        template = self.front.template
        return frozenset() if template is None else frozenset(re.findall(r"\w+", template.source))

    def notice(self, http: HttpRequest, name: str) -> None:
        """Tell the sender, by header and metric, that a field was ignored."""
        http.state.ignored = (*getattr(http.state, "ignored", ()), name)
        path = http.scope["path"]
        self.metrics.ignored_fields[path] = self.metrics.ignored_fields.get(path, 0) + 1

    async def work(
        self, http: HttpRequest, job: Callable[[], T], renders: bool = False, slow: bool = False
    ) -> T:
        """Run `job` on a body that was read: inline if the body is short, else in a thread.

        `renders`: it renders the chat template, which may take its time unless it was quick before. `slow`: never
        inline.
        """
        inline = not slow and (not renders or self.front.renders_quickly)
        return await self.threads.run(http.state.body_size, job, inline)

    async def make(self, count: int, job: Callable[[], T]) -> T:
        """Run `job`, which makes an answer of `count` vectors: inline if there are few, else in a thread."""
        return await self.threads.run(count * VECTOR_BYTES, job)

    async def start(self, http: HttpRequest, call_id: str, prompts: list[Prompt], model: str) -> Call:
        """Queue the requests of a call to a model after checking that their constraints compile.

        Raises HttpError 503 if there is no room or no engine, RequestError for a constraint that is refused.
        """
        self.check_draining()
        grammars: dict[int, str | None] = {}  # by constraint, which prompts share
        for place, prompt in enumerate(prompts):
            request, key = prompt.request, id(prompt.request.sampling.structured_outputs)
            if key not in grammars:
                grammars[key] = (
                    await self.with_grammar(http, request, prompt.constrained_by, call_id)
                ).grammar
            if grammars[key] is not None:
                request = msgspec.structs.replace(request, grammar=grammars[key])
                prompts[place] = replace(prompt, request=request)
        prompts = [
            replace(p, request=self.assigned(http, p.request, call_id, model, place))
            for place, p in enumerate(prompts)
        ]
        resumption: Resumption | None = http.state.resumption
        if resumption is not None:
            await resumption.prepare(self.front, prompts)
        self.check_draining()
        call = Call(self.engine, self.front, call_id, http.state.created, prompts, self.config, resumption)
        call.fingerprint = self.fingerprint(model)
        if self.on_prefix is not None and http.state.route is not None and http.state.route.prefix:
            tokens = sum(len(p.request.tokens) for p in prompts)
            call.generation.times[0].expected = self.on_prefix(http.state.route.prefix, tokens)
        return call

    def assigned(
        self, http: HttpRequest, request: Request, call_id: str, model: str, place: int = 0
    ) -> Request:
        """Give prompt number `place` of a call its owner, the adapter that is the call's model, and a router's seed.

        404 if that adapter was unloaded meanwhile.
        """
        self.check_model(model)
        route: Route | None = http.state.route
        if route is not None and route.seed is not None:
            request = routed.seeded(request, route.seed, place)
        owned = self.owned(http, request, call_id)
        return with_adapter(owned, self.adapters.loaded.find(model), self.front.info)

    def owned(self, http: HttpRequest, request: Request, call_id: str) -> Request:
        """Give the request its owner, who takes turns with others: a user with an API key, or without keys a call.

        Users share no cached prefixes, as times and `cached_tokens` would tell one what another has sent.
        """
        owner: str = http.state.owner
        salt = f"{owner}:{request.salt}" if owner and not self.config.share_prefix_cache else request.salt
        return msgspec.structs.replace(request, owner=owner or call_id, salt=salt)

    async def with_grammar(
        self, http: HttpRequest, request: Request, constrained_by: str | None, call_id: str
    ) -> Request:
        """Compile the request's constraint, if it has one; errors name the field that constrains it."""
        constraint = request.sampling.structured_outputs
        if constraint is None or request.choices:
            return request
        try:
            owner = http.state.owner or call_id
            grammar = await self.grammars.check(constraint, self.front.info, owner)
        except RequestError as error:
            raise at_field(error, constrained_by or "structured_outputs") from error
        return msgspec.structs.replace(request, grammar=grammar)

    def drain(self) -> None:
        """Take no more requests, and hand the streams back that other servers can go on with."""
        self.draining = True
        for call in self._resumable:
            _hand_back(call)

    @contextmanager
    def handed_back(self, call: Running) -> Iterator[None]:
        """Hand `call` back if the server drains, or did so before."""
        self._resumable.add(call)
        if self.draining:
            _hand_back(call)
        try:
            yield
        finally:
            self._resumable.discard(call)

    def check_draining(self) -> None:
        """Raise 503 once the server is shutting down."""
        if self.draining:
            self.metrics.rejections["draining"] += 1
            raise unavailable("the server is shutting down: send this request to another")

    def next_request_id(self, call_id: str) -> str:
        """Make an id that is unique in this process."""
        return f"{call_id}-{next(self._numbers):x}"

    def num_tokens(self, text: str, most: int) -> int:
        """Count the tokens of `text` when it is tokenized again, at most `most`."""
        return min(most, len(self.front.encode(text, add_special_tokens=False))) if text else 0

    def text_of(self, tokens: list[int]) -> str:
        """Decode token ids, special tokens included."""
        tokenizer = self.front.tokenizer
        return "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)


def _hand_back(call: Running) -> None:
    call.fail(HandedBackError("the server is shutting down: go on at another"))
