"""vLLM's and SGLang's names, as scripts use them, from the installed wheel."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import quire
from conftest import Installed
from quire.engine.directory import ASSETS
from quire.errors import RequestError

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def expected() -> str:
    with quire.LLM() as llm:
        (output,) = llm.generate(PROMPT, quire.SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    return output.outputs[0].text


@contextmanager
def server(env: Installed, *command: str) -> Iterator[str]:
    """A server that the command starts on a free port; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)], env=env.variables, stderr=subprocess.PIPE, text=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(6000):
            assert process.poll() is None, process.stderr and process.stderr.read()
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert "unexpected error" not in said, said


def run(env: Installed, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env.variables, input=stdin, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_every_module_can_be_imported(installed: Installed, package: str) -> None:
    root = installed.packages / "quire-compat"
    for file in sorted((root / package).rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        assert all(hasattr(module, one) for one in getattr(module, "__all__", ()))


def test_an_llm_takes_vllms_share_of_memory_and_writes_what_quires_does(expected: str) -> None:
    vllm = importlib.import_module("vllm")
    greedy = vllm.SamplingParams(temperature=0, max_tokens=6)
    with vllm.LLM() as llm:
        assert llm.config.cache.gpu_memory_utilization == 0.9
        (output,) = llm.generate([PROMPT], greedy)
        assert isinstance(output, vllm.RequestOutput)
        assert output.outputs[0].text == expected
    with vllm.LLM(gpu_memory_utilization=0.3) as llm:
        assert llm.config.cache.gpu_memory_utilization == 0.3
    assert vllm.EngineArgs().create_engine_config().cache.gpu_memory_utilization == 0.9
    with pytest.raises(AttributeError, match="from vllm import EngineArgs"):
        _ = quire.EngineArgs


def test_an_engine_is_stepped(expected: str) -> None:
    vllm = importlib.import_module("vllm")
    with vllm.LLMEngine.from_engine_args(vllm.EngineArgs()) as engine:
        engine.add_request("0", PROMPT, vllm.SamplingParams(temperature=0, max_tokens=6))
        last = [output for _ in range(10) for output in engine.step()][-1]
    assert last.outputs[0].text == expected


def test_adapters_and_constraints_have_their_names() -> None:
    vllm = importlib.import_module("vllm")
    request = importlib.import_module("vllm.lora.request").LoRARequest
    params = importlib.import_module("vllm.sampling_params")
    with vllm.LLM(enable_lora=True) as llm:
        guided = params.GuidedDecodingParams(choice=["yes", "no"])
        (output,) = llm.generate(PROMPT, vllm.SamplingParams(guided_decoding=guided), use_tqdm=False)
        assert output.outputs[0].text in ("yes", "no")
        bard = request("bard", 1, str(ASSETS / "quire-stories-lora-shakespeare"))
        scored = vllm.SamplingParams(temperature=0, max_tokens=1, logprobs=0)
        plain, with_bard = (
            llm.generate(PROMPT, scored, use_tqdm=False, lora_request=one)[0] for one in (None, bard)
        )
        assert plain.outputs[0].cumulative_logprob != with_bard.outputs[0].cumulative_logprob


def test_a_script_can_read_vllms_flags() -> None:
    vllm = importlib.import_module("vllm")
    utils = importlib.import_module("vllm.utils")
    parser = vllm.EngineArgs.add_cli_args(utils.FlexibleArgumentParser())
    line = ["--max_model_len", "1k", "--enforce-eager", "--hf-overrides.rope_theta", "10000.0"]
    arguments = vars(parser.parse_args(line))
    assert arguments["max_model_len"] == 1000
    assert arguments["gpu_memory_utilization"] == 0.9
    assert json.loads(arguments["hf_overrides"]) == {"rope_theta": 10000.0}


def test_engine_args_go_both_ways() -> None:
    vllm = importlib.import_module("vllm")
    parser = vllm.EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = vllm.EngineArgs.from_cli_args(parser.parse_args(["--model", "", "--max-model-len", "1k"]))
    assert args.max_model_len == 1000
    with vllm.LLM.from_engine_args(vllm.EngineArgs(max_model_len=64, enforce_eager=True)) as llm:
        assert llm.max_model_len == 64
    assert vllm.EngineArgs(max_num_seqs=3).create_engine_config().scheduler.max_num_seqs == 3


def test_the_command_serves_and_asks(installed: Installed, expected: str, tmp_path: Path) -> None:
    with server(installed, "vllm", "serve", "--max-model-len", "512") as url:
        asked = run(installed, "vllm", "complete", "--url", f"{url}/v1", "-q", PROMPT, "--max-tokens", "6",
                    "--temperature", "0")  # fmt: skip
        assert asked.stdout == f"{expected}\n", asked.stderr
        lines = run(installed, "vllm", "complete", "--url", url, "--model-name", "quire-stories", "--max-tokens",
                    "6", "--temperature=0", stdin=f"{PROMPT}\n{PROMPT}\n")  # fmt: skip
        assert lines.stdout == f"{expected}\n{expected}\n", lines.stderr
        chat = run(
            installed, "vllm", "chat", "--url", url, "--system-prompt", "Be brief.", "--quick", "Hello!"
        )
        assert len(chat.stdout.strip()) > 0, chat.stderr
        figures = tmp_path / "serve.json"
        bench = run(installed, "vllm", "bench", "serve", "--backend", "vllm", "--base-url", url, "--num-prompts", "3",
                    "--random-input-len", "8", "--random-output-len", "4", "--save-result", "--result-filename",
                    str(figures))  # fmt: skip
        assert bench.returncode == 0, bench.stderr
        assert json.loads(figures.read_text())["completed"] == 3


def test_tools_find_the_version_and_what_they_ask_of_an_engine(installed: Installed) -> None:
    """lm-evaluation-harness, TRL and lighteval look for these names before they make an engine."""
    code = (
        "import importlib.metadata, vllm; from quire_compat.real import installed; "
        "print(importlib.metadata.version('vllm') == vllm.__version__, installed())"
    )
    assert run(installed, "python", "-c", code).stdout == "True []\n"
    vllm = importlib.import_module("vllm")
    with vllm.LLM(max_model_len=64, threads=1) as llm:
        assert llm.llm_engine.model_config.max_model_len == 64
    made = vllm.EngineArgs(max_model_len=32).create_model_config()
    assert made.max_model_len == 32
    resolve = importlib.import_module("vllm.renderers.hf").resolve_chat_template
    assert importlib.import_module("vllm.entrypoints.chat_utils").resolve_hf_chat_template is resolve
    load = importlib.import_module("vllm.tokenizers").get_tokenizer
    assert importlib.import_module("vllm.transformers_utils.tokenizer").get_tokenizer is load
    tokenizer = load(str(ASSETS / "quire-stories"))
    assert resolve(tokenizer, "given", None, model_config=made) == "given"
    assert resolve(tokenizer, None, None, model_config=made) == tokenizer.chat_template


def test_the_command_has_vllms_metrics_and_its_way_to_allow_adapters(installed: Installed) -> None:
    with server(installed, "vllm", "serve", "--max-model-len", "64") as url:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert b"vllm:num_requests_running" in answer.read()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(f"{url}/v1/load_lora_adapter", b"{}"))
        assert b"--allow-runtime-lora" in caught.value.read()
        caught.value.close()
    allowing = {**installed.variables, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    command = [str(installed.bin / "vllm"), "serve", "--enable-lora", "--port", "0"]
    done = subprocess.run(command, env=allowing, capture_output=True, text=True)
    assert "--allow-runtime-lora" in done.stderr
    assert "--admin-api-key" in done.stderr


def test_the_command_names_itself(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> tuple[int, str]:
        main = importlib.import_module("vllm.entrypoints.cli.main").main
        try:
            main(list(words))
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, re.sub(r"\s+", " ", "".join(capsys.readouterr()))

    assert "usage: vllm serve [model] [options]" in said("serve", "--help")[1]
    assert "0.0.0.0 for every interface. (default: 0.0.0.0)" in said("serve", "--help")[1]
    status, listed = said("--help")
    assert status == 0
    assert "vllm COMMAND" in listed
    assert "quantize" not in listed
    assert said("sevre") == (2, "vllm: error: there is no command 'sevre'; did you mean serve? ")


def test_the_benchmarks_are_modules(installed: Installed, tmp_path: Path) -> None:
    figures = tmp_path / "latency.json"
    done = run(installed, "python", "-m", "vllm.benchmarks.latency", "--input-len", "4", "--output-len", "4",
               "--batch-size", "1", "--num-iters-warmup", "0", "--num-iters", "1",
               "--output-json", str(figures))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert figures.exists()


def test_programs_run_on_sglangs_server(installed: Installed, expected: str) -> None:
    sgl = importlib.import_module("sglang")

    @sgl.function
    def interview(s: Any, name: str) -> None:
        s += sgl.system("You tell stories.")
        s += sgl.user(f"Who is {name}?")
        s += sgl.assistant(sgl.gen("who", max_tokens=6, temperature=0))
        forks = s.fork(2)
        for fork in forks:
            fork += sgl.user("Is that true?") + sgl.assistant(sgl.gen("true", regex="(yes|no)"))
        s += sgl.user("Where?") + sgl.assistant(sgl.select("where", choices=["here", "there"]))
        s["answers"] = [fork["true"] for fork in forks]

    @sgl.function
    def tale(s: Any) -> None:
        s += PROMPT + sgl.gen("rest", max_tokens=6, temperature=0)

    command = ("python", "-m", "sglang.launch_server", "--model-path", "", "--mem-fraction-static", "0.3")
    with server(installed, *command, "--disable-cuda-graph") as url:
        sgl.set_default_backend(sgl.RuntimeEndpoint(url))
        states = interview.run_batch([{"name": "Lily"}, {"name": "Tom"}])
        assert {state["where"] for state in states} <= {"here", "there"}
        assert all(set(state["answers"]) <= {"yes", "no"} for state in states)
        assert [message["role"] for message in states[0].messages()][:3] == ["system", "user", "assistant"]
        assert "".join(tale.run(stream=True).text_iter("rest")) == expected
        request = urllib.request.Request(
            f"{url}/generate",
            json.dumps({"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 6}}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["text"] == expected


def test_a_runtime_takes_sglangs_options() -> None:
    sgl = importlib.import_module("sglang")
    assert sgl.Runtime is importlib.import_module("sglang.lang.backend.runtime_endpoint").Runtime


def test_images_are_refused_by_name() -> None:
    sgl = importlib.import_module("sglang")
    with pytest.raises(RequestError, match="image"):
        sgl.image("cat.png")


def test_an_engine_of_sglang_generates(expected: str) -> None:
    sgl = importlib.import_module("sglang")
    with sgl.Engine(model_path="", tp_size=1, trust_remote_code=True) as engine:
        assert engine.generate(PROMPT, {"temperature": 0, "max_new_tokens": 6})["text"] == expected


PAGE = Path(__file__).parents[2] / "docs" / "compat.md"


@pytest.mark.parametrize(
    "code", re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
)
def test_examples_of_the_page_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code, {"__name__": "example"})
    assert capsys.readouterr().out.strip()
