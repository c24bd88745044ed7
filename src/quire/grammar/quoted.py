r"""Rewrites a Lark grammar for texts inside a JSON string, to admit the escaped forms of the texts it admits.

A newline is then the two characters `\n`, and so on. Characters are escaped as `json.dumps` does it, and no others are.
Terminals become rules of single characters: as tokens, `/.+/` and a newline after it would begin with the same
backslash, and a lexer could not tell them apart. So a text is admitted however the grammar derives it, where a lexer
takes the longest match. Knows Lark and regexes, no JSON beyond strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from quire.errors import RequestError

_SPECIAL = ['"', "\\", *map(chr, range(32))]
_PLAIN = r'[^"\\\x00-\x1F]'
# Every class in grammars that may match a plain character matches one of _SAMPLE.
_SAMPLE = [chr(c) for c in range(32, 256) if chr(c) not in _SPECIAL] + ["\u4e2d", "\U0001f600"]
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "_STRING_INNER": r".*",
    "_STRING_ESC_INNER": r".*",
}
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<first>"(?:[^"\\\n]|\\.)")\s*\.\.\s*(?P<last>"(?:[^"\\\n]|\\.)")
    |(?P<string>"(?:[^"\\\n]|\\.)*")(?P<fold>i?)
    |/(?P<regex>(?:[^/\\\n]|\\.)+)/(?P<flags>[imslux]*)
    |%import\s+common(?:\.(?P<one>\w+)(?:\s*->\s*(?P<other>\w+))?|\s*\((?P<several>[^)]*)\))
    |(?P<directive>%(?!llguidance\b|ignore\b)\w+)
    |(?P<token><[^>\s]+>)
    |%ignore\s+(?:(?P<ignored>\w+)|/(?P<skipped>(?:[^/\\\n]|\\.)+)/)
    |(?P<terminal>(?<![\w-])_*[A-Z][A-Z0-9_]*(?![\w-]))
    |(?P<rest>[\w@-]+|.|\n)""",
    re.VERBOSE,
)
_HEX = re.compile(r"x(?:([0-9a-fA-F]{2})|\{([0-9a-fA-F]+)\})|u(?:([0-9a-fA-F]{4})|\{([0-9a-fA-F]+)\})")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}


def quoted(lark: str) -> str:
    """Write the grammar of the escaped texts. RequestError for parts that cannot be inside a string."""
    patterns = dict(_COMMON)
    patterns.update(re.findall(r"^(_*[A-Z][A-Z0-9_]*)\s*:\s*/((?:[^/\\\n]|\\.)+)/\s*$", lark, re.MULTILINE))
    return "".join(_rewritten(found, patterns) for found in _TOKEN.finditer(lark))


def _refuse(what: str) -> RequestError:
    return RequestError(f"the grammar of a custom tool cannot have {what}", "tools")


def _rewritten(found: re.Match[str], patterns: Mapping[str, str]) -> str:
    """Rewrite one token of Lark. `patterns` has the terminals that are one regex."""
    if found["comment"] is not None:
        return ""
    if found["first"] is not None:
        first, last = _text(found["first"]), _text(found["last"])
        return _rule_of(f"[{re.escape(first)}-{re.escape(last)}]", "")
    if found["string"] is not None:
        text = _text(found["string"])
        if found["fold"] and any(c in _SPECIAL for c in text):
            raise _refuse(f"the string {found['string']} without regard to case: write its quotes apart")
        return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False) + found["fold"]
    if found["regex"] is not None:
        return f"({_Regex(found['regex'], found['flags']).rewrite()})"
    if found["ignored"] is not None or found["skipped"] is not None:
        pattern = found["skipped"] or patterns.get(found["ignored"])
        if pattern is None:
            raise _refuse(f"%ignore {found['ignored']}, unless that is one regex")
        return f"%ignore /{_Regex(pattern, '', as_rules=False).rewrite()}/"
    if found["terminal"] is not None:
        return _rule_name(found[0])
    if found["one"] is not None:
        return _imported(found["one"], found["other"] or found["one"])
    if found["several"] is not None:
        return "\n".join(_imported(name.strip(), name.strip()) for name in found["several"].split(","))
    for part in ("directive", "token"):
        if found[part] is not None:
            raise _refuse(found[part][:64])
    return found[0]


def _text(string: str) -> str:
    try:
        return str(json.loads(string))
    except ValueError as error:
        raise _refuse(f"the string {string[:64]}: {error}") from error


def _imported(name: str, alias: str) -> str:
    if name in _COMMON:
        return f"{_rule_name(alias)}: {_Regex(_COMMON[name], '').rewrite()}"
    return f"%import common.{name}\n{_rule_name(alias)}: {name}"


def _rule_name(terminal: str) -> str:
    return f"t{'_' * (not terminal.startswith('_'))}{terminal.lower()}"


def _escaped(char: str) -> str:
    """Write a regex for the escaped form of one character."""
    return re.escape(json.dumps(char, ensure_ascii=False)[1:-1]) if char in _SPECIAL else re.escape(char)


def _parts(text: str, fold: bool) -> tuple[str, str]:
    """Write two regexes for a class's escaped characters: the plain ones, and escapes; either may be empty.

    The class is written as both Python and Rust read it.
    """
    try:
        kind = re.compile(text, re.IGNORECASE if fold else 0)
    except re.error as error:
        raise _refuse(f"the class {text[:64]}: {error}") from error
    inside = [c for c in _SPECIAL if kind.fullmatch(c)]
    if not inside:
        return text, ""
    rare = any(ord(c) > 126 for c in text) or re.search(r"\\[ux]", text)
    plain = f"[{text}&&{_PLAIN}]" if rare or any(map(kind.fullmatch, _SAMPLE)) else ""
    return plain, f"(?:{'|'.join(map(_escaped, inside))})"


def _rule_of(text: str, flags: str) -> str:
    """Write a class as an expression of Lark."""
    parts = [f"/{part}/{flags}" for part in _parts(text, "i" in flags) if part]
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


class _Regex:
    """Rewrites a regex atom by atom: as an expression of Lark, or as another regex."""

    def __init__(self, text: str, flags: str, as_rules: bool = True) -> None:
        if set(flags) - set("si"):
            raise _refuse(f"a regex with the flags {flags}: only s and i")
        self._text = text
        self._at = 0
        self._dot_all = "s" in flags
        self._fold = flags.replace("s", "")
        self._as_rules = as_rules

    def rewrite(self) -> str:
        parts = []
        while self._at < len(self._text):
            parts.append(self._atom())
        return (" " if self._as_rules else "").join(parts)

    def _atom(self) -> str:
        text, at = self._text, self._at
        char = text[at]
        self._at += 1
        if char == "\\":
            return self._escape()
        if char == "[":
            return self._bracket(at)
        if char == ".":
            return self._class(r"[\s\S]" if self._dot_all else r"[^\n]")
        if char in "*+?" or char == "{":
            return self._quantifier(at)
        if char == "(" and text[self._at : self._at + 1] == "?":
            return self._group()
        if char in "^$":
            if at != (0 if char == "^" else len(text) - 1):
                raise _refuse(f"the anchor {char} inside a regex")
            return ""  # a terminal matches from its first character to its last in any case
        return char if char in "()|" else self._char(char)

    def _char(self, char: str) -> str:
        return f"/{_escaped(char)}/{self._fold}" if self._as_rules else _escaped(char)

    def _class(self, text: str) -> str:
        if self._as_rules:
            return _rule_of(text, self._fold)
        return f"(?:{'|'.join(part for part in _parts(text, bool(self._fold)) if part)})"

    def _quantifier(self, at: int) -> str:
        """Read the quantifier; a `?` after it only says which match is preferred."""
        found = re.compile(r"[*+?]|\{\d*,?\d*\}").match(self._text, at)
        if found is None:
            return self._char("{")
        self._at = found.end() + (self._text[found.end() : found.end() + 1] == "?")
        return found[0]

    def _group(self) -> str:
        found = re.compile(r"\?(?:P?<\w+>|:)").match(self._text, self._at)
        if found is None:
            raise _refuse(f"the group ({self._text[self._at : self._at + 4]}: flags belong behind the regex")
        self._at = found.end()
        return "(" if self._as_rules else "(?:"

    def _escape(self) -> str:
        text, at = self._text, self._at
        char = text[at : at + 1]
        self._at += 1
        if code := _HEX.match(text, at):
            self._at = code.end()
            return self._char(chr(int(next(filter(None, code.groups())), 16) & 0xFFFF))
        if char in _LETTERS:
            return self._char(_LETTERS[char])
        if char in "dDsSwW":
            return self._class(f"\\{char}")
        if char.isalnum() or not char:
            raise _refuse(f"the escape \\{char} in a regex")
        return self._char(char)

    def _bracket(self, at: int) -> str:
        text = self._text
        end = at + 1 + (text[at + 1 : at + 2] == "^")
        while end < len(text) and text[end] != "]":
            if text[end] == "[" or text[end : end + 2] in ("&&", "--", "~~") or text[end : end + 2] == "\\p":
                raise _refuse(f"the class {text[at : end + 2][:64]}: escape brackets in classes")
            end += 1 + (text[end] == "\\")
        self._at = end + 1
        return self._class(text[at : self._at])
