"""Commands of an engine to its other ranks, and their answers. Knows frames and arrays; knows no process."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from msgspec.structs import astuple

from quire.devices.protocol import IntArray, Limits, ModelInput, StateInput
from quire.errors import EngineError
from quire.ranks.connections import Address

MOST_COMMAND = 1 << 28
"""A command has at most MOST_COMMAND bytes: far above the arrays of any step."""
MOST_REPORT = 1 << 16


class RankLaunch(msgspec.Struct, frozen=True, array_like=True):
    """The task of a rank, and where it reaches the others: `addresses` by rank.

    `cache` has the sizes of the KV cache, as Backend.kv_cache takes them, `table` those of a block table that steps
    append to.
    All ranks of a stage tap the same layers, because what is tapped is computed for all tokens.
    """

    limits: Limits
    cache: tuple[int, ...]
    taps: tuple[int, ...]
    table: tuple[int, int]
    addresses: list[Address]


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`Executable.run`: the arrays of a ModelInput, with the block tables of the step's sequences alone.

    `arrays` are tokens, positions, cu_q, kv_len, block table and logit rows; `adapters` and `states`, the arrays of a
    StateInput, are empty if there are none. With `slots` of sequences, the table is what was appended to it; `unseen`
    as in ModelInput.
    """

    arrays: tuple[bytes, bytes, bytes, bytes, bytes, bytes]
    adapters: bytes = b""
    states: tuple[bytes, ...] = ()
    slots: bytes = b""
    unseen: bytes = b""


class RunHead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`Executable.logits`."""

    start: int
    stop: int


class CopyBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`KVCache.copy_blocks`."""

    copies: list[tuple[int, int]]


class CopyStates(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`KVCache.copy_states`."""

    copies: list[tuple[int, int]]


class PlaceAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`Executable.adapt` with the rank's share of an adapter, which it reads itself. The rank answers."""

    slot: int
    path: str
    digest: str


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`Executable.adapt` without an adapter."""

    slot: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`MemoryRelease.release`. The rank answers."""

    parts: tuple[str, ...]


class Restore(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`MemoryRelease.restore`. The rank answers."""

    parts: tuple[str, ...]


InOrder = RunStep | RunHead | CopyBlocks | CopyStates | DropAdapter
"""InOrder are commands that a rank obeys one after another, as steps."""
Command = InOrder | PlaceAdapter | Release | Restore


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank has loaded its share."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank is alive."""


class RankAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank has obeyed, or could not because of an error: with `refused` a ModelError."""

    error: str = ""
    refused: bool = False


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank ends because of an error."""

    error: str


Report = RankReady | Beat | RankAnswer | RankFailed

encode = msgspec.msgpack.Encoder().encode
decode_launch = msgspec.msgpack.Decoder(RankLaunch).decode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode


def packed_step(inputs: ModelInput, block_size: int) -> RunStep:
    table, slots, unseen = inputs.appended_C3, inputs.slots_B, inputs.unseen_U2
    if table is None:
        used = -(-int(inputs.kv_len_B.max()) // block_size) if len(inputs.kv_len_B) else 0
        table, slots = inputs.block_table_SM[slots, :used], slots[:0]
    arrays = inputs.tokens_T, inputs.positions_T, inputs.cu_q_B1, inputs.kv_len_B, table, inputs.logit_rows_L
    tokens, positions, cu_q, kv_len, blocks, rows = (array.tobytes() for array in arrays)
    adapters, places = (b"" if array is None else array.tobytes() for array in (inputs.adapters_B, unseen))
    states = () if inputs.states is None else tuple(array.tobytes() for array in astuple(inputs.states))
    return RunStep((tokens, positions, cu_q, kv_len, blocks, rows), adapters, states, slots.tobytes(), places)


def unpacked_step(step: RunStep, kept: IntArray) -> ModelInput:
    """Unpack a step; what it appends to block tables goes to those `kept`. EngineError: its arrays have wrong sizes."""
    try:
        tokens, positions, cu_q, kv_len, table, rows = (np.frombuffer(data, np.int32) for data in step.arrays)
        count, appended = len(kv_len), None
        slots, unseen = np.arange(count, dtype=np.int32), np.frombuffer(step.unseen, np.int32).reshape(-1, 2)
        if step.slots:
            slots, appended = np.frombuffer(step.slots, np.int32), table.reshape(-1, 3)
            kept[appended[:, 0], appended[:, 1]] = appended[:, 2]
            table = kept
        else:
            table = table.reshape(count, -1)
        adapters = np.frombuffer(step.adapters, np.int32) if step.adapters else None
        arrays = tokens, positions, cu_q, kv_len, slots, table, rows
        return ModelInput(
            *arrays, adapters_B=adapters, states=_states(step.states, count), appended_C3=appended,
            unseen_U2=unseen if len(unseen) else None,
        )  # fmt: skip
    except (ValueError, IndexError) as error:
        raise EngineError(f"a step that is damaged: {error}") from error


def _states(data: tuple[bytes, ...], count: int) -> StateInput | None:
    if not data:
        return None
    rows, opened, kept, marks = (np.frombuffer(each, np.int32) for each in data)
    return StateInput(rows.reshape(count), opened.reshape(count), kept.reshape(count), marks.reshape(-1, 3))
