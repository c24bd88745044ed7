"""The torch checkpoint reader against torch.save, and against pickles that want to run something."""

from __future__ import annotations

import collections
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ModelError
from quire.weights.checkpoint.pickles import MAX_OPERATIONS, read_pickle
from quire.weights.checkpoint.torch_pickle import TorchFile

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def save(path: Path, state: Any, **options: Any) -> TorchFile:
    torch.save(state, path, **options)
    return TorchFile(path)


def forge(path: Path, pickled: bytes, members: dict[str, bytes] | None = None, **options: Any) -> Path:
    """An archive as torch writes it around any pickle."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("model/data.pkl", pickled)
        for name, content in (members or {"data/0": bytes(64), "version": b"3\n"}).items():
            archive.writestr(f"model/{name}", content)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("protocol", [2, 4])
def test_reads_what_torch_saved(dtype: torch.dtype, protocol: int, tmp_path: Path) -> None:
    values = (4 * torch.randn(3, 5)).to(dtype)
    file = save(
        tmp_path / "m.bin",
        {"a": values, "scalar": values[0, 0], "none": values[:0]},
        pickle_protocol=protocol,
    )
    for name, expected in {"a": values, "scalar": values[0, 0], "none": values[:0]}.items():
        got = file.get(name)
        assert got.dtype == file.dtype(name)
        assert got.shape == file.shape(name) == tuple(expected.shape)
        np.testing.assert_array_equal(got.astype(np.float64), expected.double().numpy())


def test_views_strides_offsets_and_shared_storages(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    views = {
        "base": base,
        "transposed": base.transpose(0, 2),
        "slice": base[1:, ::2, 3],
        "row": base[2, 1],
        "expanded": base[0, 0, :1].expand(4, 3),
        "same": base,
    }
    file = save(tmp_path / "m.bin", views)
    for name, expected in views.items():
        got = file.get(name)
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, expected.numpy())
    assert not file.get("base").flags.owndata
    assert not file.get("base").flags.writeable


def test_a_module_state_dict_with_metadata_and_parameters(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    file = save(tmp_path / "m.bin", module.state_dict())
    assert list(file.names()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    np.testing.assert_array_equal(file.get("0.weight"), module.state_dict()["0.weight"].numpy())
    parameters = save(tmp_path / "p.bin", dict(module.named_parameters()))
    np.testing.assert_array_equal(parameters.get("0.bias"), module[0].bias.detach().numpy())


def test_bfloat16_needs_no_torch(tmp_path: Path) -> None:
    got = save(tmp_path / "m.bin", {"a": torch.arange(4).bfloat16()}).get("a")
    assert got.dtype == ml_dtypes.bfloat16


class Runs:
    """Pickles into a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call

    def __repr__(self) -> str:  # the same in every process that collects tests
        return f"Runs {self.call[0].__name__}"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "payload",
    [
        Runs(os.system, "echo hostile"),
        Runs(eval, "1"),
        Runs(getattr, "text", "upper"),
        {"a": Runs(open, "/tmp/never", "w")},
        Runs(__import__, "os"),
        collections.Counter("ab"),
        bytearray(b"x"),
        torch.Size([1]),
    ],
    ids=str,
)
def test_hostile_pickles_are_refused(payload: Any, protocol: int, tmp_path: Path) -> None:
    path = forge(tmp_path / "m.bin", pickle.dumps(payload, protocol))
    with pytest.raises(ModelError, match=r"asks for|uses|holds a|is not a tensor") as raised:
        TorchFile(path)
    assert str(path) in str(raised.value)


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI16\ntQ"


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(b"\x80\x02cos\nsystem\n(Vecho\ntR.", id="global"),
        pytest.param(b"\x80\x04\x8c\x02os\x8c\x06system\x93(\x8c\x04echo\x94tR.", id="stack-global"),
        pytest.param(b"(Vecho\nios\nsystem\n.", id="inst"),
        pytest.param(b"\x80\x02(cos\nsystem\nVecho\no.", id="obj"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\n)\x81.", id="newobj"),
        pytest.param(b"\x80\x02\x82\x01.", id="extension"),
        pytest.param(b"\x80\x02" + REBUILD + b"}Vx\nI1\nsb.", id="build-on-function"),
        pytest.param(b"\x80\x02" + REBUILD + b"N}Vx\nI1\ns\x86b.", id="build-slots-on-function"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\nN}Vitems\nI1\ns\x86b.", id="build-on-class"),
        pytest.param(b"\x80\x02" + STORAGE + b"N}Vsize\nI999\ns\x86b.", id="build-on-storage"),
        pytest.param(b"\x80\x02ctorch\nFloatStorage\n)R.", id="call-a-string"),
        pytest.param(b"\x80\x02}" + b"(" * 10 + b".", id="marks-left"),
        pytest.param(b"\x80\x02cposixpath\nos.system\n.", id="dotted"),
        pytest.param(b"\x80\x02ctorch\nload\n.", id="torch-function"),
        pytest.param(b"\x80\x02ctorch\nFloatStorage\n.", id="bare-global"),
        pytest.param(b"\x80\x02(Vstorage\nVFloatStorage\nV0\ntQ.", id="short-storage"),
        pytest.param(b"\x80\x02(Vstorage\nVObject\nV0\nVcpu\nI16\ntQ.", id="unknown-storage"),
        pytest.param(b"\x80\x02(Vstorage\nVFloatStorage\nV0\nVcpu\nI-1\ntQ.", id="negative-storage"),
        pytest.param(b"\x80\x02I1\n.", id="not-a-dict"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80\x02}", id="cut"),
    ],
)
def test_forged_pickles_are_refused(pickled: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m\.bin"):
        TorchFile(forge(tmp_path / "m.bin", pickled))


def tensor_pickle(
    offset: bytes = b"I0\n", size: bytes = b"(I4\nI4\nt", stride: bytes = b"(I4\nI1\nt"
) -> bytes:
    return b"\x80\x02}Va\n" + REBUILD + b"(" + STORAGE + offset + size + stride + b"I00\nNtRs."


def test_forged_tensors_must_lie_in_their_storage(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    assert TorchFile(forge(path, tensor_pickle())).get("a").shape == (4, 4)
    for bad, message in [
        (tensor_pickle(offset=b"I1\n"), "reaches beyond"),
        (tensor_pickle(size=b"(I5\nI4\nt"), "reaches beyond"),
        (tensor_pickle(stride=b"(I5\nI1\nt"), "reaches beyond"),
        (tensor_pickle(offset=b"I-1\n"), "storage and an offset"),
        (tensor_pickle(stride=b"(I-4\nI1\nt"), "shape or strides"),
        (tensor_pickle(size=b"(I4\nt"), "1 sizes and 2 strides"),
        (tensor_pickle(size=b"Vxy\n"), "shape or strides"),
        (tensor_pickle(size=b"(F4.0\nI4\nt"), "shape or strides"),
        (tensor_pickle(size=b"(L9999999999999999999L\nI4\nt"), "shape or strides"),
        (tensor_pickle().replace(STORAGE, b"Vx\n"), "not made from a storage"),
        (tensor_pickle().replace(b"V0\n", b"V9\n"), "data/9"),
    ]:
        with pytest.raises(ModelError, match=message):
            TorchFile(forge(path, bad))


def test_state_dict_attributes_cannot_hide_entries(tmp_path: Path) -> None:
    """BUILD may set attributes on an OrderedDict; a shadowed `items` must not matter."""
    entry = tensor_pickle()[len(b"\x80\x02}") : -1]
    pickled = b"\x80\x02ccollections\nOrderedDict\n)R" + entry + b"}Vitems\nI1\nsb."
    assert list(TorchFile(forge(tmp_path / "m.bin", pickled)).names()) == ["a"]


@pytest.mark.parametrize("protocol", [2, 4])
def test_reads_the_format_before_archives(tmp_path: Path, protocol: int) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    state = {"base": base, "view": base[1:, ::2, 3], "half": torch.ones(3).half(), "none": base[:0]}
    state["wide"] = torch.randn(5, 2, dtype=torch.float64)
    old = {"_use_new_zipfile_serialization": False, "pickle_protocol": protocol}
    file = save(tmp_path / "m.bin", collections.OrderedDict(state), **old)
    assert set(file.names()) == set(state)
    for name, expected in state.items():
        np.testing.assert_array_equal(file.get(name), expected.float().numpy())


def test_damage_of_the_format_before_archives_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"a": torch.ones(200), "b": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    for end in range(10, len(data), 7):
        path.write_bytes(data[:end])
        with pytest.raises(ModelError):
            TorchFile(path)
    rng = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data)
        changed[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.write_bytes(changed)
        try:
            file = TorchFile(path)
            for name in file.names():
                file.get(name)
        except ModelError:
            pass
    path.write_bytes(pickle.dumps(os.system, 2) + data)
    with pytest.raises(ModelError, match="refused, it may be hostile"):
        TorchFile(path)


def test_archives_that_are_not_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="not a PyTorch checkpoint"):
        TorchFile(path)
    with pytest.raises(ModelError, match="compressed"):
        TorchFile(forge(path, tensor_pickle(), compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(ModelError, match="big-endian"):
        TorchFile(forge(path, tensor_pickle(), {"data/0": bytes(64), "byteorder": b"big"}))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/other", b"")
    with pytest.raises(ModelError, match=r"no data\.pkl"):
        TorchFile(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("second/data.pkl", b"")
    with pytest.raises(ModelError, match="2 top folders"):
        TorchFile(path)
    with pytest.raises(ModelError, match="cannot be read"):
        TorchFile(tmp_path / "absent")
    torch.save({"epoch": 3, "a": torch.ones(2)}, path)
    with pytest.raises(ModelError, match="'epoch' is not a tensor"):
        TorchFile(path)


@settings(max_examples=200, deadline=None)
@given(draw=st.data())
def test_a_damaged_file_is_refused_or_read_within_its_bounds(
    draw: st.DataObject, tmp_path_factory: Any
) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3, 2), "b": torch.ones(4).bfloat16()}, buffer)
    whole = buffer.getvalue()
    damaged = bytearray(whole[: draw.draw(st.integers(0, len(whole)) | st.just(len(whole)))])
    for _ in range(draw.draw(st.integers(0, 3))):
        if damaged:
            damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged", numbered=True) / "m.bin"
    path.write_bytes(damaged)
    try:
        file = TorchFile(path)
    except ModelError:
        return
    for name in file.names():
        assert file.get(name).shape == file.shape(name)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_as_a_pickle_give_plain_data_or_an_error(pickled: bytes) -> None:
    try:
        value = read_pickle(pickled)
    except Exception:
        return
    assert type(value).__module__ in ("builtins", "quire.weights.checkpoint.pickles")


NESTED, DOUBLED = (
    b")" + b"\x85" * 100_000,
    b")" + b"2\x86" * 200,
)  # tuples in tuples; each holds the last one twice


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        pytest.param(b"}" + NESTED + b"Ns.", "a tuple as a key", id="deep-key"),
        pytest.param(b"}" + DOUBLED.replace(b"2", b"q\x00h\x00") + b"Ns.", "a tuple as a key", id="doubled-key"),
        pytest.param(b"}Va\n" + NESTED + b"s.", "entry 'a' is not a tensor", id="deep-value"),
        pytest.param(b"}Va\n" + b"]" + b"q\x00h\x00a" * 1000 + b"s.", "entry 'a' is not a tensor", id="own-item"),
        pytest.param(b"}Va\n" + b"]" * 90_000 + b"a" * 89_999 + b"s.", "entry 'a' is not a tensor", id="deep-list"),
        pytest.param(b"N0" * MAX_OPERATIONS, "more than 1000000 operations", id="long"),
        pytest.param(NESTED + b"Q.", "not a storage", id="deep-storage"),
        pytest.param(b"(Vstorage\n" + NESTED + b"V0\nVcpu\nI16\ntQ.", "not a storage", id="deep-type"),
        pytest.param(
            b"}Va\n" + REBUILD + b"(" + STORAGE + b"I0\n" + NESTED + NESTED + b"tRs.",
            "no tuples of sizes",
            id="deep-shape",
        ),
    ],
)  # fmt: skip
def test_depth_and_length_are_no_danger(pickled: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        TorchFile(forge(tmp_path / "m.bin", b"\x80\x02" + pickled))


def test_the_list_of_members_is_bounded(tmp_path: Path) -> None:
    path = forge(tmp_path / "m.bin", tensor_pickle())
    data = bytearray(path.read_bytes())
    data[-10:-6] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="lists its members in 1073741824 bytes"):
        TorchFile(path)
