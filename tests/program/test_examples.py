"""The kinds of programs that SGLang's README and documentation show, with only the import changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import quire.program as sgl
from quire import LLM, SamplingParams
from quire.errors import EngineError


class Counting:
    """An LLM that counts the programs sent to it."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.role_frames = llm, llm.role_frames
        self.num_requests = 0

    def run_program(self, program: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        self.num_requests += 1
        return self.llm.run_program(program)

    def end_session(self, session: str) -> None:
        self.llm.end_session(session)

    def reset_prefix_cache(self) -> bool:
        return self.llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=64) as llm:
        yield llm


@pytest.fixture
def backend(llm: LLM) -> Counting:
    backend = Counting(llm)
    sgl.set_default_backend(backend)
    return backend


@sgl.function
def conversation(s: Any, first: str, second: str) -> None:
    s += sgl.system("You are friendly.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("first_answer", max_tokens=16))
    s += sgl.user(second)
    s += sgl.assistant(sgl.gen("second_answer", max_tokens=16))


def test_a_conversation_of_several_turns(backend: Counting) -> None:
    state = conversation.run(first="Hello!", second="Why?", temperature=0)
    assert [message["role"] for message in state.messages()] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert state.messages()[4]["content"] == state["second_answer"]
    assert state["first_answer"] in state.text()
    assert backend.num_requests == 1


def test_many_conversations_and_a_stream(backend: Counting) -> None:
    arguments = [{"first": f"Hello {i}!", "second": "Why?"} for i in range(6)]
    states = conversation.run_batch(arguments, temperature=0, num_threads=3, progress_bar=False)
    alone = [conversation.run(**one, temperature=0) for one in arguments]
    assert [state.text() for state in states] == [state.text() for state in alone]
    lazy = conversation.run_batch(arguments, temperature=0, generator_style=True)
    assert [state["second_answer"] for state in lazy] == [state["second_answer"] for state in alone]
    stream = conversation.run(**arguments[0], temperature=0, stream=True)
    pieces = list(stream.text_iter("first_answer"))
    assert len(pieces) > 1
    assert "".join(pieces) == alone[0]["first_answer"]
    assert stream.text() == alone[0].text()


@sgl.function
def tip_suggestion(s: Any) -> None:
    s += "Two tips for a happy day: 1. Play in the park. 2. Help a friend.\n"
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += f"More about tip {i + 1}:"
        branch += sgl.gen("detail", max_tokens=12, stop="\n")
    s += "Tip 1:" + branches[0]["detail"] + "\n"
    s += "Tip 2:" + branches[1]["detail"] + "\n"
    s += "So," + sgl.gen("summary", max_tokens=8)


def test_tips_that_branches_expand(backend: Counting, llm: LLM) -> None:
    state = tip_suggestion.run(temperature=0)
    head = "Two tips for a happy day: 1. Play in the park. 2. Help a friend.\n"
    params = SamplingParams(temperature=0, max_tokens=12, stop="\n")
    prompts = [f"{head}More about tip {i}:" for i in (1, 2)]
    first, second = (output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False))
    assert state.text() == f"{head}Tip 1:{first}\nTip 2:{second}\nSo,{state['summary']}"
    assert backend.num_requests == 1


def test_a_stream_is_the_text(backend: Counting) -> None:
    for trace in (True, False):
        state = sgl.function(tip_suggestion.func, trace=trace).run(temperature=0, stream=True)
        assert "".join(state.text_iter()) == state.text()
        assert "So," in state.text()


def test_an_error_in_the_code_ends_the_session(backend: Counting, llm: LLM) -> None:
    @sgl.function
    def broken(s: Any) -> None:
        s += "A" + sgl.gen("a", max_tokens=2)
        raise ZeroDivisionError(s["a"])

    with pytest.raises(ZeroDivisionError):
        broken.run()
    assert llm.stats().num_sessions == 0
    state = broken.run(stream=True)
    assert "".join(state.text_iter()) == state.text()
    assert "ZeroDivisionError" in repr(state.error())
    assert llm.stats().num_sessions == 0


@sgl.function
def judge(s: Any, essay: str) -> None:
    s += f"A story: {essay}\n"
    branches = s.fork(3)
    for branch, what in zip(branches, ("clear", "short", "funny"), strict=True):
        branch += f"Is it {what}? Why:" + sgl.gen("reason", max_tokens=8, stop="\n")
        branch += "\nSo it is" + sgl.select("grade", [" good", " bad", " very bad"])
    branches.join()
    s += "In all it is" + sgl.gen("verdict", choices=[" good", " bad"])


def test_a_judge_of_several_dimensions(backend: Counting) -> None:
    state = judge.run(essay="The cat sat on the mat. " * 10, temperature=0)
    assert len(state["reason"]) == len(state["grade"]) == 3
    assert set(state["grade"]) <= {" good", " bad", " very bad"}
    assert state["verdict"] in (" good", " bad")
    assert state.get_meta_info("verdict")["normalized_prompt_logprobs"]
    assert backend.num_requests == 1


CHARACTER = (
    r'\{"name": "[A-Z][a-z]{1,10}", "age": [0-9]{1,2}, '
    r'"kind": "(cat|dog)", "friends": \["[a-z]{2,6}", "[a-z]{2,6}"\]\}'
)


@sgl.function
def character(s: Any, name: str) -> None:
    s += f"{name} is a character of a story. Facts about {name} as JSON:\n"
    s += sgl.gen("json", max_tokens=128, regex=CHARACTER)


@sgl.function
def by_schema(s: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    s += "Answer: " + sgl.gen("json", max_tokens=20, json_schema=json.dumps(schema))


def test_json_by_regex_and_by_schema(backend: Counting) -> None:
    found = json.loads(character.run(name="Lily")["json"])
    assert found["kind"] in ("cat", "dog")
    assert isinstance(json.loads(by_schema.run()["json"])["ok"], bool)


@sgl.function
def agent(s: Any, question: str, tools: dict[str, Any], used: list[str]) -> int:
    """Thinks, calls a tool with what it wrote, and goes on, until it is done."""
    s += f"Question: {question}\n"
    for turn in range(4):
        s += f"Thought {turn}:" + sgl.gen("thought", max_tokens=8, stop="\n")
        s += "\nTool:" + sgl.gen("tool", choices=[" add", " double", " finish"])
        if turn == 3 or s["tool"] == " finish":
            break
        s += "\nNumber: " + sgl.gen_int("number", max_tokens=3)
        result = tools[s["tool"].strip()](int(s["number"]))
        used.append(s["tool"])
        s += f"\nResult: {result}\n"
    s += "\nAnswer:" + sgl.gen("answer", max_tokens=4)
    return turn


def test_an_agent_that_calls_tools(backend: Counting, llm: LLM) -> None:
    used: list[str] = []
    tools = {"add": lambda number: number + 1, "double": lambda number: 2 * number}
    state = agent.run("How old is Tom?", tools, used, temperature=0)
    assert state.error() is None
    assert state.ret_value == len(used)
    assert state.text().count("Result: ") == len(used)
    assert state["answer"]
    assert backend.num_requests >= 2
    assert llm.stats().num_sessions == 0, "the session ends with the program"
    assert llm.stats().num_used_blocks == 0


@sgl.function
def nested(s: Any) -> None:
    s += "Count:"
    with s.var_scope("numbers"):
        for i in range(3):
            s += f" {i}"
    with s.copy() as branch:
        branch += " and" + sgl.gen("inner", max_tokens=3)
        group = branch.fork(2)
        group += sgl.gen("leaf", max_tokens=2)
        group.join("concate_and_append")
    s += sgl.gen("after", max_tokens=2)


def test_a_runtime_is_a_server_of_its_own(llm: LLM) -> None:
    runtime = sgl.Runtime(max_model_len=256, context_length=None, enable_prefix_caching=True)
    try:
        state = tip_suggestion.run(temperature=0, backend=runtime)
        assert state.text() == tip_suggestion.run(temperature=0, backend=llm).text()
    finally:
        runtime.shutdown()
    with pytest.raises(EngineError, match="does not answer"):
        runtime.role_frames()
    with pytest.raises(EngineError, match="ended with status 2"):
        sgl.Runtime(no_such_option=1)


def test_forks_inside_forks_and_scopes(backend: Counting) -> None:
    state = nested.run(temperature=0)
    assert state["numbers"] == " 0 1 2"
    assert isinstance(state["inner"], list)
    assert "leaf" not in state
    assert state.text() == "Count: 0 1 2" + state["after"]
    assert backend.num_requests == 1


def test_asyncio(backend: Counting) -> None:
    state = conversation.bind(second="Why?").run(first="Hi", temperature=0, stream=True)

    async def read() -> str:
        return "".join([piece async for piece in state.text_async_iter("second_answer")])

    assert asyncio.run(read()) == state["second_answer"]
    assert sgl.flush_cache()


@pytest.mark.parametrize("trace", [True, False])
def test_a_branch_that_fails_keeps_what_it_has(backend: Counting, trace: bool) -> None:
    @sgl.function(trace=trace)
    def broken(s: Any) -> None:
        s += "One"
        good, bad = s.fork(2)
        good += " two" + sgl.gen("word", max_tokens=2)
        bad += sgl.user_begin() + " three" + sgl.user_begin() + sgl.gen("never", max_tokens=2)
        s["branches"] = [good, bad]
        s += " four"

    state = broken.run(temperature=0)
    good, bad = state["branches"]
    assert good.text() == "One two" + good["word"]
    assert good.error() is None
    assert bad.text().endswith(" three")
    assert "nest" in str(bad.error())
    with pytest.raises(KeyError):
        bad["never"]
    assert state.text() == "One four"
    assert backend.num_requests == 1


@pytest.mark.parametrize("trace", [True, False])
def test_a_stream_has_what_a_join_appends(backend: Counting, trace: bool) -> None:
    @sgl.function(trace=trace)
    def both(s: Any) -> None:
        s += "A cat"
        branches = s.fork(2)
        branches += sgl.gen("word", max_tokens=3)
        branches.join("concate_and_append")
        s += "." + sgl.gen("end", max_tokens=3)

    state = both.run(temperature=0, stream=True)
    assert "".join(state.text_iter()) == state.text()
