"""The engine's executable and KV cache when other ranks compute with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from quire.devices.adapters import Adapter
from quire.devices.hidden import HiddenRows
from quire.devices.protocol import Executable, KVCache, ModelInput
from quire.devices.sampling import Logits
from quire.engine.memory_release import MemoryRelease
from quire.errors import DeviceMemoryError, EngineError, QuireError
from quire.ranks import commands
from quire.ranks.control import Ranks, send

T = TypeVar("T")
M = TypeVar("M")


class RankedExecutable:
    """The engine's executable, which has the other ranks of its stage compute the same, after the stages `ahead`."""

    def __init__(self, own: Executable, ranks: Ranks, block_size: int, ahead: EarlierStages | None) -> None:
        self._own, self._ranks, self._block_size, self._ahead = own, ranks, block_size, ahead

    def run(self, inputs: ModelInput) -> Logits:
        def compute() -> Logits:
            stage = self._ranks.input
            if stage is None:
                return self._own.run(inputs)
            hidden_TD = stage.receive(len(inputs.tokens_T))
            return self._own.run(msgspec.structs.replace(inputs, hidden_TD=hidden_TD))

        if self._ahead is not None:
            self._ahead.begin(msgspec.structs.replace(inputs, logit_rows_L=inputs.logit_rows_L[:0]))
        return self._together(commands.packed_step(inputs, self._block_size), compute)

    def logits(self, start: int, stop: int) -> Logits:
        return self._together(commands.RunHead(start, stop), lambda: self._own.logits(start, stop))

    def hidden(self) -> HiddenRows:
        return self._own.hidden()

    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        if adapter is None:
            send(self._ranks.members, commands.DropAdapter(slot))  # no step that has begun uses it
        else:
            with self._ranks.obeying(commands.PlaceAdapter(slot, adapter.path, adapter.digest)):
                pass
        return self._own.adapt(slot, adapter)

    def taps(self) -> tuple[HiddenRows, ...]:
        return self._own.taps()

    def _together(self, command: commands.Command, own: Callable[[], T]) -> T:
        send(self._ranks.peers, command)
        try:
            return own()
        except DeviceMemoryError as error:
            raise EngineError(str(error)) from error  # other ranks are in the middle of the step
        except QuireError:
            raise
        except RuntimeError as error:
            raise self._ranks.failure(error) from error


class RankedKVCache:
    """The engine's KV cache, whose blocks the other ranks of its stage copy too, and the stages `ahead`."""

    def __init__(self, own: KVCache, ranks: Ranks, ahead: EarlierStages | None) -> None:
        self.own, self._ranks, self._ahead = own, ranks, ahead
        self.spec, self.num_blocks, self.block_size = own.spec, own.num_blocks, own.block_size

    def place_blocks(self, rows: Sequence[Sequence[int]]) -> None:
        raise EngineError("ranks keep blocks whole")

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        send(self._ranks.peers, commands.CopyBlocks(list(copies)))
        if self._ahead is not None:
            self._ahead.copy_blocks(copies)
        self.own.copy_blocks(copies)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        send(self._ranks.peers, commands.CopyStates(list(copies)))
        if self._ahead is not None:
            self._ahead.copy_states(copies)
        self.own.copy_states(copies)


class RankedMemoryRelease(MemoryRelease[M]):
    """The engine's memory, and the other ranks'."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        """`parts` as in MemoryRelease."""
        super().__init__(*parts)
        self._ranks = ranks

    def release(self, parts: Sequence[str]) -> None:
        with self._ranks.obeying(commands.Release(tuple(parts))):
            super().release(parts)

    def _take(self, parts: Sequence[str]) -> bool:
        with self._ranks.obeying(commands.Restore(tuple(parts))):
            return super()._take(parts)


class EarlierStages:
    """The stages before the engine's: they begin with a step while the engine still computes the one before."""

    def __init__(self, ranks: Ranks, block_size: int) -> None:
        self._ranks, self._block_size = ranks, block_size

    def begin(self, inputs: ModelInput) -> None:
        """Compute a step, whose rows of logits are not known yet."""
        send(self._ranks.earlier, commands.packed_step(inputs, self._block_size))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        send(self._ranks.earlier, commands.CopyBlocks(list(copies)))

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        send(self._ranks.earlier, commands.CopyStates(list(copies)))
