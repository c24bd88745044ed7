"""Text and variables of one lane of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.errors import QuireError
from quire.program.tasks import Signal
from quire.text.formats.shapes import ReasoningFormat

FEW_CHARACTERS = 64

L = TypeVar("L", bound="Lane")


class StepError(QuireError):
    """A step cannot be done, which ends its program."""


@dataclass(slots=True, eq=False)
class Lane:
    """What steps append and assign. `base` is the length of the text when the lane was forked.

    `longest` bounds the text, in characters.
    """

    path: str = ""
    longest: int = 1 << 62
    text: str = ""
    variables: dict[str | None, Any] = field(default_factory=dict)
    base: int = 0
    inherited: frozenset[str | None] = frozenset()  # variables that it had when it was forked
    known: int = 0  # length of the text that was computed
    num_begun: int = 0  # gens and selects of this call
    running: bool = False
    joined: bool = False
    reasoning: ReasoningFormat | None = None  # splits what gens give
    waited: dict[str | None, Signal[None]] = field(default_factory=dict)  # variables that others wait for
    forks: dict[str, list[Lane]] = field(default_factory=dict)

    def append(self, text: str) -> None:
        """Append text. Raises StepError if it becomes too long."""
        if len(self.text) + len(text) > self.longest:
            raise StepError(
                f"the text of lane {self.path!r} would have more than {self.longest} characters, the most for this "
                "model's length: make it shorter"
            )
        self.text += text

    def assign(self, name: str | None, value: Any) -> None:
        """Assign a variable, and wake who waits for it."""
        self.variables[name] = value
        if name in self.waited:
            self.waited.pop(name).set(None)

    def take(self, name: str | None, value: str | list[str], reasoning: str | None = None) -> None:
        """Take the value of a gen or select: its text, or the texts of n samples, of which the first is appended."""
        self.append(value if isinstance(value, str) else value[0])
        if reasoning is not None:
            self.assign(f"{name}_reasoning_content", reasoning)
        if name is not None:
            self.assign(name, value)

    def fork(self: L, path: str) -> L:
        """Make a lane that begins with the text and variables of this one."""
        child = type(self)(path, self.longest, self.text, dict(self.variables), known=self.known)
        child.base, child.inherited = len(self.text), frozenset(self.variables)
        return child

    def join_texts(self, children: Sequence[Lane]) -> None:
        """Append what the children appended since they were forked, in order."""
        for child in children:
            self.append(child.text[child.base :])

    def join_variables(self, children: Sequence[Lane]) -> None:
        """Make each variable that is new in a child a list of the children's values, unless this lane has it."""
        for name in dict.fromkeys(name for child in children for name in child.variables):
            found = [child.variables[name] for child in children if child.has_new(name)]
            if found and name not in self.variables:
                self.assign(name, found)

    def has_new(self, name: str | None) -> bool:
        """Tell whether the lane assigned a variable that its parent did not have."""
        return name in self.variables and name not in self.inherited

    @property
    def has_much_new(self) -> bool:
        """Tell whether computing the new text several times in one step takes longer than once in a step of its own."""
        return len(self.text) - self.known > FEW_CHARACTERS
