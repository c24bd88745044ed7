"""A maker with a scripted core: no model, tokens that depend on prompt and seed alone, faults on demand.

The vocabulary is the 256 bytes and five special tokens, so text splits inside characters. Words in the prompt
cause faults: "!poison-add" (add raises), "!poison" (fails alone at its third token), "!raise" (step
raises), "!crash" (the process is killed), "!hang" (a step never ends), "!forever" (no end before max_tokens),
"!held" (its third step waits while `held` exists in download_dir, as a start does),
"!say TEXT!end" (the output is TEXT, with the special token <|tool_call|> for {CALL}).
Options go in the model's name: `scripted:delay=0.01,start=0.5,fail=1`.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from quire.client.requests import Front
from quire.config import EngineConfig
from quire.engine.verbs import Identify, Ping, ResetPrefixCache, Result, Verb
from quire.errors import EngineError, ModelError
from quire.params import SamplingParams
from quire.program.host import Programs
from quire.program.texts import Texts
from quire.text.side_files import TokenizerOptions
from quire.text.template.render import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import (
    Delta,
    EngineStats,
    FinishReason,
    ModelCard,
    NewSeq,
    Request,
    ScheduledBatch,
    TokenLogprobs,
    Usage,
)

SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|tool_call|>")
EOS = 257
CALL = 260
VOCAB = 261
BLOCK = 16
NUM_BLOCKS = 4096
MAX_LEN = 2048
WORDS = ["hello ", "wörld ", "🙂🙃 ", "quire. ", "páge ", "日本語 ", "stop here ", "END\n", "a b c "]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ suffix | default('') }}"
)


def options_of(model: str) -> dict[str, float]:
    _, _, rest = model.partition(":")
    return {k: float(v) for k, v in (part.split("=") for part in rest.split(",") if part)}


def script(request: Request, index: int, length: int) -> list[int]:
    """The first `length` tokens that this sample will make."""
    prompt = bytes(t for t in request.tokens if t < 256)
    if b"!say " in prompt:
        said = prompt.rpartition(b"!say ")[2].partition(b"!end")[0]
        first, *rest = said.split(b"{CALL}")
        return [*first, *(token for part in rest for token in (CALL, *part)), *[EOS] * length][:length]
    seed = request.sample_seed(index) if request.sampling.temperature else 0
    key = f"{seed}:{request.tokens}"
    rng = hashlib.sha256(key.encode()).digest()
    out: list[int] = []
    step = 0
    end = 20 + rng[0] % 40
    forever = not request.eos_token_ids or b"!forever" in prompt
    while len(out) < length:
        if step % 32 == 0:
            rng = hashlib.sha256(rng).digest()
        out += WORDS[rng[step % 32] % len(WORDS)].encode()
        step += 1
        if not forever and step >= end:
            out += [EOS] * length
    return out[:length]


def script_of(text: str, length: int) -> list[int]:
    """What a greedy request that ignores the end makes of `text`."""
    sampling = SamplingParams(temperature=0.0)
    return script(
        Request(id="", tokens=list(text.encode()), sampling=sampling, seed=0, max_tokens=1), 0, length
    )


@dataclass(eq=False)
class Seq:
    request: Request
    index: int
    tokens: list[int]
    text: str
    slot: int = -1
    num_output: int = 0
    scored: bool = False  # a part of the prompt's log-probabilities was told


@dataclass
class ScriptedCore:
    """The interface of EngineCore over a script."""

    max_running: int
    delay: float = 0.0
    on_batch: Callable[[ScheduledBatch], None] | None = None
    on_idle: Callable[[], bool] = bool
    on_step: Callable[[float, float], None] | None = None
    waiting: list[Seq] = field(default_factory=list)
    running: list[Seq] = field(default_factory=list)
    ready: list[Delta] = field(default_factory=list)
    num: EngineStats = field(default_factory=lambda: EngineStats(num_blocks=NUM_BLOCKS))
    seen: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    cached: dict[str, int] = field(default_factory=dict)

    host: Programs | None = None
    folder: Path | None = None

    @property
    def has_work(self) -> bool:
        return self.busy or (self.host is not None and self.host.has_work)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.ready)

    def add(self, request: Request) -> None:
        if request.is_composed and self.host is not None:
            self.host.add(request)
        else:
            self.queue(request)

    def queue(self, request: Request) -> None:
        text = bytes(t for t in request.tokens if t < 256).decode("utf-8", "replace")
        if "!poison-add" in text:
            raise ValueError("this request breaks the queue")
        prompt, key = request.tokens, (request.salt, tuple(request.tokens))
        self.cached[request.id] = (len(prompt) - 1) // BLOCK * BLOCK if key in self.seen else 0
        self.num.prefix_queries += len(prompt)
        self.num.prefix_hits += self.cached[request.id]
        for index in range(request.sampling.n):
            tokens = script(request, index, request.max_tokens)
            self.waiting.append(Seq(request, index, tokens, text))

    def abort(self, request_id: str, index: int | None = None) -> None:
        if self.host is not None and request_id in self.host:
            self.host.abort(request_id)
        for queue in (self.waiting, self.running):
            for seq in list(queue):
                if seq.request.id == request_id and index in (None, seq.index):
                    queue.remove(seq)
                    self.ready.append(self.delta(seq, [], FinishReason.ABORT))

    def drop(self, request_id: str, index: int | None = None) -> None:
        self.abort(request_id, index)
        self.ready = [d for d in self.ready if d.request_id != request_id or index not in (None, d.index)]

    def keep(self, key: str, request: Request, tokens: list[int]) -> int:
        return 0

    def let_go(self, key: str) -> None:
        return

    def step(self) -> list[Delta]:
        if self.host is None:
            return self.compute()
        self.host.advance()
        return self.host.route(self.compute())

    def compute(self) -> list[Delta]:
        deltas, self.ready = self.ready, []
        new = []
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting.pop(0)
            self.running.append(seq)
            new.append(NewSeq(seq.slot, seq.request, seq.index, seq.request.tokens))
        if self.running:
            if self.on_batch is not None:
                self.on_batch(ScheduledBatch(self.num.num_steps, new, [], [], []))
            self.num.num_steps += 1
            time.sleep(self.delay)
        for seq in list(self.running):
            deltas.append(self.advance(seq))
        return deltas

    def advance(self, seq: Seq) -> Delta:
        self.fault(seq)
        if seq.request.pooling is not None:
            self.running.remove(seq)
            delta = self.delta(seq, [], FinishReason.STOP)
            delta.embedding = embed(seq.request.tokens, seq.request.pooling)
            return delta
        if "!poison" in seq.text and seq.num_output == 2:
            self.running.remove(seq)
            delta = self.delta(seq, [], FinishReason.ERROR)
            delta.error = "the logits of this request are not finite"
            return delta
        if seq.request.sampling.prompt_logprobs is not None and not (seq.index or seq.scored):
            seq.scored = True  # a long prompt's come in parts
            return self.delta(seq, [], None)
        token = seq.tokens[seq.num_output]
        seq.num_output += 1
        self.num.generation_tokens += 1
        reason, stop_reason, params = None, None, seq.request.sampling
        if seq.num_output >= params.min_tokens and token in (
            *seq.request.eos_token_ids,
            *(params.stop_token_ids or ()),
        ):
            reason = FinishReason.STOP
            stop_reason = None if token in seq.request.eos_token_ids else token
        elif seq.num_output == seq.request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.running.remove(seq)
            self.seen.add((seq.request.salt, tuple(seq.request.tokens)))
        delta = self.delta(seq, [token], reason)
        delta.stop_reason = stop_reason
        return delta

    def fault(self, seq: Seq) -> None:
        if seq.num_output != 2:
            return
        if "!crash" in seq.text:
            os.kill(os.getpid(), signal.SIGKILL)
        if "!raise" in seq.text:
            raise RuntimeError("a kernel failed")
        if "!hang" in seq.text:
            time.sleep(3600)
        if "!held" in seq.text:
            hold(self.folder)

    def delta(self, seq: Seq, tokens: list[int], reason: FinishReason | None) -> Delta:
        request, params = seq.request, seq.request.sampling
        usage = Usage(len(request.tokens), self.cached.get(request.id, 0), seq.num_output)
        logprobs = prompt_logprobs = None
        if params.logprobs is not None:
            logprobs = [scores(t, params.logprobs) for t in tokens]
        if params.prompt_logprobs is not None and seq.num_output <= 1 and seq.index == 0:
            due = request.tokens[1 + request.scored_from :]
            due = due[len(due) // 2 :] if seq.num_output else due[: len(due) // 2]
            prompt_logprobs = [scores(t, params.prompt_logprobs) for t in due]
        return Delta(request.id, seq.index, tokens, usage, logprobs, prompt_logprobs, reason)

    def stats(self) -> EngineStats:
        held = sum(math.ceil((len(s.request.tokens) + s.num_output) / BLOCK) for s in self.running)
        self.num.num_running, self.num.num_waiting = len(self.running), len(self.waiting)
        self.num.num_waiting_tokens = sum(len(s.request.tokens) for s in self.waiting)
        self.num.num_used_blocks, self.num.num_free_blocks = held, NUM_BLOCKS - held
        if self.host is not None:
            self.host.count(self.num)
        return self.num

    def do(self, verb: Verb) -> Result:
        if isinstance(verb, ResetPrefixCache):
            self.seen.clear()
            return True
        if isinstance(verb, Identify):
            return f"scripted, {self.max_running} at once"
        assert isinstance(verb, Ping)
        return None


def embed(tokens: list[int], pooling: str) -> list[float]:
    if pooling == "all":
        return [x for token in tokens for x in embed([token], "last")]
    raw = [1.0 + sum(tokens) % 7, float(len(tokens)), float(tokens[-1]), 2.0 if pooling == "mean" else 3.0]
    norm = math.sqrt(sum(x * x for x in raw))
    return [x / norm for x in raw]


def scores(token: int, top: int) -> TokenLogprobs:
    """`token` is the third most likely where it is odd, else the first."""
    rank = 3 if token % 2 else 1
    ids = [(token + i - (rank - 1)) % 256 for i in range(top)]
    return TokenLogprobs(token, -0.25 * rank, rank, ids, [-0.25 * (i + 1) for i in range(top)])


def hold(folder: Path | None) -> None:
    """Wait while a test wants it."""
    while folder is not None and (folder / "held").exists():
        time.sleep(0.01)


@dataclass
class Report:
    phases: dict[str, float]


@dataclass
class Started:
    core: ScriptedCore
    info: ModelCard
    report: Report


def start_core(config: EngineConfig) -> Started:
    options = options_of(config.model.model)
    begun = time.monotonic()
    time.sleep(options.get("start", 0.0))
    if options.get("fail"):
        raise ModelError("no such model: scripted to fail")
    folder = None if config.model.download_dir is None else Path(config.model.download_dir)
    hold(folder)
    if options.get("broken") or (folder is not None and (folder / "broken").exists()):
        raise EngineError("scripted to break")
    core = ScriptedCore(config.scheduler.max_num_seqs, options.get("delay", 0.0))
    info = ModelCard(
        name="scripted",
        max_model_len=config.model.max_model_len or MAX_LEN,
        vocab_size=VOCAB,
        eos_token_ids=(EOS, 259),
        defaults={"temperature": 0.7} if options.get("warm") else {},
    )
    texts = Texts(make_tokenizer, info.max_model_len, caching=True)
    core.host, core.folder = Programs(core, texts), folder
    return Started(core, info, Report({"learning the script": time.monotonic() - begun}))


def make_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = {letter: i for i, letter in enumerate(_byte_letters())}
    assert sorted(order) == letters
    backend = Backend(models.BPE(vocab=order, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    options = TokenizerOptions(
        named={"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}, chat_template=TEMPLATE
    )
    return Tokenizer(backend, options)


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def start_front(config: EngineConfig, info: ModelCard) -> Front:
    tokenizer = make_tokenizer()
    front = Front(info, tokenizer, lambda: ChatTemplate.load(tokenizer), config.seed)
    front.longest_text = config.model.pooler.longest_text
    return front
