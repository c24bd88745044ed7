"""Grammars of texts inside JSON strings admit the escaped form of what the grammar admits, in every tool format."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quire.errors import RequestError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.quoted import quoted
from quire.text.formats.registry import TOOL_FORMATS, tool_format
from quire.text.output.arguments import LARK
from quire.text.output.constraint import required_calls
from quire.text.output.parser import parse
from tests.grammar.conftest import END, decode, encode
from tests.grammar.test_matcher import accepts, draw, matcher_of
from tests.serve.recorded import PATCH

CASES = [
    (
        PATCH,
        [
            '*** Begin Patch\n*** Add File: a.txt\n+say "q" \\x\n*** End Patch\n',
            "*** Begin Patch\n*** Add File: \u00e9\tx\n+\n+b\n*** End Patch",
            "*** Begin Patch\n*** End Patch",
        ],
    ),
    (r'start: /^a+$/ "\n" /^"b/', ['aa\n"b', 'a"b', '"b']),
    (r"start: /[^x]*/", ["ab", "a\nb", '"\\', "\x01", "x"]),
    ('start: "say \\"" W "\\""\nW: /\\w+\\s?/  // a word', ['say "ab "', 'say "a\n"', 'say ""']),
    ('start: (A | B)+\nA: " ".."~"\nB: /[\\n"]/', ['ab"\\\n', "\t"]),
    (
        'start: x ("," x)*\nx: X | "b"i\nX: /\\d{2,3}|\\x22\\u0041/i\n%import common (WS, INT)\n%ignore WS',
        ["12, 345", '"A,\n 12', '"a,B', "1"],
    ),
    ("%import common.ESCAPED_STRING -> S\nstart: S", ['"a\\"b"', '"a', '""']),
    ("%import common.NEWLINE\nstart: /(a|b)+?/ NEWLINE /x.?/s", ["ab\r\nx\n", "ab\nx", "ab"]),
    ('%import common.SIGNED_INT\nstart: SIGNED_INT "." /[\\]\\\\\\-]/', ["-12.]", "-12.\\", "+1.x"]),
]


@pytest.mark.parametrize(("lark", "texts"), CASES)
def test_the_escaped_text_is_admitted_where_the_text_is(
    compiler: GrammarCompiler, lark: str, texts: list[str]
) -> None:
    found = []
    for text in texts:
        plain = accepts(matcher_of(compiler, grammar=lark), encode(text))
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        assert accepts(matcher_of(compiler, grammar=quoted(lark)), encode(escaped)) == plain, text
        found.append(plain)
    assert found[0]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_of_every_format_carry_such_texts(compiler: GrammarCompiler, name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", LARK: r"start: /[\"\\\n]{3}/ " + '"end"'}},
        "required": ["input"],
    }
    form = required_calls(tool_format(name), {"edit": schema}, False)
    constraint = {"structural_tag": {"type": "structural_tag", "format": form}}
    offered = [{"type": "function", "function": {"name": "edit", "parameters": schema}}]
    for seed in range(2):
        tokens = draw(matcher_of(compiler, **constraint), np.random.default_rng(seed), 400, jumps=True)
        text = decode([token for token in tokens if token != END])
        (call,) = parse(text, name, functions=offered).calls
        value = json.loads(call.arguments)["input"]
        assert set(value[:3]) <= set('"\\\n'), text
        assert value[3:] == "end"


@pytest.mark.parametrize(
    "lark",
    ['start: "a\\""i', "start: /a^b/", "start: /(^a|b)/", "start: /\\bx/", "start: /[a[b]/", "start: <tool>",
     "start: /a/x", "start: /(?i:a)/", 'start: X\nX: "a" "b"\n%ignore X', 'start: %json {"type": "string"}'],
)  # fmt: skip
def test_what_cannot_be_rewritten_is_refused(lark: str) -> None:
    with pytest.raises(RequestError, match="the grammar of a custom tool cannot have"):
        quoted(lark)
