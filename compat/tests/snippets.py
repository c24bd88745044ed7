"""Runs the snippets of the articles as they are written, with only models, paths and the host mapped to local ones.

`python compat/tests/snippets.py` runs all of them with the `vllm`, `python` and `quire` that are first on the path, and
prints a table. `python compat/tests/snippets.py FILE` runs one and prints its result as JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from zoo import STANDS_FOR, Zoo, locked

import quire

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT.parent / "shared" / "reference" / "articles" / "snippets"
PORT = 8000
START_SECONDS = 120
MOST_SECONDS = 300
PROMPT = "Once upon a time"
# The same model without the server, to compare the answers of commands that change none.
ENGINES: Mapping[str, dict[str, Any]] = {"004-28-serve-fp8.sh": {"quantization": "fp8"}}
# What the articles leave to their readers.
AFTERWARDS = {
    "000-05-openai-client.py": 'print("".join(chunk.choices[0].delta.content or "" for chunk in response))',
    "000-04-model-runner.py": 'print("batch, beams, length:", len(outputs), len(outputs[0]), len(outputs[0][0]))',
    "002-03-build-and-session.py": "print(type(runner).__name__)",
}
# What a snippet that has nothing to build is told.
TOLD = {"001-02-builder.py": "the network is empty"}
KEYS = {"004-12-serve.sh": "token-abc123"}
# What the log says of an option that means nothing here.
NOTICES = {
    "004-18-speculative.sh": "--use-v2-block-manager changes nothing: there is one way to manage blocks"
}
# The test that holds each picture of text to its word.
PROMISES = {
    "002-04-serving-stack.txt": "tests/serve/test_operations_page.py for health and metrics",
    "004-01-autoregressive-steps.txt": "compat/tests/test_promises.py::test_one_token_at_a_time_is_the_whole_run",
    "004-04-block-table.txt": "tests/sched/test_articles.py::test_six_tokens_lie_in_two_blocks_of_three",
    "004-05-static-batching.txt": "tests/sched/test_articles.py::test_a_static_batch_waits_for_its_longest",
    "004-06-continuous-batching.txt": "tests/sched/test_articles.py::test_a_waiting_request_takes_a_free_slot",
    "004-07-pip-install.sh": "compat/tests/test_install.py, from a local wheel",
    "004-08-uv-pip-install.sh": "compat/tests/test_install.py, from a local wheel",
}


@dataclass(frozen=True, slots=True)
class Snippet:
    """An entry of snippets.json."""

    about: dict[str, Any]

    @property
    def file(self) -> str:
        return str(self.about["file"])

    @property
    def kind(self) -> str:
        return str(self.about["kind"])

    @property
    def text(self) -> str:
        return (SNIPPETS / self.file).read_text()

    @property
    def argv(self) -> list[str]:
        """The command that the author meant, if the text as it stands is not the whole of it."""
        return list(self.about.get("argv", ()))

    @property
    def models(self) -> list[str]:
        return list(self.about["models"])

    @property
    def runs(self) -> bool:
        """Whether anything of it can run here: without Docker, its container's command can."""
        return bool(self.about["runs_here"]) or bool(self.argv)


def all_snippets() -> list[Snippet]:
    return [Snippet(about) for about in json.loads((SNIPPETS / "snippets.json").read_text())]


class Run:
    """One snippet in a directory of its own, where the names of models are directories."""

    def __init__(self, snippet: Snippet, zoo: Zoo, work: Path) -> None:
        self.snippet, self.zoo, self.work = snippet, zoo, work
        for name in snippet.models:
            if not name.startswith("/"):
                place = work / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(zoo.model(name), target_is_directory=True)

    def mapped(self, text: str) -> str:
        """The text with absolute paths and the article's host replaced by local ones."""
        for name in self.snippet.models:
            if name.startswith("/"):
                text = text.replace(name, str(self.zoo.model(name)))
        for host, local in self.snippet.about.get("hosts", {}).items():
            text = text.replace(host, local)
        return text

    def output(self) -> str:
        """Run it and return what it shows. AssertionError: it does not do what its article says."""
        kinds = {
            "command": self._command,
            "python": self._python,
            "http": self._http,
            "flags": self._flags,
            "formula": self._formula,
        }
        return kinds[self.snippet.kind]()

    # --- kinds

    def _command(self) -> str:
        about = self.snippet.about
        self._python_preludes()
        if "server" not in about:
            done = self._shell(self._shell_preludes() + self.snippet.text)
            found = [self._written(Path(self.work / place)) for place in about["writes"]]
            return "; ".join(found) or done
        shown = []
        if about["runs_here"]:
            shown.append(self._serve(["bash", str(self._file("snippet.sh", self.snippet.text))]))
        if self.snippet.argv:
            shown.append(self._serve([self.mapped(word) for word in self.snippet.argv]))
        return shown[-1]

    def _python(self) -> str:
        file = self.snippet.file
        parts = [(SNIPPETS / "preludes" / name).read_text() for name in self._preludes(".py")]
        self._file("snippet.py", "\n".join([*parts, self.snippet.text, AFTERWARDS.get(file, "")]))
        if file in TOLD:
            error = self._shell("python snippet.py\n", fails=True).splitlines()[-1]
            assert TOLD[file] in error, error
            return error
        out = self._shell(f"{{ {self._shell_preludes()}\n}} >&2\npython snippet.py\n")
        lines = [line for line in out.splitlines() if line.strip()]
        assert lines or "writes" in self.snippet.about, "it printed nothing"
        for place in self.snippet.about.get("writes", ()):
            lines.append(self._written(self.work / place))
        if file == "001-01-offline.py":
            assert len([line for line in lines if line.startswith("Prompt: ")]) == 3
        if file == "004-10-offline.py":
            assert len([line for line in lines if line.startswith("Generated: ")]) == 2
        return " / ".join(lines)

    def _http(self) -> str:
        request = self.snippet.about["request"]
        body = "-H 'Content-Type: application/json' -d @body.json" if "body" in request else ""
        self._file("body.json", json.dumps(request.get("body")))
        call = f"curl -sS -w '\\n%{{http_code}}' -X {request['method']} {body} http://127.0.0.1:{PORT}{request['path']}"
        text, _, status = self._shell(self._shell_preludes() + call).strip().rpartition("\n")
        assert status == "200", text
        return _gist(text) if text.strip() else "200"

    def _flags(self) -> str:
        values, base = self.snippet.about["values"], (self.snippet.models or ["facebook/opt-125m"])[0]
        if self.snippet.argv:
            self._python_preludes()
            return self._serve(self.snippet.argv)
        if not next(iter(values)).startswith("--"):
            return "; ".join(self._argument(name, value) for name, every in values.items() for value in every)
        # All first values together, then each other value alone.
        first = {name: value[0] if isinstance(value, list) else value for name, value in values.items()}
        shown = [self._checked(base, first)]
        for name, value in values.items():
            for other in value[1:] if isinstance(value, list) else ():
                quantized = f"TheBloke/Llama-2-7B-{str(other).upper()}"
                shown.append(self._checked(quantized if quantized in STANDS_FOR else base, {name: other}))
        return "; ".join(shown)

    def _argument(self, name: str, value: Any) -> str:
        """Use an argument of Python, and return it."""
        vllm = importlib.import_module("vllm")  # only this process has the names
        with vllm.LLM(str(self.zoo.model("facebook/opt-125m")), **{name: value}) as llm:
            section = llm.config.cache if name == "gpu_memory_utilization" else llm.config.scheduler
            assert getattr(section, name) == value
            assert llm.generate([PROMPT] * 20, vllm.SamplingParams(max_tokens=2), use_tqdm=False)
        return f"{name}={value}"

    def _checked(self, model: str, values: Mapping[str, Any]) -> str:
        """Start a server with flags, as far as `--check` goes, and return them."""
        command = importlib.import_module("vllm.entrypoints.cli.main")
        given = {name: value for name, value in values.items() if value not in (None, False)}
        given["--model"] = str(self.zoo.model(model))
        words = [word for pair in given.items() for word in map(str, pair)]
        with redirect_stdout(StringIO()) as said:
            command.main(["serve", *words, "--check"])
        assert "ready to serve" in said.getvalue()
        if "--block-size" in given:
            assert f"blocks of {given['--block-size']}" in said.getvalue()
        given["--model"] = model
        return " ".join(f"{name} {value}" for name, value in given.items())

    def _formula(self) -> str:
        values: dict[str, Any] = {}
        for name in self._preludes(".py"):
            exec((SNIPPETS / "preludes" / name).read_text(), values)
        expression = self.snippet.about["expression"]
        product = eval(expression, {"__builtins__": {}}, values)
        assert product == 5_368_709_120
        self._agrees(expression)
        return f"{product:,} bytes ({product / 1e9:.2f} GB, {product / 2**30:.2f} GiB)"

    def _agrees(self, expression: str) -> None:
        """The formula is what Quire's plan reserves for a token, with the number of KV heads for that of heads."""
        model = self.zoo.model("facebook/opt-125m")
        shape = json.loads((model / "config.json").read_text())
        done = subprocess.run(
            ["quire", "plan", str(model), "--json"], capture_output=True, text=True, check=True
        )
        factors = [2, shape["num_hidden_layers"], shape["num_key_value_heads"], shape["head_dim"], 1, 1, 2]
        product = 1
        for factor in factors:
            product *= factor
        assert json.loads(done.stdout)["kv_bytes_per_token"] == product, expression

    # --- parts

    def _preludes(self, ending: str) -> list[str]:
        return [name for name in self.snippet.about["prelude"] if name.endswith(ending)]

    def _shell_preludes(self) -> str:
        texts = [(SNIPPETS / "preludes" / name).read_text() for name in self._preludes(".sh")]
        return "set -e\n" + "\n".join(texts) + "\n"

    def _python_preludes(self) -> None:
        for name in self._preludes(".py"):
            text = (SNIPPETS / "preludes" / name).read_text()
            subprocess.run(["python", str(self._file(name, text))], check=True, cwd=self.work)

    def _file(self, name: str, text: str) -> Path:
        path = self.work / name
        path.write_text(self.mapped(text))
        return path

    def _shell(self, text: str, fails: bool = False) -> str:
        """Run a script in the directory and return its output; if it must fail, what it says on standard error."""
        script = self._file("script.sh", text)
        done = subprocess.run(["bash", str(script)], cwd=self.work, capture_output=True, text=True)
        assert (done.returncode != 0) == fails, f"status {done.returncode}: {done.stderr[-2000:]}"
        return done.stderr if fails else done.stdout

    def _written(self, place: Path) -> str:
        """A directory that a command wrote; one that is an engine is opened and generates."""
        names = sorted(path.name for path in place.iterdir())
        assert names, f"{place} is empty"
        if "engine.json" not in names and "config.json" not in names:
            return f"wrote {place.name}: {', '.join(names)}"
        ranks = max(1, len([name for name in names if name.startswith("rank")]))
        with quire.LLM(str(place), tensor_parallel_size=ranks) as llm:
            (output,) = llm.generate(
                PROMPT, quire.SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
            )
        return f"wrote {place.name}, which generates {output.outputs[0].text!r}"

    def _serve(self, command: list[str]) -> str:
        """Run a server, ask it what its article promises, and end it."""
        with self._server(command) as log:
            names = [entry["id"] for entry in self._ask("/v1/models")["data"]]
            model = self.snippet.models[0] if self.snippet.models else names[0]
            assert model in names, f"{model} is not among {names}"
            body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            first, again = self._ask("/v1/completions", body), self._ask("/v1/completions", body)
            text = first["choices"][0]["text"]
            assert text == again["choices"][0]["text"] == self._expected(model)
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            if "my-adapter" in names:
                scores = [self._scores({**body, "model": name}) for name in (model, "my-adapter")]
                assert scores[0] != scores[1], "the adapter changes nothing"
                text += f" (log-probability {scores[0]:.3f}, with the adapter {scores[1]:.3f})"
            self._refuses_strangers(body)
            assert NOTICES.get(self.snippet.file, "") in log.read_text()
            assert f"at http://0.0.0.0:{PORT}" in log.read_text()
        return f"{model}: {text}"

    def _scores(self, body: dict[str, Any]) -> float:
        """The sum of log-probabilities of the prompt's tokens."""
        answer = self._ask("/v1/completions", {**body, "echo": True, "logprobs": 1, "max_tokens": 0})
        return float(sum(filter(None, answer["choices"][0]["logprobs"]["token_logprobs"])))

    def _refuses_strangers(self, body: dict[str, Any]) -> None:
        if self.snippet.file in KEYS:
            with suppress(urllib.error.HTTPError):
                self._ask("/v1/completions", body, key="")
                raise AssertionError("it answers without a key")

    def _expected(self, model: str) -> str:
        """What the same model writes in this process."""
        place = str(self.work / model) if self.snippet.models else ""
        with quire.LLM(place, **ENGINES.get(self.snippet.file, {})) as llm:
            (output,) = llm.generate(
                PROMPT, quire.SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
            )
        return str(output.outputs[0].text)

    @contextmanager
    def _server(self, command: list[str]) -> Iterator[Path]:
        log = self.work / "server.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self.work, stdout=file, stderr=file, start_new_session=True
            )
        try:
            self._wait(process, log)
            yield log
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert process.poll() is None, f"the server ended: {log.read_text()[-2000:]}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"the server did not start: {log.read_text()[-2000:]}")

    def _ask(self, path: str, body: Any = None, key: str | None = None) -> Any:
        key = KEYS.get(self.snippet.file, "none") if key is None else key
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def _gist(text: str) -> str:
    """The part of a JSON answer that its endpoint is for."""
    answer = json.loads(text)
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice.get("text") or choice["message"]["content"])
    return f"a vector of {len(answer['data'][0]['embedding'])} numbers"


def result_of(snippet: Snippet, zoo: Zoo) -> dict[str, Any]:
    """Whether a snippet ran, and what it showed or why it did not."""
    with tempfile.TemporaryDirectory(prefix="snippet-") as work:
        try:
            output = Run(snippet, zoo, Path(work)).output()
        except (
            AssertionError,
            OSError,
            ValueError,
            KeyError,
            SystemExit,
            subprocess.SubprocessError,
        ) as error:
            return {"file": snippet.file, "ran": False, "output": f"{type(error).__name__}: {error}"}
    note = "" if snippet.about["runs_here"] else "without Docker: "
    return {"file": snippet.file, "ran": True, "output": note + " ".join(output.split())}


# --- a network of its own, in which port 8000 is free


@cache
def isolation() -> str | None:
    """The program that gives a command a network namespace of its own, if this system lets us make one."""
    tool = shutil.which("unshare")
    if tool is None or subprocess.run([tool, "-rn", "true"], capture_output=True).returncode:
        return None
    return tool


def port_is_taken() -> bool:
    """Whether the snippets would find their port in use."""
    with socket.socket() as probe:
        return isolation() is None and probe.connect_ex(("127.0.0.1", PORT)) == 0


def raise_loopback() -> None:
    """Switch the loopback interface of a new network namespace on."""
    set_flags, up_and_running = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", up_and_running))


def run_one(file: str, zoo: Path, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a snippet in a process, and if possible a network, of its own; otherwise one after another."""
    python = shutil.which("python", path=None if variables is None else variables["PATH"])
    assert python is not None
    command, tool = [python, __file__, file, "--zoo", str(zoo)], isolation()
    if tool is not None:
        return _result([tool, "-rn", *command, "--loopback"], file, variables)
    with locked(zoo, "port"):
        return _result(command, file, variables)


def _result(command: list[str], file: str, variables: Mapping[str, str] | None) -> dict[str, Any]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        start_new_session=True,
    )
    try:
        out, said = process.communicate(timeout=MOST_SECONDS)
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return {"file": file, "ran": False, "output": f"it took more than {MOST_SECONDS} s"}
    except (ValueError, IndexError):
        return {"file": file, "ran": False, "output": (out + said)[-2000:]}
    return found


def row(snippet: Snippet, result: Mapping[str, Any] | None) -> str:
    """A line of the table."""
    if result is None:
        return f"| {snippet.file} | | {snippet.about['reason']}; see {PROMISES[snippet.file]} |"
    output = str(result["output"]).replace("|", "\\|").replace("`", "'")
    shown = output if len(output) <= 120 else output[:117] + "..."
    return f"| {snippet.file} | {'yes' if result['ran'] else 'NO'} | {shown} |"


HEAD = "| Snippet | Ran | What it showed |\n|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", help="run this snippet alone")
    parser.add_argument("--zoo", type=Path, help="directory to keep the local models in")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    parser.add_argument("--loopback", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loopback:
        raise_loopback()
    with tempfile.TemporaryDirectory(prefix="zoo-") as place:
        zoo = options.zoo or Path(place)
        zoo.mkdir(exist_ok=True)
        if options.file:
            (snippet,) = (one for one in all_snippets() if one.file == options.file)
            result = result_of(snippet, Zoo(zoo))
            print(json.dumps(result))
            return 0 if result["ran"] else 1
        results = [(one, run_one(one.file, zoo) if one.runs else None) for one in all_snippets()]
    table = "\n".join([HEAD, *(row(snippet, result) for snippet, result in results)])
    print(table)
    if options.page:
        before, mark, rest = re.split(r"(<!-- snippets: .* -->\n)", options.page.read_text())
        options.page.write_text(f"{before}{mark}\n{table}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}")
    return 0 if all(result is None or result["ran"] for _, result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
