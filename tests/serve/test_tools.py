"""Tools and reasoning over HTTP: every API, streamed and whole, in the official clients; and real constrained calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.serve.running import Server, start

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["metric", "imperial"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "clock": CLOCK}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "parameters": CLOCK}},
]
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
BLOCKS: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
ARGUMENTS = {"city": "Zürich 🙂", "days": 3}
CALLS = (
    "<think>\nThe user wants ☂?\n</think>\n\nLet me look.\n"
    f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS, ensure_ascii=False)}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"!say {text}!end"}]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    running = start(tool_call_parser="hermes", reasoning_parser="qwen3")
    yield running
    assert running.stop() == 0
    assert "unexpected error" not in running.log, running.log


@pytest.fixture
def chats(scripted: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def messages(scripted: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    running = start(maker="quire.client.start", model="", max_model_len=768, threads=1)
    yield running
    assert running.stop() == 0
    assert "unexpected error" not in running.log, running.log


@pytest.fixture
def stories(real: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0)


def joined(stream: Any) -> tuple[dict[str, Any], str | None]:
    """The message that a stream's chunks make, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for chunk in stream:
        choice = chunk.choices[0]
        delta = choice.delta.model_dump()
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls") or []:
            if call["id"] is not None:
                assert call["index"] == len(message["tool_calls"])
                assert call["type"] == "function"
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        reason = choice.finish_reason or reason
    return message, reason


def of_whole(answer: Any) -> tuple[dict[str, Any], str | None]:
    message = answer.choices[0].message
    calls = [{"name": c.function.name, "arguments": c.function.arguments} for c in message.tool_calls or []]
    thoughts = getattr(message, "reasoning_content", None) or ""
    return {
        "content": message.content or "",
        "reasoning_content": thoughts,
        "tool_calls": calls,
    }, answer.choices[0].finish_reason


def test_chat_has_reasoning_text_and_calls(chats: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"model": "scripted", "messages": say(CALLS), "tools": TOOLS}
    answer = chats.chat.completions.create(**wanted)
    message, reason = of_whole(answer)
    assert reason == "tool_calls"
    assert message["reasoning_content"] == "The user wants ☂?"
    assert message["content"] == "Let me look."
    assert [c["name"] for c in message["tool_calls"]] == ["weather", "clock"]
    assert json.loads(message["tool_calls"][0]["arguments"]) == ARGUMENTS
    ids = [call.id for call in answer.choices[0].message.tool_calls or []]
    assert len(set(ids)) == 2
    assert all(i.startswith("call_") for i in ids)
    assert joined(chats.chat.completions.create(**wanted, stream=True)) == (message, reason)
    with chats.chat.completions.stream(**wanted) as stream:
        final = stream.get_final_completion()
    assert of_whole(final)[0]["tool_calls"] == message["tool_calls"]


def test_what_is_shown_can_be_chosen(chats: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"model": "scripted", "messages": say(CALLS)}
    bare = chats.chat.completions.create(**wanted).choices[0]
    assert bare.finish_reason == "stop"
    assert (bare.message.content or "").count("<tool_call>") == 2
    off = chats.chat.completions.create(**wanted, tools=TOOLS, tool_choice="none").choices[0]
    assert off.message.content == bare.message.content
    one = chats.chat.completions.create(**wanted, tools=TOOLS, parallel_tool_calls=False)
    assert [c["name"] for c in of_whole(one)[0]["tool_calls"]] == ["weather"]
    streamed = chats.chat.completions.create(**wanted, tools=TOOLS, parallel_tool_calls=False, stream=True)
    assert joined(streamed) == of_whole(one)
    silent = chats.chat.completions.create(**wanted, tools=TOOLS, extra_body={"include_reasoning": False})
    assert of_whole(silent)[0]["reasoning_content"] == ""
    assert of_whole(silent)[0]["content"] == "Let me look."
    only = chats.chat.completions.create(
        **{**wanted, "messages": say(CALLS[CALLS.index("<tool") :])}, tools=TOOLS
    )
    assert only.choices[0].message.content is None


def test_n_samples_with_logprobs_and_ids(chats: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {
        "model": "scripted",
        "messages": say(CALLS),
        "tools": TOOLS,
        "n": 2,
        "logprobs": True,
    }
    extra = {"extra_body": {"return_token_ids": True}}
    whole = chats.chat.completions.create(**wanted, **extra)
    seen: list[list[int]] = [[], []]
    names: list[list[str]] = [[], []]
    num = [0, 0]
    for chunk in chats.chat.completions.create(**wanted, **extra, stream=True):
        for choice in chunk.choices:
            seen[choice.index] += getattr(choice, "token_ids", None) or []
            num[choice.index] += len((choice.logprobs and choice.logprobs.content) or [])
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                names[choice.index] += [call.function.name] if call.function.name else []
    for choice in whole.choices:
        assert seen[choice.index] == choice.token_ids  # type: ignore[attr-defined]
        assert num[choice.index] == len("Let me look.")
        assert names[choice.index] == ["weather", "clock"]


def test_a_call_that_is_cut_off(chats: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"model": "scripted", "messages": say(CALLS), "tools": TOOLS, "max_tokens": 130}
    message, reason = of_whole(chats.chat.completions.create(**wanted))
    assert reason == "length"
    (call,) = message["tool_calls"]
    assert call["name"] == "weather"
    assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith(call["arguments"])
    assert joined(chats.chat.completions.create(**wanted, stream=True)) == (message, reason)


def test_results_go_back_in(chats: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    """The next turn, as each client writes it; the template gets the tools' results as messages of their own."""
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    talk: list[Any] = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "!say noon!end"},
    ]
    answer = chats.chat.completions.create(model="scripted", messages=talk, tools=TOOLS)
    assert answer.choices[0].message.content == "noon"
    items: list[Any] = [
        {"role": "user", "content": "What time is it?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "!say noon!end"},
    ]
    response = chats.responses.create(model="scripted", input=items, tools=FLAT)
    assert response.output_text == "noon"
    assert response.usage is not None
    assert answer.usage is not None
    assert response.usage.input_tokens == answer.usage.prompt_tokens, "the prompts differ"
    use = {"type": "tool_use", "id": "call_1", "name": "clock", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "call_1",
        "content": [{"type": "text", "text": "!say noon!end"}],
    }
    turns: list[Any] = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": ""}, use]},
        {"role": "user", "content": [result]},
    ]
    message = messages.messages.create(model="scripted", max_tokens=20, messages=turns, tools=BLOCKS)
    assert message.content[0].text == "noon"  # type: ignore[union-attr]
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == answer.usage.prompt_tokens


def test_responses_have_items(chats: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"model": "scripted", "input": say(CALLS), "tools": FLAT}
    whole = chats.responses.create(**wanted)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    thoughts, text, weather, clock = whole.output
    assert thoughts.content[0].text == "The user wants ☂?"  # type: ignore[union-attr,index]
    assert text.content[0].text == whole.output_text == "Let me look."  # type: ignore[union-attr,index]
    assert json.loads(weather.arguments) == ARGUMENTS  # type: ignore[union-attr]
    assert (clock.name, clock.arguments) == ("clock", "{}")  # type: ignore[union-attr]
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    deltas: dict[int, str] = {}
    kinds = []
    final = None
    for number, event in enumerate(chats.responses.create(**wanted, stream=True)):
        assert event.sequence_number == number
        if event.type.endswith(".delta"):
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
        elif event.type == "response.output_item.added":
            kinds.append(event.item.type)
        elif event.type == "response.completed":
            final = event.response
    assert final is not None
    assert kinds == [item.type for item in whole.output]
    assert deltas == {0: "The user wants ☂?", 1: "Let me look.", 2: weather.arguments, 3: "{}"}  # type: ignore[union-attr]

    def plain(items: Any) -> Any:
        return [item.model_dump(exclude={"id", "call_id"}) for item in items]

    assert plain(final.output) == plain(whole.output)
    with chats.responses.stream(**wanted) as stream:
        assert plain(stream.get_final_response().output)[0] == plain(whole.output)[0]


def test_messages_have_blocks(messages: anthropic.Anthropic) -> None:
    wanted: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 400,
        "messages": say(CALLS),
        "tools": BLOCKS,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = messages.messages.create(**wanted)
    assert whole.stop_reason == "tool_use"
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[0].thinking == "The user wants ☂?"  # type: ignore[union-attr]
    assert whole.content[2].input == ARGUMENTS  # type: ignore[union-attr]
    with messages.messages.stream(**wanted) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"thinking", "text", "input_json"} <= set(kinds)

    def plain(message: Any) -> Any:
        return [block.model_dump(exclude={"id", "parsed_output", "caller"}) for block in message.content]

    assert plain(final) == plain(whole)
    assert final.stop_reason == "tool_use"
    cut = messages.messages.create(**{**wanted, "max_tokens": 130})
    assert cut.stop_reason == "max_tokens"
    assert cut.content[-1].type == "tool_use"
    assert set(cut.content[-1].input) <= {"city"}
    single = {**wanted, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert len(messages.messages.create(**single).content) == 3


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "letters, digits",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "'retrieval' is not"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name", "'weather' appears twice"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
            "of an object",
        ),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict", "true or false"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "not 'always'"),
        ({"tool_choice": "required"}, "tool_choice", "give at least one"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "wether"}}},
            "tool_choice",
            "clock, weather",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "must name a function"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice", "not 'tool'"),
        (
            {
                "tools": [
                    {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "objekt"}}}}}
                ],
                "tool_choice": "required",
            },
            "tools",
            "objekt",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ],
)
def test_refused_with_the_reason(real: Server, fields: dict[str, Any], param: str, reason: str) -> None:
    answer = real.post("/v1/chat/completions", {"messages": say("x"), **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param
    assert reason in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (
            "responses",
            {"input": "x", "tools": [{"type": "mcp"}], "tool_choice": {"type": "mcp"}},
            "'mcp' is not",
        ),
        (
            "responses",
            {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "'web_search' is not",
        ),
        (
            "responses",
            {"input": [{"type": "function_call_output", "call_id": "a", "output": 3}]},
            "input[0].output",
        ),
        (
            "responses",
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
        ),
        ("responses", {"input": "x", "reasoning": {"effort": 3}}, "reasoning.effort"),
        ("messages", {"messages": say("x"), "tools": [{"name": "f"}]}, "input_schema"),
        ("messages", {"messages": say("x"), "tools": BLOCKS, "tool_choice": {"type": "some"}}, "'some'"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "tool_use"),
        ("messages", {"messages": say("x"), "thinking": {}}, "thinking.type"),
    ],
)
def test_other_apis_refuse(real: Server, path: str, body: dict[str, Any], reason: str) -> None:
    fields = {"max_tokens": 5, "model": "quire-stories"} if path == "messages" else {}
    answer = real.post(f"/v1/{path}", {**body, **fields})
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("suffix", "text", "thoughts", "content"),
    [
        ("<think>\n", "Hm.\n</think>\nYes", "Hm.", "Yes"),
        ("<think>\n", "Hm, no end", "Hm, no end", ""),
        ("<think>\n\n</think>\n\n", "Yes </think>", "", "Yes </think>"),
        ("", "Yes", "", "Yes"),
    ],
)
def test_the_prompt_may_have_begun_the_reasoning(
    chats: openai.OpenAI, suffix: str, text: str, thoughts: str, content: str
) -> None:
    wanted: dict[str, Any] = {
        "model": "scripted",
        "messages": say(text),
        "extra_body": {"chat_template_kwargs": {"suffix": suffix}},
    }
    message, reason = of_whole(chats.chat.completions.create(**wanted))
    assert (message["reasoning_content"], message["content"], reason) == (thoughts, content, "stop")
    assert joined(chats.chat.completions.create(**wanted, stream=True)) == (message, reason)


def test_markers_that_are_special_tokens_are_seen() -> None:
    running = start(tool_call_parser="granite")
    body = {
        "messages": say(f'Ok {{CALL}}[{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}]'),
        "tools": TOOLS,
    }
    try:
        choice = running.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["message"]["content"] == "Ok"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
        plain = running.post("/v1/chat/completions", {"messages": body["messages"]}).json()["choices"][0]
        assert plain["message"]["content"].startswith("Ok [")
    finally:
        assert running.stop() == 0


TELL: list[Any] = [{"role": "user", "content": "Tell me a story."}]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "weather"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "name": "weather"}]},
        },
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_required_calls_are_valid(stories: openai.OpenAI, choice: Any, seed: int) -> None:
    wanted: dict[str, Any] = {
        "model": "quire-stories",
        "messages": TELL,
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 400,
        "seed": seed,
        "parallel_tool_calls": choice == "required" and seed == 1,
    }
    message, reason = of_whole(stories.chat.completions.create(**wanted))
    assert joined(stories.chat.completions.create(**wanted, stream=True)) == (message, reason)
    assert message["tool_calls"]
    assert message["content"] == ""
    calls = message["tool_calls"] if reason == "tool_calls" else message["tool_calls"][:-1]
    assert reason == "tool_calls" or wanted["parallel_tool_calls"], "it goes on calling"
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    if choice != "required":
        assert {call["name"] for call in calls} == {"weather"}


@pytest.mark.parametrize("parser", ["pythonic", "qwen3_coder", "openai", "mistral"])
def test_other_formats_are_constrained_too(parser: str) -> None:
    running = start(
        maker="quire.client.start", model="", max_model_len=768, threads=1, tool_call_parser=parser
    )
    try:
        body = {
            "messages": TELL,
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "seed": 5,
        }
        for stream in (False, True):
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
                made = client.chat.completions.create(
                    model="quire-stories", max_tokens=600, stream=stream, **body
                )  # type: ignore[call-overload]
                message, reason = joined(made) if stream else of_whole(made)
            assert reason == "tool_calls"
            (call,) = message["tool_calls"]
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    finally:
        assert running.stop() == 0


def test_required_in_the_other_apis(real: Server, stories: openai.OpenAI) -> None:
    response = stories.responses.create(
        model="quire-stories",
        input="Tell me a story.",
        tools=FLAT,
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=300,
    )
    (item,) = response.output
    jsonschema.validate(json.loads(item.arguments), WEATHER)  # type: ignore[union-attr]
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model="quire-stories",
            max_tokens=300,
            messages=TELL,
            tools=BLOCKS,
            tool_choice={"type": "tool", "name": "weather"},
        )
    (block,) = message.content
    assert message.stop_reason == "tool_use"
    jsonschema.validate(block.input, WEATHER)  # type: ignore[union-attr]


def test_a_format_beside_free_choice(stories: openai.OpenAI) -> None:
    """With tools to choose from, the answer is either a call or of the format."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = stories.chat.completions.create(
        model="quire-stories",
        messages=TELL,
        tools=TOOLS,
        max_tokens=300,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    ).choices[0]
    if answer.message.tool_calls:
        assert answer.finish_reason in ("tool_calls", "length")
    else:
        jsonschema.validate(json.loads(answer.message.content or ""), schema)


def test_strict_functions_leave_other_text_free(stories: openai.OpenAI) -> None:
    strict: list[Any] = [
        {"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS
    ]
    wanted: dict[str, Any] = {"model": "quire-stories", "messages": TELL, "max_tokens": 60, "temperature": 0}
    held = stories.chat.completions.create(**wanted, tools=strict).choices[0]
    free = stories.chat.completions.create(**wanted).choices[0]
    assert held.message.content == free.message.content
    assert held.finish_reason == free.finish_reason


def test_auto_can_be_switched_off() -> None:
    running = start(enable_auto_tool_choice=False)
    try:
        answer = running.post("/v1/chat/completions", {"messages": say("x"), "tools": TOOLS})
        assert answer.status_code == 400
        assert "--no-enable-auto-tool-choice" in answer.json()["error"]["message"]
    finally:
        assert running.stop() == 0


EXAMPLES = re.findall(
    r"^```python\n(.*?)^```",
    (Path(__file__).parents[2] / "docs/tools.md").read_text(),
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize("code", [code for code in EXAMPLES if "base_url" in code])
def test_examples_of_the_docs_run(real: Server, code: str) -> None:
    code = code.replace("http://127.0.0.1:8000", real.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "{" in done.stdout


ROLL = {"properties": {"sides": {"enum": [6, 20]}}, "required": ["sides"]}
ROLLS: list[Any] = [{"type": "function", "function": {"name": "roll", "parameters": ROLL}}]


def test_arguments_are_an_object_though_the_schema_does_not_say_so(real: Server) -> None:
    for seed in range(8):
        fields = {"tools": ROLLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        answer = real.post("/v1/chat/completions", {"messages": say("x"), "max_tokens": 60, **fields}).json()
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["sides"] in (6, 20)


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_is_no_content(stories: openai.OpenAI, stream: bool) -> None:
    named: Any = {"type": "function", "function": {"name": "roll"}}
    for choice, names in (("required", ["roll"]), (named, ["roll"])):
        call: Any = {"model": "quire-stories", "messages": say("x"), "tools": ROLLS, "tool_choice": choice}
        got = stories.chat.completions.create(max_tokens=3, stream=stream, **call)
        if stream:
            deltas = [choice for chunk in got for choice in chunk.choices]
            content = "".join(d.delta.content or "" for d in deltas)
            found = [c.function.name for d in deltas for c in d.delta.tool_calls or []]
            reason = deltas[-1].finish_reason
        else:
            content = got.choices[0].message.content or ""
            found = [c.function.name for c in got.choices[0].message.tool_calls or []]
            reason = got.choices[0].finish_reason
        assert (content, found, reason) == ("", names, "length")


def test_a_forced_call_beside_a_response_format(real: Server) -> None:
    fields = {"tools": ROLLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    answer = real.post("/v1/chat/completions", {"messages": say("x"), "max_tokens": 60, **fields}).json()
    assert answer["choices"][0]["message"]["tool_calls"]


@pytest.fixture(scope="module")
def thinking() -> Iterator[Server]:
    """A model whose answers begin inside the reasoning, and whose template shows tools in no known format."""
    template = (
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{{ '<|' + m.role + '|>' + m.content + ('' if loop.last and not add_generation_prompt else '<|end|>') }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    running = start(
        maker="quire.client.start",
        model="",
        max_model_len=512,
        threads=1,
        reasoning_parser="deepseek_r1",
        chat_template=template,
    )
    yield running
    assert running.stop() == 0


def test_continued_answers_are_no_reasoning(thinking: Server) -> None:
    talk = [{"role": "user", "content": "Yes or no?"}, {"role": "assistant", "content": "My answer is"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    body = {"messages": talk, "max_tokens": 20, "structured_outputs": {"regex": " (yes|no)"}, **fields}
    message = thinking.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["content"] in (" yes", " no")
    assert not message.get("reasoning_content")
    opened = [talk[0], {"role": "assistant", "content": "<think>I am"}]
    body = {"messages": opened, "max_tokens": 5, **fields}
    message = thinking.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    assert not message["content"]


def test_a_format_that_nobody_recognises_is_not_hermes(thinking: Server) -> None:
    assert "no known format" in thinking.log
    for choice, fields in (("required", {}), ("auto", {"strict": True})):
        tools = [{"type": "function", "function": {**ROLLS[0]["function"], **fields}}]
        body = {"messages": say("x"), "max_tokens": 5, "tools": tools, "tool_choice": choice}
        answer = thinking.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert "--tool-call-parser" in answer.json()["error"]["message"]
    body = {"messages": say("x"), "max_tokens": 5, "tools": ROLLS}
    assert thinking.post("/v1/chat/completions", body).status_code == 200
