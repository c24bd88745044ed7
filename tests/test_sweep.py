"""Every command with wrong values, and places and pipes that cannot be used: one line and a status, no traceback."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import quire
from quire import LLM, RequestError, SamplingParams
from quire.cli import COMMANDS, Command, Program, load_command, main
from quire.config import SECTIONS
from quire.errors import ConfigError
from quire.flags.arguments import integer, number
from quire.quantize.fisher import fisher_information

ENGINE_COMMANDS = [
    name
    for name, entry in COMMANDS.items()
    if name
    not in (
        "complete",
        "inspect",
        "bench serve",
        "pull",
        "models",
        "models where",
        "models rm",
        "ps",
        "doctor",
        "completion",
        "docs",
        "kernels",
        "route",
        "bench host",
    )
]


def command_of(name: str) -> Command:
    return load_command(name, Program())


def wrong_values(options: type, field: Field[Any]) -> Iterator[str]:
    """Values that the option's type or range excludes."""
    hint = get_type_hints(options)[field.name]
    kinds = {hint, *get_args(hint)}
    if get_origin(hint) is Literal:
        yield "nonsense"
    if kinds & {int, float} and str not in kinds:
        yield from ("x", "")
        for bound, step in ((field.metadata["low"], -1), (field.metadata["high"], 1)):
            if bound is not None:
                yield str(type(bound)(bound) + step)
    if float in kinds and str not in kinds:
        yield "nan"


def assert_refused(capsys: pytest.CaptureFixture[str], status: int, *args: str) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (status, ""), (args, said)
    assert said.err.count("\n") == 1, (args, said.err)
    return said.err


@pytest.mark.parametrize("name", [*COMMANDS, "engine"])
def test_wrong_values_are_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of the engine are the same for all its commands: one stands for them."""
    command = name if name in COMMANDS else "generate"
    parts = [command_of(name).options] if name in COMMANDS else list(SECTIONS.values())
    for options in parts:
        for field in fields(options):
            for value in wrong_values(options, field):
                flag = f"--{field.name.replace('_', '-')}"
                assert flag in assert_refused(capsys, 2, *command.split(), f"{flag}={value}")


@pytest.mark.parametrize("name", COMMANDS)
def test_places_that_cannot_be_written_are_found_first(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for field in fields(command_of(name).options):
        if field.metadata["writes"]:
            flag = f"--{field.name.replace('_', '-')}"
            for place in (tmp_path / "file" / "below", Path("/proc/quire/x")):
                said = assert_refused(capsys, 2, *name.split(), flag, str(place))
                assert f"{flag} {place}" in said
                assert "choose a place that can be written" in said


@pytest.mark.parametrize("name", ENGINE_COMMANDS)
def test_a_model_that_is_not_there(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text"
    text.write_text("Once upon a time. " * 50)
    needed = {"bench quality": ["--text", str(text)]}.get(name, [])
    if any(field.name == "output" for field in fields(command_of(name).options)):
        needed = ["-o", str(tmp_path / "out")]
    if name == "generate":
        needed = ["Once"]
    said = assert_refused(capsys, 1, *name.split(), *needed, "--model", str(tmp_path / "none"))
    assert "none" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("redirection", "status"),
    [("| true", 141), (">/dev/full", 1), (">&-", 0), ("2>&-", 0), ("<&-", 0)],
)
@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "plan",
        "generate Once --max-tokens 3",
        "doctor",
        "ps",
        "models --suggest",
        "completion bash",
    ],
)
def test_closed_outputs(command: str, redirection: str, status: int) -> None:
    line = f"set -o pipefail; run() {{ {sys.executable} -m quire.cli {command}; }}; run {redirection}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert done.returncode in {status, 0 if status == 141 else status}, (
        done.stderr
    )  # a late reader got it all
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("\n") == (status == 1)


def test_missing_extras_name_the_line_that_installs_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for args, packages in (
        (("generate", "Once", "--backend", "torch"), "torch"),
        (("generate", "Once", "--model-impl", "transformers"), "torch transformers"),
        (("bench", "serve", "--plot", str(tmp_path / "plot.png")), "matplotlib"),
    ):
        assert f"pip install {packages}\n" in assert_refused(capsys, 2, *args)
    with pytest.raises(Exception, match="pip install torch transformers"):
        fisher_information(tmp_path, None, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve -p 8000", "there is no option -p; did you mean --port?"),
        ("generate -n 5 Once", "there is no option -n; did you mean --max-tokens?"),
        ("generate -t 0 Once", "there is no option -t; did you mean --threads?"),
        ("generate model Once more", "'more' is one argument too many; --model names the model"),
        ("plan model other", "'other' is one argument too many\n"),
    ],
)
def test_short_flags_are_no_prefixes(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in assert_refused(capsys, 2, *line.split())


def test_a_prompt_that_is_a_model_is_refused(
    tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    for model in (tiny_model(), "owner/name", "owner/name-GGUF:Q4_K_M"):
        assert f"quire generate {model} TEXT" in assert_refused(capsys, 2, "generate", model)
    assert "two models" in assert_refused(
        capsys, 2, "generate", "owner/name", "Once", "--model", "other/name"
    )


def test_a_model_may_stand_before_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "quire-stories", "Once upon", "--max-tokens", "3", "--temperature", "0"])
    before = capsys.readouterr().out
    main(["generate", "Once upon", "--model", "quire-stories", "--max-tokens", "3", "--temperature", "0"])
    assert capsys.readouterr().out == before


def test_a_type_that_is_a_quantization_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --quantization int8" in assert_refused(capsys, 2, "generate", "Once", "--dtype", "int8")
    assert "invalid choice: 'int9'" in assert_refused(capsys, 2, "generate", "Once", "--dtype", "int9")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1GiB", 2**30),
        ("1GB", 10**9),
        ("4K", 4096),
        ("4k", 4000),
        ("1.5kB", 1500),
        ("1e3", 1000),
        ("2MiB", 2**21),
    ],
)
def test_units_of_sizes(text: str, value: int) -> None:
    assert integer(text) == value


def test_percentages_and_auto(capsys: pytest.CaptureFixture[str]) -> None:
    assert number("90%") == 0.9
    main(["plan", "--gpu-memory-utilization", "90%", "--threads", "auto", "--json"])
    assert json.loads(capsys.readouterr().out)["total_bytes"] > 0
    for text in ("1.5", "1e-3", "1Gb", "1xB", "1.0001k"):
        with pytest.raises(ValueError, match=re.escape(text)):
            integer(text)


@pytest.mark.parametrize("name", ["quire-stories-draft", "quire-stories-eagle3", "quire-stories-mlp"])
def test_shipped_drafters_go_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    same = ("generate", "Once", "--model", "quire-stories", "--max-tokens", "6", "--temperature", "0")
    main(same)
    plain = capsys.readouterr().out
    main([*same, "--spec-model", name])
    assert capsys.readouterr().out == plain


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": 5}, "model must be a directory or a Hugging Face id, got 5"),
        ({"modle": "x"}, "unknown option: modle; did you mean model?"),
        ({"tensor_parallel_size": "2"}, "must be an integer, got '2'"),
        ({"max_model_len": 2.5}, "must be an integer, got 2.5"),
        ({"gpu_memory_utilization": "most"}, "must be a number, got 'most'"),
        ({"enable_lora": "yes"}, "must be True or False, got 'yes'"),
        ({"max_model_len": 5000}, "max_model_len 5000 is more than the 1024 positions"),
        ({"max_num_batched_tokens": 10**9}, "quantization int8 or int4, or lower max_num_batched_tokens"),
        ({"data_parallel_size": 2}, "data_parallel_size 2 is not supported"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
    ],
)
def test_python_options_of_wrong_types(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        LLM(**options)
    assert "--" not in str(refused.value)


def test_python_prompts_of_wrong_types(tiny_model: Callable[..., str]) -> None:
    with LLM(Path(tiny_model()), max_model_len=64) as llm:
        for prompt in (
            5,
            None,
            {"prompt": 5},
            b"bytes",
            ["Once", 5],
            ["Once", None],
            [True],
            {"prompt_token_ids": 5},
        ):
            with pytest.raises(RequestError, match=r"must be|outside the vocabulary"):
                llm.generate(prompt, use_tqdm=False)  # type: ignore[arg-type]
        for params in ({"max_tokens": 3}, 5, [5], "x"):
            with pytest.raises(RequestError, match="sampling_params must be"):
                llm.generate("Once", params, use_tqdm=False)  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=3, temperature=0.0)
        plain = llm.generate([3, 4, 5], params)[0].outputs[0].token_ids
        for same in (np.array([3, 4, 5]), [np.int64(3), np.int64(4), np.int64(5)], np.array([[3, 4, 5]])):
            assert llm.generate(same, params)[0].outputs[0].token_ids == plain  # type: ignore[arg-type]


NO_PROMPT: list[Any] = [
    5,
    None,
    1.5,
    b"x",
    {},
    {"x": 1},
    [5.5],
    [None],
    [{}],
    [[None]],
    [{"role": 5}],
    object(),
]


@pytest.mark.parametrize(
    "method",
    ["generate", "generate_ids", "stream", "submit", "enqueue"]
    + ["chat", "stream_chat", "enqueue_chat", "chat_token_ids"]
    + ["embed", "encode", "classify", "reward", "score", "beam_search", "run_program"],
)
def test_python_methods_refuse_what_is_no_prompt(
    method: str, tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    """Whatever the method, and whatever stands in place of texts, messages or parameters: a RequestError."""
    with LLM(Path(tiny_model()), max_model_len=64) as llm:
        call = getattr(llm, method)
        for wrong in NO_PROMPT:
            given = [wrong, wrong] if method in ("score", "beam_search") else [wrong]
            with pytest.raises(RequestError):
                list(call(*given))


@pytest.mark.parametrize("name", ["use_tqdm", "priority", "lora_request", "sampling_params"])
def test_python_arguments_of_wrong_types(name: str, tiny_model: Callable[..., str]) -> None:
    with LLM(Path(tiny_model()), max_model_len=64) as llm:
        for wrong in (5, "x", [5, 5], ["x"], {"a": 1}, object()):
            with pytest.raises(RequestError, match=f"{name}|priorities|adapters"):
                llm.generate("Once", **{name: wrong})


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_sampling_parameters_of_wrong_types(name: str) -> None:
    """Each is refused by name, or means something."""
    for wrong in (object(), "x", [5], [None], {"a": 1}, -7, 1.5, float("nan"), b"x"):
        try:
            SamplingParams(**{name: wrong})
        except RequestError as error:
            assert name in str(error)  # noqa: PT017


def test_dir_lists_the_public_names() -> None:
    assert set(quire.__all__) == set(dir(quire))


def test_quality_of_a_quantized_checkpoint_needs_its_base(
    tiny_model: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    main(["quantize", tiny_model(), "-o", str(tmp_path / "small"), "--method", "rtn", "--group-size", "16"])
    (tmp_path / "text").write_text("Once upon a time. " * 20)
    main(
        ["bench", "quality", str(tmp_path / "small"), "--text", str(tmp_path / "text"), "--max-tokens", "40"]
    )
    assert "without --base it is compared with itself" in caplog.text
