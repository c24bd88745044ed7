"""Requests for a load generator: prompts, the lengths of their outputs and, in a trace, their times.

Everything is drawn from the seed, so two runs send the same requests. Knows no HTTP.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from quire.bench.files import Arrival, Text, is_token_trace, read_arrivals, read_talks, read_texts
from quire.cli import Options
from quire.config import option
from quire.errors import ConfigError
from quire.radix import RadixTree
from quire.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]

# Without a tokenizer the vocabulary is unknown; every vocabulary has at least this many ids.
SAFE_VOCAB_SIZE = 256
DEFAULT_OUTPUT_LEN = 256
CHUNK_SIZES = (512, 256, 128, 64, 32, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions(Options):
    """What to send. Names are vLLM's, except the two scales of a trace."""

    dataset_name: Literal[
        "random", "sharegpt", "multi_turn", "custom", "prefix_repetition", "timed_trace"
    ] = option("random", "Source of the prompts.")
    dataset_path: str | None = option(None, "File of the dataset: ShareGPT JSON, custom JSONL, or a trace.")
    num_prompts: int = option(1000, "Requests to send.", low=1)
    seed: int = option(0, "Seed of prompts, lengths and arrival times.")
    tokenizer: str | None = option(
        None, "Directory of the tokenizer, to count tokens and to decode ids to text."
    )
    input_len: int | None = option(None, "Prompt tokens, for datasets in which they can be chosen.", low=1)
    output_len: int | None = option(None, "Output tokens, for datasets in which they can be chosen.", low=1)
    random_input_len: int = option(1024, "random: tokens of each prompt after the shared prefix.", low=1)
    random_output_len: int = option(128, "random: tokens to generate.", low=1)
    random_range_ratio: str = option(
        "0.0", 'random: lengths vary by this share both ways; a number, or {"input": 0.3, "output": 0.5}.'
    )
    random_prefix_len: int = option(0, "random: tokens of the prefix that all prompts share.", low=0)
    sharegpt_output_len: int | None = option(
        None, "sharegpt: tokens to generate, instead of the dataset's own length.", low=1
    )
    custom_output_len: int | None = option(
        None, "custom: tokens to generate, instead of the dataset's own length.", low=1
    )
    multi_turn_num_turns: int = option(5, "multi_turn: most questions of a conversation.", low=1)
    multi_turn_input_len: int = option(64, "multi_turn without a file: tokens of each question.", low=1)
    multi_turn_output_len: int = option(
        64, "multi_turn: tokens of each answer, unless the file has answers.", low=1
    )
    prefix_repetition_prefix_len: int = option(256, "prefix_repetition: tokens of each prefix.", low=1)
    prefix_repetition_suffix_len: int = option(256, "prefix_repetition: tokens after the prefix.", low=1)
    prefix_repetition_num_prefixes: int = option(10, "prefix_repetition: number of prefixes.", low=1)
    prefix_repetition_output_len: int = option(128, "prefix_repetition: tokens to generate.", low=1)
    timed_trace_chunk_hash_size: int | None = option(
        None, "timed_trace: tokens per hash id; by default inferred from the trace (Mooncake: 512).", low=1
    )
    timed_trace_sec_multiplier: float = option(
        0.001, "timed_trace: seconds per unit of its timestamps.", low=0
    )
    trace_length_scale: float = option(
        1.0, "timed_trace: factor for all lengths, shared parts included.", low=1e-6
    )
    trace_time_scale: float = option(
        1.0, "timed_trace: factor for all times; 0.5 replays twice as fast.", low=0
    )
    disable_shuffle: bool = option(False, "Keep the dataset's order.")
    oversample: bool = option(True, "Repeat prompts if the dataset has too few; else send fewer requests.")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to send. `prompt` is text or token ids. `prompt_len` is 0 if unknown. `timestamp` is in
    seconds from the start, or None outside a trace. A turn of a conversation comes `after` another sample; its prompt,
    which is text, follows that one's prompt and answer."""

    prompt: str | Ids
    prompt_len: int
    output_len: int
    timestamp: float | None = None
    after: int | None = None


def load_samples(options: DatasetOptions, tokenizer: Tokenizer | None) -> list[Sample]:
    """Make the requests to send, in order. Raises ConfigError if the file does not match its dataset's format."""
    samples = list(_DATASETS[options.dataset_name](options, tokenizer))
    if not samples:
        raise ConfigError(f"--dataset-path {options.dataset_path} holds no request that can be sent")
    return samples


def as_text(samples: Iterable[Sample], tokenizer: Tokenizer) -> list[Sample]:
    """Decode prompts of token ids to text with about the same tokens, for APIs that only take text."""
    return [s if isinstance(s.prompt, str) else _to_text(s, tokenizer) for s in samples]


def ideal_cached_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """Count the prompt tokens that an infinite cache would hit if each prompt came after all earlier ones.

    The last token of a prompt always needs computing, so a repeated prompt of n tokens hits n - 1.
    """
    tree: RadixTree[bool] = RadixTree()
    found = 0
    for prompt in prompts:
        found += min(tree.match(prompt)[1], len(prompt) - 1)
        tree.insert(prompt, True)
    return found


# --- vocabulary ---------------------------------------------------------------------------------------------


def _vocabulary(tokenizer: Tokenizer | None) -> Ids:
    """List the ids to draw from: all except special tokens."""
    if tokenizer is None:
        return np.arange(SAFE_VOCAB_SIZE, dtype=np.int32)
    size = tokenizer.vocab_size
    usable = [i for i in range(size) if tokenizer.id_to_token(i) is not None and not tokenizer.is_special(i)]
    return np.array(usable, dtype=np.int32)


def _draw(vocabulary: Ids, length: int, *seed: int) -> Ids:
    return vocabulary[np.random.default_rng(seed).integers(0, len(vocabulary), length)]


def _to_text(sample: Sample, tokenizer: Tokenizer) -> Sample:
    """Cut to the wanted length: decoding and encoding again can give more tokens."""
    assert not isinstance(sample.prompt, str)
    ids = sample.prompt.tolist()
    text = tokenizer.decode(ids)
    again = tokenizer.encode(text, add_special_tokens=False)
    if len(again) > len(ids):
        text = tokenizer.decode(again[: len(ids)])
        again = tokenizer.encode(text, add_special_tokens=False)
    return replace(sample, prompt=text, prompt_len=len(again))


# --- synthetic datasets -------------------------------------------------------------------------------------


def _ratios(text: str) -> tuple[float, float]:
    try:
        value = json.loads(text)
        ratios = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
        low, high = float(ratios[0]), float(ratios[1])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'--random-range-ratio must be a number or {{"input": a, "output": b}}, got {text!r}'
        ) from error
    if not (0 <= low < 1 and 0 <= high < 1):
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {text}")
    return low, high


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, math.floor(mean * (1 - ratio))), max(1, math.ceil(mean * (1 + ratio)))
    return [int(n) for n in rng.integers(low, high + 1, count)]


def _random(options: DatasetOptions, tokenizer: Tokenizer | None) -> Iterator[Sample]:
    vocabulary = _vocabulary(tokenizer)
    rng = np.random.default_rng(options.seed)
    inputs, outputs = _ratios(options.random_range_ratio)
    input_lens = _lengths(rng, options.input_len or options.random_input_len, inputs, options.num_prompts)
    output_lens = _lengths(rng, options.output_len or options.random_output_len, outputs, options.num_prompts)
    prefix = vocabulary[rng.integers(0, len(vocabulary), options.random_prefix_len)]
    for input_len, output_len in zip(input_lens, output_lens, strict=True):
        prompt = np.concatenate([prefix, vocabulary[rng.integers(0, len(vocabulary), input_len)]])
        yield Sample(prompt, len(prompt), output_len)


def _prefix_repetition(options: DatasetOptions, tokenizer: Tokenizer | None) -> list[Sample]:
    vocabulary = _vocabulary(tokenizer)
    rng = np.random.default_rng(options.seed)
    each = options.num_prompts // options.prefix_repetition_num_prefixes
    if each == 0:
        raise ConfigError("--num-prompts must be at least --prefix-repetition-num-prefixes")

    def draw(length: int) -> Ids:
        return vocabulary[rng.integers(0, len(vocabulary), length)]

    output_len = options.output_len or options.prefix_repetition_output_len
    samples: list[Sample] = []
    for _ in range(options.prefix_repetition_num_prefixes):
        prefix = draw(options.prefix_repetition_prefix_len)
        for _ in range(each):
            prompt = np.concatenate([prefix, draw(options.prefix_repetition_suffix_len)])
            samples.append(Sample(prompt, len(prompt), output_len))
    return samples if options.disable_shuffle else [samples[i] for i in rng.permutation(len(samples))]


# --- text files ---------------------------------------------------------------------------------------------


def _path(options: DatasetOptions) -> Path:
    if options.dataset_path is None:
        raise ConfigError(f"--dataset-name {options.dataset_name} needs --dataset-path FILE")
    return Path(options.dataset_path)


def _count(tokenizer: Tokenizer | None, text: str, special: bool = True) -> int:
    return len(tokenizer.encode(text, add_special_tokens=special)) if tokenizer else 0


def _pick(options: DatasetOptions, samples: Iterator[Sample], rng: np.random.Generator) -> Iterator[Sample]:
    """Pick the first num_prompts samples. If there are fewer, repeat some, unless --no-oversample forbids it."""
    picked: list[Sample] = []
    for sample in samples:
        picked.append(sample)
        yield sample
        if len(picked) == options.num_prompts:
            return
    if picked and options.oversample:
        for i in rng.integers(0, len(picked), options.num_prompts - len(picked)):
            yield picked[i]


def _shuffled(options: DatasetOptions, texts: Iterator[Text], rng: np.random.Generator) -> list[Text]:
    found = list(texts)
    return found if options.disable_shuffle else [found[i] for i in rng.permutation(len(found))]


def _sharegpt(options: DatasetOptions, tokenizer: Tokenizer | None) -> Iterator[Sample]:
    """Read ShareGPT: the first turn is the prompt, the second's length the output's. Bounds are vLLM's."""
    path = _path(options)
    rng = np.random.default_rng(options.seed)
    wanted = options.output_len or options.sharegpt_output_len

    def samples() -> Iterator[Sample]:
        for text in _shuffled(options, read_texts(path, options.timed_trace_sec_multiplier), rng):
            sample = _text_sample(text, wanted, tokenizer)
            total = sample.prompt_len + sample.output_len
            if tokenizer is None or (
                4 <= sample.prompt_len <= 1024 and (wanted or sample.output_len >= 4) and total <= 2048
            ):
                yield sample

    return _pick(options, samples(), rng)


def _custom(options: DatasetOptions, tokenizer: Tokenizer | None) -> Iterator[Sample]:
    """Read JSONL of {"prompt": text, "output_tokens": n}; without the second, or a length option, 256 tokens."""
    rng = np.random.default_rng(options.seed)
    wanted = options.output_len or options.custom_output_len
    texts = _shuffled(options, read_texts(_path(options), options.timed_trace_sec_multiplier), rng)
    return _pick(options, (_text_sample(text, wanted, tokenizer) for text in texts), rng)


def _text_sample(text: Text, wanted: int | None, tokenizer: Tokenizer | None) -> Sample:
    """Make a sample; its output length is the option's, else the row's, else the answer's, else 256."""
    length = wanted or text.output_len
    if length is None and text.answer is not None:
        if tokenizer is None:
            raise ConfigError(
                "counting the tokens of answers needs a tokenizer: pass --tokenizer DIR or --output-len N"
            )
        length = _count(tokenizer, text.answer)
    return Sample(
        text.prompt,
        _count(tokenizer, text.prompt),
        DEFAULT_OUTPUT_LEN if length is None else max(1, length),
        text.time,
    )


# --- conversations ---------------------------------------------------------------------------------------------


def _multi_turn(options: DatasetOptions, tokenizer: Tokenizer | None) -> list[Sample]:
    """Make conversations of up to `multi_turn_num_turns` turns, num_prompts questions in all, first questions first."""
    talks, questions, count = [], 0, options.num_prompts
    for talk in _talks(options, tokenizer):
        talks.append(talk[: min(options.multi_turn_num_turns, count - questions)])
        questions += len(talks[-1])
        if questions == count:
            break
    samples: list[Sample] = []
    last: list[int | None] = [None] * len(talks)
    for turn in range(options.multi_turn_num_turns):
        for i, talk in enumerate(talks):
            if turn < len(talk):
                samples.append(replace(talk[turn], after=last[i]))
                last[i] = len(samples) - 1
    return samples


def _talks(options: DatasetOptions, tokenizer: Tokenizer | None) -> Iterator[list[Sample]]:
    """Make the questions of each conversation, from a ShareGPT file or at random."""
    rng = np.random.default_rng(options.seed)
    if options.dataset_path is None:
        if tokenizer is None:
            raise ConfigError(
                "multi_turn makes questions of text: pass --tokenizer DIR or --dataset-path FILE"
            )
        vocabulary, output = _vocabulary(tokenizer), options.output_len or options.multi_turn_output_len
        length = options.input_len or options.multi_turn_input_len
        while True:
            drawn = vocabulary[rng.integers(0, len(vocabulary), (options.multi_turn_num_turns, length))]
            yield [_to_text(Sample(ids, length, output), tokenizer) for ids in drawn]
    talks = list(read_talks(Path(options.dataset_path)))
    for i in range(len(talks)) if options.disable_shuffle else rng.permutation(len(talks)):
        yield [
            Sample(question, _count(tokenizer, question), _answer_len(options, tokenizer, answer))
            for question, answer in talks[i]
        ]


def _answer_len(options: DatasetOptions, tokenizer: Tokenizer | None, answer: str) -> int:
    wanted = options.output_len or (None if tokenizer else options.multi_turn_output_len)
    return wanted or max(1, _count(tokenizer, answer, special=False))


# --- traces -------------------------------------------------------------------------------------------------


def _timed_trace(options: DatasetOptions, tokenizer: Tokenizer | None) -> Iterator[Sample]:
    """Read a trace: Mooncake's JSONL (hash ids mark shared prefixes), Azure's CSV (lengths only), or timed texts."""
    path = _path(options)
    if not is_token_trace(path):
        yield from _timed_texts(path, options, tokenizer)
        return
    found = read_arrivals(path, options.timed_trace_sec_multiplier)
    arrivals = sorted(found, key=lambda a: a.time)[: options.num_prompts]
    size = _chunk_size(path, options, arrivals)
    vocabulary, chunks = _vocabulary(tokenizer), _Chunks(options, size, _vocabulary(tokenizer))
    start = arrivals[0].time
    for number, arrival in enumerate(arrivals):
        if arrival.hash_ids is None:
            length = max(1, round(arrival.input_len * options.trace_length_scale))
            prompt = _draw(vocabulary, length, options.seed, 1, number)
        else:
            prompt = chunks.prompt(arrival.input_len, arrival.hash_ids)
        output_len = max(1, round(arrival.output_len * options.trace_length_scale))
        seconds = (arrival.time - start) * options.trace_time_scale
        yield Sample(prompt, len(prompt), output_len, seconds)


def _timed_texts(path: Path, options: DatasetOptions, tokenizer: Tokenizer | None) -> Iterator[Sample]:
    if options.trace_length_scale != 1:
        raise ConfigError("--trace-length-scale needs a trace of lengths, but this one holds texts")
    samples = [
        _text_sample(text, options.output_len, tokenizer)
        for text in read_texts(path, options.timed_trace_sec_multiplier)
    ]
    times = [s.timestamp for s in samples if s.timestamp is not None]
    if len(times) < len(samples) or not samples:
        raise ConfigError(f"{path}: every line of a trace needs a timestamp")
    start = min(times)
    timed = [
        replace(s, timestamp=(t - start) * options.trace_time_scale)
        for s, t in zip(samples, times, strict=True)
    ]
    yield from sorted(timed, key=lambda s: s.timestamp or 0.0)[: options.num_prompts]


class _Chunks:
    """Makes prompts from hash ids. An id always maps to the same tokens, so prompts share what the trace shares. A
    partly filled chunk is a prefix of its id's tokens."""

    def __init__(self, options: DatasetOptions, size: int, vocabulary: Ids) -> None:
        self._seed, self._scale, self._size = options.seed, options.trace_length_scale, size
        self._length = max(1, round(size * options.trace_length_scale))
        self._vocabulary = vocabulary
        self._made: dict[int, Ids] = {}

    def prompt(self, input_len: int, hash_ids: tuple[int, ...]) -> Ids:
        full, rest = divmod(input_len, self._size)
        parts = [self._chunk(i) for i in hash_ids]
        if rest:
            parts[full] = parts[full][: max(1, round(rest * self._scale))]
        return np.concatenate(parts)

    def _chunk(self, hash_id: int) -> Ids:
        made = self._made.get(hash_id)
        if made is None:
            made = self._made[hash_id] = _draw(self._vocabulary, self._length, self._seed, 0, hash_id)
        return made


def _chunk_size(path: Path, options: DatasetOptions, arrivals: list[Arrival]) -> int:
    """Find the tokens per hash id: the option's, or the size that fits every line. Every line is checked against it."""

    def fits(size: int) -> bool:
        return all(a.hash_ids is None or math.ceil(a.input_len / size) == len(a.hash_ids) for a in arrivals)

    said = options.timed_trace_chunk_hash_size
    sizes = CHUNK_SIZES if said is None else (said,)
    for size in sizes:
        if fits(size):
            return size
    raise ConfigError(
        f"{path}: the hash ids do not fit the input lengths at {' or '.join(map(str, sizes))} tokens each: "
        "pass the right --timed-trace-chunk-hash-size"
    )


_DATASETS: dict[str, Callable[[DatasetOptions, Tokenizer | None], Iterable[Sample]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "multi_turn": _multi_turn,
    "custom": _custom,
    "prefix_repetition": _prefix_repetition,
    "timed_trace": _timed_trace,
}
