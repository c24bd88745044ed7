"""The native module raises plain Python exceptions; callers expect Quire's."""

from __future__ import annotations

from types import TracebackType

from quire.errors import EngineError


class _NativeErrors:
    """A context that turns the native module's exceptions into EngineError."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, (ValueError, IndexError, TypeError)):
            raise EngineError(str(error)) from error
        if isinstance(error, MemoryError):
            raise EngineError(
                "the plan needs more memory than this process may address: lower --gpu-memory-utilization or "
                "--max-model-len, or raise the limit (ulimit -v)"
            ) from error


native_errors = _NativeErrors()
