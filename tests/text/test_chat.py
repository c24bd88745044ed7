"""Chat templates against transformers' own rendering, message checks, and hostile templates."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, ModelError, RequestError
from quire.text.formats.shapes import thinking
from quire.text.side_files import TokenizerOptions
from quire.text.template.messages import MAX_BROKEN, parse_messages
from quire.text.template.process import TemplateProcess
from quire.text.template.render import ChatTemplate
from quire.text.tokenizer import Tokenizer
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
HELLO = [{"role": "user", "content": "hi"}]
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
def limited() -> Iterator[TemplateProcess]:
    """One with tight limits, for those that do."""
    process = TemplateProcess(1.0, memory_mib=64)
    yield process
    process.close()


@pytest.fixture
def make(process: TemplateProcess) -> Callable[..., ChatTemplate]:
    def make_template(source: str | dict[str, str], *rest: Any) -> ChatTemplate:
        return ChatTemplate(source, *rest, process=process)

    return make_template


@pytest.fixture(scope="module")
def templates(sources: dict[str, str], process: TemplateProcess) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(source, SPECIAL, FrozenClock.now, process) for name, source in sources.items()}


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
            if isinstance(want, Exception) and "append" in str(
                want
            ):  # transformers forbids templates to change lists of their own
                assert "functions.weather:0" in template.render(sent, tools, prompt)
            elif isinstance(want, Exception):
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
def test_content_reaches_the_template_in_the_form_it_reads(
    make: Callable[..., ChatTemplate], source: str, text: str, parts: str
) -> None:
    template = make(source)
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
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_messages_are_refused_by_name(
    make: Callable[..., ChatTemplate], messages: Any, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        make(TEXT_TEMPLATE).render(messages)
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


def test_other_arguments_are_checked(make: Callable[..., ChatTemplate]) -> None:
    template, chat = make(TEXT_TEMPLATE), [{"role": "user", "content": "x"}]
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
    dropping = make("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(RequestError, match="changes or drops"):
        dropping.render(chat, None, False, True)


def test_raise_exception_reaches_the_client(make: Callable[..., ChatTemplate]) -> None:
    template = make("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_generation_blocks_loop_controls_and_json_work(make: Callable[..., ChatTemplate]) -> None:
    source = "{% generation %}{{ 'é<' | tojson }}{% endgeneration %}{% for i in range(9) %}{% if i > 1 %}{% break %}"
    template = make(source + "{% endif %}{{ i ~ ',' ~ none }}{% endfor %}")
    assert template.render([{"role": "user", "content": "x"}]) == '"é<"0,None1,None'


def test_templates_are_chosen_by_argument_then_name_then_tools(
    make: Callable[..., ChatTemplate], tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "x"}]
    named = {"default": "plain", "tool_use": "tools", "rag": "rag"}
    tokenizer = Tokenizer(byte_level_backend(), TokenizerOptions(chat_template=named))
    assert ChatTemplate.load(tokenizer).render(chat) == "plain"
    assert ChatTemplate.load(tokenizer).render(chat, TOOLS) == "tools"
    assert ChatTemplate.load(tokenizer, "rag").render(chat, TOOLS) == "rag"
    assert ChatTemplate.load(tokenizer, "{{ 1 + 1 }}").render(chat) == "2"
    (tmp_path / "t.jinja").write_text("from a file {{ messages[0].content }}")
    assert ChatTemplate.load(tokenizer, str(tmp_path / "t.jinja")).render(chat) == "from a file x"
    with pytest.raises(ConfigError, match="neither a file nor"):
        ChatTemplate.load(tokenizer, str(tmp_path / "missing.jinja"))
    with pytest.raises(RequestError, match="several chat templates"):
        make({"rag": "x"}).render(chat)
    with pytest.raises(ModelError, match="--chat-template"):
        ChatTemplate.load(Tokenizer(byte_level_backend(), TokenizerOptions()))


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ ", "{% include 'x' ", "{{ a.b.c( }}", "(" * 9, "{{" + "(" * 9999]
)
def test_templates_that_are_not_jinja_are_refused(make: Callable[..., ChatTemplate], source: str) -> None:
    if "{" not in source:
        assert make(source).render([{"role": "user", "content": "x"}]) == source
        return
    with pytest.raises(ModelError, match="chat template"):
        make(source)


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
    "bytes": "{{ (1).to_bytes(10**11, 'big') }}",
    "date": "{{ strftime_now('%9999999999d') }}",
}


DEEP = "{% set n = namespace(s=[]) %}{% for i in range(60000) %}{% set n.s = [n.s] %}{% endfor %}"
BIG = "{% set s = 'http://a.b ' * 400000 %}"
# What these do is up to Jinja; all that matters is that it ends.
COSTLY = {
    "format": "{{ (':' * 300000).format() }}",
    "nested braces": "{{ ('{' * 300000).format(1) }}",
    "folded": "{{ 1|round(1000000000, 'floor') }}",
    "rounded": "{{ messages|length|round(1000000000, 'floor') }}",
    "compared": NESTED + "{{ n.s == n.s }}{{ n.s < n.s }}",
    "joined": NESTED + "{{ n.s|join }}",
    "escaped": NESTED + "{{ n.s|escape }}",
    "deep": DEEP + "{{ n.s }}",
    "deep json": DEEP + "{{ n.s|tojson }}",
    "deep compared": DEEP + "{% set t = n.s %}" + DEEP + "{{ t == n.s }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "wordwrap": BIG + "{{ s|wordwrap(1) }}",
    "urlize": BIG + "{{ s|urlize }}",
    "map": BIG + "{{ ['x'] * 1000000 | map('replace', 'x', s)|list|length }}",
    "sums": "{{ range(99999)|map('string')|map('length')|sum ** 99999 }}",
    "sorts": "{% for i in range(99999) %}{% set s = range(99999)|sort %}{% endfor %}",
    "extended": "{% set x = [1] %}{% for i in range(99) %}{{ x.extend(x) or '' }}{% endfor %}",
    "macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(20_000)),
    "elifs": "{% if 0 %}" + "{% elif 1 %}x" * 20_000 + "{% endif %}",
    "parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "lexer": "{{ '" + "\\\\" * 200_000,
    "translate": "{{ 'xx'.translate({120: 'y' * 10000000}) }}",
}


def ends(process: TemplateProcess, source: str) -> str | None:
    """Whether a template does no more than its limits allow, and leaves the process at work: its error, if any."""
    error = None
    try:
        ChatTemplate(source, process=process).render([{"role": "user", "content": "x"}])
    except (ModelError, RequestError) as refused:
        error = str(refused)
    assert (
        ChatTemplate(TEXT_TEMPLATE, process=process).render([{"role": "user", "content": "a"}]) == "<user>a"
    )
    return error


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused(limited: TemplateProcess, name: str) -> None:
    assert "chat template" in (ends(limited, HOSTILE[name]) or "")


@pytest.mark.parametrize("name", COSTLY)
def test_costly_templates_end(limited: TemplateProcess, name: str) -> None:
    assert "chat template" in (ends(limited, COSTLY[name]) or "chat template")


def test_limits_say_what_they_are(limited: TemplateProcess) -> None:
    assert "takes more than 1 seconds" in (ends(limited, LOOP * 3 + END * 3) or "")
    taken = "{% set x = [] %}{% for i in range(99) %}{{ x.append((i ~ 'x') * 9000000) or '' }}{% endfor %}"
    assert "emory" in (ends(limited, taken) or "")


@pytest.mark.parametrize("error", ["{{ 1 / 0 }}", "{{ [1][3].x }}", "{{ none + 1 }}", "{{ {}|attr('x')() }}"])
def test_mistakes_of_templates_are_errors_of_the_request(
    make: Callable[..., ChatTemplate], error: str
) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        make(error).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_templates_that_were_dropped_are_compiled_again(process: TemplateProcess) -> None:
    chat = [{"role": "user", "content": "x"}]
    templates = [ChatTemplate(f"{i} {{{{ messages[0].content }}}}", process=process) for i in range(80)]
    for _ in range(2):
        assert [t.render(chat) for t in templates] == [f"{i} x" for i in range(80)]


def test_a_lost_process_is_replaced() -> None:
    process = TemplateProcess(60.0)
    template = ChatTemplate(TEXT_TEMPLATE, process=process)
    process.close()
    assert template.render([{"role": "user", "content": "a"}]) == "<user>a"
    process.close()


def test_threads_share_a_process(process: TemplateProcess) -> None:
    template = ChatTemplate(TEXT_TEMPLATE, process=process)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: template.render([{"role": "user", "content": str(i)}]), range(200)))
    assert texts == [f"<user>{i}" for i in range(200)]


def test_templates_of_requests_have_limits_of_their_own(make: Callable[..., ChatTemplate]) -> None:
    chat = [{"role": "user", "content": "x"}]
    own = make("{{ bos_token }}{{ messages[0].content }}", SPECIAL)
    other = own.of_request("{{ bos_token }}other {{ messages[0].content }}")
    assert (own.render(chat), other.render(chat)) == ("<s>x", "<s>other x")
    with pytest.raises(RequestError) as caught:
        own.of_request("{{ ")
    assert caught.value.param == "chat_template"
    with pytest.raises(RequestError, match="takes more than 1 seconds"):
        own.of_request(LOOP * 3 + END * 3).render(chat)
    assert own.render(chat) == "<s>x"


def test_templates_may_change_what_they_see(make: Callable[..., ChatTemplate]) -> None:
    chat = [{"role": "user", "content": "x"}]
    assert make("{{ messages.append(1) or messages|length }}").render(chat) == "2"
    assert chat == [{"role": "user", "content": "x"}]


def test_numbers_are_of_64_bits(make: Callable[..., ChatTemplate]) -> None:
    with pytest.raises(RequestError, match="64 bits"):
        make("{{ x }}").render([{"role": "user", "content": "x"}], x=1 << 64)


def test_a_template_that_is_too_long_is_refused(make: Callable[..., ChatTemplate]) -> None:
    with pytest.raises(ModelError, match="at most"):
        make("x" * ((1 << 20) + 1))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text("aé<&'\"", max_size=5),
        lambda x: st.lists(x),
    )
)
def test_json_in_templates_is_python_s(process: TemplateProcess, value: Any) -> None:
    template = ChatTemplate("{{ value | tojson }}{{ value | tojson(indent=2) }}", process=process)
    text = template.render([{"role": "user", "content": "x"}], value=value)
    assert text == json.dumps(value, ensure_ascii=False) + json.dumps(value, ensure_ascii=False, indent=2)


def test_a_template_may_have_roles_of_its_own(make: Callable[..., ChatTemplate]) -> None:
    assert make(TEXT_TEMPLATE).render([{"role": "my-role", "content": "x"}]) == "<my-role>x"


def test_the_first_name_of_the_reasoning_counts() -> None:
    given = [{"role": "assistant", "content": "x", "reasoning_content": "b", "reasoning": "a"}]
    assert parse_messages(given)[0]["reasoning_content"] == "a"


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ('{"a": 1, "b": [2, {"c": "x"', {"a": 1, "b": [2, {}]}),
        ('{"a": "cut of', {}),
        ('{"a": 1,, "b": 2}', {"a": 1}),
        ("{" * 500, {}),
    ],
)
def test_calls_that_broke_off_can_be_sent_back(text: str, members: dict[str, Any]) -> None:
    call = {"function": {"name": "f", "arguments": text}}
    (message,) = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == members


def test_long_arguments_that_are_malformed_are_refused() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": "' + "x" * MAX_BROKEN}}
    with pytest.raises(RequestError, match="is not valid JSON"):
        parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])


def test_arguments_are_given_as_text_to_a_template_that_needs_it(make: Callable[..., ChatTemplate]) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{% for c in messages[1].tool_calls %}{{ '>' + c.function.arguments }}{% endfor %}"
    assert make(source).render(chat) == '>{"a": 1}'


@pytest.mark.parametrize(
    "source",
    [
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
        "{% if x %}{% elif thinking %}Think.{% endif %}",
        "{% if not thinking %}</think>{% endif %}",
        "{% set reasoning = reasoning if reasoning is not undefined else true %}{{ reasoning }}",
        "{% if thinking_budget is defined and thinking_budget == 0 %}no{% endif %}",
    ],
)
def test_reasoning_is_switched_under_every_name(source: str) -> None:
    template = ChatTemplate(source)
    assert template.switches_thinking
    assert template.render(HELLO, **thinking(True)) != template.render(HELLO, **thinking(False))


def test_public_templates_with_a_switch_are_switched(sources: dict[str, str]) -> None:
    """And no other one is said to have one."""
    for name, source in sources.items():
        template = ChatTemplate(source, SPECIAL)
        tools = TOOLS if "Hermes" in name else None  # its template for tools needs some
        on, off = (template.render(HELLO, tools, **thinking(switch)) for switch in (True, False))
        assert (on != off) == template.switches_thinking, name
