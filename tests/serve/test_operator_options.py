"""Options by which operators change the server: middleware, plugins, logs, sleep, TLS, limits of heads."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from quire.errors import ConfigError
from quire.serve.options import ServerConfig
from quire.serve.tls import check_tls
from tests.serve.running import Server, start
from tests.waiting import wait_until

PLUGIN = """
from quire.text.formats.shapes import ReasoningFormat
from quire.text.formats.registry import reasoning_format
import dataclasses, msgspec
FORMAT = msgspec.structs.replace(reasoning_format("qwen3"), name="mine") if hasattr(
    reasoning_format("qwen3"), "__struct_fields__") else dataclasses.replace(reasoning_format("qwen3"), name="mine")
"""


class Stamp:
    """ASGI middleware that adds a header."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"1")]
            await send(message)

        await self.app(scope, receive, stamped)


async def refuse_teapots(request: Any, call_next: Callable[[Any], Any]) -> Any:
    response = await call_next(request)
    if "teapot" in request.headers:
        response.headers["x-teapot"] = "yes"
    return response


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("operator")
    (folder / "plugin.py").write_text(PLUGIN)
    running = start(
        maker="quire.client.start",
        model=tiny_model(),
        max_model_len=128,
        threads=1,
        middleware=[f"{__name__}:Stamp", f"{__name__}.refuse_teapots"],
        reasoning_parser_plugin=str(folder / "plugin.py"),
        reasoning_parser="mine",
        enable_sleep_mode=True,
        enable_tokenizer_info_endpoint=True,
        disable_fastapi_docs=True,
        disable_access_log_for_endpoints="/health,/load",
        enable_log_requests=True,
        enable_log_outputs=True,
        max_log_len=9,
        h11_max_header_count=40,
        profiler_config=json.dumps({"torch_profiler_dir": str(folder)}),
    )
    yield running
    running.stop()


def test_middleware_is_around_all_endpoints(server: Server) -> None:
    with server.client as client:
        reply = client.get("/version", headers={"teapot": "1"})
        assert (reply.headers["x-stamp"], reply.headers["x-teapot"]) == ("1", "yes")


def test_sleep_and_wake_up(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    before = server.post("/v1/completions", body).json()["choices"]
    with server.client as client:
        for level in (1, 2):
            assert client.post("/sleep", params={"level": level}).status_code == 200
            assert client.get("/is_sleeping").json() == {"is_sleeping": True}
            assert client.post("/v1/completions", json=body).status_code == 503
            assert client.get("/health").status_code == 200
            client.post("/wake_up", params={"tags": "weights"})
            client.post("/wake_up")
            assert client.get("/is_sleeping").json() == {"is_sleeping": False}
            assert client.post("/v1/completions", json=body).json()["choices"] == before
        assert client.post("/sleep?level=7").status_code == 400
        assert client.post("/sleep?mode=later").status_code == 400
        assert client.post("/v1/completions", json=body).status_code == 200


def test_logs(server: Server) -> None:
    body = {"prompt": "a secret that is long", "max_tokens": 3, "ignore_eos": True}
    with server.client as client:
        client.post("/v1/completions", json=body, headers={"X-Request-Id": "logged-1"})
        client.get("/health")
    (line,) = server.lines_with("request done", "logged-1")
    assert "prompt=a secret " in line
    assert "long" not in line
    assert server.lines_with('"POST /v1/completions ')
    assert not [line for line in server.lines if '"GET /health ' in line]


def test_endpoints_that_options_add_and_remove(server: Server) -> None:
    with server.client as client:
        assert client.get("/docs").status_code == 404
        assert client.get("/openapi.json").status_code == 404
        assert client.get("/tokenizer_info").json()["model_max_length"] == 128
        assert client.post("/start_profile").status_code == 200
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
        path = Path(client.post("/stop_profile").json()["path"])
        assert json.loads(path.read_text())["traceEvents"]
        many = client.get("/version", headers={f"x-{i}": "1" for i in range(50)})
        assert many.status_code == 431
        assert "--h11-max-header-count" in many.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_ciphers": "X"}, "need --ssl-certfile"),
        ({"tool_parser_plugin": "/nowhere.py"}, "--tool-parser-plugin '/nowhere.py' cannot be loaded"),
        ({"default_chat_template_kwargs": "[1]"}, "--default-chat-template-kwargs must be a JSON object"),
        ({"reasoning_parser": "mine"}, "'mine' is unknown"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**options)


def test_tls_options_are_checked_first(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = {name: str(tmp_path / name) for name in ("key.pem", "cert.pem", "ca.pem")}
    issue(authority, files)
    authority.cert_pem.write_to_path(files["ca.pem"])
    options: dict[str, Any] = {"ssl_keyfile": files["key.pem"], "ssl_certfile": files["cert.pem"]}
    check_tls(ServerConfig(**options, ssl_ca_certs=files["ca.pem"], ssl_cert_reqs=2))
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        check_tls(ServerConfig(**options, ssl_ca_certs=files["key.pem"]))
    with pytest.raises(ConfigError, match="--ssl-ciphers 'NONE-SUCH'"):
        check_tls(ServerConfig(**options, ssl_ciphers="NONE-SUCH"))


def test_tls_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    """New connections get the new certificate; a broken file leaves the last good one in use."""
    authority = trustme.CA()
    files = {name: str(tmp_path / name) for name in ("key.pem", "cert.pem", "ca.pem")}
    authority.cert_pem.write_to_path(files["ca.pem"])
    issue(authority, files)
    context = ssl.create_default_context(cafile=files["ca.pem"])
    running = start(ssl_keyfile=files["key.pem"], ssl_certfile=files["cert.pem"], enable_ssl_refresh=True)
    try:
        url = running.url.replace("127.0.0.1", "localhost")
        address = ("localhost", int(url.rpartition(":")[2]))

        def served() -> bytes | None:
            with (
                socket.create_connection(address, 5) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as secure,
            ):
                return secure.getpeercert(binary_form=True)

        first = served()
        Path(files["cert.pem"]).write_text("broken")
        wait_until(lambda: "cannot be loaded yet" in running.log)
        assert served() == first
        issue(authority, files)
        wait_until(lambda: served() != first)
        with httpx.Client(verify=context) as client:
            assert client.get(f"{url}/version").status_code == 200
    finally:
        running.stop()


def issue(authority: trustme.CA, files: dict[str, str]) -> None:
    """Write a new certificate for localhost and its key."""
    cert = authority.issue_cert("localhost")
    cert.private_key_pem.write_to_path(files["key.pem"])
    cert.cert_chain_pems[0].write_to_path(files["cert.pem"])
