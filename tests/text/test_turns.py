"""Where an answer begins: what the template writes after the messages, whatever their texts are."""

from __future__ import annotations

from typing import Any

import pytest

from quire.text.formats.registry import reasoning_format
from quire.text.template.process import TemplateProcess
from quire.text.template.render import ChatTemplate
from tests.text.conftest import EVERY_TEMPLATE

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# Short texts that stand in markers and role names, blanks, and texts that imitate the turn of an answer.
TEXTS = (
    *("hi", "k", "n", "in", "a", "<", "", " ", "\n", "think", "nk>", "<think>", "</think>", "[THINK]"),
    *("<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n", "<|channel>thought\n", "<seed:think>"),
    *("<|START_THINKING|>", "Here are my reasoning steps:\n", "◁think▷", "QUIRE_CONTINUES_HERE_7f3a "),
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
Chat = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def after_user(text: str) -> Chat:
    return [user(text)]


def after_result(text: str) -> Chat:
    called = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]}
    return [user("q"), called, {"role": "tool", "tool_call_id": "call00001", "content": text}]


def after_answers(text: str) -> Chat:
    return [user(text), {"role": "assistant", "content": text or "x"}, user("q")]


HISTORIES = (after_user, after_result, after_answers)


MESSAGES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
THINKS = "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
ALWAYS = "{{ '<|assistant|><think></think>' }}"
EARLY = (
    "{% set opened = add_generation_prompt %}"
    + MESSAGES
    + "{{ '<|assistant|><think>\n' if opened else '<|end|>' }}"
)
ENDED = MESSAGES + "{% if add_generation_prompt is true %}<|assistant|>{% else %}<|end|>{% endif %}"


@pytest.mark.parametrize(
    ("source", "turn"),
    [
        (MESSAGES + THINKS, "<|assistant|><think>\n"),
        (MESSAGES + ALWAYS, "<|assistant|><think></think>"),
        (EARLY, "<|assistant|><think>\n"),
        (ENDED, "<|assistant|>"),
        (MESSAGES, ""),
    ],
)
def test_the_turn_is_what_follows_the_messages(process: TemplateProcess, source: str, turn: str) -> None:
    for _ in range(2):  # a template's turn is remembered
        template = ChatTemplate(source, process=process)
        for text in TEXTS:
            for history in HISTORIES:
                assert template.render_prompt(history(text)).turn == turn
    assert template.render_prompt([user("hi")], None, False).turn == ""


@pytest.mark.parametrize(
    ("source", "text", "turn"),
    [
        (MESSAGES, "It is", "<|assistant|>It is"),
        (MESSAGES, "<think>I'm", "<|assistant|><think>I'm"),
        ("{{ messages | length }}" + MESSAGES, "It is", "It is"),  # the earlier part differs: the text alone
    ],
)
def test_a_continued_turn_is_that_of_the_last_message(
    process: TemplateProcess, source: str, text: str, turn: str
) -> None:
    template = ChatTemplate(source, process=process)
    for asked in TEXTS:
        rendered = template.render_prompt(
            [user(asked), {"role": "assistant", "content": text}], None, False, True
        )
        assert (rendered.turn, rendered.continued) == (turn, True)


def test_a_turn_costs_one_more_render_once(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(MESSAGES + THINKS, process=process)
    renders: list[object] = []
    render = process.render
    monkeypatch.setattr(process, "render", lambda *args: renders.append(args) or render(*args))
    for text in TEXTS:
        assert template.render_prompt([user(text)]).turn == "<|assistant|><think>\n"
    assert len(renders) == len(TEXTS) + 1


@EVERY_TEMPLATE
def test_no_text_moves_the_turn_of_a_public_template(process: TemplateProcess, path: Any) -> None:
    source = path.read_text()
    form = reasoning_format("auto", source) or reasoning_format("qwen3")
    assert form is not None
    for history in HISTORIES:
        if history is after_result and path.stem == "google-gemma-2-2b-it":  # it has no tools
            continue
        template = ChatTemplate(source, SPECIAL, process=process)
        want = template.render_prompt(history("Zq neutral"), TOOLS).turn
        if "add_generation_prompt" in source and "R1-Distill" not in path.stem:
            assert want  # R1 goes on after results without a new turn
        for text in TEXTS:
            rendered = template.render_prompt(history(text), TOOLS)
            assert (rendered.turn, form.place(rendered.turn)) == (want, form.place(want)), text
