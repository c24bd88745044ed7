"""`quire docs`: the pages of the docs, read here without a network."""

from __future__ import annotations

import html
import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from markdown_it import MarkdownIt
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from quire.cli import Command, Options
from quire.config import option
from quire.errors import ConfigError
from quire.spelling import nearest

STYLE = "body{max-width:60rem;margin:2rem auto;font:1rem/1.5 sans-serif;padding:0 1rem}pre{overflow:auto}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocsOptions(Options):
    """Options of `quire docs`."""

    page: str = option("", "The page to read (default: list all).")
    web: bool = option(False, "Serve all pages on this machine, for a browser.")
    port: int = option(8001, "TCP port of --web; 0 picks a free one.", low=0, high=65535)


def run(options: DocsOptions) -> None:
    pages = read_pages()
    if options.web:
        serve(pages, options.port)
    elif options.page:
        name = options.page.removesuffix(".md")
        if name not in pages:
            raise ConfigError(f"no page {options.page}{nearest(name, pages) or ': quire docs lists all'}")
        console = Console()
        with console.pager(styles=True) if console.is_terminal else nullcontext():
            console.print(Markdown(pages[name]))
    else:
        table = Table("page", "", show_header=False)
        for name, text in pages.items():
            table.add_row(name, title(text))
        Console().print(table)
        print("read one: quire docs PAGE; all in a browser: quire docs --web")


def read_pages() -> dict[str, str]:
    """Read each page's Markdown by name: the wheel's, or the checkout's."""
    package = Path(__file__).parents[1]
    folder = next(path for path in (package / "pages", package.parents[1] / "docs") if path.is_dir())
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.md"))}


def title(text: str) -> str:
    """Return the heading of a page."""
    return text.partition("\n")[0].lstrip("# ")


def serve(pages: dict[str, str], port: int) -> None:
    """Show the pages at a port of this machine until the process is interrupted."""
    try:
        server = HTTPServer(("127.0.0.1", port), partial(_Handler, pages))
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; 0 picks a free one") from error
    print(f"the docs are at http://127.0.0.1:{server.server_port}", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def page_as_html(pages: dict[str, str], name: str) -> str:
    """Return a page as HTML, with links between pages; the list of all under the name ''."""
    if name:
        links = re.sub(r"\]\(([a-z-]+)\.md(#[^)]*)?\)", r"](/\1\2)", pages[name])
        body = MarkdownIt("js-default").render(links)
    else:
        rows = (f'<li><a href="/{name}">{html.escape(title(text))}</a></li>' for name, text in pages.items())
        body = f"<h1>Quire</h1><ul>{''.join(rows)}</ul>"
    return f'<!doctype html><meta charset="utf-8"><title>Quire</title><style>{STYLE}</style><a href="/">docs</a>{body}'


class _Handler(BaseHTTPRequestHandler):
    """Answers GET with a page."""

    def __init__(self, pages: dict[str, str], *args: object) -> None:
        self._pages = pages
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].strip("/")
        if name and name not in self._pages:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = page_as_html(self._pages, name).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: the terminal shows the address."""


COMMAND = Command(run, DocsOptions, ("page",), uses=frozenset(), reads_user_file=False)
