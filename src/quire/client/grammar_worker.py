"""The process that compiles constraints before the engine sees them, so that they may be slow, grow or crash.

Started as `python -m quire.client.grammar_worker`. Exchanges length-prefixed frames over standard input and output.
Knows the tokenizer and grammars; no engine, no HTTP.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.client.maker import load_maker
from quire.config import EngineConfig
from quire.engine.wire import framed, read_frame
from quire.errors import EngineError, RequestError
from quire.lazy import Lazy
from quire.params import StructuredOutputsParams
from quire.types import ModelCard

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from quire.grammar import compiler, vocabulary
else:  # the server's process imports this module for its messages alone
    compiler, vocabulary = Lazy("quire.grammar.compiler"), Lazy("quire.grammar.vocabulary")

log = logging.getLogger("quire.grammar")


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """The first frame: the source of the tokenizer, and how many bytes of memory compiling may add."""

    maker: str
    config: EngineConfig
    info: ModelCard
    memory: int


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The reply to a constraint: its grammar or an error. The reply to the setup has an empty text."""

    text: str = ""
    error: str | None = None


def frame(message: Setup | StructuredOutputsParams | Verdict) -> bytes:
    return framed(msgspec.msgpack.encode(message))


def _read() -> bytes:
    """Read the content of the next frame; exit at the end of the input."""
    data = read_frame(sys.stdin.fileno())
    if data is None:
        raise SystemExit(0)
    return data


def _write(verdict: Verdict) -> None:
    sys.stdout.buffer.write(frame(verdict))
    sys.stdout.buffer.flush()


def _limit_memory(more: int) -> None:
    """Allow this process `more` bytes from now on (Linux only)."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def make_compiler(setup: Setup) -> compiler.GrammarCompiler:
    tokenizer = load_maker(setup.maker).start_front(setup.config, setup.info).tokenizer
    if tokenizer is None:
        raise EngineError("structured outputs need a tokenizer")
    info = setup.info
    return compiler.GrammarCompiler(
        lambda: vocabulary.vocabulary_of(tokenizer, info.vocab_size, info.eos_token_ids)
    )


def main() -> int:
    if sys.platform == "linux":
        os.nice(10)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if the server was killed
    setup = msgspec.msgpack.decode(_read(), type=Setup)
    grammars = make_compiler(setup)
    grammars.prepare()  # now, so that its memory is not charged to the first constraint
    _limit_memory(setup.memory)
    _write(Verdict())
    while True:
        params = msgspec.msgpack.decode(_read(), type=StructuredOutputsParams)
        try:
            _write(Verdict(grammars.check(params)))
        except RequestError as error:
            _write(Verdict(error=str(error)))
        except MemoryError:
            raise  # ends the process, as when native code runs out of memory
        except Exception as error:
            log.exception("unexpected error while compiling a constraint")
            _write(Verdict(error=f"the constraint cannot be read: {type(error).__name__}: {error}"))


if __name__ == "__main__":
    sys.exit(main())
