"""The backends by name: the values of `--backend` and `--isa`, and what makes each.

A backend's module is imported when it is first used, so a machine needs only what its own backend needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from quire.errors import ConfigError

if TYPE_CHECKING:
    import quire.devices.cpu.backend as cpu
    import quire.devices.reference.backend as reference
    from quire.devices.protocol import Backend
else:
    from quire.lazy import Lazy

    cpu = Lazy("quire.devices.cpu.backend")
    reference = Lazy("quire.devices.reference.backend")

BackendName = Literal["auto", "native", "reference"]
Isa = Literal["auto", "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "neon"]


def make_backend(name: BackendName = "auto", threads: int | None = None, isa: Isa = "auto") -> Backend:
    """The backend of that name; "auto" is the fastest for this machine.

    `threads` None means one per core that the process may use. Raises ConfigError for an unknown name, EngineError if
    the machine cannot run it.
    """
    if name == "reference":
        return reference.ReferenceBackend()
    if name in ("auto", "native"):
        return cpu.NativeBackend(threads, isa)
    raise ConfigError(f"there is no backend {name!r}; choose auto, native or reference")
