"""Chat templates against transformers' own rendering, message checks, and hostile templates."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ModelError, RequestError
from quire.text.template import sandbox
from quire.text.template.messages import answer_turn, parse_messages
from quire.text.template.render import ChatTemplate
from quire.text.tokenizer import Tokenizer, TokenizerOptions
from tests.text.conftest import byte_level_backend

Chat = list[dict[str, Any]]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "City"},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["city"],
}
FUNCTION = {"name": "weather", "description": "The <weather> & more, é", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich"}},
}
CHATS: dict[str, tuple[Chat, list[Any] | None]] = {
    "single": ([{"role": "user", "content": "Hi there"}], None),
    "system": ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}], None),
    "turns": (
        [
            {"role": "user", "content": "Q1 "},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA1"},
            {"role": "user", "content": " Q2\n"},
        ],
        None,
    ),
    "reasoning": (
        [
            {"role": "user", "content": "Q1"},
            {"role": "assistant", "content": "A1", "reasoning_content": "hmm"},
            {"role": "user", "content": "Q2"},
        ],
        None,
    ),
    "tools": ([{"role": "system", "content": "S"}, {"role": "user", "content": "Weather?"}], TOOLS),
    "tool call": (
        [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"t": 3}'},
        ],
        TOOLS,
    ),
}


class FrozenClock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime(2025, 3, 4, 5, 6, 7)


@pytest.fixture(scope="module")
def sources(data: Path) -> dict[str, str]:
    """Public models' templates by file name."""
    found = {path.name: path.read_text() for path in sorted((data / "templates-llamacpp").glob("*.jinja"))}
    for path in sorted((data / "tok-qwen2" / "configs").iterdir()):
        if path.suffix == ".jinja":
            found[path.name] = path.read_text()
        elif path.name.endswith("tokenizer_config.json"):
            template = json.loads(path.read_text()).get("chat_template")
            if isinstance(template, str):
                found[path.name] = template
    assert len(found) >= 40
    return found


@pytest.fixture(scope="module")
def templates(sources: dict[str, str]) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(source, SPECIAL, now=FrozenClock.now) for name, source in sources.items()}


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' renderer with the clock stopped; gives the text or the error."""
    module = pytest.importorskip("transformers.utils.chat_template_utils")
    monkeypatch.setattr(module, "datetime", FrozenClock)

    def render(source: str, chat: Chat, **options: Any) -> str | Exception:
        try:
            text: str = module.render_jinja_template([copy.deepcopy(chat)], chat_template=source, **options)[
                0
            ][0]
            return text
        except Exception as error:
            return error

    return render


def as_clients_send(chat: Chat) -> Chat:
    """Tool calls with their arguments as JSON text."""
    chat = copy.deepcopy(chat)
    for message in chat:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return chat


@pytest.mark.parametrize("name", CHATS)
def test_public_templates_render_as_transformers_renders_them(
    sources: dict[str, str], templates: dict[str, ChatTemplate], theirs: Any, name: str
) -> None:
    chat, tools = CHATS[name]
    sent = as_clients_send(chat)
    rendered = 0
    for source_name, source in sources.items():
        template = templates[source_name]
        for prompt in (True, False):
            want = theirs(source, chat, tools=tools, add_generation_prompt=prompt, **SPECIAL)
            if isinstance(want, TypeError):  # a template that expects arguments as text
                want = theirs(source, sent, tools=tools, add_generation_prompt=prompt, **SPECIAL)
            if isinstance(want, Exception):
                with pytest.raises(RequestError):
                    template.render(sent, tools, add_generation_prompt=prompt)
            else:
                assert template.render(sent, tools, prompt) == want, source_name
                rendered += 1
    assert rendered >= 60


def test_final_messages_are_continued_as_transformers_does(
    sources: dict[str, str], templates: dict[str, ChatTemplate], theirs: Any
) -> None:
    rendered = 0
    for text in ("Once upon", "Once upon ", "\n  Once"):
        chat = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": text}]
        for name, source in sources.items():
            template = templates[name]
            want = theirs(source, chat, continue_final_message=True, add_generation_prompt=False, **SPECIAL)
            if isinstance(want, Exception):
                with pytest.raises(RequestError):
                    template.render(chat, add_generation_prompt=False, continue_final_message=True)
            else:
                got = template.render(chat, add_generation_prompt=False, continue_final_message=True)
                assert got == want, name
                rendered += 1
    assert rendered >= 60


def test_template_variables_and_dates_are_passed(
    sources: dict[str, str], templates: dict[str, ChatTemplate], theirs: Any
) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    differs = 0
    for name, source in sources.items():
        template = templates[name]
        options = {"enable_thinking": False, "thinking": True, "add_generation_prompt": True}
        want = theirs(source, chat, **options, **SPECIAL)
        if isinstance(want, str):
            assert template.render(chat, **options) == want
            differs += want != template.render(chat)
    assert differs >= 5
    llama = templates["meta-llama-Llama-3.2-3B-Instruct.jinja"]
    assert "04 Mar 2025" in llama.render(chat)


TEXT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PART_TEMPLATE = "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}"
BOTH_TEMPLATE = (
    "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}[{{ p.text }}]{% endfor %}"
    "{% endif %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [
        (TEXT_TEMPLATE, "<user>a", "<user>a\nb"),
        (PART_TEMPLATE, "[a]", "[a][b]"),
        (BOTH_TEMPLATE, "a", "[a][b]"),
    ],
)
def test_content_reaches_the_template_in_the_form_it_reads(source: str, text: str, parts: str) -> None:
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": "a"}]) == text
    both = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": both}]) == parts
    assert template.render([{"role": "user", "content": ["a", "b"]}]) == parts


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0]"),
        ([{"role": "user", "content": object()}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_messages_are_refused_by_name(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(TEXT_TEMPLATE).render(messages)
    assert caught.value.param == param


def test_messages_are_copied_and_completed() -> None:
    call = {"function": {"name": "f", "arguments": ' {"a": [1]} '}}
    empty = {"function": {"name": "g", "arguments": ""}}
    given = [{"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call, empty]}]
    before = copy.deepcopy(given)
    (message,) = parse_messages(given)
    assert given == before
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == [{"a": [1]}, {}]
    assert message["reasoning_content"] == message["thinking"] == "r"
    assert "tool_calls" not in parse_messages([{"role": "assistant", "content": "x", "tool_calls": []}])[0]


def test_other_arguments_are_checked() -> None:
    template, chat = ChatTemplate(TEXT_TEMPLATE), [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="exclude each other"):
        template.render(chat, continue_final_message=True)
    for options, param in (({"tools": "x"}, "tools"), ({"documents": [1]}, "documents")):
        with pytest.raises(RequestError) as caught:
            template.render(chat, **options)  # type: ignore[arg-type]
        assert caught.value.param == param
    with pytest.raises(RequestError, match="only JSON"):
        template.render(chat, thing=object())
    with pytest.raises(RequestError, match="last message"):
        template.render([{"role": "assistant", "content": None}], None, False, True)
    dropping = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(RequestError, match="changes or drops"):
        dropping.render(chat, None, False, True)


def test_raise_exception_reaches_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_generation_blocks_loop_controls_and_json_work() -> None:
    source = "{% generation %}{{ 'é<' | tojson }}{% endgeneration %}{% for i in range(9) %}{% if i > 1 %}{% break %}"
    template = ChatTemplate(source + "{% endif %}{{ i ~ ',' ~ none }}{% endfor %}")
    assert template.render([{"role": "user", "content": "x"}]) == '"é<"0,None1,None'


def test_templates_are_chosen_by_argument_then_name_then_tools(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    named = {"default": "plain", "tool_use": "tools", "rag": "rag"}
    tokenizer = Tokenizer(byte_level_backend(), TokenizerOptions(chat_template=named))
    assert ChatTemplate.load(tokenizer).render(chat) == "plain"
    assert ChatTemplate.load(tokenizer).render(chat, TOOLS) == "tools"
    assert ChatTemplate.load(tokenizer, "rag").render(chat, TOOLS) == "rag"
    assert ChatTemplate.load(tokenizer, "{{ 1 + 1 }}").render(chat) == "2"
    (tmp_path / "t.jinja").write_text("from a file {{ messages[0].content }}")
    assert ChatTemplate.load(tokenizer, str(tmp_path / "t.jinja")).render(chat) == "from a file x"
    with pytest.raises(ModelError, match="neither a file nor"):
        ChatTemplate.load(tokenizer, str(tmp_path / "missing.jinja"))
    with pytest.raises(RequestError, match="several chat templates"):
        ChatTemplate({"rag": "x"}).render(chat)
    with pytest.raises(ModelError, match="--chat-template"):
        ChatTemplate.load(Tokenizer(byte_level_backend(), TokenizerOptions()))


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ ", "{% include 'x' ", "{{ a.b.c( }}", "(" * 9, "{{" + "(" * 9999]
)
def test_templates_that_are_not_jinja_are_refused(source: str) -> None:
    if "{" not in source:
        assert ChatTemplate(source).render([{"role": "user", "content": "x"}]) == source
        return
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source)


NESTED = "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"
HOSTILE = {
    "class": "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ ''|attr('__class__')|attr('__mro__') }}{{ (''|attr('__class__')).x.y }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception).x.y }}",
    "format method": "{{ ('{0.__class__}'|attr('format'))(1) }}{{ {}.x.y }}",
    "globals": "{{ raise_exception.__globals__['sys'].exit() }}",
    "namespace": "{% set n = namespace(__class__=1) %}",
    "change": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "loops": LOOP * 3 + END * 3,
    "shadowed": "{% set tick = 1 %}{% set environment = 1 %}" + LOOP * 2 + END * 2,
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "tree recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "range": "{{ range(10**9) | list }}",
    "output": "{% set s = 'x' * 100000 %}" + LOOP + "{{ s }}" + END,
    "macro output": "{% macro f(s) %}" + LOOP + "{{ s }}" + END + "{% endmacro %}{{ f('x' * 9999)|length }}",
    "times": "{{ ('x' * 10**12)|length }}",
    "times list": "{{ ([0] * 10**12)|length }}",
    "times twice": "{{ [['x' * 9999999] * 9999] * 9999 }}",
    "double": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "tilde": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "nested": NESTED + "{{ n.s }}",
    "nested json": NESTED + "{{ n.s|tojson }}",
    "nested string": NESTED + "{{ n.s|string }}",
    "power": "{{ 9 ** 99999 }}",
    "product": "{% set n = namespace(i=3) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "pad": "{{ 'x'.center(10**10) }}",
    "pad filter": "{{ 'x'|center(10**10) }}",
    "zfill": "{{ 'x'.zfill(width=10**10) }}",
    "percent": "{{ '%99999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "percent filter": "{{ '%99999999999d'|format(1) }}",
    "format width": "{{ '{:>99999999999}'.format(1) }}",
    "format nested": "{{ '{:>{}}'.format(1, 10**10) }}",
    "indent": "{{ ('x\n' * 100000)|indent(10**6) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(10**6) }}",
    "replace": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "replace filter": "{{ ('x' * 100000)|replace('x', 'y' * 100000) }}",
    "join": "{{ ('x' * 100000).join(['y'] * 100000) }}",
    "join filter": "{{ (['y' * 100000] * 1000)|join('x' * 100000) }}",
    "json indent": "{{ [1]|tojson(indent=10**10) }}",
    "translate": "{{ 'xx'.translate({120: 'y' * 10000000}) }}",
    "bytes": "{{ (1).to_bytes(10**11, 'big') }}",
    "date": "{{ strftime_now('%9999999999d') }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused_within_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 20_000)
    template = ChatTemplate(HOSTILE[name])
    with pytest.raises(RequestError, match="chat template"):
        template.render([{"role": "user", "content": "x"}])


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", -1.0)
    template = ChatTemplate("{% for i in range(1000) %}{% endfor %}")
    with pytest.raises(RequestError, match="seconds"):
        template.render([{"role": "user", "content": "x"}])


def test_bounds_count_for_each_render_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1000)
    template = ChatTemplate("{% for i in range(900) %}{% endfor %}done")
    for _ in range(3):
        assert template.render([{"role": "user", "content": "x"}]) == "done"


def test_a_template_that_is_too_long_is_refused() -> None:
    with pytest.raises(ModelError, match="at most"):
        ChatTemplate("x" * ((1 << 20) + 1))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text("aé<&'\"", max_size=5), lambda x: st.lists(x)
    )
)
def test_json_in_templates_is_python_s(value: Any) -> None:
    template = ChatTemplate("{{ value | tojson }}{{ value | tojson(indent=2) }}")
    text = template.render([{"role": "user", "content": "x"}], value=value)
    assert text == json.dumps(value, ensure_ascii=False) + json.dumps(value, ensure_ascii=False, indent=2)


def test_null_content_stays_null() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    asks = "{% for m in messages %}{% if m['content'] is none %}none{% endif %}|{% endfor %}"
    assert ChatTemplate(asks).render(chat) == "|none|"


def test_a_template_may_have_roles_of_its_own() -> None:
    assert ChatTemplate(TEXT_TEMPLATE).render([{"role": "my-role", "content": "x"}]) == "<my-role>x"


def test_the_first_name_of_the_reasoning_counts() -> None:
    given = [{"role": "assistant", "content": "x", "reasoning_content": "b", "reasoning": "a"}]
    assert parse_messages(given)[0]["reasoning_content"] == "a"


def test_arguments_are_given_as_text_to_a_template_that_needs_it() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{% for c in messages[1].tool_calls %}{{ '>' + c.function.arguments }}{% endfor %}"
    assert ChatTemplate(source).render(chat) == '>{"a": 1}'


@pytest.mark.parametrize(
    ("prompt", "messages", "continued", "turn"),
    [
        ("<|u|>Hi<|a|><think>\n", ["Hi"], False, "<|a|><think>\n"),
        ("<|u|>What is <think>?<|a|>", ["What is <think>?"], False, "<|a|>"),
        ("<|u|>think<|a|><think>", ["think"], False, "<|a|><think>"),
        ("<|u|>Hi<|a|><think>Hi there", ["Hi", "<think>Hi there"], True, "<|a|><think>Hi there"),
        ("<|u|>Hi<|a|>Hi", ["Hi", "Hi"], True, "<|a|>Hi"),
        ("<|u|>changed<|a|>", ["original"], False, "<|u|>changed<|a|>"),
    ],
)
def test_the_turn_of_the_answer(prompt: str, messages: list[str], continued: bool, turn: str) -> None:
    chat = [{"role": "user", "content": text} for text in messages]
    assert answer_turn(prompt, chat, continued) == turn
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in messages]
    assert answer_turn(prompt, parts, continued) == turn
