"""The one tree of errors. Each message says what was wrong and what to change."""

from __future__ import annotations


class QuireError(Exception):
    """Anything Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """An engine option is out of range, contradicts another, or is not supported."""


class ResourceError(ConfigError):
    """The machine lacks now what the options ask for: memory, a port, a limit."""


class ModelError(QuireError, ValueError):
    """A model cannot be loaded: its files, shapes, tensors or config fields are not what they must be."""


class UnknownArchitectureError(ModelError):
    """No family of Quire's describes the model; it needs its own code."""


class RequestError(QuireError, ValueError):
    """A request is refused before it makes a token. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """The prompt has `num_tokens`, more than the `longest` that fit."""

    def __init__(self, message: str, num_tokens: int, longest: int) -> None:
        super().__init__(message, "prompt")
        self.num_tokens = num_tokens
        self.longest = longest


class OverloadedError(QuireError):
    """The queue is full; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(QuireError, RuntimeError):
    """The engine itself failed; running requests end with this error."""


class EngineDiedError(EngineError):
    """The engine ended while a request ran in it."""


class FailedStepError(EngineError):
    """A step failed by what one of its requests holds; device and engine are sound."""


class DeviceMemoryError(FailedStepError):
    """The device had no memory for a step. The same request may go through later, or in smaller steps."""


class DeviceLostError(EngineError):
    """The device does not answer any more; a new process may open it again."""


class ProgramError(EngineError):
    """A program ended before its last step."""


class SessionExpiredError(RequestError):
    """A program goes on from a session that is not there any more."""


def message_of(error: BaseException) -> str:
    """Return what to tell a caller about an error: its message, with its class if it is not Quire's own."""
    if isinstance(error, QuireError):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"


def named(failure: QuireError | None, request_id: str) -> QuireError:
    """Return the same error with the id of its request."""
    return type(failure or EngineError())(f"request {request_id} failed: {failure}")
