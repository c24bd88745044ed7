"""Translates the patterns of JSON Schema, which are ECMA-262's, to Rust's dialect, which the compiler reads.

A pattern has the meaning of the flag `u`. What only the older syntax allows (`\\-`, a literal `{`) has its meaning
there if no other dialect could mean something else by it. All other patterns are refused by construct.
"""

from __future__ import annotations

import re
from typing import Any

from quire.errors import RequestError


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_DEPTH = 100
SHOWN = 60
ANY = r"\x{0}-\x{10ffff}"
SETS = {
    "d": "0-9",
    "w": "0-9A-Z_a-z",
    "s": r"\x{9}-\x{d}\x{20}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}",
}
LINE_ENDS = r"\x{a}\x{d}\x{2028}\x{2029}"
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
LOOKS = {"=": "a lookahead", "!": "a lookahead", "<=": "a lookbehind", "<!": "a lookbehind"}
UNKNOWN = {**dict.fromkeys("bB", "a word boundary"), **dict.fromkeys("k123456789", "a backreference")}
UNSUPPORTED = "uses what is not supported"
# Names of properties that stand without a value and are no general category, as ECMA-262 spells them.
BINARY = names(
    "ASCII ASCII_Hex_Digit AHex Alphabetic Alpha Any Assigned Bidi_Control Bidi_C Bidi_Mirrored Bidi_M Case_Ignorable "
    "CI Cased CWCF Changes_When_Casefolded CWCM Changes_When_Casemapped CWL Changes_When_Lowercased CWKCF "
    "Changes_When_NFKC_Casefolded CWT Changes_When_Titlecased CWU Changes_When_Uppercased Dash "
    "Default_Ignorable_Code_Point DI Deprecated Dep Diacritic Dia Emoji Emoji_Component EComp Emoji_Modifier EMod "
    "Emoji_Modifier_Base EBase Emoji_Presentation EPres Extended_Pictographic ExtPict Extender Ext Grapheme_Base "
    "Gr_Base Grapheme_Extend Gr_Ext Hex_Digit Hex IDS_Binary_Operator IDSB IDS_Trinary_Operator IDST ID_Continue IDC "
    "ID_Start IDS Ideographic Ideo Join_Control Join_C Logical_Order_Exception LOE Lowercase Lower Math "
    "Noncharacter_Code_Point NChar Pattern_Syntax Pat_Syn Pattern_White_Space Pat_WS Quotation_Mark QMark Radical "
    "Regional_Indicator RI Sentence_Terminal STerm Soft_Dotted SD Terminal_Punctuation Term Unified_Ideograph UIdeo "
    "Uppercase Upper Variation_Selector VS White_Space space XID_Continue XIDC XID_Start XIDS"
)

_QUANTIFIER = re.compile(r"(?:[*+?]|\{([0-9]{1,6})(,([0-9]{1,6})?)?\})\??")
_LONG = re.compile(r"\{[0-9]+(,[0-9]*)?\}")
_PROPERTY = re.compile(
    r"([pP])\{(?:(Script|sc|Script_Extensions|scx|General_Category|gc)=)?([A-Z][A-Za-z_]*|space)\}"
)
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{(0*[0-9A-Fa-f]{1,6})\}")
_LOW = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_GROUP = re.compile(r"\?(?::|<[A-Za-z_$][\w$]*>|([is]*)(?:-([is]*))?:)")

# Keywords that hold a schema, or a list or a map of them.
_PARTS = names(
    "additionalItems additionalProperties allOf anyOf contains else if items not oneOf prefixItems propertyNames then "
    "unevaluatedItems unevaluatedProperties contentSchema"
)
_MAPS = names("$defs definitions dependencies dependentSchemas patternProperties properties")
_TEXTS = names("const default enum examples")


def translate_patterns(schema: Any, references: str = "") -> Any:
    """Translate the patterns of a schema; also under unknown keywords that `references` name."""
    if isinstance(schema, list):
        return [translate_patterns(part, references) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new = dict(schema)
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            new[key] = translate(value)
        elif key in _MAPS and isinstance(value, dict):
            parts = {name: translate_patterns(part, references) for name, part in value.items()}
            if key == "patternProperties":
                parts = {translate(name): part for name, part in parts.items()}
            new[key] = parts
        elif key in _PARTS or (key not in _TEXTS and f"/{key}" in references):
            new[key] = translate_patterns(value, references)
    return new


def translate(pattern: str) -> str:
    """Write a pattern in Rust's dialect. RequestError names the construct that has no translation."""
    reader = _Reader(pattern)
    translated = reader.alternatives(0, False)
    if reader.at < len(pattern):
        raise reader.refusal("a ) without its (")
    return translated


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def refusal(self, what: str, verdict: str = "is not valid in ECMA-262") -> RequestError:
        shown = self.pattern if len(self.pattern) <= SHOWN else f"{self.pattern[:SHOWN]}..."
        message = f"the JSON schema's pattern {shown!r} {verdict}: {what} at character {self.at}"
        return RequestError(message, "structured_outputs")

    def alternatives(self, depth: int, dotall: bool) -> str:
        """Read up to the end of the pattern or of the group."""
        if depth > MAX_DEPTH:
            raise self.refusal(f"groups nested more than {MAX_DEPTH} deep", UNSUPPORTED)
        parts: list[str] = []
        while self.at < len(self.pattern) and (char := self.pattern[self.at]) != ")":
            if char in "|^$":
                self.at += 1
                parts.append(char)
            elif _QUANTIFIER.match(self.pattern, self.at):
                raise self.refusal("nothing to repeat")
            else:
                parts.append(self._atom(char, depth, dotall) + self._quantifier())
        return "".join(parts)

    def _atom(self, char: str, depth: int, dotall: bool) -> str:
        if char == "(":
            return self._group(depth, dotall)
        self.at += 1
        if char == "[":
            return self._class()
        if char == ".":
            return f"[{ANY}]" if dotall else f"[^{LINE_ENDS}]"
        if char == "\\":
            found = self._escape(False)
            return found if isinstance(found, str) else _literal(found)
        return _literal(self._checked(ord(char)))

    def _quantifier(self) -> str:
        found = _QUANTIFIER.match(self.pattern, self.at)
        if found is None:
            if _LONG.match(self.pattern, self.at):
                raise self.refusal("a count of more than six digits", UNSUPPORTED)
            return ""
        low, high = found[1], found[3]
        if high is not None and int(high) < int(low):
            raise self.refusal("a repetition whose bounds are out of order")
        self.at = found.end()
        return found[0][:1] + found[0][1:].removesuffix("?")  # lazy or greedy, the language is the same

    def _group(self, depth: int, dotall: bool) -> str:
        self.at += 1
        flags = ""
        if self.pattern.startswith("?", self.at):
            found = _GROUP.match(self.pattern, self.at)
            if found is None:
                after = self.pattern[self.at + 1 : self.at + 3]
                for look in LOOKS:
                    if after.startswith(look):
                        raise self.refusal(LOOKS[look], UNSUPPORTED)
                raise self.refusal(f"a group (?{after}")
            on, off = found[1] or "", found[2] or ""
            dotall = (dotall or "s" in on) and "s" not in off
            flags = "i" * ("i" in on) + "-i" * ("i" in off)
            self.at = found.end()
        inner = self.alternatives(depth + 1, dotall)
        if not self.pattern.startswith(")", self.at):
            raise self.refusal("a ( without its )")
        self.at += 1
        return f"(?{flags}:{inner})"

    def _class(self) -> str:
        negated = self.pattern.startswith("^", self.at)
        self.at += negated
        items: list[str] = []
        while not self.pattern.startswith("]", self.at):
            first = self._member()
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                self.at += 1
                last = self._member()
                if isinstance(first, int) and isinstance(last, int):
                    if last < first:
                        raise self.refusal("a range that is out of order")
                    items.append(f"{_literal(first)}-{_literal(last)}")
                else:
                    items += map(_item, (first, ord("-"), last))
            else:
                items.append(_item(first))
        self.at += 1
        if not items:
            return f"[{ANY}]" if negated else f"[^{ANY}]"
        return f"[{'^' * negated}{''.join(items)}]"

    def _member(self) -> int | str:
        """Read one character, or set of them, of a class."""
        if self.at >= len(self.pattern):
            raise self.refusal("a [ without its ]")
        char = self.pattern[self.at]
        self.at += 1
        return self._escape(True) if char == "\\" else self._checked(ord(char))

    def _escape(self, inside: bool) -> int | str:
        """Read what follows a backslash: a code point, or a class."""
        char = self.pattern[self.at : self.at + 1]
        if char.lower() in SETS and char:
            self.at += 1
            return f"[{'^' * char.isupper()}{SETS[char.lower()]}]"
        if found := _PROPERTY.match(self.pattern, self.at):
            return self._property(found)
        if found := _HEX.match(self.pattern, self.at):
            self.at = found.end()
            point = int(found[1] or found[2] or found[3], 16)
            low = _LOW.match(self.pattern, self.at)
            if found[2] and low and 0xD800 <= point < 0xDC00:
                self.at = low.end()
                point = 0x10000 + ((point - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            return self._checked(point)
        after = self.pattern[self.at + 1 : self.at + 2]
        if char == "c" and after.isascii() and after.isalpha():
            self.at += 2
            return ord(after) % 32
        if char == "0" and not after.isdecimal():
            self.at += 1
            return 0
        if char in CONTROLS or (inside and char == "b"):
            self.at += 1
            return CONTROLS.get(char, 8)
        if not char or char.isalnum():
            if char in UNKNOWN and not inside:
                raise self.refusal(UNKNOWN[char], UNSUPPORTED)
            raise self.refusal(f"the escape \\{char}")
        self.at += 1
        return self._checked(ord(char))

    def _property(self, found: re.Match[str]) -> str:
        kind, name = found[2], found[3]
        kind = ("" if name in BINARY else "gc=") if kind is None else f"{kind}="
        if name.startswith("Is"):
            raise self.refusal(f"the property {name}")
        self.at = found.end()
        return f"\\{found[1]}{{{kind}{name}}}"

    def _checked(self, point: int) -> int:
        if 0xD800 <= point < 0xE000:
            raise self.refusal("half of a surrogate pair")
        if point > 0x10FFFF:
            raise self.refusal("a code point above 10FFFF")
        return point


def _literal(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else f"\\x{{{point:x}}}"


def _item(member: int | str) -> str:
    return member if isinstance(member, str) else _literal(member)
