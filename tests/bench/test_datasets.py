"""Datasets: lengths, sharing and times are those that were asked for, and the same for the same seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.datasets import DatasetOptions, Sample, as_text, ideal_cached_tokens, load_samples
from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer
from tests.tiny import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer.load(path)


def samples_of(tokenizer: Tokenizer | None = None, **options: Any) -> list[Sample]:
    return load_samples(DatasetOptions(**options), tokenizer)


def ids(sample: Sample) -> list[int]:
    assert not isinstance(sample.prompt, str)
    return sample.prompt.tolist()


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_random_prompts_have_their_lengths_and_share_the_prefix() -> None:
    samples = samples_of(num_prompts=50, random_input_len=20, output_len=7, random_prefix_len=5)
    assert len(samples) == 50
    assert {(len(ids(s)), s.prompt_len, s.output_len) for s in samples} == {(25, 25, 7)}
    assert len({tuple(ids(s)[:5]) for s in samples}) == 1
    assert len({tuple(ids(s)) for s in samples}) == 50


def test_random_lengths_vary_within_their_ratio() -> None:
    samples = samples_of(
        num_prompts=400,
        random_input_len=100,
        random_output_len=10,
        random_range_ratio='{"input": 0.2, "output": 0}',
    )
    lengths = {s.prompt_len for s in samples}
    assert (min(lengths), max(lengths)) == (80, 120)
    assert {s.output_len for s in samples} == {10}


def test_the_seed_decides(tokenizer: Tokenizer) -> None:
    first, again, other = (
        [ids(s) for s in samples_of(tokenizer, num_prompts=5, random_input_len=9, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_special_tokens_are_not_drawn(tokenizer: Tokenizer) -> None:
    drawn = {t for s in samples_of(tokenizer, num_prompts=200, random_input_len=64) for t in ids(s)}
    assert not any(tokenizer.is_special(t) for t in drawn)
    assert max(drawn) > 255


@pytest.mark.parametrize("ratio", ["1.0", "-0.1", "x", "[1]", '{"input": 0.1}'])
def test_a_ratio_out_of_range_is_refused(ratio: str) -> None:
    with pytest.raises(ConfigError, match="random-range-ratio"):
        samples_of(random_range_ratio=ratio)


def test_prefix_repetition() -> None:
    samples = samples_of(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=4,
        prefix_repetition_num_prefixes=3,
    )
    prefixes = [tuple(ids(s)[:8]) for s in samples]
    assert len(samples) == 12
    assert {len(ids(s)) for s in samples} == {12}
    assert sorted(prefixes.count(p) for p in set(prefixes)) == [4, 4, 4]
    assert ideal_cached_tokens(ids(s) for s in samples) >= 9 * 8
    with pytest.raises(ConfigError, match="num-prefixes"):
        samples_of(dataset_name="prefix_repetition", num_prompts=2)


def test_sharegpt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def talk(*turns: str) -> dict[str, Any]:
        return {"conversations": [{"from": "x", "value": turn} for turn in turns]}

    rows = [
        talk("a question", "an answer"),
        talk("too short", "no"),
        talk("only one"),
        talk("x" * 1025, "long"),
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(rows))
    options = {"dataset_name": "sharegpt", "dataset_path": str(path), "num_prompts": 3}
    samples = samples_of(tokenizer, **options)
    assert {(s.prompt, s.prompt_len, s.output_len) for s in samples} == {("a question", 10, 9)}
    assert len(samples) == 3
    assert len(samples_of(tokenizer, **options, oversample=False)) == 1
    assert {s.output_len for s in samples_of(tokenizer, **options, sharegpt_output_len=2)} == {2}
    with pytest.raises(ConfigError, match="--tokenizer"):
        samples_of(None, **options)
    path.write_text('{"conversations": 3}')
    with pytest.raises(ConfigError, match="neither a conversation nor a prompt"):
        samples_of(tokenizer, **options)


def test_custom(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", [{"prompt": "one", "output_tokens": 4}, {"prompt": "three"}])
    options = {"dataset_name": "custom", "dataset_path": path, "num_prompts": 2, "disable_shuffle": True}
    assert [(s.prompt, s.prompt_len, s.output_len) for s in samples_of(tokenizer, **options)] == [
        ("one", 3, 4),
        ("three", 5, 256),
    ]
    assert [s.output_len for s in samples_of(None, **options, custom_output_len=9)] == [9, 9]


def test_texts_are_found_by_the_names_that_datasets_use(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "output_tokens": 3},
        {"input": "b", "output_length": 4},
        {"prompt": "c", "output": "four", "in_toks": 1},
        {
            "timestamp": 5,
            "requests": [{"prompt": "d", "Output Length": 6}, {"prompt": "e", "Output Length": 7}],
        },
    ]
    wanted = [("a", 3), ("b", 4), ("c", 4), ("d", 6), ("e", 7)]
    lines, array = tmp_path / "t.jsonl", tmp_path / "t.json"
    write_lines(lines, rows)
    array.write_text(json.dumps(rows))
    for path in (lines, array):
        options = {
            "dataset_name": "custom",
            "dataset_path": str(path),
            "num_prompts": 5,
            "disable_shuffle": True,
        }
        assert [(s.prompt, s.output_len) for s in samples_of(tokenizer, **options)] == wanted
    with pytest.raises(ConfigError, match="--tokenizer"):
        samples_of(None, **options)


def test_a_trace_may_hold_texts(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2500, "requests": [{"prompt": "later", "Output Length": 6}]},
        {"timestamp": 500, "requests": [{"prompt": "sooner", "Output Length": 2}]},
    ]
    options = {"dataset_name": "timed_trace", "dataset_path": write_lines(tmp_path / "t.jsonl", rows)}
    found = [(s.prompt, s.output_len, s.timestamp) for s in samples_of(**options)]
    assert found == [("sooner", 2, 0.0), ("later", 6, 2.0)]
    with pytest.raises(ConfigError, match="trace-length-scale"):
        samples_of(**options, trace_length_scale=0.5)
    write_lines(tmp_path / "t.jsonl", [{"prompt": "when?"}])
    with pytest.raises(ConfigError, match="timestamp"):
        samples_of(**options)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("aibrix_8min_up_and_down.jsonl", 2026),
        ("llmservingsim_sharegpt300_text.jsonl", 300),
        ("lmbenchmark_sharegpt_run.json", 252),
    ],
)
def test_real_conversations(data: Path, tokenizer: Tokenizer, name: str, count: int) -> None:
    path = str(data / "prompts-sharegpt" / name)
    samples = samples_of(
        tokenizer, dataset_name="custom", dataset_path=path, num_prompts=5000, oversample=False
    )
    assert len(samples) == count
    assert len(samples_of(None, dataset_name="sharegpt", dataset_path=path, num_prompts=9, output_len=4)) == 9


@pytest.mark.parametrize("row", [{"text": "x"}, {"prompt": ""}, {"prompt": "x", "output_tokens": -1}, 3])
def test_custom_lines_that_are_wrong_name_the_line(tmp_path: Path, row: Any) -> None:
    path = write_lines(tmp_path / "c.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(ConfigError, match=r"c\.jsonl:2"):
        samples_of(dataset_name="custom", dataset_path=path)


def test_a_missing_path_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --dataset-path"):
        samples_of(dataset_name="custom")
    with pytest.raises(ConfigError, match="cannot be read"):
        samples_of(dataset_name="custom", dataset_path=str(tmp_path / "none"))


TRACE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 8, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    {"timestamp": 2500, "input_length": 600, "output_length": 40, "hash_ids": [0, 3]},
]


def test_a_trace_shares_what_its_hash_ids_share(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", TRACE)
    first, second, third = samples_of(dataset_name="timed_trace", dataset_path=path, trace_time_scale=0.5)
    assert [s.timestamp for s in (first, second, third)] == [0.0, 0.75, 1.0]
    assert [s.prompt_len for s in (first, second, third)] == [1100, 600, 1024]
    assert [s.output_len for s in (first, second, third)] == [8, 40, 1]
    assert ids(third) == ids(first)[:1024]
    assert ids(second)[:512] == ids(first)[:512]
    assert ids(second)[512:] != ids(first)[512:600]
    assert 512 + 1023 <= ideal_cached_tokens(ids(s) for s in (first, second, third)) <= 512 + 1023 + 3


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.5, 2.0])
def test_a_scaled_trace_keeps_its_shape(tmp_path: Path, scale: float) -> None:
    path = write_lines(tmp_path / "t.jsonl", TRACE)
    first, second, third = samples_of(dataset_name="timed_trace", dataset_path=path, trace_length_scale=scale)
    block = round(512 * scale)
    assert len(ids(third)) == 2 * block
    assert ids(third) == ids(first)[: 2 * block]
    assert ids(second)[:block] == ids(first)[:block]
    assert len(ids(first)) == 2 * block + round(76 * scale)
    assert second.output_len == max(1, round(40 * scale))


def test_the_chunk_size_is_read_off_the_trace_or_checked(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [5, 6, 7]}]
    path = write_lines(tmp_path / "t.jsonl", rows)
    assert samples_of(dataset_name="timed_trace", dataset_path=path)[0].prompt_len == 40
    with pytest.raises(ConfigError, match="timed-trace-chunk-hash-size"):
        samples_of(dataset_name="timed_trace", dataset_path=path, timed_trace_chunk_hash_size=512)
    write_lines(tmp_path / "t.jsonl", [{"timestamp": 0}])
    with pytest.raises(ConfigError, match=r"t\.jsonl:1"):
        samples_of(dataset_name="timed_trace", dataset_path=path)


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = samples_of(dataset_name="timed_trace", dataset_path=str(path))
    assert (first.prompt_len, first.output_len, first.timestamp) == (374, 44, 0.0)
    assert second.timestamp == pytest.approx(4.314579)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n")
    with pytest.raises(ConfigError, match=r"a\.csv:2"):
        samples_of(dataset_name="timed_trace", dataset_path=str(path))


def test_real_traces(data: Path) -> None:
    """The hit rate that the trace's own notes give for whole blocks of 512, within what partial blocks add."""
    path = str(data / "traces-mooncake" / "arxiv_trace_first1000.jsonl")
    samples = samples_of(dataset_name="timed_trace", dataset_path=path, trace_length_scale=1 / 32)
    prompts = [ids(s) for s in samples]
    assert len(prompts) == 1000
    assert ideal_cached_tokens(prompts) / sum(map(len, prompts)) == pytest.approx(0.38, abs=0.03)
    azure = samples_of(
        dataset_name="timed_trace",
        dataset_path=str(data / "traces-azure2023" / "AzureLLMInferenceTrace_conv.csv"),
        num_prompts=100,
    )
    assert len(azure) == 100


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12))
def test_the_ideal_is_the_longest_prefix_of_any_earlier_prompt(prompts: list[list[int]]) -> None:
    def shared(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    expected = 0
    for i, prompt in enumerate(prompts):
        expected += min(max((shared(prompt, p) for p in prompts[:i]), default=0), len(prompt) - 1)
    assert ideal_cached_tokens(prompts) == expected


def test_ids_as_text(tokenizer: Tokenizer) -> None:
    samples = samples_of(tokenizer, num_prompts=20, random_input_len=30)
    for sample in as_text(samples, tokenizer):
        assert isinstance(sample.prompt, str)
        assert sample.prompt_len == len(tokenizer.encode(sample.prompt, add_special_tokens=False))
    text = Sample("kept", 4, 1)
    assert as_text([text], tokenizer) == [text]


@pytest.mark.parametrize("name", ["random", "prefix_repetition"])
def test_every_synthetic_dataset_gives_arrays(name: Any, tokenizer: Tokenizer) -> None:
    make: Callable[..., list[Sample]] = samples_of
    assert all(isinstance(s.prompt, np.ndarray) for s in make(tokenizer, dataset_name=name, num_prompts=10))
