"""Samples on a device: the tokens that the CPU draws from the same logits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from quire.devices.cpu.sampler import NativeSampler
from quire.devices.cuda.copies import Fetched, sent
from quire.devices.cuda.drafts import CudaDraws, device_rows
from quire.devices.cuda.errors import device_errors
from quire.devices.cuda.kernels import sample
from quire.devices.cuda.launch import Launcher
from quire.devices.host import HostLogits, check_rows
from quire.devices.protocol import Array, IntArray
from quire.devices.reference.logits import truncate
from quire.devices.reference.sampler import draw, is_sound
from quire.devices.sampling import (
    BAD_LOGITS,
    NOT_DRAWN,
    NOTHING_ALLOWED,
    Logits,
    Pending,
    Samples,
    SlotSampling,
    TokenMask,
    edits_logits,
    has_penalties,
    is_greedy,
    lowest_scaled,
)
from quire.errors import EngineError


class Drawn:
    """Tokens that the device draws. `guessed` are the drafts behind rows."""

    def __init__(self, sampler: CudaSampler, fetched: Fetched, slots: list[int], guessed: list[int]) -> None:
        self._sampler, self._fetched, self._slots, self._guessed = sampler, fetched, slots, guessed
        self._owners = [sampler.turns[slot] for slot in slots]  # a slot that is taken anew gets no token
        self._samples: Samples | None = None

    def result(self) -> Samples:
        """Wait for the tokens, and append them to the outputs of slots that were not taken anew."""
        if self._samples is None:
            self._sampler.settle(self)
            self._samples = samples = Samples([NOT_DRAWN] * len(self._slots))
            for i, token in enumerate(self._fetched.result().tolist()):
                before, follows = samples.tokens[i - 1], i > 0 and self._slots[i - 1] == self._slots[i]
                if follows and (before == NOT_DRAWN or before != self._guessed[i - 1]):
                    continue
                if token >= 0:
                    samples.tokens[i] = token
                else:
                    samples.errors[i] = BAD_LOGITS if token == sample.BAD else NOTHING_ALLOWED
            self._sampler.append(self._slots, self._owners, samples.tokens)
        return self._samples


class CudaSampler(NativeSampler):
    """Draws on the device. Only tokens are copied, and rows of which log-probabilities are asked.

    `last_tokens` on the device has the token drawn last for each slot. If it is `plain`, the host draws: slowly.
    """

    def __init__(self, vocab_size: int, pool: Any, run: Launcher, last_tokens: Any) -> None:
        super().__init__(vocab_size, pool)
        self.turns: Counter[int] = Counter()  # how often each slot was taken
        self._run, self.last_tokens, self.plain = run, last_tokens, False
        self._open: deque[Drawn] = deque()  # whose tokens are not in the outputs of their slots
        self._states: dict[int, SlotSampling] = {}
        self._edited = set[int]()  # slots that may change their logits before a token is drawn
        self.following = set[int]()  # of these, slots whose changes follow the tokens of their output
        self._numbers = np.zeros((len(last_tokens), 4), np.int64)  # by slot, as kernels/sample.py takes them
        self._reals = np.zeros((len(last_tokens), 4))

    def set(self, slot: int, state: SlotSampling) -> None:
        self.turns[slot] += 1
        super().set(slot, state)
        params, greedy, self._states[slot] = state.params, is_greedy(state.params), state
        self._edited.discard(slot)
        self.following.discard(slot)
        if edits_logits(params, state.bad_words):
            self._edited.add(slot)
            if has_penalties(params) or state.bad_words:
                self.following.add(slot)
        inverse = 1.0 if greedy else 1.0 / params.temperature
        self._numbers[slot] = np.uint64(state.seed).view(np.int64), 0, params.top_k, greedy
        self._reals[slot] = inverse, params.top_p, np.float32(inverse), lowest_scaled(params)

    def clear(self, slot: int) -> None:
        self.turns[slot] += 1
        super().clear(slot)
        self._states.pop(slot, None)

    def extend(self, slot: int, tokens: list[int]) -> None:
        super().extend(slot, tokens)
        self._states[slot].output_tokens += tokens

    def retract(self, slot: int, count: int) -> None:
        super().retract(slot, count)
        output = self._states[slot].output_tokens
        del output[len(output) - count :]

    def settle(self, drawn: Drawn | None = None) -> None:
        """Wait for what was drawn before, or for all."""
        while self._open and self._open[0] is not drawn:
            self._open[0].result()

    def append(self, slots: list[int], owners: list[int], tokens: list[int]) -> None:
        """Append drawn tokens, the oldest that are open, to the outputs of their slots."""
        self._open.popleft()
        for slot, owner, token in zip(slots, owners, tokens, strict=True):
            if token != NOT_DRAWN and self.turns[slot] == owner:
                self.extend(slot, [token])

    @device_errors()
    def sample(
        self,
        logits: Logits,
        slots: list[int],
        positions: list[int],
        drafts: list[int] | None = None,
        masks_LW: TokenMask | None = None,
    ) -> Pending[Samples]:
        tensor = device_rows(logits)
        if tensor.shape[1] != self.vocab_size:
            raise EngineError(f"logits must be [rows, {self.vocab_size}], got {list(tensor.shape)}")
        guessed = check_rows(len(logits), self.vocab_size, slots, positions, drafts, masks_LW)
        if unknown := [slot for slot in slots if slot not in self._states]:
            raise EngineError(f"slot {unknown[0]} was never set")
        if not self.following.isdisjoint(slots):
            self.settle()
        found = self._draw(tensor, slots, positions, guessed, masks_LW)
        drawn = Drawn(self, Fetched(found), slots, guessed)
        self._open.append(drawn)
        if drafts is None:
            self.last_tokens[sent(np.array(slots), found.device)] = found.clamp(min=0)
        else:
            self._keep_last(found, np.array(slots), np.array(guessed))
        wanted = [i for i, slot in enumerate(slots) if self._states[slot].params.wants_logprobs]
        if not wanted:
            return drawn
        samples = drawn.result()
        for i in wanted:
            if samples.tokens[i] != NOT_DRAWN:
                target = np.array(samples.tokens[i : i + 1], np.int32)
                num_top = self._states[slots[i]].params.logprobs or 0
                [samples.logprobs[i]] = self.logprobs(logits[i : i + 1], target, num_top)
        return samples

    def _draw(
        self, logits: Any, slots: list[int], positions: list[int], drafts: list[int], masks: TokenMask | None
    ) -> Any:
        """Draw a token for each row as if the drafts before it were drawn: int32 [L]."""
        behind, before = list[list[int]](), list[int]()
        for i, slot in enumerate(slots):
            before = [*before, drafts[i - 1]] if i and slots[i - 1] == slot else []
            unseen = positions[i] - self._states[slot].position - len(before)
            if unseen and not self._open:
                raise EngineError(
                    f"slot {slot} is at position {self._states[slot].position}, not {positions[i]}"
                )
            behind.append([0] * unseen + before)  # their number counts, of slots that do not follow them
        given = None if masks is None else sent(masks.view(np.int32), logits.device)
        return self.drawn(self._changed(logits, slots, behind), slots, positions, given)

    def draw_ahead(self, logits: Any, slots: list[int], positions: list[int]) -> Any:
        """Draw as `sample` does behind tokens that nobody has seen, for slots which do not depend on them."""
        if not self._edited.isdisjoint(slots):
            ahead = [at - self._states[slot].position for slot, at in zip(slots, positions, strict=True)]
            logits = self._changed(logits, slots, [[0] * count for count in ahead])
        return self.drawn(logits, slots, positions)

    def _changed(self, logits: Any, slots: list[int], behind: list[list[int]]) -> Any:
        """Return the logits as requests change them, after tokens `behind` the outputs of their slots."""
        if self._edited.isdisjoint(slots):
            return logits
        changed = logits.clone()
        for row, slot, tokens in zip(changed, slots, behind, strict=True):
            if slot in self._edited:
                edit(row, self._states[slot], self._states[slot].output_tokens + tokens)
        return changed

    def _keep_last(self, found: Any, slots: Array, guessed: Array) -> None:
        """Keep the last token of each slot that follows drafts which were drawn; rows of a slot are side by side."""
        begins = np.flatnonzero(np.diff(slots, prepend=-1))
        owners = np.repeat(np.arange(len(begins)), np.diff([*begins, len(slots)]))
        device = found.device
        guesses, firsts, owner = sent(np.stack([guessed, begins[owners], owners]), device)
        first, slot = sent(np.stack([begins, slots[begins]]), device)
        wrong = (found != guesses).long()
        before = wrong.cumsum(0) - wrong
        rows = torch.zeros_like(first).index_add_(0, owner, (before == before[firsts]).long())
        self.last_tokens[slot] = found[first + rows - 1].clamp(min=0)

    def drawn(self, logits: Any, slots: list[int], positions: list[int], masks: Any = None) -> Any:
        """Draw a token for each row of logits as they are: int32 [L], see kernels/sample.py."""
        numbers, device = self._numbers[slots], logits.device
        if self.plain:
            every = [None] * len(slots) if masks is None else masks.cpu().numpy()
            rows = zip(logits.cpu().numpy(), every, slots, positions, strict=True)
            tokens = [drawn_plainly(row, mask, self._states[slot], at) for row, mask, slot, at in rows]
            return torch.tensor(tokens, dtype=torch.int32, device=device)
        numbers[:, 1] = positions
        out = torch.empty(len(slots), dtype=torch.int32, device=device)
        reals = sent(self._reals[slots], device)
        sample.sample(self._run, logits, masks, sent(numbers, device), reals, out)
        return out

    def keep_draws(self, width: int, target_ids: IntArray | None, draft_ids: IntArray | None) -> CudaDraws:
        return CudaDraws(self, width, target_ids, draft_ids)

    def _copied(self, logits: Logits) -> HostLogits:
        return HostLogits(device_rows(logits).cpu().numpy())


def drawn_plainly(row: Any, mask: Any, state: SlotSampling, position: int) -> int:
    """Draw from a row [V] of the host, whose changes were made, as devices/reference does."""
    if not is_sound(row):
        return sample.BAD
    if mask is not None:
        row = np.where(np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(row)], row, -np.inf)
    if row.max() == -np.inf:
        return sample.NOTHING
    if is_greedy(state.params):
        return int(row.argmax())
    return draw(row, truncate(row, state.params), state.params.temperature, state.seed, position)


def edit(row: Any, state: SlotSampling, output: list[int]) -> None:
    """Change a row [V] as devices/reference/logits.py does, whose order this is. An unsound row becomes NaN."""
    params, unsound = state.params, ~(row < torch.inf).all()

    def ids(tokens: Iterable[int]) -> Any:
        return torch.tensor([*tokens], dtype=torch.int64, device=row.device)

    if params.allowed_token_ids is not None:
        left = ids(set(params.allowed_token_ids))
        row.copy_(torch.full_like(row, -torch.inf).index_copy_(0, left, row[left]))
    ended = [word[-1] for word in state.bad_words if output[len(output) - len(word) + 1 :] == [*word[:-1]]]
    row[ids([*ended, *(state.stop_ids if len(output) < params.min_tokens else ())])] = -torch.inf
    bias = params.logit_bias or {}
    row[ids(bias)] += torch.tensor([*bias.values()], dtype=torch.float32, device=row.device)
    if params.repetition_penalty != 1.0:
        seen = ids({*state.prompt_tokens, *output})
        x = row[seen]
        penalty = torch.tensor(params.repetition_penalty, dtype=torch.float32, device=row.device)
        row[seen] = torch.where(x > 0, x / penalty, x * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        counts = Counter(output)
        often = torch.tensor([*counts.values()], dtype=torch.float32, device=row.device)
        row[ids(counts)] -= often * float(np.float32(params.frequency_penalty))
        row[ids(counts)] -= float(np.float32(params.presence_penalty))
    row.masked_fill_(unsound, torch.nan)
