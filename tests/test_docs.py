"""Every Python example of the README and the docs runs as it stands, and every command they name exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Examples with the names of other engines are run by compat/tests, where these are installed.
COMPAT = re.compile(r"^(from|import) (vllm|sglang|tensorrt)", re.MULTILINE)
# Examples that talk to a running server are run by tests/serve.
OFFLINE = [
    (page, i, code)
    for page in PAGES
    for i, code in enumerate(BLOCK.findall(page.read_text()))
    if "LLM" in code and not COMPAT.search(code)
]


@pytest.mark.parametrize(("page", "index", "code"), OFFLINE, ids=lambda v: getattr(v, "name", str(v)[:8]))
def test_examples_run(page: Path, index: int, code: str, tmp_path: Path) -> None:
    if '"interpreter"' in code:
        pytest.importorskip("triton", reason="the kernels of GPUs need the extra quire-llm[cuda]")
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, f"{page.name}, example {index}: {result.stderr}"
    for said in re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE):
        assert said in result.stdout, f"{page.name}, example {index} says {said}: {result.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page: Path) -> None:
    for words in re.findall(r"(?:^|`)quire ([a-z]+(?: [a-z]+)?)", page.read_text(), re.MULTILINE):
        known = any(words == name or name.split()[0] == words.split()[0] for name in COMMANDS)
        assert known, f"{page.name} names `quire {words}`"


def test_what_is_installed_is_this_project() -> None:
    """The name on the public index is another project's: extras come from a checkout, or from their own packages."""
    sources = [path for folder in ("src", "bench") for path in (ROOT / folder).rglob("*.py")]
    for page in (*PAGES, *sources):
        assert not re.search(r"pip install [\"']?quire(?!-llm)\b", page.read_text()), (
            f"{page} installs another project"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.skipif(
    not (ROOT / "src").is_dir(), reason="needs the sources, which a wheel's tests run without"
)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_and_targets_exist(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"^([a-z0-9.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text):
        if path.startswith((".venv/", "build/")):  # made by make
            continue
        places = (ROOT, ROOT / "src/quire", ROOT / "src")
        assert "NAME" in path or any((place / path).exists() for place in places), f"{page.name} names {path}"
    for target in re.findall(r"(?:^|`)make ([a-z0-9.-]+)", text, re.MULTILINE):
        assert target in targets, f"{page.name} names `make {target}`"
