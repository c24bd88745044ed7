"""Ways for ranks to exchange activations, by name. Loads torch for gloo alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from quire import _native as native
from quire.lazy import Lazy, need

if TYPE_CHECKING:
    import quire.devices.sockets as sockets
    import quire.devices.torch.exchange as gloo
    from quire.devices.peers import Exchange, Peers
else:
    sockets = Lazy("quire.devices.sockets")
    gloo = Lazy("quire.devices.torch.exchange")

ExchangeName = Literal["tcp", "gloo"]


def peers_bytes(size: int) -> int:
    """Bytes of the file through which `size` ranks of one machine exchange activations."""
    return int(native.Peers.bytes(size))


def make_peers(file: int, rank: int, size: int, patience: float) -> Peers:
    """A rank's connection to the others, for graphs of any backend with host memory.

    `file` is a descriptor of `peers_bytes` zero bytes. A rank that does not answer for `patience` seconds is an error.
    """
    peers: Peers = native.Peers(file, rank, size, patience)
    return peers


def make_exchange(kind: ExchangeName, rank: int, size: int, patience: float) -> Exchange:
    """A way for ranks without common memory to exchange activations. ConfigError: its library is not installed."""
    if kind == "tcp":
        return sockets.SocketExchange(rank, size, patience)
    need("--disable-custom-all-reduce", "torch")
    return gloo.GlooExchange(rank, size, patience)


def peers_over(exchange: Exchange, rank: int, size: int) -> Peers:
    """A rank's connection to the others that exchanges activations in another way than through memory."""
    peers: Peers = native.Peers.over(exchange, rank, size)
    return peers
