"""The residual stream between pipeline stages: arrays over a connection, in the order of steps."""

from __future__ import annotations

import queue
import socket
import threading

import numpy as np

from quire.devices.protocol import FloatArray
from quire.engine.wire import LENGTH


class StageInput:
    """The previous stage's output. A thread reads ahead, so that the stage need not wait until this one is ready."""

    def __init__(self, width: int, max_tokens: int) -> None:
        self._width, self._most = width, 4 * width * max_tokens
        self._found: queue.SimpleQueue[FloatArray | str] = queue.SimpleQueue()

    def connect(self, connection: socket.socket) -> None:
        threading.Thread(target=self._read, args=(connection,), name="quire-stage", daemon=True).start()

    def receive(self, num_tokens: int) -> FloatArray:
        """Receive the hidden states [num_tokens, D] of the next step. RuntimeError: the previous stage has gone."""
        found = self._found.get()
        if isinstance(found, str):
            self._found.put(found)
            raise RuntimeError(found)
        return found.reshape(num_tokens, self._width)

    def abort(self, rank: int) -> None:
        """End all waiting, because a rank has gone."""
        self._found.put(f"rank {rank} has ended")

    def _read(self, connection: socket.socket) -> None:
        header = bytearray(LENGTH.size)
        with connection:
            while _filled(connection, memoryview(header)):
                (size,) = LENGTH.unpack(header)
                if size % (4 * self._width) or size > self._most:
                    break
                hidden = np.empty(size // 4, np.float32)
                if not _filled(connection, hidden.data.cast("B")):
                    break
                self._found.put(hidden)
        self._found.put("the previous stage has ended")


def send_hidden(connection: socket.socket, hidden_TD: FloatArray) -> None:
    """Send hidden states to the next stage. OSError: it has gone."""
    connection.sendall(LENGTH.pack(hidden_TD.nbytes))
    connection.sendall(np.ascontiguousarray(hidden_TD).data)


def _filled(connection: socket.socket, left: memoryview) -> bool:
    """Fill memory from the stream; False if it ends before."""
    try:
        while left:
            count = connection.recv_into(left)
            if not count:
                return False
            left = left[count:]
    except OSError:
        return False
    return True
