"""Matches names with the regular expressions of files, in time that grows with the name's length and no faster.

Python's `re` tries one way after another, and a file can make it try for hours. Here all expressions of a file are one
automaton that follows every way at once and remembers where each character led, so that a name costs a look-up for each
character. Steps that were not remembered have a budget. Lookaround and backreferences are refused.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from quire.errors import ModelError

MAX_PATTERN = 4096  # characters
MAX_DEPTH = 32  # of groups in groups
MAX_STATES = 1 << 16
MAX_STEPS = 1 << 21  # a second or two
TOKEN = re.compile(
    r"""(?P<group>\((?:\?:|\?P<\w+>|(?!\?)))
    |(?P<close>\))
    |(?P<bar>\|)
    |(?P<repeat>(?:[*+?]|\{(?=[\d,])(?P<low>\d{0,4})(?P<comma>,)?(?P<high>\d{0,4})\})\??(?![*+?{]))
    |(?P<atom>\\(?:[dDwWsStnrfvAZ]|[^A-Za-z0-9])
        |\[\^?\]?(?:\\(?:[dDwWsStnrfv]|[^A-Za-z0-9])|(?!--|&&|~~|\|\|)[^\]\\\[])*\]
        |[^\\\[\](){}|*+?])""",
    re.VERBOSE | re.DOTALL,
)
STARTS, ENDS = ("^", r"\A"), ("$", r"\Z")
Build = Callable[[int], int]  # adds a piece's states after a state, and returns the last
Piece = tuple[str, Build]  # with the text that it was read from
Tokens = deque[re.Match[str]]


class _Place:
    """The states that a text has led to.

    `found` is the first expression that it matched on the way, `end` the first if it ends here.
    """

    __slots__ = ("end", "found", "moves", "states")

    def __init__(self, states: frozenset[int], found: int, end: int) -> None:
        self.states, self.found, self.end = states, found, end
        self.moves: dict[str, _Place] = {}


class Expressions:
    """Expressions in Python's dialect, each compared with the beginning of a text. ModelError.

    `where` names the file and field at fault.
    """

    def __init__(self, patterns: Iterable[str], where: str) -> None:
        self._where, self._steps = where, 0
        self._moves: list[dict[str, int]] = [{}]  # of each state, by atom
        self._free: dict[int, set[int]] = {}  # moves that take no character
        self._built: dict[tuple[int, str], int] = {}  # expressions that begin alike share their states
        self._atoms: dict[str, re.Pattern[str]] = {}
        self._last: dict[int, int] = {}  # by an expression's last state, its number
        self._count = 0
        for pattern in patterns:
            self._last.setdefault(self._read(pattern)(0), self._count)
            self._count += 1
        self._places: dict[tuple[frozenset[int], int], _Place] = {}
        self._start = self._place({0}, self._count, STARTS)
        self._reached: dict[str, _Place] = {}  # by module: its matrices have their names' beginning in common

    def first(self, text: str) -> int | None:
        """Return the number of the first expression that matches. ModelError if that takes too long."""
        if not self._count:
            return None
        cut = text.rfind(".") + 1
        place = self._reached.get(text[:cut])
        if place is None:
            place = self._reached[text[:cut]] = self._walk(self._start, text[:cut])
        place = self._walk(place, text[cut:])
        return place.end if place.end < self._count else None

    def _walk(self, place: _Place, text: str) -> _Place:
        for char in text:
            place = place.moves.get(char) or self._move(place, char)
        return place

    def _move(self, place: _Place, char: str) -> _Place:
        moves = [move for state in place.states for move in self._moves[state].items()]
        self._steps += 1 + len(moves) + len(place.states)
        if self._steps > MAX_STEPS:
            raise ModelError(
                f"{self._where}: its expressions take too long to match: use fewer or simpler ones"
            )
        reached = {state for atom, state in moves if self._atoms[atom].fullmatch(char)}
        place.moves[char] = found = self._place(reached, place.found, ())
        return found

    def _place(self, states: set[int], found: int, passed: tuple[str, ...]) -> _Place:
        reached = self._closed(states, passed)
        found = min([found, *(self._last[state] for state in reached & self._last.keys())])
        key = frozenset(reached), found
        if key not in self._places:
            ends = self._closed(reached, (*passed, *ENDS)) & self._last.keys()
            self._places[key] = _Place(*key, min([found, *(self._last[state] for state in ends)]))
        return self._places[key]

    def _closed(self, states: set[int], passed: tuple[str, ...]) -> set[int]:
        """Add all states that need no character; `passed` are the anchors that hold here."""
        reached, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            moves = self._moves[state]
            new = {*self._free.get(state, ()), *(moves[a] for a in passed if a in moves)} - reached
            reached |= new
            waiting += new
        return reached

    def _read(self, pattern: str) -> Build:
        if len(pattern) > MAX_PATTERN:
            raise ModelError(f"{self._where}: {pattern[:80]!r}... has more than {MAX_PATTERN} characters")
        tokens: Tokens = deque()
        at = 0
        while at < len(pattern):
            token = TOKEN.match(pattern, at)
            if token is None:
                raise self._refused(pattern, at)
            tokens.append(token)
            at = token.end()
        build = self._branches(tokens, 0)
        if tokens:
            raise self._refused(pattern, tokens[0].start())
        return build

    def _refused(self, pattern: str, at: int) -> ModelError:
        return ModelError(
            f"{self._where}: the expression {pattern!r:.100} is not supported at {pattern[at : at + 10]!r}: use "
            "characters, classes, groups, alternatives, repetitions, ^ and $ only"
        )

    def _branches(self, tokens: Tokens, depth: int) -> Build:
        """Read alternatives up to the end of their group."""
        branches: list[list[Piece]] = [[]]
        while tokens and tokens[0].lastgroup != "close":
            token = tokens.popleft()
            pattern, begin, end = token.string, token.start(), token.end()
            if token.lastgroup == "bar":
                branches.append([])
                continue
            if token.lastgroup == "group":
                build = self._branches(tokens, depth + 1) if depth < MAX_DEPTH else None
                if build is None or not tokens:
                    raise self._refused(pattern, begin)
                end = tokens.popleft().end()
            elif token.lastgroup == "atom":
                build = partial(self._atom, token)
            elif branches[-1]:
                text, inner = branches[-1].pop()
                build, begin = partial(self._repeated, token, (text, inner)), begin - len(text)
            else:
                raise self._refused(pattern, begin)
            branches[-1].append((pattern[begin:end], build))
        return partial(self._either, branches)

    def _either(self, branches: Sequence[Sequence[Piece]], state: int) -> int:
        if len(branches) == 1:
            return self._along(state, *branches[0])
        end = self._new()
        for pieces in branches:
            self._link(self._along(state, *pieces), end)
        return end

    def _along(self, state: int, *pieces: Piece) -> int:
        for text, build in pieces:
            if (state, text) not in self._built:
                self._built[state, text] = build(state)
            state = self._built[state, text]
        return state

    def _atom(self, token: re.Match[str], state: int) -> int:
        """Add a move by one character, or by an anchor. A class means what Python's `re` takes it for."""
        atom = token[0]
        if atom not in self._atoms:
            try:
                self._atoms[atom] = re.compile(atom)
            except re.error as error:
                raise self._refused(token.string, token.start()) from error
        self._moves[state][atom] = end = self._new()
        return end

    def _repeated(self, token: re.Match[str], piece: Piece, state: int) -> int:
        low, high = (int(token[name] or 0) if token["low"] is not None else 0 for name in ("low", "high"))
        sign = token[0][0]
        endless = sign in "*+" or bool(token["comma"] and not token["high"])
        if sign == "{":
            high = high if token["comma"] else low
            if high < low and not endless:
                raise self._refused(token.string, token.start())
        else:
            low, high = int(sign == "+"), 1
        for _ in range(low):
            before, state = state, self._along(state, piece)
            if state == before:
                break  # the piece takes nothing
        end = self._new()
        if endless:
            self._link(state, end)
            self._link(self._along(end, piece), end)
            return end
        for _ in range(high - low):
            self._link(state, end)
            state = self._along(state, piece)
        self._link(state, end)
        return end

    def _new(self) -> int:
        if len(self._moves) >= MAX_STATES:
            raise ModelError(f"{self._where}: its expressions are too long or repeat too much")
        self._moves.append({})
        return len(self._moves) - 1

    def _link(self, state: int, other: int) -> None:
        self._free.setdefault(state, set()).add(other)
