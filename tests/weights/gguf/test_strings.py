"""Strings with their lengths before them: read as struct reads them, and never past the end."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import _native


@given(st.lists(st.text(max_size=20), max_size=10), st.binary(max_size=9), st.integers(0, 200))
def test_strings_are_read_and_bounded(texts: list[str], before: bytes, cut: int) -> None:
    encoded = [text.encode() for text in texts]
    data = before + b"".join(struct.pack("<Q", len(text)) + text for text in encoded)
    array = np.frombuffer(data, np.uint8)
    assert _native.strings_end(array, len(before), len(texts)) == len(data)
    assert _native.read_strings(array, len(before), len(texts)) == texts
    for count in (len(texts) + 1, 1 << 63):
        with pytest.raises(IndexError):
            _native.read_strings(array, len(before), count)
    if texts and cut < len(data) - len(before):
        with pytest.raises(IndexError):
            _native.strings_end(array[: len(before) + cut], len(before), len(texts))


@pytest.mark.parametrize("length", [1, 1 << 32, (1 << 64) - 8, (1 << 64) - 1])
def test_a_length_beyond_the_end_is_refused(length: int) -> None:
    array = np.frombuffer(struct.pack("<Q", length), np.uint8)
    for read in (_native.read_strings, _native.strings_end):
        with pytest.raises(IndexError):
            read(array, 0, 1)
        with pytest.raises(IndexError):
            read(array, (1 << 64) - 4, 1)


def test_text_must_be_utf8() -> None:
    array = np.frombuffer(struct.pack("<Q", 2) + b"\xff\xfe", np.uint8)
    with pytest.raises(UnicodeDecodeError):
        _native.read_strings(array, 0, 1)
