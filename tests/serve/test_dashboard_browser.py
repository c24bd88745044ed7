"""The page in a real browser: it chats, completes, asks for the key, shows the engine, and never trusts the model."""

from __future__ import annotations

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
        return WebDriverWait(self.driver, 15, poll_frequency=0.02).until(lambda _: condition())

    def all(self, selector: str) -> list[WebElement]:
        found: list[WebElement] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def texts(self, selector: str) -> list[str]:
        return [str(element.get_property("textContent")) for element in self.all(selector)]

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
        browser.execute_script("sessionStorage.clear(); localStorage.clear();")
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
    assert (second["temperature"], second["seed"], second["max_tokens"], second["model"]) == (
        0.5,
        7,
        256,
        "made-up",
    )
    assert "top_p" not in second
    assert "3 tokens" in page.texts(".note")[0]
    assert "24 of 31 prompt tokens from cache" in page.texts(".note")[0]
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
    assert page.all(".log img, .log script, .log b, .log i") == []
    page["tab-complete"].click()
    page["complete-send"].click()
    page.until(lambda: page["complete-note"].text)
    assert page.texts("#complete-output") == ["Once upon a time" + evil]
    assert page.all("#complete-output img, #complete-output script, #complete-output b") == []
    page.world.error = (400, evil)
    page["complete-send"].click()
    page.until(lambda: page.texts("#complete-output .trouble"))
    assert page.texts("#complete-output .trouble") == [evil]
    assert "owned" not in page.driver.title


def test_reasoning_is_shown_apart_and_not_sent_back(page: Page) -> None:
    page.world.thoughts = ["Let me ", "<b>see</b>."]
    page.say("Hi")
    page.until(lambda: page.texts(".turn .note"))
    assert page.texts(".turn .thoughts") == ["Let me <b>see</b>."]
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
    page.until(lambda: "cut at the limit" in page["complete-note"].text)
    assert page.texts("#complete-output") == ["Once upon a time there was"]
    assert page.world.requests[-1]["prompt"] == "Once upon a time"
    page["complete-keep"].click()
    assert page["complete-input"].get_attribute("value") == "Once upon a time there was"


def test_errors_are_the_servers_words_and_the_message_comes_back(page: Page) -> None:
    page.world.error = (400, "max_tokens must be an integer >= 1")
    page.say("Hi")
    page.until(lambda: page.texts(".trouble"))
    assert page.texts(".trouble") == ["max_tokens must be an integer >= 1"]
    assert page["chat-input"].get_attribute("value") == "Hi"
    page.world.error = (400, "tiny has no chat template")
    page["chat-input"].send_keys(Keys.ENTER)
    page.until(lambda: page.all(".trouble button"))[0].click()
    assert page["complete-input"].is_displayed()


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
    assert page["model"].text == "made-up"
    assert page["health"].text == "Busy"
    page.world.stats.update(num_running=0, num_waiting=0, healthy=False)
    page.until(lambda: page["running"].text == "0")
    assert page["health"].text == "Engine restarting"
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
        page["key-input"].send_keys("wrong", Keys.ENTER)
        page.until(lambda: "not accepted" in page["key-why"].text)
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
    page.until(lambda: "No answer from the server" in "".join(page.texts(".trouble")))
    browser.get("about:blank")
    browser.get_log("browser")


def test_colours_follow_the_system_or_the_choice(page: Page) -> None:
    def paper() -> Any:
        return page.run("return getComputedStyle(document.body).backgroundColor")

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
        "return [...document.querySelectorAll('button, a, input, textarea, canvas')].filter((e) => "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert nameless == []
    page.run("document.activeElement.blur()")
    reached = set()
    for _ in range(20):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(page.driver.switch_to.active_element.get_attribute("id"))
    page["chat-input"].send_keys("x")
    assert reached >= {"theme", "tab-chat", "settings-button", "clear", "chat-input", "chat-send"}


def test_it_fits_a_telephone(page: Page) -> None:
    size = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open()
        page.until(lambda: page["running"].text == "3")
        assert (
            page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
            == 0
        )
        page.say("Hi")
        page.until(lambda: page.texts(".turn .note"))
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_wheel_would_hold_the_page() -> None:
    """Package data lies beside the code that reads it, where the build takes everything below src/quire."""
    code = "from quire.serve.dashboard.router import load_assets; print(sorted(load_assets()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "index.html" in found.stdout
    assert (Path(__file__).parent.parent.parent / "src/quire/serve/dashboard/static/index.html").is_file()
