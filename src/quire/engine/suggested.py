"""Names models to try on this machine, by the planner's figures of a few that are published (assets/models.json)."""

from __future__ import annotations

import msgspec

from quire.devices.choices import CPU
from quire.devices.protocol import Backend
from quire.devices.registry import make_backend
from quire.engine.directory import SHIPPED_MODEL
from quire.meter import in_bytes
from quire.weights.hub import ASSETS

TABLE = ASSETS / "models.json"
CONTEXT = 4096  # tokens that a model must have room for
LEAST_RATE = 3.0  # tokens per second of a first model, as fast as people read


class Suggestion(msgspec.Struct, frozen=True):
    """A model of the hub, and its figures in the plan of a machine.

    `memory` is that of weights, workspace and CONTEXT tokens; `read` are the bytes that one token reads.
    """

    model: str
    file: str
    licence: str
    parameters: int
    bytes: int
    context: int
    memory: int
    read: int

    def fits(self, free: int) -> bool:
        """Tell whether `quire serve` takes the model with its default options."""
        return self.memory <= free * CPU.gpu_memory_utilization

    def rate(self, read_gbs: float) -> float:
        """Bound the tokens per second of one sequence by what it reads."""
        return read_gbs * 1e9 / self.read


def suggestions() -> list[Suggestion]:
    """Read the table, smallest first."""
    return msgspec.json.decode(TABLE.read_bytes(), type=list[Suggestion])


def first_model(free: int) -> Suggestion | None:
    """Choose the largest model that fits in `free` bytes and answers quickly on any machine; None: none fits."""
    found = [each for each in suggestions() if each.fits(free) and each.rate(CPU.read_gbs) >= LEAST_RATE]
    return max(found, key=lambda each: each.parameters, default=None)


def advice(command: str, measured: bool = False) -> str:
    """Say that the shipped model is a toy, and what to try instead; its speed if memory may be `measured` now."""
    toy = f"{SHIPPED_MODEL} is a toy that tells children's stories."
    backend = make_backend()
    free = backend.free_memory()
    found = first_model(free)
    if found is None:
        return f"{toy} No model of `quire models --suggest` fits in {in_bytes(free)} of free memory"
    fast = f", up to {found.rate(read_gbs(backend)):.0f} tok/s" if measured else ""
    return (
        f"{toy} With {in_bytes(free)} free, {backend.name}, try: {command} {found.model} "
        f"({in_bytes(found.bytes)} to fetch{fast}); `quire models --suggest` lists more"
    )


def read_gbs(backend: Backend) -> float:
    """Measure how fast the machine reads memory."""
    return backend.measure_limits("fp32").read_gbs
