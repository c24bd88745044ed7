"""TensorRT-LLM's programs: they convert, build, quantize, measure and serve, and name what they do not do."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from conftest import Installed
from quire import LLM, SamplingParams
from quire.engine.directory import ASSETS, SHIPPED_MODEL
from quire.model.engine_dir import read_manifest
from quire.model.info import EngineLimits

MODEL = str(ASSETS / SHIPPED_MODEL)
PROMPT = [0, 40, 71, 95]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def run(installed: Installed, directory: Path, line: str, status: int = 0) -> str:
    """Run a program; returns what it prints and logs."""
    program, *words = shlex.split(line)
    command = [str(installed.bin / program), *words]
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, env=installed.variables, timeout=120
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def text_of(model: Path | str) -> str:
    with LLM(str(model)) as llm:
        return llm.generate(["Once upon a time"], GREEDY, use_tqdm=False)[0].outputs[0].text


def test_convert_then_build(installed: Installed, tmp_path: Path) -> None:
    run(installed, tmp_path, f"convert_checkpoint.py --model_dir {MODEL} --output_dir c --dtype bfloat16")
    said = run(
        installed,
        tmp_path,
        "trtllm-build --checkpoint_dir c --output_dir e/1-gpu --gemm_plugin auto --max_batch_size 64 "
        "--max_input_len 512 --max_seq_len 1024 --workers 2",
    )
    assert "--gemm_plugin changes nothing: Quire has its own kernels" in said
    limits = EngineLimits(max_batch_size=64, max_input_len=512, max_seq_len=1024)
    assert read_manifest(tmp_path / "e/1-gpu").limits == limits
    assert text_of(tmp_path / "e/1-gpu") == text_of(MODEL)
    run(installed, tmp_path, "trtllm-build --checkpoint_dir e/1-gpu --output_dir e/2 --max_seq_len 600")
    assert read_manifest(tmp_path / "e/2").limits.max_seq_len == 600


def test_a_copied_script_converts_for_four_ranks(installed: Installed, tmp_path: Path) -> None:
    script = tmp_path / "convert_checkpoint.py"
    script.write_bytes((installed.bin / "convert_checkpoint.py").read_bytes())
    words = ["--model_dir", MODEL, "--output_dir", "four", "--dtype", "float16", "--tp_size", "4"]
    command = [str(installed.python), script.name, *words]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, env=installed.variables)
    assert read_manifest(tmp_path / "four").ranks == 4
    assert len(list((tmp_path / "four").glob("weights*.bin"))) == 4
    run(installed, tmp_path, "trtllm-build --checkpoint_dir four --output_dir engine --max_seq_len 256")
    assert read_manifest(tmp_path / "engine").ranks == 4
    code = f"""
from tensorrt_llm.runtime import ModelRunner
print(ModelRunner.from_dir("engine").generate([{PROMPT}], max_new_tokens=8).tolist())
"""
    done = subprocess.run(
        [str(installed.python), "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=installed.variables,
    )
    with LLM(MODEL) as llm:
        (wanted,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    assert json.loads(done.stdout) == [[[*PROMPT, *wanted.outputs[0].token_ids]]], done.stderr


@pytest.mark.parametrize("qformat", ["int8_wo", "fp8"])
def test_quantize(qformat: str, installed: Installed, tmp_path: Path) -> None:
    said = run(
        installed,
        tmp_path,
        f"quantize.py --model_dir {MODEL} --qformat {qformat} --output_dir q --calib_size 4 "
        "--calib_max_seq_length 64 --awq_block_size 64 --batch_size 8",
    )
    assert "--batch_size changes nothing" in said
    manifest = read_manifest(tmp_path / "q")
    assert manifest.quantized is not None
    coded = any(tensor.about["layout"] == "codes" for tensor in manifest.tensors.values())
    assert coded == (qformat != "int8_wo")
    run(installed, tmp_path, "trtllm-build --checkpoint_dir q --output_dir e")
    assert text_of(tmp_path / "e") == text_of(tmp_path / "q")


REFUSED = [
    (f"build --checkpoint_dir {MODEL} --max_draft_len 4", "--max_draft_len 4 is not supported"),
    (f"build --checkpoint_dir {MODEL} --gather_context_logits", "nearest is logprobs and prompt"),
    (f"build --checkpoint_dir {MODEL} --streamingllm enable", "--streamingllm enable is not supported"),
    ("build", "name the checkpoint"),
    (f"convert --model_dir {MODEL} --int8_kv_cache", "chosen when the engine serves"),
    (f"convert --model_dir {MODEL} --smoothquant 0.5", "quantize.py --qformat int8_sq"),
    (f"convert --model_dir {MODEL} --tp_size 7", "can be divided among"),
    (f"quantize --model_dir {MODEL} --kv_cache_dtype fp8", "--kv_cache_dtype fp8 is not supported"),
    (f"serve {MODEL} --context_parallel_size 2", "--context_parallel_size 2 is not supported"),
    ("bench build", "name the model"),
]


def test_what_is_not_done_is_named(installed: Installed, tmp_path: Path) -> None:
    code = """
import importlib, shlex, sys

for line in sys.argv[1:]:
    program, *words = shlex.split(line)
    try:
        importlib.import_module(f"tensorrt_llm.commands.{program}").main(words)
    except SystemExit as stop:
        print(f"status {stop.code}", file=sys.stderr)
"""
    command = [str(installed.python), "-c", code, *(line for line, _ in REFUSED)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=installed.variables)
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["status 2"] * len(REFUSED), done.stderr
    for line, (_, said) in zip(lines[::2], REFUSED, strict=True):
        assert said in line


def test_an_unknown_option_is_refused(installed: Installed, tmp_path: Path) -> None:
    said = run(installed, tmp_path, "trtllm-build --max_batch_sise 4", status=2)
    assert "did you mean --max-batch-size?" in said


def test_bench(installed: Installed, tmp_path: Path) -> None:
    rows = [{"task_id": i, "input_ids": [0, 40 + i], "output_tokens": 3 + i} for i in range(3)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(installed, tmp_path, f"trtllm-bench --model {MODEL} -w w build --max_seq_len 256")
    engine = f"w/{SHIPPED_MODEL}/tp_1_pp_1"
    for command in ("throughput", "latency"):
        said = run(
            installed,
            tmp_path,
            f"trtllm-bench --model stories {command} --dataset data.jsonl --backend tensorrt --engine_dir {engine} "
            "--report_json report.json",
        )
        assert "3 requests" in said
        assert json.loads((tmp_path / "report.json").read_text())["output_tok_s"]


def test_serve(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(
        "kv_cache_config:\n  enable_block_reuse: false\nenable_chunked_prefill: true\nmax_seq_len: 128\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(installed.bin / "trtllm-serve"),
        "serve",
        MODEL,
        "--port",
        str(port),
        "--tp_size",
        "1",
        "--pp_size",
        "2",
    ]
    command += ["--max_batch_size", "4", "--backend", "pytorch", "--extra_llm_api_options", "options.yaml"]
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=file, env=installed.variables)
    try:
        base, body = (
            f"http://localhost:{port}",
            {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8},
        )
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                with urllib.request.urlopen(f"{base}/v1/models", timeout=5) as answer:
                    (model,) = json.load(answer)["data"]
                break
            except OSError:
                time.sleep(0.05)
        assert model["max_model_len"] == 128
        data, headers = json.dumps({**body, "temperature": 0}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{base}/v1/completions", data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["choices"][0]["text"] == text_of(MODEL)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    assert (
        "--enable_chunked_prefill changes nothing: prompts are always computed in chunks" in log.read_text()
    )
