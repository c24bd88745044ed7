"""An executor without a model: the KV at a position is a hash of its prefix, so a wrong block shows."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.params import SamplingParams
from quire.sched import Scheduler
from quire.sched.states import StatePool
from quire.shapes import WHOLE_BLOCK, BlockShape
from quire.state_rows import StateRows
from quire.types import (
    UNSEEN,
    Delta,
    FinishReason,
    Request,
    ScheduledBatch,
    ScheduledSeq,
    StepOutput,
    TokenLogprobs,
)

VOCAB = 11


def request(id: str, tokens: list[int], max_tokens: int = 4, **options: object) -> Request:
    fields = {k: options.pop(k) for k in list(options) if k in Request.__struct_fields__}
    sampling = SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    return Request(id=id, tokens=tokens, sampling=sampling, max_tokens=max_tokens, **{"seed": 0, **fields})  # type: ignore[arg-type]


def root_hash(adapter: str | None, salt: str) -> int:
    return zlib.crc32(repr((adapter, salt)).encode())


def extend_hashes(hashes: list[int], tokens: list[int]) -> None:
    """hashes[i + 1] stands for the KV at position i: a function of the namespace and tokens[: i + 1]."""
    for token in tokens[len(hashes) - 1 :]:
        hashes.append(hash((hashes[-1], token)))


def sample(request: Request, index: int, prefix_hash: int, num_output: int) -> int:
    """The next token after a prefix: depends on the request and the prefix alone. Keeps min_tokens."""
    ends = {*request.eos_token_ids, *(request.sampling.stop_token_ids or ())}
    salt = 0
    while True:
        token = hash((prefix_hash, request.sample_seed(index), salt)) % VOCAB
        if num_output >= request.sampling.min_tokens - 1 or token not in ends:
            return token
        salt += 1


def alone(
    request: Request, index: int, max_total: int, before: Sequence[int] = ()
) -> tuple[list[int], FinishReason, int | None]:
    """What a request gives when nothing else runs; a fork, after the output `before` that it begins with."""
    tokens, output = [*request.tokens, *before], list(before)
    hashes = [root_hash(request.adapter, request.salt)]
    while True:
        extend_hashes(hashes, tokens)
        token = sample(request, index, hashes[-1], len(output))
        tokens.append(token)
        output.append(token)
        if len(output) >= request.sampling.min_tokens:
            if token in request.eos_token_ids:
                return output[len(before) :], FinishReason.STOP, None
            if token in (request.sampling.stop_token_ids or ()):
                return output[len(before) :], FinishReason.STOP, token
        if len(output) >= request.max_tokens or len(tokens) >= max_total:
            return output[len(before) :], FinishReason.LENGTH, None


def embedding(tokens: list[int]) -> list[float]:
    return [float(len(tokens)), float(sum(tokens))]


@dataclass
class Slot:
    request: Request
    index: int
    tokens: list[int]
    hashes: list[int]
    blocks: list[int] = field(default_factory=list)
    failed: bool = False

    def fill(self, item: ScheduledSeq) -> list[int]:
        """The tokens of `item`, those not seen when it was planned included."""
        known = [token for token in item.tokens if token != UNSEEN]
        start, end = item.start, item.start + len(item.tokens)
        assert known == self.tokens[start : start + len(known)]
        assert self.failed or item.wants_logits == (end == len(self.tokens))
        assert item.wants_logits or known == item.tokens
        return self.tokens[start:end]


class FakeStates:
    """State rows: each holds the hash of the tokens that it has taken in, and those of each open row. None: poison."""

    def __init__(self, rows: StateRows) -> None:
        self.rows = rows
        self.taken: list[int | None] = [None] * rows.num_rows
        self.open: list[list[int | None]] = [[None] * rows.num_open for _ in range(rows.num_rows)]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            self.taken[target], self.open[target] = self.taken[source], list(self.open[source])

    def check(self, seqs: list[ScheduledSeq]) -> None:
        """As a device does: all rows of a step differ, and numbers are within their ranges."""
        written = []
        for item in seqs:
            use, count = item.state, len(item.tokens) + len(item.draft)
            assert use is not None
            assert 0 <= use.open <= min(self.rows.num_open, item.start)
            assert 0 <= use.kept <= len(item.tokens)
            assert count - use.kept <= self.rows.num_open
            assert list(use.marks) == sorted(use.marks)
            assert all(0 < count <= use.kept for count, _ in use.marks)
            written += [use.row, *(row for _, row in use.marks)]
        assert len(set(written)) == len(written)
        assert set(written) <= set(range(self.rows.num_rows))

    def advance(self, item: ScheduledSeq, hashes: list[int]) -> None:
        """Replay open rows, then take tokens in; hashes[i] is that of the first i tokens, the draft's included."""
        use, start = item.state, item.start
        assert use is not None
        committed, row = start - use.open, use.row
        if committed:
            assert self.taken[row] == hashes[committed], "a sequence goes on from another one's state"
        assert self.open[row][: use.open] == hashes[committed + 1 : start + 1], "wrong open rows are replayed"
        for count, mark in use.marks:
            self.put(mark, hashes[start + count], [])
        self.put(row, hashes[start + use.kept], hashes[start + use.kept + 1 :])

    def put(self, row: int, taken: int | None, open: list[int]) -> None:
        self.taken[row] = taken
        self.open[row] = [*open, *[None] * (self.rows.num_open - len(open))]

    def spoil(self, item: ScheduledSeq) -> None:
        use = item.state
        assert use is not None
        for row in (use.row, *(row for _, row in use.marks)):
            self.put(row, None, [])

    def poison(self, pool: StatePool) -> None:
        """Spoil the rows that nobody has, unless they are still to be copied."""
        for row in {*pool._free} - {source for source, _ in pool._copies}:
            self.put(row, None, [])

    def check_snapshots(self, pool: StatePool) -> None:
        """Every snapshot is the state of the tokens that lead to its node, once its copy is made."""
        later = FakeStates(self.rows)
        later.taken, later.open = list(self.taken), list(self.open)
        later.copy(pool._copies)
        for node, snapshot in pool._snapshots.items():
            key: list[object] = []
            while node.parent is not None:
                key, node = [*node.edge, *key], node.parent
            (adapter, salt), tokens = key[0], list(key[1:])  # type: ignore[misc]
            hashes = [root_hash(adapter, salt)]
            extend_hashes(hashes, tokens)
            at = snapshot.position - snapshot.open
            assert len(tokens) == snapshot.position
            assert not at or later.taken[snapshot.row] == hashes[at], "a snapshot is another sequence's"
            assert later.open[snapshot.row][: snapshot.open] == hashes[at + 1 :]


class FakeExecutor:
    """Follows batches as a real one does; asserts that each sequence reads the KV of its own prefix."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        rng: random.Random,
        draft_rate: float = 0.0,
        shape: BlockShape = WHOLE_BLOCK,
        rows: StateRows | None = None,
    ) -> None:
        self.shape = shape
        self.states = None if rows is None else FakeStates(rows)
        columns = self.shape.full + self.shape.windowed
        self.kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks * columns)]
        # The slabs of each block; without windowed layers, slab i is block i.
        self.mapped = {} if shape.windowed else {block: [block] for block in range(num_blocks)}
        self.block_size = block_size
        self.slots: dict[int, Slot] = {}
        self.rng = rng
        self.draft_rate = draft_rate
        self.error_rate = 0.0
        self.poison: set[str] = set()  # requests that make each step fail in which they would sample
        self.break_rate = 0.0  # of other steps of several sequences
        self.broken = False  # a step failed, and this is not known yet

    def step(self, batch: ScheduledBatch) -> StepOutput | None:
        """Compute a step; None if it fails. Those after it then compute nothing of use."""
        size, slots = self.block_size, self.slots
        for slot in batch.freed:
            del slots[slot]
        for block, *slabs in batch.mapped:
            self.mapped[block] = slabs
        sources = {src for src, _ in batch.copies}
        targets = [dst for _, dst in batch.copies]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets)
        for src, dst in batch.copies:
            for column, slab in enumerate(self.mapped[dst]):
                self.kv[slab] = list(self.kv[self.mapped[src][column]])
        if self.states is not None:
            self.states.copy(batch.state_copies)
        for new in batch.new:
            assert new.slot not in slots, "a slot was reused before it was freed"
            hashes = [root_hash(new.request.adapter, new.request.salt)]
            slots[new.slot] = Slot(new.request, new.index, list(new.tokens), hashes)
        assert len({item.slot for item in batch.seqs}) == len(batch.seqs)
        for item in batch.seqs:
            slots[item.slot].blocks += item.new_blocks
        if self.broken or self._breaks(batch):
            self.broken = True
            for item in batch.seqs:
                for position in range(item.start, item.start + len(item.tokens) + len(item.draft)):
                    for slab in self.mapped[slots[item.slot].blocks[position // size]]:
                        self.kv[slab][position % size] = None
                if self.states is not None:
                    self.states.spoil(item)
            return None
        if self.states is not None:
            self.states.check(batch.seqs)
        holders: dict[int, int] = {}
        for slot in slots.values():
            for block in slot.blocks:
                holders[block] = holders.get(block, 0) + 1
        for item in batch.seqs:  # all writes of a step come before its reads, as in a layer of a model
            slot = slots[item.slot]
            end = item.start + len(item.tokens)
            assert item.tokens
            assert item.wants_logits or not item.draft
            if slot.failed and UNSEEN in item.tokens:  # what it computes is never read
                if self.states is not None:
                    self.states.spoil(item)
                continue
            known = slot.tokens[: item.start] + slot.fill(item)
            extend_hashes(slot.hashes, known)
            hashes = slot.hashes[: end + 1]
            extend_hashes(hashes, known + item.draft)
            if self.states is not None:
                self.states.advance(item, hashes)
            for position in range(item.start, end + len(item.draft)):
                block = slot.blocks[position // size]
                assert holders[block] == 1, "a shared block was written to"
                assert block not in sources or position >= item.start
                for slab in self.mapped[block]:
                    self.kv[slab][position % size] = hashes[position + 1]
        output = StepOutput(batch.step, {})
        for item in batch.seqs:
            if not slots[item.slot].failed:
                self._read(item.slot, item.start, item.start + len(item.tokens))
            self._sample(item.slot, item.start, len(item.tokens), item.draft, item.wants_logits, output)
        return output

    def _breaks(self, batch: ScheduledBatch) -> bool:
        if any(item.wants_logits and self.slots[item.slot].request.id in self.poison for item in batch.seqs):
            return True
        return len(batch.seqs) > 1 and self.rng.random() < self.break_rate

    def _read(self, number: int, start: int, end: int) -> None:
        """Read what tokens from `start` on see: all positions, through windows the tiles that reach into them."""
        slot, size, shape = self.slots[number], self.block_size, self.shape
        first = max(0, start - shape.reach + 1) // shape.tile * shape.tile
        for position in range(end):
            slabs = self.mapped[slot.blocks[position // size]]
            for slab in slabs if position >= first else slabs[: shape.full]:
                found = self.kv[slab][position % size]
                assert found == slot.hashes[position + 1], f"position {position} holds another sequence's KV"

    def _sample(
        self, number: int, start: int, count: int, draft: list[int], wants_logits: bool, output: StepOutput
    ) -> None:
        slot = self.slots[number]
        num_prompt = len(slot.request.tokens)
        if slot.request.sampling.prompt_logprobs is not None and slot.index == 0 and start < num_prompt - 1:
            due = slot.tokens[start + 1 : min(start + count + 1, num_prompt)]
            output.prompt_logprobs[number] = [TokenLogprobs(t, -1.0, 1, [], []) for t in due]
        slot.failed = slot.failed or self.rng.random() < self.error_rate
        if slot.failed:
            output.errors[number] = "made to fail"
            return
        if not wants_logits:
            return
        if slot.request.pooling is not None:
            output.embeddings[number] = embedding(slot.tokens)
            return
        constrained = slot.request.grammar is not None
        if constrained and self.rng.random() < 0.3:
            output.deferred.add(number)
            return
        out: list[int] = []
        for guess in [*draft, None]:
            extend_hashes(slot.hashes, slot.tokens)
            out.append(sample(slot.request, slot.index, slot.hashes[-1], len(slot.tokens) - num_prompt))
            slot.tokens.append(out[-1])
            if guess != out[-1]:
                break
        if constrained and not draft and self.rng.random() < 0.3:
            output.forced[number] = self.rng.randint(1, 3)
            for _ in range(output.forced[number]):
                extend_hashes(slot.hashes, slot.tokens)
                out.append(sample(slot.request, slot.index, slot.hashes[-1], len(slot.tokens) - num_prompt))
                slot.tokens.append(out[-1])
        output.tokens[number] = out
        if slot.request.sampling.logprobs is not None:
            output.logprobs[number] = [TokenLogprobs(t, -1.0, 1, [], []) for t in out]
        if self.rng.random() < self.draft_rate:
            output.drafts[number] = self._guess(slot)

    def _guess(self, slot: Slot) -> list[int]:
        tokens, hashes, guesses = list(slot.tokens), list(slot.hashes), []
        for _ in range(self.rng.randint(1, 5)):
            extend_hashes(hashes, tokens)
            right = sample(slot.request, slot.index, hashes[-1], len(tokens) - len(slot.request.tokens))
            tokens.append(right if self.rng.random() < 0.7 else self.rng.randrange(VOCAB))
            guesses.append(tokens[-1])
        return guesses

    def check_index(self, scheduler: Scheduler) -> None:
        """Every block that the prefix index names holds what its key says."""
        if self.states is not None:
            assert scheduler._tables.states is not None
            self.states.poison(scheduler._tables.states)
            self.states.check_snapshots(scheduler._tables.states)
        for key, block in scheduler._tables.prefix.entries():
            (adapter, salt), tokens = key[0], list(key[1:])
            hashes = [root_hash(adapter, salt)]
            extend_hashes(hashes, tokens)
            first = (len(tokens) - 1) // self.block_size * self.block_size
            slabs, owned = self.mapped[block], scheduler._tables.slabs
            whole = owned is None or owned.is_whole(block)
            for slab in slabs if whole else slabs[: self.shape.full]:
                for position in range(first, len(tokens)):
                    assert self.kv[slab][position - first] == hashes[position + 1], "the index names wrong KV"


class Journal:
    """What came out, by request and sample."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[int]] = {}
        self.prompt_logprobs: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], Delta] = {}
        self.deltas: dict[tuple[str, int], list[Delta]] = {}
        self.before: dict[str, list[int]] = {}  # by fork: the output it begins with

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in self.ends, "a delta of a sequence that has ended"
            tokens = self.tokens.setdefault(key, [])
            tokens += delta.tokens
            self.deltas.setdefault(key, []).append(delta)
            if delta.prompt_logprobs:
                others = [
                    self.tokens[id, index] for id, index in self.tokens if id == delta.request_id and index
                ]
                assert not any(others), "a sample spoke before the prompt had all its scores"
            assert delta.usage.num_output == len(self.before.get(delta.request_id, ())) + len(tokens)
            self.logprobs.setdefault(key, []).extend(e.token for e in delta.logprobs or [])
            self.prompt_logprobs.setdefault(key, []).extend(e.token for e in delta.prompt_logprobs or [])
            if delta.finish_reason is not None:
                self.ends[key] = delta


class Loop:
    """Up to `depth` steps in flight: planned and computed in order, their results taken in later."""

    def __init__(self, scheduler: Scheduler, executor: FakeExecutor, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.flight: deque[tuple[ScheduledBatch, StepOutput | None]] = deque()

    def plan(self) -> ScheduledBatch | None:
        """Plan and compute one more step, if there is room and something to compute."""
        batch = self.scheduler.schedule() if len(self.flight) < self.depth else None
        if batch is not None:
            self.flight.append((batch, self.executor.step(batch)))
            self.check()
        return batch

    def take(self) -> list[Delta]:
        """The deltas of the oldest step in flight. If it failed, all are taken back."""
        batch, output = self.flight.popleft()
        if output is None:
            self.flight.clear()
            self.executor.broken = False
            deltas = self.scheduler.undo("made to fail")
        else:
            deltas = self.scheduler.update(batch, output, seconds=self.executor.rng.random() / 10)
        self.check()
        return deltas

    def check(self) -> None:
        self.scheduler.check()
        if not self.executor.broken:
            self.executor.check_index(self.scheduler)


def drain(
    scheduler: Scheduler, executor: FakeExecutor, journal: Journal, depth: int = 1, max_steps: int = 5000
) -> list[ScheduledBatch]:
    """Step until nothing is left; the batches."""
    batches: list[ScheduledBatch] = []
    loop = Loop(scheduler, executor, depth)
    while scheduler.has_work:
        while batch := loop.plan():
            batches.append(batch)
        assert loop.flight, "there is work, but nothing to compute and no result to come"
        journal.take(loop.take())
        assert len(batches) < max_steps, "livelock"
    return batches
