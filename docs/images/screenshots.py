"""Takes the pictures of docs/: `python docs/images/screenshots.py [DIR]` with quire, selenium and chromium installed.

Serves the model inside the package on a free port, drives the page in headless Chromium, and writes one PNG per scene.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

HERE = Path(__file__).parent
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
)
QUESTION = "Tell me a story about a fox who finds a red ball."
BODY = b'{"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": true}'


@contextmanager
def server() -> Iterator[str]:
    """A server of the shipped model; gives its address."""
    command = [sys.executable, "-m", "quire.cli", "serve", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        yield next(line.rpartition(" at ")[2].strip() for line in lines if " at http" in line)
    finally:
        process.terminate()
        process.wait()


class Page:
    def __init__(self, url: str) -> None:
        options = webdriver.ChromeOptions()
        for flag in FLAGS.split():
            options.add_argument(flag)
        options.add_argument(f"--user-data-dir={tempfile.mkdtemp()}")
        options.binary_location = shutil.which("chromium") or ""
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.url = url

    def open(self, width: int = 1440, height: int = 900, dark: bool = False, scale: float = 1.0) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.get(self.url)
        self.until(lambda: self["health"].text in ("Ready", "Busy"))

    def __getitem__(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def until(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, 60).until(lambda _: condition())

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def ask(self, text: str, answers: int = 1) -> None:
        self["chat-input"].send_keys(text + "\n")
        self.until(lambda: len(self.driver.find_elements(By.CSS_SELECTOR, ".turn .note")) >= answers)


def load(url: str, stop: threading.Event) -> None:
    """Keep one request running."""
    while not stop.is_set():
        request = urllib.request.Request(f"{url}/v1/completions", BODY, {"Content-Type": "application/json"})
        urllib.request.urlopen(request).read()


def scenes(page: Page, save: Callable[[str], None]) -> None:
    page.open()
    save("page")
    page.run(
        "localStorage.setItem('quire-settings', JSON.stringify({logprobs: true, seed: '7', max_tokens: '160'}))"
    )
    page.open()
    page.ask(QUESTION)
    page.run(
        "[...document.querySelectorAll('.verbs button')].find((b) => b.textContent === 'Tokens').click()"
    )
    page.run("document.querySelectorAll('.token')[12].click()")
    save("probabilities")
    page.run("localStorage.clear()")
    page.open()
    page["settings-button"].click()
    page.run("document.querySelectorAll('#settings details').forEach((d) => (d.open = true))")
    page["tools-text"].send_keys('[{"name": "weather", "parameters": {"type": "object"}}]')
    page.run("document.getElementById('settings').scrollTop = 9999")
    save("tools")
    page.open(width=390, height=844, scale=2)
    page.ask(QUESTION)
    save("phone")


def busy_scenes(page: Page, save: Callable[[str], None]) -> None:
    stop = threading.Event()
    threads = [threading.Thread(target=load, args=(page.url, stop)) for _ in range(12)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(25)
        page.open()
        page.ask(QUESTION)
        time.sleep(3)
        save("dashboard")
        page["tab-engine"].click()
        time.sleep(2)
        save("engine")
        page.open(dark=True)
        page.ask("Tell me a story about the first snow.")
        time.sleep(2)
        save("dark")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with server() as url:
        page = Page(url)

        def save(name: str) -> None:
            time.sleep(0.5)
            page.driver.save_screenshot(str(folder / f"{name}.png"))

        scenes(page, save)
        busy_scenes(page, save)
        page.driver.quit()


if __name__ == "__main__":
    main()
