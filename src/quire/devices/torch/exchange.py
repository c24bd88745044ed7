"""Exchange between ranks through torch.distributed: gloo for arrays of the host, or tensors where a device has them.

Knows torch; sums go in the order of ranks, in float32.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from quire.devices.inputs import all_gathered, all_reduced, received
from quire.devices.peers import Peers
from quire.devices.protocol import ModelInput
from quire.sockets import receive_exactly
from quire.weights.tensor import FloatArray

dist: Any = torch.distributed  # its process groups are not in its type stubs
PORT = struct.Struct("<I")


class Group:
    """A process group of its own, of NCCL if ranks have a `gpu` each, or of gloo.

    Its store is at the first rank, on a port of its own.
    """

    def __init__(self, rank: int, size: int, patience: float, gpu: str | None = None) -> None:
        self.rank, self.size = rank, size
        self._patience, self._gpu = timedelta(seconds=patience), gpu
        self._links: dict[int, socket.socket] = {}
        self._group: Any = None
        self._store: Any = None
        self._gone: int | None = None

    def connect(self, links: Mapping[int, socket.socket], seconds: float) -> None:
        self._links = dict(links)
        limit = timedelta(seconds=seconds)
        if self.rank == 0:
            host = next(iter(links.values())).getsockname()[0]
            store = dist.TCPStore(host, 0, self.size, True, limit, wait_for_workers=False)
            for link in links.values():
                link.sendall(PORT.pack(store.port))
        else:
            host = links[0].getpeername()[0]
            try:
                (port,) = PORT.unpack(receive_exactly(links[0], PORT.size))
            except EOFError:
                raise RuntimeError("rank 0 has ended") from None
            store = dist.TCPStore(host, port, self.size, False, limit)
        self._store = store
        kind = dist.ProcessGroupGloo if self._gpu is None else dist.ProcessGroupNCCL
        options = kind._Options() if self._gpu is None else kind.Options()
        options._timeout = self._patience
        if self._gpu is None:
            own = next(iter(links.values())).getsockname()[0]
            options._devices = [kind.create_device(hostname=own)]
        else:
            torch.cuda.set_device(self._gpu)
        self._group = kind(store, self.rank, self.size, options)

    def gather(self, rows: list[Any], own: Any) -> None:
        """Fill `rows` with all ranks' tensors of one shape. RuntimeError: a rank is gone or does not answer."""
        self._wait(lambda group: group.allgather([rows], [own]))

    def _wait(self, begin: Callable[[Any], Any]) -> None:
        """Begin an exchange and wait for it, as a GPU's stream does for those of NCCL."""
        if self._group is None:
            raise RuntimeError("the ranks are not connected yet")
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            if self._gone is not None:
                raise RuntimeError(f"rank {self._gone} has ended") from error
            raise

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def abort(self, rank: int) -> None:
        self._gone = rank
        with suppress(RuntimeError):
            if self._group is not None:
                self._group.abort()


class GlooExchange(Group):
    """`Exchange` of arrays in host memory."""

    def exchange(self, parts: FloatArray) -> None:
        rows = [torch.from_numpy(row) for row in parts]
        own = rows[self.rank]
        rows[self.rank] = torch.empty_like(own)
        self.gather(rows, own)


class TorchPeers(Group):
    """`Peers` that take tensors where they are, too. `stop` is a number that kernels read, 1 once a rank has gone."""

    stop: Any = None

    def abort(self, rank: int) -> None:
        if self.stop is not None:
            self.stop.fill_(1)
        super().abort(rank)

    def registered(self, device: Any) -> Any:
        """Give the group a name by which memory of all ranks is found, and a `stop`."""
        self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        group, kind = dist.ProcessGroup(self._store, self.rank, self.size), dist.ProcessGroup.BackendType.NCCL
        group._set_group_name("quire")
        group._register_backend(device, kind, self._group)
        group._set_default_backend(kind)
        torch._C._distributed_c10d._register_process_group("quire", group)  # type: ignore[arg-type]
        return group

    def parts(self, x: Any) -> Any:
        """Gather the x of all ranks, of one shape and type: [size, ...]."""
        found = x.new_empty((self.size, *x.shape))
        if x.numel():
            self.gather(list(found.view(torch.uint8)), x.contiguous().view(torch.uint8))
        return found

    def share(self, x: Any) -> None:
        """Give all ranks the first one's x."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._wait(lambda group: group.broadcast([x], options))

    def all_reduce(self, x: FloatArray) -> None:
        x[:] = summed(torch.from_numpy(x).to(self._gpu or "cpu"), self).cpu().numpy()


class TorchStage(Group):
    """`StageLink` over which tensors pass from where they lie, from rank 0 of two to rank 1."""

    def __init__(self, rank: int, patience: float, gpu: str | None) -> None:
        super().__init__(rank, 2, patience, gpu)
        self._type: Any = None  # of what passes: as the receiver keeps it

    def send(self, hidden: Any) -> None:
        if self._type is None and self._store is not None:
            self._type = getattr(torch, self._store.get("type").decode())
        rows = getattr(hidden, "tensor", None)
        rows = torch.from_numpy(hidden).to(self._gpu or "cpu") if rows is None else rows
        own = rows.to(self._type or rows.dtype).contiguous().view(torch.uint8)
        self._wait(lambda group: group.send([own], 1, 0))

    def receive(self, num_tokens: int) -> Any:
        """Return what fills rows when an operation asks for them: see `arrived`."""
        return self

    def fill(self, out: Any) -> None:
        """Receive into rows [T, D]."""
        if self._type is None and self._store is not None:
            self._type = out.dtype
            self._store.set("type", str(out.dtype).removeprefix("torch."))
        self._wait(lambda group: group.recv([out.view(torch.uint8)], 0, 0))


def arrived(inputs: ModelInput, out: Any) -> Any:
    """Fill rows [T, D] with what comes with a step from the stage before."""
    if isinstance(inputs.hidden_TD, TorchStage):
        inputs.hidden_TD.fill(out)
        return out
    return out.copy_(torch.from_numpy(received(inputs, out.shape[1])))


def summed(x: Any, peers: Peers | None) -> Any:
    """Return the sum of all ranks' x [rows, D], float32."""
    if x.is_meta:
        return x.float()
    if not isinstance(peers, TorchPeers):
        return torch.from_numpy(all_reduced(x.float().cpu().numpy(), peers)).to(x.device)
    first, *others = peers.parts(x)
    total = first.float()
    for part in others:
        total = total + part
    return total


def joined(x: Any, widths: Sequence[int], peers: Peers | None) -> Any:
    """Return the columns of all ranks side by side."""
    if x.is_meta:
        return x.new_empty((len(x), sum(widths)))
    if not isinstance(peers, TorchPeers):
        return torch.from_numpy(all_gathered(x.float().cpu().numpy(), widths, peers)).to(x.device)
    own = x.new_zeros((len(x), max(widths)))
    own[:, : x.shape[1]] = x
    return torch.cat([part[:, :width] for part, width in zip(peers.parts(own), widths, strict=True)], 1)
