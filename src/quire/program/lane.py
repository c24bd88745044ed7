"""Text and variables of one lane of a program, and what each step makes of them, in the engine and in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Lane:
    """What steps append and assign. `base` is the length of the text when the lane was forked.

    The engine's interpreter runs steps on it. The language repeats them on its own copy, with the values of the
    engine's events.
    """

    text: str = ""
    variables: dict[str | None, Any] = field(default_factory=dict)
    base: int = 0
    inherited: frozenset[str | None] = frozenset()  # variables that it had when it was forked

    def append(self, text: str) -> None:
        """Append text."""
        self.text += text

    def assign(self, name: str | None, value: Any) -> None:
        """Assign a variable."""
        self.variables[name] = value

    def take(self, name: str | None, value: str | list[str], reasoning: str | None = None) -> None:
        """Take the value of a gen or select: its text, or the texts of n samples, of which the first is appended."""
        self.append(value if isinstance(value, str) else value[0])
        if reasoning is not None:
            self.assign(f"{name}_reasoning_content", reasoning)
        if name is not None:
            self.assign(name, value)

    def fork_from(self, parent: Lane) -> None:
        """Begin with the text and variables of `parent`."""
        self.text, self.variables = parent.text, dict(parent.variables)
        self.base, self.inherited = len(parent.text), frozenset(parent.variables)

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
