"""The incremental detokenizer against whole-text decoding, for every split, prompt and stop string."""

from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import EngineError, RequestError
from quire.params import SamplingParams
from quire.text.detok import Detokenizer, token_text
from quire.text.stop_strings import StopMatcher
from quire.text.tokenizer import Tokenizer

NAMES = ["byte_level", "metaspace", "old_metaspace", "words"]
SAME_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
TEXTS = st.text(st.sampled_from("abcthe ,.\n▁éü日本🦙\U0001f468‍\ufffd"), max_size=30)


def output_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """The oracle: decode prompt and output in one, keep the characters that end inside the output."""
    pieces = tokenizer.pieces(skip)
    before = b"".join([pieces[t] for t in prompt])
    if not before:
        return tokenizer.decode(output, skip)
    data = before + b"".join([pieces[t] for t in output])
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    kept: list[str] = []
    for i in range(len(data)):
        chars = decoder.decode(data[i : i + 1])
        inside = bool(decoder.getstate()[0])
        for k, c in enumerate(chars):
            end = i if k == len(chars) - 1 and not inside else i - 1
            if end >= len(before):
                kept.append(c)
    left = decoder.getstate()[0]
    if left and len(data) > len(before):
        kept.append(decoder.decode(b"", final=True))
    return "".join(kept)


def first_stop(text: str, stop: list[str]) -> tuple[int, int, str] | None:
    """The oracle for stop strings: the least end, then the least start."""
    found = [
        (at + len(s), at, s) for s in stop for at in range(len(text) - len(s) + 1) if text.startswith(s, at)
    ]
    return min(found) if found else None


def pushes(detok: Detokenizer, output: list[int], cuts: list[int]) -> list[str]:
    edges = sorted({0, len(output), *(c % (len(output) + 1) for c in cuts)})
    parts = [detok.push(output[a:b]) for a, b in pairwise(edges)]
    return [*parts, detok.finish()]


@st.composite
def outputs(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Token soup, or the tokens of a text."""
    if draw(st.booleans()):
        return draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=25))
    return tokenizer.encode(draw(TEXTS), add_special_tokens=False)


@pytest.mark.parametrize("name", NAMES)
@SAME_FIXTURE
@given(st.data())
def test_pushes_add_up_to_the_decoded_output(
    tiny: dict[str, Tokenizer], name: str, data: st.DataObject
) -> None:
    tokenizer = tiny[name]
    prompt, output = data.draw(outputs(tokenizer)), data.draw(outputs(tokenizer))
    skip = data.draw(st.booleans())
    detok = Detokenizer(tokenizer, skip_special_tokens=skip, prompt_tokens=prompt)
    parts = pushes(detok, output, data.draw(st.lists(st.integers(0, 99), max_size=10)))
    want = output_text(tokenizer, prompt, output, skip)
    assert "".join(parts) == want
    assert detok.num_tokens == detok.num_tokens_in_text == len(output)


@pytest.mark.parametrize("name", NAMES)
@SAME_FIXTURE
@given(st.data())
def test_stop_strings_cut_exactly(tiny: dict[str, Tokenizer], name: str, data: st.DataObject) -> None:
    tokenizer = tiny[name]
    output = data.draw(outputs(tokenizer))
    prompt = data.draw(st.sampled_from([[], tokenizer.encode("the cat", add_special_tokens=False)]))
    full = output_text(tokenizer, prompt, output, True)
    stop = data.draw(
        st.lists(st.text(st.sampled_from("atheé日🦙 \ufffd"), min_size=1, max_size=4), max_size=4)
    )
    if full and data.draw(st.booleans()):
        a = data.draw(st.integers(0, len(full) - 1))
        stop.append(full[a : a + data.draw(st.integers(1, 8))])
    include = data.draw(st.booleans())
    detok = Detokenizer(tokenizer, stop, include, prompt_tokens=prompt)
    parts = pushes(detok, output, data.draw(st.lists(st.integers(0, 99), max_size=10)))
    match = first_stop(full, stop)
    want = full if match is None else full[: match[0] if include else match[1]]
    assert "".join(parts) == want
    assert detok.stopped == (None if match is None else match[2])
    # Every token that is counted begins before the cut, and the next one does not.
    count = detok.num_tokens_in_text
    assert all(offset < len(want) for offset in detok.offsets[:count]) or match is None
    assert all(offset >= len(want) for offset in detok.offsets[count:])


@SAME_FIXTURE
@given(st.data())
def test_text_survives_any_split(tiny: dict[str, Tokenizer], data: st.DataObject) -> None:
    tokenizer = tiny["byte_level"]
    text = data.draw(st.text(max_size=40))
    output = tokenizer.encode(text, add_special_tokens=False)
    detok = Detokenizer(tokenizer)
    sent = [detok.push([t]) for t in output]
    assert "".join(sent) == text
    assert ("\ufffd" in "".join(sent)) == ("\ufffd" in text)
    assert detok.finish() == ""


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5))
def test_matcher_agrees_with_plain_search(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    match = matcher.feed(text)
    want = first_stop(text, stop)
    assert match == (None if want is None else (want[0], want[2]))
    if match is None:
        held = max(k for s in stop for k in range(len(s)) if text.endswith(s[:k]))
        assert matcher.depth == held


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Token ids that spell `data` byte by byte."""
    by_byte = {
        tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1
    }
    return [by_byte[data[i : i + 1]] for i in range(len(data))]


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
def test_a_split_character_is_held_until_it_is_whole(tiny: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tiny[name]
    ids = byte_ids(tokenizer, "a🦙b".encode())
    detok = Detokenizer(tokenizer)
    assert [detok.push([t]) for t in ids] == ["a", "", "", "", "🦙", "b"]
    assert detok.offsets == [0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
def test_an_unfinished_character_is_replaced_at_the_end_only(tiny: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tiny[name]
    ids = byte_ids(tokenizer, "a🦙".encode()[:-1])
    detok = Detokenizer(tokenizer)
    assert detok.push(ids) == "a"
    assert detok.finish() == "\ufffd"
    assert tokenizer.decode(ids) == "a\ufffd"
    assert detok.finish() == ""


def test_a_prompt_that_ends_inside_a_character_does_not_leak(tiny: dict[str, Tokenizer]) -> None:
    tokenizer = tiny["byte_level"]
    prompt = byte_ids(tokenizer, b"secret " + "🦙".encode()[:2])
    done = Detokenizer(tokenizer, prompt_tokens=prompt)
    assert done.push(byte_ids(tokenizer, "🦙".encode()[2:] + b"!")) == "🦙!"
    broken = Detokenizer(tokenizer, prompt_tokens=prompt)
    assert broken.push(byte_ids(tokenizer, b"ok")) + broken.finish() == "ok"
    nothing = Detokenizer(tokenizer, prompt_tokens=prompt)
    assert nothing.push([]) + nothing.finish() == ""


def test_sentencepiece_space_is_kept_after_a_prompt_and_dropped_without(tiny: dict[str, Tokenizer]) -> None:
    tokenizer = tiny["metaspace"]
    the = tokenizer.encode("the", add_special_tokens=False)
    bos = [tokenizer.token_to_id("<s>") or 0]
    assert Detokenizer(tokenizer, prompt_tokens=the).push(the) == " the"
    assert Detokenizer(tokenizer).push(the) == "the"
    assert Detokenizer(tokenizer, prompt_tokens=bos).push(the) == "the"
    shown = Detokenizer(tokenizer, skip_special_tokens=False, prompt_tokens=bos)
    assert shown.push(the) == " the"


def test_special_tokens_are_hidden_or_shown(tiny: dict[str, Tokenizer]) -> None:
    tokenizer = tiny["byte_level"]
    ids = tokenizer.encode("a<|end|>b<tool>")
    assert Detokenizer(tokenizer).push(ids) == "ab<tool>"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(ids) == "a<|end|>b<tool>"


def test_spaces_between_special_tokens(tiny: dict[str, Tokenizer]) -> None:
    tokenizer = tiny["words"]
    ids = tokenizer.encode("the <a> <b> cat")
    spaced = Detokenizer(tokenizer, skip_special_tokens=False)
    tight = Detokenizer(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert spaced.push(ids) == "the <a> <b> cat" == tokenizer.decode(ids, skip_special_tokens=False)
    assert tight.push(ids) == "the <a><b> cat"


def test_stop_strings_wait_for_min_tokens(tiny: dict[str, Tokenizer]) -> None:
    tokenizer = tiny["byte_level"]
    ids = byte_ids(tokenizer, b"abxabyab")
    detok = Detokenizer(tokenizer, ["ab"], min_tokens=4)
    assert detok.push(ids) == "abx"
    assert (detok.stopped, detok.num_tokens, detok.num_tokens_in_text) == ("ab", 5, 3)
    assert detok.push(ids) == ""
    assert detok.finish() == ""


def test_the_stop_string_that_completes_first_wins(tiny: dict[str, Tokenizer]) -> None:
    tokenizer = tiny["byte_level"]
    for stop, text, reason in ((["abcd", "bc"], "xa", "bc"), (["bc", "abc"], "x", "abc")):
        detok = Detokenizer(tokenizer, stop)
        assert detok.push(byte_ids(tokenizer, b"xabcdef")) == text
        assert detok.stopped == reason


def test_for_sampling_takes_the_request_s_parameters(tiny: dict[str, Tokenizer]) -> None:
    sampling = SamplingParams(
        stop="END", include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=2
    )
    detok = Detokenizer.for_sampling(tiny["byte_level"], sampling)
    assert detok.push(tiny["byte_level"].encode("a<|end|>END b")) == "a<|end|>END"
    assert detok.stopped == "END"


def test_token_text(tiny: dict[str, Tokenizer]) -> None:
    tokenizer = tiny["metaspace"]
    assert token_text(tokenizer, tokenizer.token_to_id("▁the") or 0) == " the"
    assert token_text(tokenizer, tokenizer.token_to_id("<s>") or 0) == "<s>"
    assert token_text(tokenizer, tokenizer.token_to_id("<0xF0>") or 0) == "\ufffd"
    assert token_text(tokenizer, tokenizer.vocab_size + 9) == ""


def test_misuse_is_refused(tiny: dict[str, Tokenizer]) -> None:
    tokenizer = tiny["byte_level"]
    detok = Detokenizer(tokenizer)
    detok.finish()
    with pytest.raises(EngineError, match="after finish"):
        detok.push([1])
    with pytest.raises(RequestError, match="at most"):
        Detokenizer(tokenizer, ["x" * 20000])
    with pytest.raises(RequestError, match="surrogate"):
        Detokenizer(tokenizer, ["\ud800"])
    with pytest.raises(RequestError, match="token id"):
        Detokenizer(tokenizer).push([-1])
