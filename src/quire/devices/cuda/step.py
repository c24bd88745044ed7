"""One step on a device: its numbers, copied at once, its values in the arena, and the work lists of its layers."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.devices.cuda.arena import PIECE, ROWS, TOKENS, Arena
from quire.devices.cuda.cache import CudaKVCache
from quire.devices.cuda.copies import aligned, sent
from quire.devices.cuda.fuse import SCALE
from quire.devices.cuda.hidden import CudaRows
from quire.devices.cuda.kernels.attention import LayerCache, StepTensors, WorkTensors, work_tensors
from quire.devices.cuda.kernels.experts import Experts, ExpertScratch, expert_scratch
from quire.devices.cuda.kernels.recurrent import StateStep
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.plain import plain_step
from quire.devices.cuda.tiles import attention_tiles
from quire.devices.cuda.work import WorkShape, work_list
from quire.devices.inputs import received
from quire.devices.ops import Value
from quire.devices.protocol import FloatArray, ModelInput
from quire.devices.torch.cache import TorchStep

if TYPE_CHECKING:
    from quire.devices.cuda.adapters import StepAdapters


class CudaStep:
    """A `ModelInput` on the device. `step[value]` is a value's tensor [rows, width], wherever its operation is.

    `mirror` is the device's copy of the block table [S, M], which takes what the step appends. Without it the table is
    compact: row b holds the blocks that sequence b uses. `tapped` fills with the tapped tensors.
    """

    def __init__(
        self, inputs: ModelInput, arena: Arena, memory: Any, cache: CudaKVCache, run: Launcher, mirror: Any
    ) -> None:
        self.inputs, self.cache, self.tapped = inputs, cache, list[Any]()
        self._arena, self._memory, self._run = arena, memory, run
        self.adapters: StepAdapters | None = None
        self.states: StateStep | None = None
        batch, size = len(inputs.kv_len_B), cache.block_size
        slot_T = np.repeat(inputs.slots_B, np.diff(inputs.cu_q_B1))
        block_T, offset_T = np.divmod(inputs.positions_T, size)
        places_T = inputs.block_table_SM[slot_T, block_T].astype(np.int64) * size + offset_T
        parts = [inputs.tokens_T, inputs.positions_T, inputs.logit_rows_L, inputs.cu_q_B1, inputs.kv_len_B]
        if mirror is None:
            table_BM = inputs.block_table_SM[inputs.slots_B, : -(-int(inputs.kv_len_B.max()) // size)]
            parts += [np.arange(batch, dtype=np.int32), table_BM.reshape(-1)]
        else:
            assert inputs.appended_C3 is not None
            parts += [inputs.slots_B, inputs.appended_C3]
        if inputs.unseen_U2 is not None:
            parts.append(inputs.unseen_U2)
        every = [aligned(part) for part in (places_T.view(np.int32), *parts)]
        sizes = [len(part) for part in every]
        packed = sent(np.concatenate(every), cache.device)
        places, *found = torch.split(packed, sizes)
        self.tokens, self.positions, self.logit_rows, cu_q, kv_len, rows, table, *self._unseen = (
            tensor[: part.size] for tensor, part in zip(found, parts, strict=True)
        )
        self.places = places.view(torch.int64)[: len(places_T)]
        if mirror is None:
            mirror = table.view(batch, -1)
        elif len(table):
            slots, columns, blocks = table.view(-1, 3).T
            mirror[slots.long(), columns.long()] = blocks
        self.sequences = StepTensors(cu_q, kv_len, rows, mirror)
        self._counts = {TOKENS: len(self.tokens), ROWS: len(self.logit_rows), PIECE: 0}
        self._views: dict[Value, Any] = {}
        self._works: dict[WorkShape, WorkTensors] = {}
        self._rooms: dict[tuple[Any, ...], ExpertScratch] = {}

    def fill_in(self, last_tokens: Any) -> None:
        """Take the tokens that the host has not seen from those drawn last [slots]."""
        for pairs in self._unseen:
            places, slots = pairs.view(-1, 2).T.long()
            self.tokens[places] = last_tokens[slots]

    def received(self, width: int) -> Any:
        """The hidden states [T, width] that come with the step. EngineError if missing or of another shape."""
        hidden = self.inputs.hidden_TD
        if isinstance(hidden, CudaRows) and hidden.tensor.shape == (len(self.tokens), width):
            return hidden.tensor
        return torch.from_numpy(received(self.inputs, width))

    def narrow(self, hidden: Value, start: int, stop: int) -> None:
        """Compute the logits of these logit rows next: the hidden states are theirs from now on."""
        self._counts[PIECE] = stop - start
        self._views = {hidden: self.rows_of(hidden)[start:stop]}

    def __getitem__(self, value: Value) -> Any:
        found = self._views.get(value)
        if found is None:
            found = self._views[value] = self.rows_of(value)
        return found

    def rows_of(self, value: Value) -> Any:
        """All rows of a value."""
        place = self._arena.places[value]
        count = self._counts[place.kind]
        size = count * place.width * place.dtype.itemsize
        return self._memory[place.begin : place.begin + size].view(place.dtype).view(count, place.width)

    def kind(self, value: Value) -> int:
        """Tell what the rows of a value are: TOKENS, ROWS or a PIECE."""
        return self._arena.places[value].kind

    def optional(self, value: Value | None) -> Any:
        return None if value is None else self[value]

    def routes(self, value: Value) -> tuple[Any, Any]:
        """The ids int32 and the weights float32 [T, C] of a Route, side by side in its place."""
        count, width = len(self.tokens), self._arena.places[value].width // 2
        begin, first = self._arena.places[value].begin, -(-self._arena.max_tokens * width * 4 // 16) * 16
        ids, weights = (self._memory[start : start + 4 * count * width] for start in (begin, begin + first))
        return ids.view(torch.int32).view(count, width), weights.view(torch.float32).view(count, width)

    def codes(self, value: Value) -> tuple[Any, Any]:
        """Int8 codes [rows, D] and their scales float32 [rows], one behind the other in the place of a value."""
        place = self._arena.places[value]
        count, width = self._counts[place.kind], place.width - SCALE
        scales = place.begin + -(-count * width // 16) * 16
        codes = self._memory[place.begin : place.begin + count * width].view(torch.int8).view(count, width)
        return codes, self._memory[scales : scales + 4 * count].view(torch.float32)

    def room(self, x: Any, chosen: int, experts: Experts, width: int) -> ExpertScratch:
        """Room for a mixture of rows x, which layers of equal shapes share."""
        rounds = experts.up.rounds or experts.down.rounds
        key = chosen, experts.sizes.shape[0], experts.largest, width, experts.up.form, rounds
        if key not in self._rooms:
            made = expert_scratch(self._run, x, chosen, experts, width, self.empty)
            self._rooms[key] = made
        return self._rooms[key]

    def empty(self, *shape: int, dtype: Any) -> Any:
        """Room that this step needs alone."""
        return torch.empty(shape, dtype=dtype, device=self.cache.device)

    @cached_property
    def plain(self) -> TorchStep:
        """The step for operations without a kernel."""
        return plain_step(self.inputs, self.cache)

    def host(self, value: Value) -> FloatArray:
        """A value in host memory, float32."""
        found: FloatArray = self[value].float().cpu().numpy()
        return found

    def put(self, value: Value, given: FloatArray) -> None:
        """Copy a value from host memory."""
        self[value].copy_(torch.from_numpy(given))

    def work(
        self, num_heads: int, width: int, layer: LayerCache, window: int, chunk: int, ahead: int
    ) -> tuple[WorkShape, WorkTensors]:
        """The work list of a layer whose values are `width` wide, which layers of equal shapes share."""
        groups, by_token = layer.keys.shape[1], layer.keys.dtype == torch.int8
        tiles = attention_tiles(self._run.target.family, width, by_token, latent=layer.values is None)
        shape = WorkShape(num_heads, groups, tiles.few, window, chunk, ahead)
        if len(self.tokens) > len(self.sequences.kv_len) * shape.tokens_of_tile:
            shape = WorkShape(num_heads, groups, tiles.many, window, chunk, ahead)
        if shape not in self._works:
            self._works[shape] = self._listed(shape, width)
        return shape, self._works[shape]

    def _listed(self, shape: WorkShape, width: int) -> WorkTensors:
        work = work_list(self.inputs.cu_q_B1, self.inputs.kv_len_B, shape, self._run.target.processors)
        return work_tensors(work, shape, width, partial(sent, device=self.cache.device), self.empty)
