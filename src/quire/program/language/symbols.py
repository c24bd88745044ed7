"""Values that a program does not know yet, while it is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from quire.errors import QuireError
from quire.program.language.expressions import Expression
from quire.steps import Insert

if TYPE_CHECKING:
    from quire.program.language.root import Branch


class UntraceableError(QuireError):
    """The Python code of a program needs a value: it must run step by step."""


class Symbol(Expression):
    """The value of a variable. It can be appended and added to texts; every other use ends the trace."""

    def __init__(
        self, trace: Trace, lane: Branch, name: str, is_list: bool, index: int | None = None
    ) -> None:
        self.trace, self.lane, self.name, self.is_list, self.index = trace, lane, name, is_list, index
        self.used = False
        trace.symbols.append(self)

    def use(self, lane: Branch) -> Insert:
        """Note that the value goes into the text of `lane`, and make the step."""
        self.used = True
        if lane is not self.lane:
            self.trace.crossing.append((self.lane, self.name))
        return Insert(name=self.name, lane=self.lane.path, index=self.index)

    def value(self) -> Any:
        """Return the value, once the program has run."""
        found = self.lane.live.variables[self.name]
        return found if self.index is None else found[self.index]

    def __add__(self, other: Any) -> Expression:
        self._text()
        return super().__add__(other)

    def __radd__(self, other: Any) -> Expression:
        self._text()
        return super().__radd__(other)

    def __getitem__(self, index: Any) -> Symbol:
        if not self.is_list or type(index) is not int or index < 0:
            self.trace.give_up()
        self.used = True
        return Symbol(self.trace, self.lane, self.name, False, index)

    def _text(self) -> None:
        if self.is_list:
            self.trace.give_up()

    def _needed(self, *_: Any) -> NoReturn:
        self.trace.give_up()

    __bool__ = __str__ = __repr__ = __format__ = __len__ = __iter__ = __contains__ = _needed
    __int__ = __float__ = __index__ = __hash__ = _needed
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _needed
    __mul__ = __rmul__ = __mod__ = __call__ = _needed

    def __getattr__(self, name: str) -> NoReturn:
        self.trace.give_up()


class Trace:
    """Notes whether the code of a program made a decision on a value."""

    def __init__(self) -> None:
        self.failed = False
        self.symbols: list[Symbol] = []
        self.crossing: list[tuple[Branch, str]] = []  # variables that other lanes read

    def give_up(self) -> NoReturn:
        """End the trace, even if the program catches the error."""
        self.failed = True
        raise UntraceableError("the program decides by a value: it runs step by step")

    @property
    def complete(self) -> bool:
        """Tell whether every value that the code asked for went into a text, so the engine alone needs it.

        Another lane may read a variable at any time, so it must be assigned once.
        """
        used = not self.failed and all(symbol.used for symbol in self.symbols)
        return used and all(lane.assigns_once(name) for lane, name in self.crossing)
