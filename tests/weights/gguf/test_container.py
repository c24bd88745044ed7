"""GGUF files that are damaged or hostile: refused with an error of ours, without a crash or a huge allocation."""

from __future__ import annotations

import resource
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ModelError, QuireError
from quire.model.gguf import read_gguf
from quire.weights.gguf import container
from quire.weights.gguf.choice import model_at
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.tokenizer import read_tokenizer
from tests.gguf_files import finish, write_gguf
from tests.models import inspect_model
from tests.tiny import write_checkpoint

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def entry(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack("<I", len(sizes))
    return head + b"".join(struct.pack("<Q", s) for s in sizes) + struct.pack("<IQ", kind, offset)


def file_of(
    tmp_path: Path,
    pairs: list[bytes] = [],  # noqa: B006
    entries: list[bytes] = [],  # noqa: B006
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(entries), len(pairs))))
    body = head + b"".join(pairs) + b"".join(entries)
    path = tmp_path / "m.gguf"
    path.write_bytes(body + bytes(-len(body) % 32) + data)
    return path


def test_values_of_every_type_come_back(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "bool": True,
        "text": "naïve ☃",
        "list": [1, 2, 3],
        "texts": ["a", "", "ü"],
        "neg": -7,
    }
    writer.add_bool("bool", True)
    writer.add_string("text", values["text"])
    writer.add_array("list", [1, 2, 3])
    writer.add_array("texts", values["texts"])
    writer.add_int64("neg", -7)
    writer.add_float64("double", 0.1)
    writer.add_float32("single", 0.1)
    writer.add_uint8("byte", 255)
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("a", data)
    writer.add_tensor("b", data[0] + 1)
    finish(writer)
    file = GGUFFile(path)
    assert {key: file.get(key) for key in values} == values
    assert file.get("double") == 0.1
    assert file.get("single") == np.float32(0.1)
    assert file.get("byte") == 255
    assert file.get("absent") is None
    assert file.tensors["a"].shape == (3, 4)
    assert np.array_equal(file.raw("a").view(np.float32).reshape(3, 4), data)
    assert np.array_equal(file.raw("b").view(np.float32), data[0] + 1)


HUGE = 1 << 60
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "version 1": ({"version": 1}, "of version 1"),
    "big-endian": ({"version": 3 << 24}, "big-endian"),
    "tensor count": ({"counts": (HUGE, 0)}, "claims"),
    "key count": ({"counts": (0, HUGE)}, "claims"),
    "more keys than there are": ({"counts": (0, 9)}, "ends inside"),
    "key length": ({"pairs": [struct.pack("<Q", HUGE) + b"key"]}, "at most"),
    "key beyond the end": ({"pairs": [struct.pack("<Q", 60000) + b"key"]}, "ends inside"),
    "key not UTF-8": ({"pairs": [pair("k", U32, bytes(4)).replace(b"k", b"\xff")]}, "not UTF-8"),
    "key twice": ({"pairs": [pair("k", U32, bytes(4))] * 2}, "twice"),
    "value type": ({"pairs": [pair("k", 13, bytes(64))]}, "type 13"),
    "string length": ({"pairs": [pair("k", STRING, struct.pack("<Q", HUGE) + b"x")]}, "ends inside k"),
    "array length": ({"pairs": [pair("k", ARRAY, struct.pack("<IQ", U8, HUGE))]}, "ends inside k"),
    "array overflows": (
        {"pairs": [pair("k", ARRAY, struct.pack("<IQ", U64, (1 << 64) - 1))]},
        "ends inside k",
    ),
    "string array length": ({"pairs": [pair("k", ARRAY, struct.pack("<IQ", STRING, HUGE))]}, "strings"),
    "string array cut": (
        {"pairs": [pair("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + struct.pack("<Q", HUGE))]},
        "ends inside k",
    ),
    "nested array": ({"pairs": [pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))]}, "do not nest"),
    "alignment 0": ({"pairs": [pair("general.alignment", U32, bytes(4))]}, "power of two"),
    "alignment 24": ({"pairs": [pair("general.alignment", U32, struct.pack("<I", 24))]}, "power of two"),
    "alignment huge": (
        {"pairs": [pair("general.alignment", U32, struct.pack("<I", 1 << 31))]},
        "power of two",
    ),
    "alignment text": ({"pairs": [pair("general.alignment", STRING, text("32"))]}, "power of two"),
    "name length": ({"entries": [struct.pack("<Q", HUGE)]}, "at most"),
    "no dimensions": ({"entries": [entry("a", [])]}, "0 dimensions"),
    "dimensions": ({"entries": [entry("a", [1] * 9)]}, "9 dimensions"),
    "empty": ({"entries": [entry("a", [0, 4])]}, "cannot be"),
    "size": ({"entries": [entry("a", [HUGE, 4])]}, "cannot be"),
    "product": ({"entries": [entry("a", [1 << 40] * 4)]}, "truncated"),
    "type": ({"entries": [entry("a", [32], kind=99)]}, "type 99"),
    "type that is not read": ({"entries": [entry("a", [256], kind=31)]}, "type 31"),
    "row of half a block": ({"entries": [entry("a", [33, 32], kind=8)]}, "multiples of 32"),
    "offset beyond the end": ({"entries": [entry("a", [8], offset=1 << 40)], "data": bytes(32)}, "truncated"),
    "offset overflows": (
        {"entries": [entry("a", [8], offset=(1 << 64) - 32)], "data": bytes(32)},
        "truncated",
    ),
    "offset not aligned": ({"entries": [entry("a", [4], offset=4)], "data": bytes(64)}, "multiple of 32"),
    "tensor twice": ({"entries": [entry("a", [4])] * 2, "data": bytes(64)}, "twice"),
    "overlap": ({"entries": [entry("a", [16]), entry("b", [8], offset=32)], "data": bytes(64)}, "overlaps"),
    "data cut": ({"entries": [entry("a", [16])], "data": bytes(63)}, "truncated"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused(case: str, tmp_path: Path) -> None:
    parts, message = BROKEN[case]
    with pytest.raises(ModelError, match=message):
        GGUFFile(file_of(tmp_path, **parts))


def test_a_million_tensors_are_refused_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path, counts=(1 << 20, 0))
    one = entry("t0000000", [1])
    with path.open("ab") as file:
        file.write(one * 1000)
        file.truncate(len(one) << 20)  # as many as it claims would fit
    monkeypatch.setattr(container, "_read_entry", lambda *arguments: pytest.fail("a tensor was read"))
    with pytest.raises(ModelError, match="claims 1048576 tensors"):
        GGUFFile(path)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content, message in ((b"", "too few"), (b"GGUF", "too few"), (bytes(64), "does not begin with GGUF")):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            GGUFFile(path)
    with pytest.raises(ModelError, match="cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")


def test_text_that_is_not_unicode_is_refused_when_it_is_read(tmp_path: Path) -> None:
    file = GGUFFile(file_of(tmp_path, [pair("k", STRING, text(b"\xff\xfe"))]))
    with pytest.raises(ModelError, match="k holds text that is not UTF-8"):
        file.get("k")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    directory = write_checkpoint(folder / "model", "llama", **small)
    return write_gguf(directory, folder / "m.gguf", "llama", "Q8_0").read_bytes()


def read_all(path: Path) -> None:
    """Everything that opening a model reads."""
    inspect_model(path)
    read_tokenizer(GGUFFile(path)).encode("the cat <|user|> naïve")
    tensors = read_gguf(path).checkpoint
    for name in tensors.names():
        assert tensors.get(name).shape == tensors.shape(name)


def test_a_file_cut_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    read_all(path)
    start = GGUFFile(path).tensors["token_embd.weight"].begin
    header = range(0, start, max(1, start // 150))
    for length in [*header, start, *range(start, len(whole) - 32, (len(whole) - start) // 20)]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            read_all(path)


@given(data=st.data())
@settings(max_examples=300)
def test_flipped_bytes_never_crash(whole: bytes, data: st.DataObject, tmp_path_factory: Any) -> None:
    """Either it is refused as ours, or it reads within its bounds; and memory stays small."""
    path: Path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    damaged = bytearray(whole)
    start = len(whole) - 1 if data.draw(st.booleans()) else 12_000
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(start, len(whole) - 1)))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.sampled_from([0, 1, 0x7F, 0xFF, 0x80, data.draw(st.integers(0, 255))]))
        damaged[at : at + width] = bytes([value]) * len(damaged[at : at + width])
    path.write_bytes(damaged)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(QuireError):
        read_all(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_a_blob_without_a_suffix_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """As in Ollama's store: ~/.ollama/models/blobs/sha256-..."""
    directory = tmp_path / "model"
    write_checkpoint(directory)
    blob = write_gguf(directory, tmp_path / "model.gguf").rename(tmp_path / "sha256-0123")
    assert inspect_model(blob).spec.num_layers == inspect_model(directory).spec.num_layers
    assert model_at(blob) == blob
