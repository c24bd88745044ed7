"""The pages of the site that lie outside docs/: README is its first page (a hook of mkdocs)."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "bench/README.md": "figures.md",
    "bench/HISTORY.md": "history.md",
    "compat/README.md": "compat-package.md",
}
IMAGES = ("bench/plots",)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the images that they show."""
    for path, name in PAGES.items():
        files.append(File.generated(config, name, content=relinked((ROOT / path).read_text(), path)))
    for folder in IMAGES:
        for image in sorted((ROOT / folder).glob("*.svg")):
            files.append(File.generated(config, f"{folder}/{image.name}", abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of docs/ that go outside to the site's own pages."""
    for path, name in PAGES.items():
        markdown = markdown.replace(f"](../{path}", f"]({name}")
    return markdown.replace("](../bench/plots/", "](bench/plots/")


def relinked(text: str, path: str) -> str:
    """Lead the links of a page at `path` to the site's pages. Links to sources become their names."""
    base = Path(path).parent

    def link(found: re.Match[str]) -> str:
        shown, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        place, _, anchor = target.partition("#")
        inside = str((ROOT / base / place).resolve().relative_to(ROOT))
        name = PAGES.get(inside) or (
            inside.removeprefix("docs/") if inside.startswith(("docs/", *IMAGES)) else ""
        )
        if not name:
            return shown
        return f"[{shown}]({name}{'#' if anchor else ''}{anchor})"

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, text)
