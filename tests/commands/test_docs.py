"""`quire docs`: lists, reads and serves the pages."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from quire.commands.docs import page_as_html, read_pages
from tests.hub_server import quire


def test_pages_are_listed_and_read() -> None:
    listed = quire("docs")
    assert "hybrid" in listed.stdout
    read = quire("docs", "hybrid.md")
    assert "Hybrid models" in read.stdout
    assert "\x1b" not in read.stdout
    wrong = quire("docs", "hybird")
    assert wrong.returncode
    assert "did you mean hybrid?" in wrong.stderr


def test_links_lead_to_pages_and_html_of_a_page_is_text() -> None:
    pages = read_pages()
    for name in ("", *pages):
        shown = page_as_html(pages, name)
        for target in re.findall(r'href="/([a-z-]*)', shown):
            assert target in ("", *pages), f"{name} links to {target}"
    assert "<script>" not in page_as_html({"a": "# A\n<script>alert(1)</script>"}, "a")


def test_a_browser_gets_them() -> None:
    command = [sys.executable, "-m", "quire.cli", "docs", "--web", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            with urllib.request.urlopen(f"{address}/gguf") as answer:
                assert "GGUF" in answer.read().decode()
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(f"{address}/nothing")
            refused.value.close()
        finally:
            server.terminate()
