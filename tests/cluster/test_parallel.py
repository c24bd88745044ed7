"""`quire serve --data-parallel-size` starts servers on this machine, keeps them running and ends them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from quire import cli
from tests.cluster.stand_in import started
from tests.waiting import wait_until


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def words(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()


def test_two_servers_answer_as_one() -> None:
    command = ["serve", "--data-parallel-size", "2", "--threads", "2", "--api-key", "user"]
    with started(*command, "--kv-cache-memory-bytes", "64M") as running:
        wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 2)
        body = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
        url, key = f"{running.url}/v1/completions", {"authorization": "Bearer user"}
        assert httpx.post(url, json=body).status_code == 401
        text = httpx.post(url, json=body, headers=key).json()["choices"][0]["text"]
        servers = children(running.process.pid)
        assert len(servers) == 2
        assert all(b"router_api_key" not in words(pid) and b"user" not in words(pid) for pid in servers)
        os.kill(servers[0], signal.SIGKILL)
        for _ in range(6):
            assert httpx.post(url, json=body, headers=key, timeout=120).json()["choices"][0]["text"] == text
        wait_until(lambda: "starting another" in running.log)
        wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 2)
        servers = children(running.process.pid)
        running.process.terminate()
        assert running.process.wait(60) == 0
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "name the replicas"),
        (("--replica", "http://a:1"), "--router-api-key-file"),
        (("--replica", "ftp://a"), "--replica must look like"),
        (("--replica", "http://a/path"), "--replica must look like"),
        (("--replicas-file", "/no/such/file"), "cannot be read"),
        (("--replicas-dns", "name"), "NAME:PORT"),
        (("--replica", "http://a:1", "--prefill", "x"), "--prefill"),
        (("--replica", "http://a:1", "--policy", "best"), "policy"),
        (("--replica", "http://a:1", "--api-key", ""), "must not be empty"),
    ],
)
def test_wrong_options_of_a_router_are_said_in_a_line(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = () if "--router-api-key-file" in said else ("--router-api-key", "k")
    with pytest.raises(SystemExit) as ended:
        cli.main(["route", *options, *key])
    assert ended.value.code
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert said in line
