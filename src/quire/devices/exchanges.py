"""Ways for ranks to exchange activations, by name. Loads torch for gloo alone."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from quire import _native as native
from quire.devices.hidden import HiddenRows
from quire.devices.peers import Peers
from quire.devices.registry import device_of_rank, on_cpu
from quire.lazy import Lazy, need
from quire.weights.tensor import FloatArray

if TYPE_CHECKING:
    import quire.devices.sockets as sockets
    import quire.devices.torch.exchange as gloo
else:
    sockets = Lazy("quire.devices.sockets")
    gloo = Lazy("quire.devices.torch.exchange")


class Connected(Protocol):
    """Connections to the other ranks."""

    def connect(self, links: Mapping[int, socket.socket], seconds: float) -> None:
        """Use these connections to the other ranks from now on, or agree over them on others."""

    def close(self) -> None:
        """Close the connections."""

    def abort(self, rank: int) -> None:
        """End all waiting with a RuntimeError, because `rank` has gone."""


class StageLink(Connected, Protocol):
    """A connection to a rank of the next stage or the previous one: hidden states pass in the order of steps."""

    def send(self, hidden: HiddenRows) -> None:
        """Send a step's hidden states to the next stage. OSError, RuntimeError: it has gone."""

    def receive(self, num_tokens: int) -> HiddenRows:
        """Receive the hidden states [num_tokens, D] of the next step. RuntimeError: the previous stage has gone."""


class Exchange(Connected, Protocol):
    """A way in which ranks pass arrays to each other. `Peers` made of it add and gather, in the order of ranks."""

    def exchange(self, parts: FloatArray) -> None:
        """Send this rank's row of `parts` [size, n] to all others, and fill in theirs.

        RuntimeError: a rank is gone or does not answer.
        """


ExchangeName = Literal["tcp", "gloo"]


def peers_bytes(size: int) -> int:
    """Count the bytes of the file through which `size` ranks of one machine exchange activations."""
    return int(native.Peers.bytes(size))


def make_peers(file: int, rank: int, size: int, patience: float) -> Peers:
    """Return a rank's connection to the others, for graphs of any backend with host memory.

    `file` is a descriptor of `peers_bytes` zero bytes. A rank that does not answer for `patience` seconds is an error.
    """
    peers: Peers = native.Peers(file, rank, size, patience)
    return peers


def make_exchange(kind: ExchangeName, rank: int, size: int, patience: float) -> Exchange:
    """Make a way for ranks without common memory to exchange activations. ConfigError: its library is missing."""
    if kind == "tcp":
        return sockets.SocketExchange(rank, size, patience)
    need("--disable-custom-all-reduce", "torch")
    return gloo.GlooExchange(rank, size, patience)


def passes_tensors(device: str, backend: str) -> bool:
    """Tell whether ranks exchange tensors of their GPUs, and not arrays of the host."""
    return not on_cpu(device, backend) and device.startswith(("auto", "cuda", "interpreter"))


def make_device_peers(device: str, rank: int, size: int, patience: float) -> gloo.TorchPeers:
    """Return a rank's connection to the others over which tensors of its GPU pass, or of the interpreter's."""
    return gloo.TorchPeers(rank, size, patience, _gpu(device))


def make_device_stage(device: str, receives: bool, patience: float) -> StageLink:
    """Return a connection between stages over which tensors of GPUs pass, or of the interpreter's."""
    return gloo.TorchStage(int(receives), patience, _gpu(device))


def _gpu(device: str) -> str | None:
    need(f"--device {device}", "torch")
    return None if device == "interpreter" else device_of_rank(device, "auto", 0)


def peers_over(exchange: Exchange, rank: int, size: int) -> Peers:
    """Return a rank's connection to the others that exchanges activations in another way than through memory."""
    peers: Peers = native.Peers.over(exchange, rank, size)
    return peers
