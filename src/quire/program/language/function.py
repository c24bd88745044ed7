"""`@function`: Python code that becomes a program, run once or many times."""

from __future__ import annotations

import inspect
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.errors import RequestError
from quire.program.language.expressions import no_stop_regex, values_given
from quire.program.language.root import Backend, Root
from quire.program.language.state import State
from quire.program.language.symbols import Symbol, Trace
from quire.steps import Text

PREFIX_CHARACTERS = 64  # shorter common prefixes of a batch are not computed ahead
CHUNK = 200  # programs of a batch that are under way if their states are yielded one by one


class _Default:
    """The backend of programs that are run without one."""

    def __init__(self) -> None:
        self.backend: Backend | None = None


_default = _Default()


def set_default_backend(backend: Backend) -> None:
    """Use `backend`, an LLM or a RuntimeEndpoint, for programs that are run without one."""
    _default.backend = backend


def flush_cache(backend: Any = None) -> bool:
    """Forget all cached prefixes of the backend."""
    return bool(_chosen(backend).reset_prefix_cache())


def _chosen(backend: Any) -> Any:
    found = backend or _default.backend
    assert found is not None, "Please specify a backend"
    return found


class Function:
    """Python code whose first parameter is the state `s`.

    The code is traced first: if it decides nothing by values, the whole program is one request. Otherwise it runs
    from its start again, step by step, and the engine keeps its state between the steps. So code that has effects
    outside of `s` before its first decision should be made with `trace=False`.
    """

    def __init__(self, code: Callable[..., Any], trace: bool = True) -> None:
        self.func, self._trace = code, trace
        self.bind_arguments: dict[str, Any] = {}
        names = list(inspect.signature(code).parameters)
        assert names[:1] == ["s"], 'The first argument must be "s"'
        self.arg_names = names[1:]
        self.__doc__, self.__name__ = code.__doc__, code.__name__

    def bind(self, **arguments: Any) -> Function:
        """Make the same function with some arguments given."""
        unknown = set(arguments) - set(self.arg_names)
        assert not unknown, f"the function has no argument {', '.join(sorted(unknown))}"
        bound = Function(self.func, self._trace)
        bound.bind_arguments = {**self.bind_arguments, **arguments}
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> State:
        return self.run(*args, **kwargs)

    def run(
        self,
        *args: Any,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: Any = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        **kwargs: Any,
    ) -> State:
        """Run the program; the sampling values are defaults of its gens. With `stream` it returns at once."""
        given = {**locals()}
        no_stop_regex(stop_regex)
        sampling = values_given({**given, "max_tokens": max_new_tokens})
        arguments = {**self.bind_arguments, **kwargs}
        return self._start(_chosen(backend), args, arguments, sampling, stream)

    def run_batch(
        self,
        batch_kwargs: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **sampling: Any,
    ) -> Any:
        """Run the program once for each set of arguments, many at a time. Returns the states in order.

        A long text that all of them begin with is computed once before. With `generator_style` it returns an
        iterator. `progress_bar` has no effect.
        """
        calls = [self._arguments(one) for one in batch_kwargs]
        if not calls:
            return []
        chosen = _chosen(backend)
        self._compute_prefix(chosen, calls)
        most = max(96, 16 * (os.cpu_count() or 1)) if num_threads == "auto" else int(num_threads)
        found = self._all(calls, chosen, sampling, min(most, len(calls)))
        return found if generator_style else list(found)

    def _all(
        self, calls: Sequence[Mapping[str, Any]], backend: Any, sampling: Mapping[str, Any], num_threads: int
    ) -> Iterator[State]:
        with ThreadPoolExecutor(num_threads, "quire-programs") as threads:
            for start in range(0, len(calls), CHUNK):
                part = calls[start : start + CHUNK]
                yield from threads.map(lambda call: self.run(backend=backend, **sampling, **call), part)

    def _arguments(self, given: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        if isinstance(given, Mapping):
            return dict(given)
        required = [name for name, value in self._free().items() if value.default is inspect.Parameter.empty]
        if not len(required) <= len(given) <= len(self._free()):
            raise RequestError("Given arguments mismatch the SGL function signature")
        return dict(zip(self._free(), given, strict=False))

    def _free(self) -> dict[str, inspect.Parameter]:
        parameters = list(inspect.signature(self.func).parameters.items())[1:]
        return {name: value for name, value in parameters if name not in self.bind_arguments}

    def cache(self, backend: Any = None) -> None:
        """Compute the text that the program begins with, if it is long and depends on no argument."""
        calls = [dict.fromkeys(self._free(), text) for text in ("", "\0")]
        self._compute_prefix(_chosen(backend), calls)

    def _compute_prefix(self, backend: Backend, calls: Sequence[Mapping[str, Any]]) -> None:
        """Compute the text that all these runs begin with, as far as a trace can tell, if it is long."""
        prefixes = []
        for call in calls:
            root = Root(backend, {}, False, Trace())
            self._call(State(root.first), (), {**self.bind_arguments, **call})
            steps = itertools.takewhile(lambda one: isinstance(one, Text) or callable(one), root.first.steps)
            prefixes.append("".join(one.text for one in steps if isinstance(one, Text)))
        prefix = _common(prefixes)
        if len(prefix) > PREFIX_CHARACTERS:
            compute = [{"type": "text", "text": prefix}, {"type": "compute"}]
            list(backend.run_program({"steps": compute}))

    def _call(self, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Trace the code. False: it needs values, or fails."""
        trace = state._root.trace
        assert trace is not None
        try:
            state.ret_value = self.func(state, *args, **kwargs)
        except Exception:  # the code fails again, and is heard, when it runs step by step
            return False
        _use(state.ret_value)
        return trace.complete

    def _start(
        self,
        backend: Backend,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sampling: Mapping[str, Any],
        stream: bool,
    ) -> State:
        if self._trace:
            state = State(Root(backend, sampling, stream, Trace()).first)
            if self._call(state, args, kwargs):
                state._root.traced()
                return _in_thread(state, lambda: _finish(state)) if stream else _finish(state)
        state = State(Root(backend, sampling, stream, None).first)

        def whole() -> State:
            try:
                state.ret_value = self.func(state, *args, **kwargs)
            except Exception as error:
                state._root.fail(error)
                state._root.send(last=True)
                if not stream:
                    raise
            else:
                state._root.send(last=True)
            return state

        return _in_thread(state, whole) if stream else whole()


def _common(texts: Sequence[str]) -> str:
    """Find the text with which all of them begin."""
    first, last = min(texts), max(texts)
    count = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:count]


def _finish(state: State) -> State:
    """Send a traced program."""
    state._root.send()
    state.ret_value = _resolved(state.ret_value)
    return state


def _in_thread(state: State, work: Callable[[], Any]) -> State:
    threading.Thread(target=work, name="quire-program", daemon=True).start()
    return state


def _use(value: Any) -> None:
    """Note the symbols in what the code returns: they have values at the end."""
    if isinstance(value, Symbol):
        value.used = True
    elif type(value) in (list, tuple):
        for one in value:
            _use(one)
    elif type(value) is dict:
        for one in value.values():
            _use(one)


def _resolved(value: Any) -> Any:
    if isinstance(value, Symbol):
        return value.value()
    if type(value) in (list, tuple):
        return type(value)(_resolved(one) for one in value)
    if type(value) is dict:
        return {name: _resolved(one) for name, one in value.items()}
    return value


def function(
    code: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None, trace: bool = True
) -> Any:
    """Make a program of a function. `num_api_spec_tokens` has no effect."""
    if code is None:
        return lambda later: Function(later, trace)
    return Function(code, trace)
