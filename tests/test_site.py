"""The docs as a site: it builds strictly, so that each link and each page has a place."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import quire

pytest.importorskip("mkdocs", reason="builds the site: pip install '.[docs]'")
ROOT = Path(__file__).parents[1]
if not (ROOT / "mkdocs.yml").exists():
    pytest.skip("needs the checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Links(HTMLParser):
    """The targets of a page's links and images."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


def test_every_link_inside_the_site_leads_to_a_file(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        for link in Links(page).found:
            target = link.partition("#")[0].partition("?")[0]
            if target and ":" not in target and not target.startswith("//"):
                place = (page.parent / target).resolve()
                assert (place / "index.html" if place.is_dir() else place).exists(), f"{page}: {link}"


def test_the_api_page_has_every_public_name(site: Path) -> None:
    text = (site / "api" / "index.html").read_text()
    for name in quire.__all__:
        assert name in text or name in ("__version__", "RequestOutputKind"), f"docs/api.md leaves out {name}"
