"""The backends by name: the values of `--backend` and `--isa`, and what makes each.

A backend's module is imported when it is first used, so a machine needs only what its own backend needs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quire.errors import ConfigError
from quire.lazy import Lazy, need

if TYPE_CHECKING:
    import quire._native as native
    import quire.devices.cpu.backend as cpu
    import quire.devices.cpu.machine as machine
    import quire.devices.reference.backend as reference
    import quire.devices.sockets as sockets
    import quire.devices.torch.backend as torch
    import quire.devices.torch.exchange as gloo
    import quire.devices.torch.foreign as transformers
    from quire.devices.foreign import ForeignModel
    from quire.devices.peers import Exchange
    from quire.devices.protocol import Backend, Peers
else:
    native = Lazy("quire._native")
    cpu = Lazy("quire.devices.cpu.backend")
    machine = Lazy("quire.devices.cpu.machine")
    reference = Lazy("quire.devices.reference.backend")
    sockets = Lazy("quire.devices.sockets")
    torch = Lazy("quire.devices.torch.backend")
    gloo = Lazy("quire.devices.torch.exchange")
    transformers = Lazy("quire.devices.torch.foreign")

BackendName = Literal["auto", "native", "reference", "torch"]
ExchangeName = Literal["tcp", "gloo"]
Isa = Literal["auto", "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "neon"]


def make_backend(name: BackendName = "auto", threads: int | None = None, isa: Isa = "auto") -> Backend:
    """The backend of that name; "auto" is the fastest for this machine.

    `threads` None means one per core that the process may use. Raises ConfigError if the name is unknown or its library
    is not installed, EngineError if the machine cannot run it.
    """
    if name in ("auto", "native"):
        return cpu.NativeBackend(threads, isa)
    if name == "reference":
        return reference.ReferenceBackend()
    if name == "torch":
        need("--backend torch", "torch")
        return torch.TorchBackend(threads)
    raise ConfigError(f"there is no backend {name!r}; choose auto, native, reference or torch")


def usable_threads() -> int:
    """The number of cores that this process may use."""
    return machine.usable_threads()


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


def runs_foreign_models() -> bool:
    """Whether the libraries are installed that run models of families that Quire does not have."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def open_foreign_model(directory: Path, dtype: str) -> ForeignModel:
    """A model of a family that Quire does not have, run by its library's code.

    ModelError if that cannot be done, ConfigError if the library is not installed.
    """
    need("a model that runs through transformers", "torch", "transformers")
    return transformers.open_model(directory, dtype)


def make_foreign_backend(threads: int | None = None) -> Backend:
    """The backend that runs the graphs of foreign models, and nothing else."""
    return transformers.TransformersBackend(threads)
