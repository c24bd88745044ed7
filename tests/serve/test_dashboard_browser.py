"""The page in a real browser: it chats, completes, asks for the key, shows the engine, and never trusts the model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.dashboard_page import World, page_server

selenium = pytest.importorskip("selenium", reason="the page's tests drive a browser: pip install selenium")

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1400,900"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs a browser: apt-get install -y chromium chromium-driver",
)


class Page:
    """What a reader sees and does."""

    def __init__(self, driver: Any, world: World) -> None:
        self.driver = driver
        self.world = world

    def __getitem__(self, name: str) -> WebElement:
        found: WebElement = self.driver.find_element(By.ID, name)
        return found

    def open(self) -> None:
        self.driver.get(self.world.url)

    def until(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, 60, poll_frequency=0.02).until(lambda _: condition())

    def all(self, selector: str) -> list[WebElement]:
        found: list[WebElement] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return [str(text) for text in self.driver.execute_script(script, selector)]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            f"(async (...given) => {{ {script} }})(...arguments).then(done, (e) => done('failed: ' + e));",
            *arguments,
        )

    def say(self, text: str) -> None:
        self["chat-input"].send_keys(text, Keys.ENTER)

    @property
    def complaints(self) -> list[str]:
        """Errors in the console, but for answers that a test asked to fail."""
        entries = self.driver.get_log("browser")
        return [e["message"] for e in entries if e["level"] == "SEVERE" and "status of" not in e["message"]]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.binary_location = CHROMIUM or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER, log_output=subprocess.DEVNULL))
    driver.set_script_timeout(15)
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    with page_server(World()) as world:
        page = Page(browser, world)
        page.open()
        yield page
        assert page.complaints == []
        page.run("sessionStorage.clear(); localStorage.clear(); indexedDB.deleteDatabase('quire')")
        browser.get("about:blank")


def test_it_chats_with_what_was_said_before(page: Page) -> None:
    page["settings-button"].click()
    page["system"].send_keys("Be brief.")
    page["temperature"].send_keys("0.5")
    page["seed"].send_keys("7")
    page.say("Hi")
    page.until(lambda: page.texts(".turn .note"))
    page.say("And\nmore".replace("\n", Keys.SHIFT + Keys.ENTER + Keys.NULL))
    page.until(lambda: len(page.texts(".turn .note")) == 2)
    assert page.texts(".turn .said") == ["Hi", "Hello, world.", "And\nmore", "Hello, world."]
    first, second = page.world.requests
    assert [m["content"] for m in first["messages"]] == ["Be brief.", "Hi"]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert (second["temperature"], second["seed"], second["model"]) == (0.5, 7, "made-up")
    assert not {"top_p", "max_tokens", "tools", "response_format"} & set(second)
    assert "3 tokens" in page.texts(".note")[0]
    assert "24 of 31 prompt tokens from cache" in page.texts(".note")[0]
    assert page.texts("#context span") == ["34 of 400 tokens of context"]
    assert page["chat-input"].get_attribute("value") == ""
    page["clear"].click()
    assert page.texts(".turn") == []
    page.say("Again")
    page.until(lambda: len(page.world.requests) == 3)
    assert len(page.world.requests[2]["messages"]) == 2


def test_what_the_model_writes_is_text_and_nothing_else(page: Page) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><b>bold</b>"
    page.world.pieces = [evil[:9], evil[9:30], evil[30:]]
    page.say("<i>me too</i>")
    page.until(lambda: page.texts(".turn .note"))
    assert page.texts(".turn .said") == ["<i>me too</i>", evil]
    assert page.all(".log img, .log script, .log b, .log i, .log a") == []
    page["tab-complete"].click()
    page["complete-send"].click()
    page.until(lambda: page["complete-note"].text)
    assert page.texts("#complete-output") == ["Once upon a time" + evil]
    assert page.all("#complete-output img, #complete-output script, #complete-output b") == []
    page.world.error = (400, evil)
    page["complete-send"].click()
    page.until(lambda: page.texts("#complete-output .trouble p"))
    assert page.texts("#complete-output .trouble p") == [evil]
    assert "owned" not in page.driver.title


def test_reasoning_is_shown_apart_and_not_sent_back(page: Page) -> None:
    page.world.thoughts = ["Let me ", "<b>see</b>."]
    page.say("Hi")
    page.until(lambda: page.texts(".turn .note"))
    assert page.texts(".turn .thoughts") == ["Let me <b>see</b>."]
    assert page.texts(".turn summary") == ["Reasoning"]
    assert not page.all(".turn .thoughts")[0].is_displayed()
    assert page.texts(".turn .said") == ["Hi", "Hello, world."]
    page.say("More")
    page.until(lambda: len(page.world.requests) == 2)
    assert page.world.requests[1]["messages"][1] == {"role": "assistant", "content": "Hello, world."}


def test_an_answer_can_be_stopped(page: Page) -> None:
    page.world.pieces, page.world.delay = [f"word{i} " for i in range(500)], 0.02
    page.say("Talk")
    page.until(lambda: "word3" in "".join(page.texts(".turn .said")))
    assert page["chat-stop"].is_displayed()
    page["chat-input"].send_keys(Keys.ESCAPE)
    page.until(lambda: "stopped" in "".join(page.texts(".turn .note")))
    page.until(lambda: page.world.aborted == 1)
    assert page["chat-send"].is_displayed()
    page.world.pieces = ["fine"]
    page.say("And now?")
    page.until(lambda: len(page.texts(".turn .note")) == 2)
    assert page.world.requests[-1]["messages"][1]["content"].startswith("word0 word1")


def test_it_completes_and_continues(page: Page) -> None:
    page.world.pieces, page.world.finish = [" there", " was"], "length"
    page["tab-chat"].send_keys(Keys.ARROW_RIGHT)
    assert page["tab-complete"].get_attribute("aria-selected") == "true"
    assert not page["chat-input"].is_displayed()
    page["complete-input"].send_keys(Keys.CONTROL, Keys.ENTER)
    page.until(lambda: "cut at the token limit" in page["complete-note"].text)
    assert page.texts("#complete-output") == ["Once upon a time there was"]
    assert page.world.requests[-1]["prompt"] == "Once upon a time"
    page["complete-keep"].click()
    assert page["complete-input"].get_attribute("value") == "Once upon a time there was"


def test_errors_are_the_servers_words_and_can_be_retried(page: Page) -> None:
    page.world.error = (400, "max_tokens must be an integer >= 1")
    page.say("Hi")
    page.until(lambda: page.texts(".trouble p"))
    assert page.texts(".trouble p") == ["max_tokens must be an integer >= 1"]
    assert page.texts(".turn .said")[0] == "Hi"
    page.world.error = None
    page.all(".trouble button")[0].click()
    page.until(lambda: page.texts(".turn .note"))
    assert page.texts(".turn .said") == ["Hi", "Hello, world."]
    page.world.error = (400, "tiny has no chat template")
    page.say("Hm")
    page.until(lambda: page.all(".trouble button")[1:])[0].click()
    assert page["complete-input"].is_displayed()


def test_an_answer_that_breaks_off_stays_with_its_question(page: Page) -> None:
    page.world.break_after = 2
    page.say("Hi")
    page.until(lambda: page.texts(".trouble p"))
    assert page.texts(".turn .said") == ["Hi", "Hello, "]
    assert "broke off" in page.texts(".trouble p")[0]
    page.world.break_after = None
    page.all(".trouble button")[0].click()
    page.until(lambda: page.texts(".turn .said")[-1:] == ["Hello, world."])
    assert "2/2" in page.texts(".turn .verbs")[1]


def test_a_new_chat_during_an_answer_takes_nothing_along(page: Page) -> None:
    page.world.pieces, page.world.delay = [f"word{i} " for i in range(500)], 0.01
    page.say("An old secret")
    page.until(lambda: "word3" in "".join(page.texts(".turn .said")))
    page["clear"].click()
    assert page.texts(".turn") == []
    page.until(lambda: page.world.aborted == 1)
    page.world.pieces, page.world.delay = ["fine"], 0.0
    page.until(lambda: page["chat-send"].is_displayed())
    page.say("New")
    page.until(lambda: page.texts(".turn .note"))
    assert page.world.requests[-1]["messages"] == [{"role": "user", "content": "New"}]
    assert page.texts(".turn .said") == ["New", "fine"]


def test_eight_thousand_pieces_do_not_hold_up_the_page(page: Page) -> None:
    page.world.pieces = [f"w{i} " + ("\n\n" if i % 50 == 49 else "") for i in range(8000)]
    page.run(
        "window.longest = 0; let last = performance.now(); const beat = () => { const now = performance.now();"
        "window.longest = Math.max(window.longest, now - last); last = now; setTimeout(beat, 10); }; beat();"
    )
    page.say("Talk")
    page.until(lambda: page.texts(".turn .note"))
    assert len(page.all(".turn .said p")) == 160
    assert page.run("return window.longest") < 2000  # it was 84,000 with a node for each piece


def test_a_full_context_offers_to_leave_out_the_oldest_turns(page: Page) -> None:
    page.world.longest = 3
    for count, text in enumerate(("one", "two"), 1):
        page.say(text)
        page.until(lambda count=count: len(page.texts(".turn .note")) == count)
    page.say("three")
    (offer,) = page.until(lambda: page.all(".trouble button"))
    assert offer.text == "Leave out the oldest turns"
    offer.click()
    page.until(lambda: not page.all(".trouble") and "from cache" in page.texts(".turn .note")[-1])
    assert [m["content"] for m in page.world.requests[-1]["messages"]] == ["two", "Hello, world.", "three"]
    assert [text for text in page.texts(".note") if "no longer sent" in text] != []
    assert len(page.texts(".turn")) == 6
    page["settings-button"].click()
    page["drop_oldest"].click()
    page.say("four")
    page.until(lambda: len(page.texts(".turn")) == 8 and "from cache" in page.texts(".turn .note")[-1])
    assert [m["content"] for m in page.world.requests[-1]["messages"]][::2] == ["three", "four"]
    page.world.longest = 0
    page.say("five")
    page.until(lambda: page.texts(".trouble button") == ["Retry"])


def test_turns_are_a_tree(page: Page) -> None:
    page.say("One")
    page.until(lambda: page.texts(".turn .note"))
    page.world.pieces = ["Another", " answer."]
    press(page, 1, "Regenerate")
    page.until(lambda: page.texts(".turn .said") == ["One", "Another answer."])
    press(page, 1, "‹")
    assert page.texts(".turn .said") == ["One", "Hello, world."]
    press(page, 0, "Edit")
    editor = page.all(".edit textarea")[0]
    editor.clear()
    editor.send_keys("Two")
    page.all(".edit .primary")[0].click()
    page.until(lambda: page.texts(".turn .said") == ["Two", "Another answer."])
    assert page.world.requests[-1]["messages"] == [{"role": "user", "content": "Two"}]
    page.world.pieces = [" And more."]
    press(page, 1, "Continue")
    page.until(lambda: page.texts(".turn .said") == ["Two", "Another answer. And more."])
    body = page.world.requests[-1]
    assert body["messages"][-1] == {"role": "assistant", "content": "Another answer."}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    press(page, 1, "Delete")
    assert page.texts(".turn .said") == ["Two", "Another answer."]
    page.all("#chat-undo button")[0].click()
    assert page.texts(".turn .said") == ["Two", "Another answer. And more."]


def press(page: Page, turn: int, name: str) -> None:
    """Press a button of turn number `turn`."""
    box = page.all(".turn")[turn]
    page.driver.execute_script(
        "[...arguments[0].querySelectorAll('.verbs button')].find((b) => b.textContent === arguments[1]).click()",
        box,
        name,
    )


def test_chats_are_saved_found_renamed_and_exported(page: Page) -> None:
    page.say("A tale of two ducks")
    page.until(lambda: page.texts(".turn .note"))
    page["clear"].click()
    page.say("Something else")
    page.until(lambda: page.texts(".turn .note"))
    page.driver.refresh()
    page["chats-button"].click()
    page.until(lambda: len(page.texts(".chat-name")) == 2)
    page["chat-search"].send_keys("DUCKS")
    page.until(lambda: page.texts(".chat-name") == ["A tale of two ducks"])
    page.all(".chat-name")[0].click()
    page.until(lambda: page.texts(".turn .said") == ["A tale of two ducks", "Hello, world."])
    page.run(
        "document.querySelector('.menu summary').click(); document.querySelector('.menu button').click()"
    )
    title = page.all(".chats form input")[0]
    title.clear()
    title.send_keys("Ducks, revisited", Keys.ENTER)
    page.until(lambda: page.texts(".chat-name") == ["Ducks, revisited"])
    forms = page.run(
        "const tree = await import('/dashboard/tree.js'); const store = await import('/dashboard/store.js');"
        "const chat = (await store.all()).find((c) => c.title);"
        "return [tree.asMarkdown(chat), tree.asJson(chat), tree.messages(tree.fromJson(tree.asJson(chat)))]"
    )
    assert forms[0].startswith("# Ducks, revisited\n\n## You\n\nA tale of two ducks")
    assert forms[2] == [
        {"role": "user", "content": "A tale of two ducks"},
        {"role": "assistant", "content": "Hello, world."},
    ]
    page.run("[...document.querySelectorAll('.menu button')].find((b) => b.textContent === 'Delete').click()")
    page.until(lambda: page.texts(".chat-name") == [])
    page.all("#chat-undo button")[0].click()
    page.until(lambda: page.texts(".chat-name") == ["Ducks, revisited"])


def test_markdown_becomes_elements_and_never_markup(page: Page) -> None:
    text = (
        "# Title\n\nSome **bold**, *slanted* and `code <b>`.\n\n- one\n- two\n  1. inner\n\n> quoted\n\n"
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint('<hi>')\n```\n\n"
        "[good](https://example.org/x) [bad](javascript:alert(1)) ![pic](https://example.org/p.png) "
        "<script>alert(1)</script> <https://example.org/auto>\n\nשלום עולם"
    )
    page.world.pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    page.say("Show")
    page.until(lambda: page.texts(".turn .note"))
    said = ".turn[data-role=assistant] .said "
    assert page.texts(said + "h3") == ["Title"]
    assert page.texts(said + "strong") == ["bold"]
    assert page.texts(said + "em") == ["slanted"]
    assert page.texts(said + "p code") == ["code <b>"]
    assert page.texts(said + "ol li") == ["inner"]
    assert page.texts(said + "blockquote") == ["quoted"]
    assert page.texts(said + "td") == ["1", "2"]
    assert page.texts(said + "pre") == ["print('<hi>')"]
    assert page.texts(said + ".code figcaption span") == ["python"]
    links = [a.get_attribute("href") for a in page.all(said + "a")]
    assert links == ["https://example.org/x", "https://example.org/p.png", "https://example.org/auto"]
    assert page.all(said + "script, " + said + "img, " + said + "b") == []
    assert "[bad](javascript:alert(1))" in "".join(page.texts(said + "p"))
    right = "return getComputedStyle([...document.querySelectorAll('.said p')].at(-1)).direction"
    assert page.run(right) == "rtl"
    press(page, 1, "Raw")
    assert page.texts(said) == [text]
    whole = page.run(
        "const m = await import('/dashboard/markdown.js'); const a = document.createElement('div');"
        "a.append(...m.render(given[0])); const b = document.createElement('div');"
        "const g = new m.Growing(b); for (let i = 1; i <= given[0].length; i += 1) g.update(given[0].slice(0, i));"
        "return a.innerHTML === b.innerHTML",
        text,
    )
    assert whole is True


HOSTILE = {
    "stars": "*" * 20000,
    "ticks": "`" * 20000,
    "brackets": "[" * 20000,
    "quotes": "> " * 9000,
    "bullets": "- " * 9000,
    "underscores": "_a" * 9000,
    "a heading of marks": "# " + "#" * 50000 + " a",
    "headings of marks": ("# " + "#" * 1900 + " a\n") * 500,
    "a wide table": ("|" + "a|" * 2500 + "\n") + ("|" + "-|" * 2500 + "\n") + ("|" + "b|" * 2500 + "\n") * 18,
    "a long table": "|a|b|\n|-|-|\n" + "|c|d|\n" * 100000,
    "dividers": "|a\n" + ("-" + " " * 1900 + "x\n") * 500,
    "a fence of blanks": "```" + " " * 50000 + "`",
    "fences of blanks": ("```" + " " * 1900 + "`\n") * 500,
    "blank lines after a list": "- a\n" + "\n" * 1000000,
    "short lines": "a\n" * 500000,
    "paragraphs": "a\n\n" * 300000,
    "a long list": "- a\n" * 250000,
    "code": "```\n" + "x\n" * 500000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_leaves_the_page_alive(page: Page, name: str) -> None:
    """Its drawing gives way again and again: between two tasks of the page pass few of the milliseconds it takes."""
    found = page.run(
        "const m = await import('/dashboard/markdown.js'); const box = document.createElement('div');"
        "const tick = () => new Promise((done) => setTimeout(done)); let turns = 0, longest = 0;"
        "let at = performance.now(); const growing = new m.Growing(box); growing.update(given[0]);"
        "for (; turns < 60; turns += 1) { longest = Math.max(longest, performance.now() - at);"
        "at = performance.now(); await tick(); }"
        "const parts = box.childNodes.length; growing.update(''); return [longest, parts]",
        HOSTILE[name],
    )
    longest, parts = found
    assert longest < 5000, "a rule that takes time without bound takes minutes; this machine may be busy"
    assert parts > 0


def test_tool_calls_are_cards_that_one_answers(page: Page) -> None:
    page["settings-button"].click()
    page.run("document.querySelectorAll('#settings details').forEach((d) => (d.open = true))")
    page["tools-text"].send_keys('[{"name": "weather"}')
    assert page["tools-state"].get_attribute("data-state") == "bad"
    page.say("Nothing is sent")
    assert page.world.requests == []
    page["chat-input"].clear()
    page["tools-text"].send_keys("]")
    assert page["tools-state"].get_attribute("data-state") == "good"
    page.world.pieces = []
    page.world.calls = [
        {
            "index": 0,
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":'},
        },
        {"index": 0, "function": {"arguments": ' "Ur"}'}},
    ]
    page.say("How is it in Ur?")
    page.until(lambda: page.all(".answers"))
    assert page.texts(".call code") == ["weather"]
    assert page.texts(".call pre") == ['{\n  "city": "Ur"\n}']
    page.all(".answers textarea")[0].send_keys("dry")
    page.world.calls, page.world.pieces = [], ["It is dry."]
    page.all(".answers .primary")[0].click()
    page.until(lambda: page.texts(".turn .said")[-1:] == ["It is dry."])
    sent = page.world.requests[-1]
    assert sent["tools"][0]["function"]["name"] == "weather"
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ur"}'
    assert sent["messages"][2] == {"role": "tool", "content": "dry", "tool_call_id": "c1"}


def test_structured_output_is_checked_and_sent(page: Page) -> None:
    page["settings-button"].click()
    page.run("document.querySelectorAll('#settings details').forEach((d) => (d.open = true))")
    page.run("const k = document.getElementById('format-kind'); k.value = 'json_schema'; k.oninput()")
    page["format-text"].send_keys('{"type": ')
    assert page["format-state"].get_attribute("data-state") == "bad"
    page["format-text"].send_keys('"object"}')
    assert page["format-state"].text == "✓ Valid"
    page.say("Hi")
    page.until(lambda: page.texts(".turn .note"))
    assert page.world.requests[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_settings_are_checked_at_the_field_and_kept(page: Page) -> None:
    page.until(lambda: [e.get_attribute("placeholder") for e in page.all("#temperature")] == ["0.7"])
    page["settings-button"].click()
    page["top_p"].send_keys("3")
    assert page["top_p"].get_attribute("aria-invalid") == "true"
    assert "from above 0 to 1" in page["top_p-note"].text
    page["top_p"].clear()
    page["min_p"].send_keys("0.1")
    page["stop"].send_keys("END")
    page["thinking"].click()
    page.driver.refresh()
    page.until(lambda: page.all("#thinking"))
    page.say("Hi")
    page.until(lambda: page.world.requests)
    body = page.world.requests[0]
    assert (body["min_p"], body["stop"]) == (0.1, ["END"])
    assert body["enable_thinking"] is False


def test_the_request_is_shown_in_four_forms(page: Page) -> None:
    page["chat-input"].send_keys('It\'s "me"')
    page["chat-request"].click()
    shown = page.run(
        "const s = await import('/dashboard/snippets.js');"
        "const messages = [{ role: 'user', content: \"It's\" }];"
        "return s.forms('v1/chat/completions', { model: 'm', messages, top_k: 3 })"
    )
    assert set(shown) == {"JSON", "curl", "Python", "JavaScript"}
    assert "'\\''" in shown["curl"]
    compile(shown["Python"], "snippet", "exec")
    assert "extra_body" in shown["Python"]
    assert json.loads(page.texts("#request-body pre")[0])["messages"][0]["content"] == 'It\'s "me"'
    page["request-close"].click()


def test_token_probabilities_and_another_token(page: Page) -> None:
    page.world.logprobs = True
    page["settings-button"].click()
    page["logprobs"].click()
    page.say("Hi")
    page.until(lambda: page.texts(".turn .note"))
    assert page.world.requests[0]["top_logprobs"] == 5
    press(page, 1, "Tokens")
    assert page.texts(".token") == ["Hello", ", ", "world."]
    page.all(".token")[1].click()
    page.until(lambda: page.all(".candidates li button"))[0].click()
    page.until(lambda: len(page.world.requests) == 2)
    assert page.world.requests[1]["messages"][-1] == {"role": "assistant", "content": "Hello other"}


def test_two_models_side_by_side(page: Page) -> None:
    page.world.models = ["made-up", "second"]
    page.driver.refresh()
    page["tab-compare"].click()
    page.until(lambda: len(page.all("#compare-left option")) == 2)
    page["compare-input"].send_keys("Who?")
    page["compare-send"].click()
    page.until(lambda: page.texts(".side .said") == ["Hello, world.", "Hello, world."])
    assert {r["model"] for r in page.world.requests} == {"made-up", "second"}


def test_an_encoder_gets_a_form_for_vectors(page: Page) -> None:
    page.world.facts = {**page.world.facts, "generates": False, "chat": False}
    page.driver.refresh()
    page.until(lambda: page["vectors-send"].is_displayed())
    assert not page["tab-chat"].is_displayed()
    page["vectors-send"].click()
    page.until(lambda: page.texts(".ranks b"))
    assert page.texts(".ranks b") == ["0.8000", "0.6000"]


def test_live_requests_are_a_table_and_can_be_stopped(page: Page) -> None:
    entry = {"id": "chatcmpl-1", "state": "writing", "age": 3.2, "prompt": 40, "cached": 16, "output": 9}
    page.world.stats["requests"] = [{**entry, "rate": 2.5, "blocks": 4}]
    page["tab-engine"].click()
    page.until(lambda: page.texts("#requests-body td"))
    assert page.texts("#requests-body td")[:8] == [
        "chatcmpl-1",
        "writing",
        "3 s",
        "40",
        "16",
        "9",
        "2.5",
        "4",
    ]
    page.all("#requests-body button")[0].click()
    page.until(lambda: page.world.stopped == ["chatcmpl-1"])
    page.world.stats["requests"] = []
    page.until(lambda: page["requests-none"].is_displayed())


def test_history_is_there_at_once(page: Page) -> None:
    page.until(lambda: page["running"].text == "3")
    ink = """
        const canvas = document.getElementById("chart-rate");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width / 2, canvas.height).data;
        let found = 0;
        for (let i = 3; i < data.length; i += 4) found += data[i] > 200 && data[i - 3] > 150 && data[i - 2] < 90;
        return found;"""
    page.until(lambda: page.run(ink) > 50)
    assert page["running"].text == "3"


def test_the_reference_needs_nothing_from_outside(page: Page) -> None:
    page.driver.get(page.world.url + "/dashboard/reference")
    page.until(lambda: page.texts("#endpoints summary code"))
    assert "/v1/chat/completions" in page.texts("#endpoints summary code")
    page["search"].send_keys("embeddings")
    page.until(lambda: len([d for d in page.all("#endpoints details") if d.is_displayed()]) == 1)


def test_the_engine_is_shown_live(page: Page) -> None:
    page.until(lambda: page["running"].text == "3")
    shown = {
        name: page[name].text
        for name in ("waiting", "kv-share", "kv-used", "kv-cached", "kv-free", "hit-rate")
    }
    assert shown == {
        "waiting": "12",
        "kv-share": "25%",
        "kv-used": "1,024",
        "kv-cached": "512",
        "kv-free": "2,560",
        "hit-rate": "25%",
    }
    assert [page[f"{n}-{q}"].text for n in ("ttft", "itl") for q in ("p50", "p99")] == [
        "38 ms",
        "1.3 s",
        "7.3 ms",
        "–",
    ]
    assert page["finished"].text == "10, 1 failed"
    assert page["model"].get_attribute("value") == "made-up"
    assert page["health"].text == "Busy"
    page.world.stats.update(num_running=0, num_waiting=0, healthy=False)
    page.until(lambda: page["running"].text == "0")
    assert page["health"].text == "Busy"  # a trouble is shown when it has lasted two seconds
    page.until(lambda: page["health"].text == "Engine restarting")
    page.world.stats["generation_tokens"] += 5000
    page.until(lambda: page["rate"].text not in ("–", "0"))


def test_the_picture_of_the_cache_has_its_parts(page: Page) -> None:
    """Pixels of each colour are in proportion to the blocks."""
    count = """
        const { drawBlocks } = await import("/dashboard/draw.js");
        const canvas = document.getElementById("kv");
        const kinds = [["--red", given[0]], ["--gold", given[1]], ["--free", given[2]]];
        drawBlocks(canvas, kinds);
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const probe = document.createElement("i"), tally = {};
        document.body.append(probe);
        for (const [name] of kinds) {
          probe.style.color = `var(${name})`;
          const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
          tally[name] = 0;
          for (let i = 0; i < data.length; i += 4)
            tally[name] += data[i + 3] === 255 && data[i] === r && data[i + 1] === g && data[i + 2] === b;
        }
        return tally;"""
    tally = page.run(count, 1024, 512, 2560)
    assert tally["--gold"] / tally["--red"] == pytest.approx(0.5, rel=0.05)
    assert tally["--free"] / tally["--red"] == pytest.approx(2.5, rel=0.05)
    assert page.run(count, 0, 1, 100000)["--gold"] > 0
    assert page.run(count, 0, 0, 10)["--red"] == 0
    split = 'return (await import("/dashboard/draw.js")).share(given[0], given[1], given[2])'
    assert page.run(split, [1, 1, 9998], 10000, 100) == [1, 1, 98]
    assert sum(page.run(split, [333, 333, 334], 1000, 700)) == 700


def test_events_are_read_however_they_are_cut(page: Page) -> None:
    read = """
        const { events } = await import("/dashboard/api.js");
        const text = "data: é1\\n\\n: note\\r\\n\\r\\ndata: 2\\r\\n\\r\\ndata: a\\ndata: b\\n\\ndata: [DONE]\\n\\n";
        const bytes = new TextEncoder().encode(text);
        const body = new ReadableStream({ start(c) {
          for (let i = 0; i < bytes.length; i += given[0]) c.enqueue(bytes.slice(i, i + given[0]));
          c.close();
        } });
        const found = [];
        for await (const data of events({ body })) found.push(data);
        return found;"""
    for size in (1, 2, 3, 1000):
        assert page.run(read, size) == ["é1", "2", "a\nb", "[DONE]"]


def test_it_asks_for_the_key_and_keeps_it_in_this_tab(browser: Any) -> None:
    with page_server(World(key="open sesame")) as world:
        page = Page(browser, world)
        page.open()
        page.until(lambda: page["key-dialog"].is_displayed())
        assert page["running"].text == "–"
        page["key-cancel"].click()
        page.until(lambda: not page["key-dialog"].is_displayed())
        page.until(lambda: page["health"].text == "Needs a key")
        assert not page["key-dialog"].is_displayed()
        page["key-button"].click()
        page["key-input"].send_keys("wrong", Keys.ENTER)
        page.until(lambda: "did not accept" in page["key-why"].text)
        page["key-input"].clear()
        page["key-input"].send_keys("open sesame", Keys.ENTER)
        page.until(lambda: page["running"].text == "3")
        page.say("Hi")
        page.until(lambda: page.texts(".turn .note"))
        assert page["key-button"].is_displayed()
        stored = page.run(
            "return [sessionStorage.length, localStorage.length, document.cookie, location.href]"
        )
        assert stored == [1, 0, "", world.url + "/"]
        browser.refresh()
        page.until(lambda: page["running"].text == "3")
        assert not page["key-dialog"].is_displayed()
        assert page.complaints == []
        browser.execute_script("sessionStorage.clear();")
        browser.get("about:blank")


def test_it_comes_back_after_the_server_was_gone(browser: Any) -> None:
    with page_server(World()) as world:
        page = Page(browser, world)
        page.open()
        page.until(lambda: page["running"].text == "3")
    page.until(lambda: page["health"].text in ("No connection", "Reconnecting", "Shutting down"))
    page.say("Anyone?")
    page.until(lambda: "The server does not answer" in "".join(page.texts(".trouble")))
    assert page["health"].text in ("No connection", "Reconnecting", "Shutting down")
    browser.get("about:blank")
    browser.get_log("browser")


def test_colours_follow_the_system_or_the_choice(page: Page) -> None:
    def paper() -> Any:
        return page.run("return getComputedStyle(document.body).backgroundColor")

    page.until(lambda: paper() != "rgba(0, 0, 0, 0)")  # the style sheet has come
    light = paper()
    page["theme"].click()
    assert paper() == light
    page["theme"].click()
    assert paper() != light
    page.driver.refresh()
    assert "dark" in str(page["theme"].get_attribute("aria-label"))
    assert paper() != light


def test_every_control_has_a_name_and_the_tab_key_reaches_it(page: Page) -> None:
    nameless = page.run(
        "return [...document.querySelectorAll('button, a, input, textarea, select, meter, canvas')].filter((e) => "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert nameless == []
    page.run("document.activeElement.blur()")
    reached = set()
    for _ in range(30):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(page.driver.switch_to.active_element.get_attribute("id"))
    page["chat-input"].send_keys("x")
    assert reached >= {"theme", "tab-chat", "settings-button", "clear", "chat-input", "chat-send"}


OUTSIDE = """
  const seen = (e) => e.offsetParent && getComputedStyle(e).visibility !== 'hidden';
  const found = [...document.querySelectorAll('.composer, .playhead, .bar, #model, .primary, .card *')].filter(seen);
  return found.filter((e) => {
    const card = (e.closest('.card') ?? document.documentElement).getBoundingClientRect();
    const box = e.getBoundingClientRect();
    const below = !e.closest('.card') && box.bottom > innerHeight + 1;
    return below || box.right > card.right + 1 || box.left < card.left - 1;
  }).map((e) => e.id || e.className || e.textContent);
"""


@pytest.mark.parametrize(
    ("width", "height"), [(390, 800), (1366, 768), (1366, 625), (1920, 1080), (2560, 1440)]
)
def test_nothing_leaves_the_screen_or_its_card(page: Page, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.world.models = ["made-up", "made-up-tale"]
        page.world.stats |= {"itl_p99": 0.0123, "itl_prefill_p99": 0.0123}
        page.open()
        page.until(lambda: page.texts("#running") == ["3"] and page.texts("#model option"))
        assert page["model"].is_displayed()
        for view in ("settings-button", "tab-compare", "tab-engine"):
            page[view].click()
            assert page.run(OUTSIDE) == [], view
            if view == "tab-compare":
                word = "const [i] = document.querySelectorAll('.side input'); i.value = ''; i.type = 'text';"
                assert page.run(word + "i.value = i.placeholder; return i.scrollWidth - i.clientWidth") == 0
        edge = "return innerWidth - document.getElementById('live').getBoundingClientRect().right"
        assert page.run(edge) <= 1
        page["tab-chat"].click()
        assert page.run(edge) <= 1 or not page["live"].is_displayed()
        page.run("document.querySelector('#model').selectedIndex = 1")
        page["settings-button"].click()
        page.say("Hi")
        page.until(lambda: page.world.requests)
        assert page.world.requests[-1]["model"] == "made-up-tale"
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_fits_a_telephone(page: Page) -> None:
    size = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open()
        page.until(lambda: page.texts("#running") == ["3"])
        assert (
            page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
            == 0
        )
        assert not page["live"].is_displayed()
        page.world.pieces = ["word "] * 400
        page.say("Hi")
        page.until(lambda: page.texts(".turn .note"))
        below = (
            "const l = document.getElementById('log'); return l.scrollHeight - l.scrollTop - l.clientHeight"
        )
        assert page.run(below) < 80
        small = page.run(
            "return [...document.querySelectorAll('button, summary, .tool')].filter((b) => b.offsetParent && "
            "!b.closest('.hint') && b.getBoundingClientRect().height < 43).map((b) => b.id || b.textContent)"
        )
        assert small == []
        page["tab-engine"].click()
        assert page["live"].is_displayed()
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_wheel_would_hold_the_page() -> None:
    """Package data lies beside the code that reads it, where the build takes everything below src/quire."""
    code = "from quire.serve.dashboard.router import load_assets; print(sorted(load_assets()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "index.html" in found.stdout
    assert (Path(__file__).parent.parent.parent / "src/quire/serve/dashboard/static/index.html").is_file()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["chat", "settings", "complete", "compare", "engine", "reference"])
def test_axe_finds_nothing(page: Page, scheme: str, view: str) -> None:
    axe = pytest.importorskip("axe_core_python", reason="checks accessibility: pip install axe-core-python")
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    page.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    try:
        page.driver.get(page.world.url + ("/dashboard/reference" if view == "reference" else ""))
        if view == "chat":
            page.say("Hi")
            page.until(lambda: page.texts(".turn .note"))
        elif view == "settings":
            page["settings-button"].click()
            page["chats-button"].click()
        elif view != "reference":
            page[f"tab-{view}"].click()
        source = (Path(axe.__file__).parent / "axe.min.js").read_text()
        page.driver.execute_script(source)
        found = page.run("return (await axe.run()).violations.map((v) => [v.id, v.nodes.map((n) => n.html)])")
        assert found == []
    finally:
        page.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
