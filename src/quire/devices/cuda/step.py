"""One step on a device: its numbers, copied at once, its values in the arena, and the work lists of its layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.devices.cuda.arena import PIECE, ROWS, TOKENS, Arena, Place
from quire.devices.cuda.cache import CudaKVCache
from quire.devices.cuda.copies import aligned, padded, sent
from quire.devices.cuda.encoders.states import state_parts
from quire.devices.cuda.fuse import SCALE
from quire.devices.cuda.hidden import CudaRows
from quire.devices.cuda.kernels.attention import LayerCache, StepTensors, WorkTensors, work_tensors
from quire.devices.cuda.kernels.experts import Experts, ExpertScratch, expert_scratch
from quire.devices.cuda.kernels.recurrent import StateStep
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.plain import plain_step
from quire.devices.cuda.tiles import attention_tiles
from quire.devices.cuda.work import Work, WorkShape, work_list
from quire.devices.ops import Value
from quire.devices.peers import Peers
from quire.devices.protocol import Array, FloatArray, ModelInput
from quire.devices.torch.cache import TorchStep
from quire.devices.torch.exchange import TorchPeers, arrived

if TYPE_CHECKING:
    from quire.devices.cuda.adapters import StepAdapters


class CudaStep:
    """A `ModelInput` on the device. `step[value]` is a value's tensor [rows, width], wherever its operation is.

    With a `size` its tokens, sequences and logit rows are padded to that number, and each `fill` puts its numbers where
    the last one did: what is launched for one such step computes any other. Tokens of the padding go to a scratch
    block, and nothing attends for them. `closed` is room for closed states of attention. `tapped` has tapped tensors.
    """

    def __init__(
        self, arena: Arena, memory: Any, closed: Any, cache: CudaKVCache, run: Launcher, size: int = 0
    ) -> None:
        self.cache, self.size, self.tapped = cache, size, dict[Value, Any]()
        self._arena, self._memory, self._closed, self._run = arena, memory, closed, run
        self.adapters: StepAdapters | None = None
        self.states: StateStep | None = None
        self._numbers: Any = None
        self._sequences: list[Any] = []
        self._views: dict[Value, Any] = {}
        self._works: dict[WorkShape, WorkTensors] = {}
        self._lists: dict[WorkShape, Any] = {}  # the same lists of a step with a size, each as one tensor
        self._rooms: dict[tuple[Any, ...], ExpertScratch] = {}
        self._given: dict[int, int] = {}

    def fill(self, inputs: ModelInput, mirror: Any) -> bool:
        """Take the numbers of a step; False if they do not fit the size, and nothing is changed.

        `mirror` is the device's copy of the block table [S, M], which takes what the step appends, or if nobody says
        what that is, the blocks that its sequences use. Without a mirror the table is compact: row b is sequence b's.
        """
        self.inputs, counts = inputs, len(inputs.kv_len_B)
        works = {shape: self._listed(shape) for shape in self._lists}
        if any(work.partials > len(self._works[shape].partial_values) for shape, work in works.items()):
            return False
        lists = [work.flat for work in works.values()]
        parts, rest = self._parts(inputs, mirror is None), list[Any]([inputs.appended_C3])
        if inputs.appended_C3 is None or mirror is None:
            most = -(-int(inputs.kv_len_B.max()) // self.cache.block_size)
            rest = [inputs.block_table_SM[inputs.slots_B, :most]]
        rest += [] if inputs.unseen_U2 is None else [inputs.unseen_U2]
        every = [aligned(part) for part in (*parts, *lists, *rest)]
        sizes, count = [len(part) for part in every], len(parts)
        packed = sent(np.concatenate(every), self.cache.device)
        own, *others = torch.split(packed, [sum(sizes[:count]), *sizes[count:]])
        if self._numbers is None:
            self._numbers = own
            self._name(torch.split(own, sizes[:count]), parts)
        else:
            self._numbers.copy_(own)
        self._given = {TOKENS: len(inputs.tokens_T), ROWS: len(inputs.logit_rows_L), PIECE: 0}
        self._views = {}  # the last step narrowed the hidden states
        for kept, new in zip(self._lists.values(), others, strict=False):
            kept.copy_(new)
        table, *self._unseen = (
            new[: part.size] for new, part in zip(others[len(lists) :], rest, strict=True)
        )
        if mirror is None:
            mirror = table.view(counts, -1)
        elif inputs.appended_C3 is None:
            mirror[self._sequences[2][:counts].long(), : rest[0].shape[1]] = table.view(counts, -1)
        elif len(table):
            slots, columns, blocks = table.view(-1, 3).T
            mirror[slots.long(), columns.long()] = blocks
        cu_q, kv_len, rows = self._sequences
        self.sequences = StepTensors(cu_q, kv_len, rows, mirror)
        return True

    def _name(self, tensors: Sequence[Any], parts: Sequence[Array]) -> None:
        """Find the numbers of each kind where they were placed."""
        found = [tensor[: part.size] for tensor, part in zip(tensors, parts, strict=True)]
        places, self.tokens, self.positions, self.logit_rows, *sequences = found
        self.places, self._sequences = places.view(torch.int64), sequences[:3]
        if (states := self.inputs.states) is not None:
            some = states.kept_B < np.diff(self.inputs.cu_q_B1)
            self.states = StateStep(
                self.cache.num_open > 0 if self.size else bool(some.any()), *sequences[3:]
            )
        self._counts = {TOKENS: len(self.tokens), ROWS: len(self.logit_rows), PIECE: 0}

    def _parts(self, inputs: ModelInput, compact: bool) -> list[Array]:
        """Collect numbers of tokens, logit rows, sequences and states, padded to the size: int32, a place 64 bits.

        Sequences have rows of the block table by slot, or, if it is compact, in order.
        """
        slot_T = np.repeat(inputs.slots_B, np.diff(inputs.cu_q_B1))
        block_T, offset_T = np.divmod(inputs.positions_T, self.cache.block_size)
        places_T = inputs.block_table_SM[slot_T, block_T].astype(np.int64) * self.cache.block_size + offset_T
        slots = np.arange(len(inputs.slots_B), dtype=np.int32) if compact else inputs.slots_B
        sequences = inputs.cu_q_B1, inputs.kv_len_B, slots
        found: list[Array] = [places_T, inputs.tokens_T, inputs.positions_T, inputs.logit_rows_L, *sequences]
        if size := self.size:
            fills = self.cache.scratch, 0, 0, 0, len(inputs.tokens_T), 0, 0
            counts = size, size, size, size, size + 1, size, size
            found = [padded(part, *about) for part, *about in zip(found, counts, fills, strict=True)]
        return [found[0].view(np.int32), *found[1:], *state_parts(inputs, size)]

    def fill_in(self, last_tokens: Any, peers: Peers | None) -> None:
        """Take the tokens that the host has not seen from those drawn last [slots]; the first rank draws."""
        for pairs in self._unseen:
            places, slots = pairs.view(-1, 2).T.long()
            tokens = last_tokens[slots]
            if isinstance(peers, TorchPeers):
                peers.share(tokens)
            self.tokens[places] = tokens

    def receive(self, out: Any) -> None:
        """Take the hidden states [T, D] that come with the step. EngineError if missing or of another shape."""
        hidden, rows = self.inputs.hidden_TD, out[: len(self.inputs.tokens_T)]
        if isinstance(hidden, CudaRows) and hidden.tensor.shape == rows.shape:
            rows.copy_(hidden.tensor)
        else:
            arrived(self.inputs, rows)

    def narrow(self, hidden: Value, start: int, stop: int, size: int = 0) -> None:
        """Compute logits of these logit rows next, padded to a size: the hidden states are theirs from now on."""
        self._given[PIECE] = stop - start
        self._counts[PIECE] = count = size or stop - start
        self._views = {hidden: self._tensor(self._arena.places[hidden], start, count)}

    def __getitem__(self, value: Value) -> Any:
        found = self._views.get(value)
        if found is None:
            found = self._views[value] = self.rows_of(value)
        return found

    def rows_of(self, value: Value) -> Any:
        """Return all rows of a value, with those of the padding."""
        place = self._arena.places[value]
        return self._tensor(place, 0, self._counts[place.kind])

    def given(self, tensor: Any, value: Value) -> Any:
        """Return the rows of a tensor like a value that are not of the padding."""
        return tensor[: self._given[self.kind(value)]]

    def _tensor(self, place: Place, start: int, count: int) -> Any:
        row = place.width * place.dtype.itemsize
        memory = self._memory[place.begin + start * row : place.begin + (start + count) * row]
        return memory.view(place.dtype).view(count, place.width)

    def kind(self, value: Value) -> int:
        """Tell what the rows of a value are: TOKENS, ROWS or a PIECE."""
        return self._arena.places[value].kind

    def optional(self, value: Value | None) -> Any:
        return None if value is None else self[value]

    def routes(self, value: Value) -> tuple[Any, Any]:
        """Return the ids int32 and the weights float32 [T, C] of a Route, side by side in its place."""
        count, width = len(self.tokens), self._arena.places[value].width // 2
        begin, first = self._arena.places[value].begin, -(-self._arena.max_tokens * width * 4 // 16) * 16
        ids, weights = (self._memory[start : start + 4 * count * width] for start in (begin, begin + first))
        return ids.view(torch.int32).view(count, width), weights.view(torch.float32).view(count, width)

    def codes(self, value: Value) -> tuple[Any, Any]:
        """Return int8 codes [rows, D] and their float32 scales [rows], one behind the other in the place of a value."""
        place = self._arena.places[value]
        count, width = self._counts[place.kind], place.width - SCALE
        scales = place.begin + -(-count * width // 16) * 16
        codes = self._memory[place.begin : place.begin + count * width].view(torch.int8).view(count, width)
        return codes, self._memory[scales : scales + 4 * count].view(torch.float32)

    def room(self, x: Any, chosen: int, experts: Experts, width: int) -> ExpertScratch:
        """Find room for a mixture of rows x, which layers of equal shapes share."""
        about = [(side.rounds, side.inputs is None) for side in (experts.up, experts.down)]
        key = chosen, experts.sizes.shape[0], experts.largest, width, experts.up.form, *about
        if key not in self._rooms:
            made = expert_scratch(self._run, x, chosen, experts, width, self.empty)
            self._rooms[key] = made
        return self._rooms[key]

    def forget(self) -> None:
        """Let go of room that launches share: a graph's next replay finds it as its capture did, in no other launch."""
        self._rooms.clear()
        if self.adapters is not None:
            self.adapters.forget()

    def empty(self, *shape: int, dtype: Any) -> Any:
        """Make room that this step needs alone."""
        return torch.empty(shape, dtype=dtype, device=self.cache.device)

    @property
    def plain(self) -> TorchStep:
        """Return the step for operations without a kernel."""
        return plain_step(self.inputs, self.cache)

    def host(self, value: Value) -> FloatArray:
        """Return a value in host memory, float32."""
        found: FloatArray = self[value].float().cpu().numpy()
        return found

    def put(self, value: Value, given: FloatArray) -> None:
        """Copy a value from host memory."""
        self[value].copy_(torch.from_numpy(given))

    def work(
        self, num_heads: int, width: int, layer: LayerCache, window: int, chunk: int, ahead: int, listed: int,
        every: int,
    ) -> tuple[WorkShape, WorkTensors]:  # fmt: skip
        """Return the work list of a layer whose values are `width` wide, which layers of equal shapes share."""
        groups, by_token = layer.keys.shape[1], layer.keys.dtype == torch.int8
        tiles = attention_tiles(self._run.target.family, width, by_token, latent=layer.values is None)
        shape = WorkShape(num_heads, groups, tiles.few, window, chunk, ahead, listed, every)
        many = len(self.tokens) > len(self.sequences.kv_len) * shape.tokens_of_tile
        if many and not self.size and not listed:
            shape = dataclasses.replace(shape, tile=tiles.many)
        if shape not in self._works:
            self._works[shape] = self._placed(shape, width)
        return shape, self._works[shape]

    def _listed(self, shape: WorkShape) -> Work:
        work = work_list(self.inputs.cu_q_B1, self.inputs.kv_len_B, shape, self._run.target.processors)
        return work.padded(shape, self.size, self._run.target.processors) if self.size else work

    def _placed(self, shape: WorkShape, width: int) -> WorkTensors:
        """Place a list, and room for its closed states; of a step with a size, all room that there is."""
        work, left = self._listed(shape), [self._closed]

        def room(*sizes: int, dtype: Any) -> Any:
            count = math.prod(sizes) * dtype.itemsize
            if count > len(left[0]):
                return self.empty(*sizes, dtype=dtype)
            piece, left[0] = left[0][:count], left[0][count:]
            return piece.view(dtype).view(sizes)

        if not self.size:
            return work_tensors(work, shape, width, partial(sent, device=self.cache.device), room)
        self._lists[shape] = whole = sent(work.flat, self.cache.device)
        pieces = iter(torch.split(whole, [rows.size for rows in work.lists]))
        most = max(work.partials, len(self._closed) // shape.state_bytes(width))
        given = dataclasses.replace(work, partials=most)
        return work_tensors(given, shape, width, lambda rows: next(pieces).view(rows.shape), room)
