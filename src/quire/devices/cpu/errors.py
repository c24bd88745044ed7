"""The native module raises plain Python exceptions; callers expect Quire's."""

from __future__ import annotations

from types import TracebackType

from quire.errors import EngineError

NATIVE = (ValueError, IndexError, TypeError, MemoryError)
"""What the native module raises."""


def engine_error(error: BaseException) -> EngineError:
    """Make the EngineError for one of `NATIVE`."""
    if isinstance(error, MemoryError):
        return EngineError(
            "the plan needs more memory than this process may address: lower --gpu-memory-utilization or "
            "--max-model-len, or raise the limit (ulimit -v)"
        )
    return EngineError(str(error))


class _NativeErrors:
    """A context that turns the native module's exceptions into EngineError."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, NATIVE):
            raise engine_error(error) from error


native_errors = _NativeErrors()
