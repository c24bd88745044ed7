"""Programs as one request beside the same calls as separate requests, over HTTP, in turns.

    python bench/programs.py [--model DIR] [--clients 1 16] [--rounds 5] [--essay 1500]

Three programs: a judge that rates an essay in eight dimensions, each in a branch that writes a reason and selects a
grade; tips that are expanded in two branches and summed up; and a chain of four gens. The separate requests are a
completion for each gen with the whole text, branches in threads of their own, and for a select either one completion
(`structured_outputs` with `select`) or, as clients of other servers do it, one that computes the text and one with
log-probabilities of all choices ("scored"). Results must be equal. Seconds are medians over rounds; the prefix cache is
emptied before each.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quire.program.selection import decide, kept

DIMENSIONS = ("clarity", "courage", "humour", "length", "order", "sound", "style", "truth")
GRADES = [" good", " fair", " poor", " very bad"]
SENTENCE = " The girl went home and saw that her little dog was very happy in the big garden."


class Server:
    """A running server."""

    def __init__(self, arguments: list[str]) -> None:
        command = [str(Path(sys.executable).with_name("quire")), "serve", *arguments, "--port", "0"]
        command += ["--disable-uvicorn-access-log"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"serving .* at http://([\d.]+):(\d+)", line):
                self.address = found[1], int(found[2])
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self._local = threading.local()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request, over one connection per thread."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(*self.address, timeout=300)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {data!r}")
        return json.loads(data or b"null")


def gen(name: str, max_tokens: int) -> dict[str, Any]:
    return {"type": "gen", "name": name, "max_tokens": max_tokens, "ignore_eos": True}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def judge(essay: str) -> list[dict[str, Any]]:
    branches = [
        [
            text(f"\nRate its {dimension}. Reason:"),
            gen("reason", 24),
            text("\nIts grade is"),
            {"type": "select", "name": "grade", "choices": GRADES},
        ]
        for dimension in DIMENSIONS
    ]
    return [text(essay), {"type": "fork", "branches": branches}, {"type": "join"}]


def tips(essay: str) -> list[dict[str, Any]]:
    branches = [[text(f"\nThing {i}:"), gen("tip", 32)] for i in (1, 2)]
    insert = [{"type": "insert", "name": "tip", "index": i} for i in (0, 1)]
    return [
        text(essay),
        {"type": "fork", "branches": branches},
        {"type": "join"},
        *insert,
        gen("summary", 32),
    ]


def chain(essay: str) -> list[dict[str, Any]]:
    return [text(essay), *(one for i in range(4) for one in (text(f"\nPart {i}:"), gen(f"part{i}", 16)))]


PROGRAMS = {
    "judge, 8 branches": (judge, False),
    "judge, 8 branches, choices scored": (judge, True),
    "tips, 2 branches": (tips, False),
    "chain of 4 gens": (chain, False),
}


class Separate:
    """Runs steps with a request for each call, as SGLang's client does."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor, scored: bool) -> None:
        self._server, self._pool, self._scored = server, pool, scored

    def run(self, steps: list[dict[str, Any]], before: str = "") -> dict[str, Any]:
        """The variables of the steps; "" has the text."""
        found: dict[str, Any] = {"": before}
        running: list[Any] = []
        for step in steps:
            if step["type"] == "text":
                found[""] += step["text"]
            elif step["type"] == "gen":
                found[step["name"]] = self._complete(found[""], step["max_tokens"])["choices"][0]["text"]
                found[""] += found[step["name"]]
            elif step["type"] == "select":
                found[step["name"]] = self._select(found[""], step["choices"])
                found[""] += found[step["name"]]
            elif step["type"] == "fork":
                self._complete(found[""], 0)  # so that the branches find the text in the prefix cache
                running = [self._pool.submit(self.run, branch, found[""]) for branch in step["branches"]]
            elif step["type"] == "join":
                branches = [one.result() for one in running]
                found |= {name: [one[name] for one in branches] for name in branches[0] if name}
            else:
                found[""] += found[step["name"]][step["index"]]
        return found

    def _complete(self, prompt: str, max_tokens: int) -> Any:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self._server.post("/v1/completions", body | ({"echo": True} if max_tokens == 0 else {}))

    def _select(self, prompt: str, choices: list[str]) -> str:
        if not self._scored:
            constraint = {"choice": choices, "select": True}
            body = {"prompt": prompt, "max_tokens": 16, "structured_outputs": constraint}
            return self._server.post("/v1/completions", body)["choices"][0]["text"]
        num_tokens = self._complete(prompt, 0)["usage"]["prompt_tokens"]
        body = {
            "prompt": [prompt + choice for choice in choices],
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
        }
        rows = []
        for answer in self._server.post("/v1/completions", body)["choices"]:
            scored = answer["logprobs"]
            entries = list(zip(scored["token_logprobs"], scored["tokens"], strict=True))[num_tokens - 1 :]
            rows.append(kept(prompt, [(logprob, 0, token) for logprob, token in entries]))
        return choices[decide("token_length_normalized", rows).index]


def timed(work: Callable[[int], Any], clients: int) -> tuple[float, list[Any]]:
    """Seconds until all clients have their answers."""
    with ThreadPoolExecutor(clients) as threads:
        began = time.perf_counter()
        answers = list(threads.map(work, range(clients)))
        return time.perf_counter() - began, answers


def compare(
    server: Server, make: Callable[[str], list[dict[str, Any]]], scored: bool, clients: int, options: Any
) -> str:
    essays = [(f"Story {i}:" + SENTENCE * 100)[: options.essay] for i in range(clients)]
    seconds: dict[str, list[float]] = {"one": [], "separate": []}
    with ThreadPoolExecutor(8 * clients) as pool:
        separate = Separate(server, pool, scored)

        def one(i: int) -> Any:
            body = {"steps": make(essays[i]), "sampling": {"temperature": 0}}
            answer = server.post("/v1/programs", body)
            return {"": answer["text"], **answer["variables"]}

        for number in range(options.rounds + 1):
            results = {}
            for kind, work in (("one", one), ("separate", lambda i: separate.run(make(essays[i])))):
                server.post("/reset_prefix_cache", {})
                took, results[kind] = timed(work, clients)
                if number:  # the first round warms up
                    seconds[kind].append(took)
            assert results["one"] == results["separate"], "the results differ"
    one_s, separate_s = (statistics.median(seconds[kind]) for kind in ("one", "separate"))
    return f"{clients:7}  {one_s:9.3f} s  {separate_s:9.3f} s  {separate_s / one_s:6.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory of the model; by default the one inside the package")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--essay", type=int, default=1500, help="characters of the text that is forked")
    parser.add_argument("--only", help="the programs whose name begins so")
    options = parser.parse_args()
    server = Server([options.model] if options.model else [])
    try:
        for name, (make, scored) in PROGRAMS.items():
            if options.only and not name.startswith(options.only):
                continue
            print(f"{name}\nclients  one request  separate     ratio")
            for clients in options.clients:
                print(compare(server, make, scored, clients, options), flush=True)
    finally:
        server.process.terminate()
        server.process.wait()


if __name__ == "__main__":
    main()
