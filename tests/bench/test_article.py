"""The studies of `python -m bench.article`: each runs small, and what can be known otherwise is compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.article import kv_formula, kv_waste, plain_loop, quantized_size
from bench.article.command import STUDIES, ArticleOptions, load, run
from bench.article.lengths import conversations
from bench.article.study import Measured, Result, Setting
from quire.bench.report import cost_per_million, share_of
from quire.config import EngineConfig
from quire.devices.cpu.backend import NativeBackend
from quire.errors import ConfigError
from tests.shared import require

NEEDS_DATA = {"quantization", "plain-loop"}  # tested apart

lengths = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=30)


def small(**options: object) -> Setting:
    threads = {"threads": 1, "kv_cache_memory_bytes": 16 << 20, **options}
    return Setting(EngineConfig.from_options(**threads), scale=0.01)


@given(lengths)
def test_blocks_hold_all_that_contiguous_slots_hold(pairs: list[tuple[int, int]]) -> None:
    budget = 4096
    exact = kv_waste.contiguous(pairs, lambda length: length, budget)
    padded = kv_waste.contiguous(pairs, kv_waste.power_of_two, budget)
    blocks = kv_waste.paged(pairs, budget)
    for usage in (exact, padded):
        assert 0 < usage.used <= usage.reserved <= budget * usage.steps
        assert usage.fragmented <= usage.refused
    assert blocks.reserved - blocks.used < kv_waste.BLOCK * blocks.sequences
    assert all(0 <= tail < kv_waste.BLOCK for tail in blocks.tails)


@given(st.lists(st.integers(1, 40), max_size=40), st.randoms())
def test_slots_of_an_arena_never_overlap(counts: list[int], rng: object) -> None:
    arena, held = kv_waste.Arena(256), []
    for count in counts:
        begin = arena.take(count)
        if begin is None:
            assert held  # an empty arena has room for each
            arena.give(*held.pop(rng.randrange(len(held))))  # type: ignore[attr-defined]
            continue
        assert all(begin + count <= at or at + size <= begin for at, size in held)
        held.append((begin, count))
        assert arena.num_free == 256 - sum(size for _, size in held)


def test_a_last_block_has_half_a_block_unused() -> None:
    usage = kv_waste.paged([(1 + i % 32, 20) for i in range(64)])
    assert sum(usage.tails) / len(usage.tails) == pytest.approx((16 - 1) / 2, abs=0.7)


def test_the_bytes_of_a_cache_are_those_of_the_formula() -> None:
    sizes = [row[-1] for row in kv_formula.measure(small()).rows]
    assert sizes == [
        pytest.approx(2 * 80 * heads * 128 * tokens * 2 / 1e9)
        for heads, tokens in ((8, 4096), (8, 2048), (64, 2048))
    ]


def test_four_bits_and_their_scales() -> None:
    plain, held, packed, packed_held = (float(row[1]) for row in quantized_size.measure(small()).rows)
    layers = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert plain == pytest.approx(141.1, abs=0.1)
    packs = NativeBackend().compact  # bfloat16 in 12 bits; the scalar set does not
    assert 0.7 * plain < held < (0.8 if packs else 1.01) * plain
    assert packed_held < (1.1 if packs else 1.11) * packed
    assert packed == pytest.approx((layers * (4 + 20 / 128) / 8 + 2 * 2 * 128256 * 8192) / 1e9, rel=2e-3)


@pytest.mark.parametrize("name", sorted(STUDIES.keys() - NEEDS_DATA))
def test_a_study_runs(name: str) -> None:
    study = load(name)
    result = study.measure(small())
    check(result)
    assert study.claims
    assert study.title


def check(result: Result) -> None:
    assert result.rows
    assert all(len(row) == len(result.columns) for row in result.rows)
    assert result.finding.endswith(".")
    for points in result.plot.points.values() if result.plot else ():
        assert len(points) > 1


def test_a_plain_loop_of_transformers_on_any_instruction_set_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AVX2 has no limit of bfloat16; what was measured before the interrupt is not measured again."""
    pytest.importorskip("transformers")
    file = tmp_path / "partial"

    def setting() -> Setting:
        return replace(small(isa="avx2"), measured=Measured(file, {"study": "plain-loop"}))

    def interrupted(self: Setting, **changes: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Setting, "llm", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load("plain-loop").measure(setting())
    before = Measured(file, {"study": "plain-loop"}).parts
    assert len(before) == 2
    with monkeypatch.context() as patched:
        patched.setattr(plain_loop, "Transformers", interrupted)  # the loop is not run again
        found = load("plain-loop").measure(setting())
    check(found)
    assert [row[1] for row in found.rows[:2]] == list(before.values())
    assert Measured(file, {"study": "another"}).parts == {}


def test_a_study_that_is_complete_leaves_no_partial_file(tmp_path: Path) -> None:
    run(
        EngineConfig.from_options(),
        ArticleOptions(study="tiled-attention", scale=0.1, resume=str(tmp_path / "r")),
    )
    assert not (tmp_path / "r").exists()


def test_an_index_of_whole_blocks_reuses_less_and_answers_alike() -> None:
    figures = load("shared-prompts").measure(small())
    none, blocks, tree = (float(str(row[-1]).rstrip("%")) for row in figures.rows)
    assert none == 0 < blocks < tree


def test_a_share_above_the_limit_is_noise() -> None:
    assert (share_of(3.0, 4.0), share_of(1.0, 8.0, 1)) == ("75%", "12.5%")
    assert share_of(5.12, 4.0) == "128% (noise)"


def test_methods_are_compared_on_a_text(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data"):
        load("quantization").measure(small())
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a little girl. She had a cat. " * 40)
    model = tiny_model(hidden_size=128, intermediate_size=256)  # methods take groups of 128
    check(load("quantization").measure(replace(small(model=model), data=text)))


def test_the_command_lists_shows_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, file = EngineConfig.from_options(), tmp_path / "figures.json"
    run(config, ArticleOptions())
    listed = capsys.readouterr().out
    assert all(name in listed for name in STUDIES)
    run(config, ArticleOptions(study="kv-formula", output_json=str(file)))
    out = capsys.readouterr().out
    assert "claimed: Llama 2 70B has 64 KV heads" in out
    assert json.loads(file.read_text())["rows"][0][-1] == pytest.approx(1.342177280)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"study": "kv-wastes"}, "did you mean kv-waste"),
        ({"study": "kv-waste", "data": "/nowhere"}, "does not exist"),
        ({"study": "kv-formula", "plot": "x.svg"}, "no curves"),
    ],
)
def test_bad_options_say_what_to_change(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(EngineConfig.from_options(), ArticleOptions(**options))


def test_lengths_of_a_real_trace(data: Path) -> None:
    trace = require(data / "traces-azure2023" / "AzureLLMInferenceTrace_conv.csv")
    found = conversations(trace, 100, 2048)
    assert len(found) == 100
    assert all(min(pair) >= 1 and sum(pair) <= 2048 for pair in found)
    with pytest.raises(ConfigError, match="at most 1 tokens"):
        conversations(trace, 100, 1)


def test_costs() -> None:
    assert cost_per_million(3.6, 1000) == pytest.approx(1.0)
