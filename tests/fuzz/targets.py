"""What is fuzzed: readers of files of every kind, and built engines down to the native code that runs them.

A target is a function that prepares sound inputs in a folder and returns a function of a random generator, which
changes one of them and reads it. Only a QuireError may come out.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save

from quire import LLM, SamplingParams
from quire.build import build_engine
from quire.config import EngineConfig
from quire.devices.cpu.backend import NativeBackend
from quire.devices.protocol import Limits
from quire.model.engine_dir import MANIFEST
from quire.model.info import EngineLimits
from quire.model.outline import ConfigFiles
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint.safetensors import SafetensorsFile
from quire.weights.checkpoint.torch_pickle import TorchFile
from tests.engine_files import rewrite_weights, seal
from tests.fuzz.adapters import fuzz_adapters, fuzz_drafters, fuzz_rules
from tests.fuzz.converted import fuzz_converted
from tests.fuzz.gguf_files import fuzz_gguf, fuzz_gguf_blocks
from tests.fuzz.mutate import mutate_bytes, mutate_json, read_all
from tests.fuzz.quantized import fuzz_quantized
from tests.tiny import CONFIG, FAMILIES, OTHERS, write_checkpoint

Case = Callable[[Random], None]
SAMPLES = ("Once upon a time", "naïve 日本 <bos>\n", "")


def fuzz_configs(folder: Path) -> Case:
    """Configs of all families, as far as a plan of the native backend."""
    device = NativeBackend(threads=1).outline()
    path = folder / "config.json"
    families = list((FAMILIES | OTHERS).values())

    def case(rng: Random) -> None:
        full = {k: v for k, v in {**CONFIG, **rng.choice(families)}.items() if v is not None}
        path.write_text(json.dumps(mutate_json(rng, full)))
        model = ConfigFiles(path).outline(device)
        device.workspace_bytes(model.graph, model.spec.kv_spec("bfloat16"), Limits(64, 4, 4))

    return case


def fuzz_safetensors(folder: Path) -> Case:
    whole = save({"a": np.ones((3, 2), np.float32), "b": np.ones(4, np.int8)}, {"format": "pt"})
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    path = folder / "model.safetensors"

    def case(rng: Random) -> None:
        if rng.random() < 0.5:
            path.write_bytes(mutate_bytes(rng, whole))
        else:
            changed = json.dumps(mutate_json(rng, header)).encode()
            path.write_bytes(struct.pack("<Q", len(changed)) + changed + whole[8 + length :])
        read_all(SafetensorsFile(path))

    return case


class _Pickler(pickle._Pickler):  # Python's own: C's has no names that are not there
    """Writes a state dict as torch.save does."""

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", _Name("torch", "FloatStorage"), "0", "cpu", 16) if obj is _STORAGE else None

    def save_named(self, obj: Any) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())

    def save_tensor(self, obj: Any) -> None:
        rebuild = _Name("torch._utils", "_rebuild_tensor_v2")
        self.save_reduce(rebuild, (_STORAGE, 0, obj.shape, obj.strides, False, ()), obj=obj)


class _Name:
    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self) -> None: ...


_STORAGE = object()


class _Tensor:
    def __init__(self, *shape: int) -> None:
        self.shape, self.strides = shape, tuple(np.cumprod((1, *shape[:0:-1]))[::-1].tolist())


_Pickler.dispatch = {**pickle._Pickler.dispatch, _Name: _Pickler.save_named, _Tensor: _Pickler.save_tensor}  # type: ignore[attr-defined]


def fuzz_pickles(folder: Path) -> Case:
    buffer = io.BytesIO()
    _Pickler(buffer, 2).dump({"a": _Tensor(4, 4), "b": _Tensor(2, 3)})
    path = folder / "pytorch_model.bin"

    def archive(pickled: bytes) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as members:
            for name, content in (("data.pkl", pickled), ("version", b"3\n"), ("data/0", bytes(64))):
                members.writestr(f"model/{name}", content)
        return file.getvalue()

    sound = archive(buffer.getvalue())
    path.write_bytes(sound)
    read_all(TorchFile(path))

    def case(rng: Random) -> None:
        inside = rng.random() < 0.7
        path.write_bytes(
            archive(mutate_bytes(rng, buffer.getvalue())) if inside else mutate_bytes(rng, sound)
        )
        read_all(TorchFile(path))

    return case


def fuzz_tokenizers(folder: Path) -> Case:
    """tokenizer.json and the files beside it; texts are encoded and decoded."""
    model = write_checkpoint(folder / "model")
    names = ("tokenizer.json", "tokenizer_config.json", "config.json")
    sound = {name: (model / name).read_bytes() for name in names}
    values = {name: json.loads(data) for name, data in sound.items()}
    values["tokenizer.json"]["normalizer"] = {
        "type": "Precompiled",
        "precompiled_charsmap": "BAAAAP////9hYg==",
    }

    def case(rng: Random) -> None:
        for name in names:
            (model / name).write_bytes(sound[name])
        name = rng.choice(names)
        if rng.random() < 0.2:
            (model / name).write_bytes(mutate_bytes(rng, sound[name]))
        else:
            (model / name).write_text(json.dumps(mutate_json(rng, values[name])))
        tokenizer = Tokenizer.load(model)
        for text in SAMPLES:
            tokenizer.decode(tokenizer.encode(text))

    return case


ENGINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("qwen2_moe", {"dtype": "bfloat16"}),
    ("deepseek_v3", {"quantization": "int8"}),
    ("gpt_oss", {"quantization": "int4"}),
    ("bloom", {"dtype": "bfloat16"}),
)


def fuzz_engines(folder: Path) -> Case:
    """Manifests and weights with right checksums; engines that are taken write a few tokens."""
    sound = []
    for family, options in ENGINES:
        model = write_checkpoint(folder / f"{family}-model", family, num_hidden_layers=2)
        config = EngineConfig.from_options(model=str(model), **options)
        build_engine(config, folder / family, EngineLimits())
        sound.append(folder / family)
    engine = folder / "engine"

    def case(rng: Random) -> None:
        shutil.rmtree(engine, ignore_errors=True)
        shutil.copytree(rng.choice(sound), engine)
        if rng.random() < 0.3:
            rewrite_weights(engine, lambda data, manifest: _spoil(rng, data, [*manifest["tensors"].values()]))
        else:
            file = json.loads((engine / MANIFEST).read_text())
            part = rng.choice((file["engine"], file["engine"]["spec"], file["engine"]["tensors"]))
            part.update(mutate_json(rng, part))
            seal(engine / MANIFEST, file["format"], json.dumps(file["engine"]))
        with LLM(str(engine), num_gpu_blocks_override=16, max_num_batched_tokens=64, max_num_seqs=2) as llm:
            llm.generate(["Once", "On"], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)

    return case


def _spoil(rng: Random, data: bytearray, tensors: list[dict[str, Any]]) -> None:
    """Put values that are no numbers, or too large, at the ends of tensors or anywhere in them."""
    for _ in range(rng.randint(1, 4)):
        tensor = rng.choice(tensors)
        value = np.float32(rng.choice((np.nan, np.inf, -np.inf, -1.0, 3e38, 1e-40))).tobytes()
        count = rng.choice((1, 4, 64, tensor["nbytes"] // 4)) * 4
        start = tensor["offset"] + rng.choice(
            (0, max(0, tensor["nbytes"] - count), rng.randrange(tensor["nbytes"]))
        )
        end = min(start + count, tensor["offset"] + tensor["nbytes"])
        data[start:end] = (
            (value * (count // 4 + 1))[: end - start] if rng.random() < 0.7 else rng.randbytes(end - start)
        )


TARGETS: Mapping[str, Callable[[Path], Case]] = {
    "configs": fuzz_configs,
    "safetensors": fuzz_safetensors,
    "pickles": fuzz_pickles,
    "gguf": fuzz_gguf,
    "gguf-blocks": fuzz_gguf_blocks,
    "tokenizers": fuzz_tokenizers,
    "quantized": fuzz_quantized,
    "adapters": fuzz_adapters,
    "drafters": fuzz_drafters,
    "rules": fuzz_rules,
    "engines": fuzz_engines,
    "converted": fuzz_converted,
}
