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
from quire.model.engine_dir import MANIFEST, EngineLimits
from quire.model.load import outline_config
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import Checkpoint
from quire.weights.checkpoint.safetensors import SafetensorsFile
from quire.weights.checkpoint.torch_pickle import TorchFile
from quire.weights.gguf import read_gguf
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.tokenizer import read_tokenizer
from tests.engine_files import rewrite_weights, seal
from tests.fuzz.mutate import mutate_bytes, mutate_json
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
        model = outline_config(path, device)
        device.workspace_bytes(model.graph, model.spec.kv_spec("bfloat16"), Limits(64, 4, 4))

    return case


def read_all(checkpoint: Checkpoint) -> None:
    for name in checkpoint.names():
        assert checkpoint.get(name).shape == checkpoint.shape(name)


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


def fuzz_gguf(folder: Path) -> Case:
    """A file's header is changed; all of it is read: config, tokenizer and tensors."""
    from_scratch = _gguf_bytes()
    path = folder / "model.gguf"
    path.write_bytes(from_scratch)
    GGUFFile(path)

    def case(rng: Random) -> None:
        path.write_bytes(mutate_bytes(rng, from_scratch))
        read_tokenizer(GGUFFile(path))
        _, _, tensors = read_gguf(path)
        read_all(tensors)

    return case


def _gguf_bytes() -> bytes:
    """A whole Llama of one layer, written plainly by the format's description."""

    def text(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    def pair(key: str, kind: int, value: bytes) -> bytes:
        return text(key) + struct.pack("<I", kind) + value

    def array(key: str, kind: int, values: list[bytes]) -> bytes:
        return pair(key, 9, struct.pack("<IQ", kind, len(values)) + b"".join(values))

    tokens = [f"<0x{i:02X}>" for i in range(256)] + ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "▁a"]
    kinds = [6] * 256 + [2, 3, 3, 1, 1, 1, 1, 1]
    numbers = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "rope.dimension_count": 16,
    }
    pairs = [
        pair("general.architecture", 8, text("llama")),
        *(pair(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in numbers.items()),
        pair("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        pair("tokenizer.ggml.model", 8, text("llama")),
        array("tokenizer.ggml.tokens", 8, [text(token) for token in tokens]),
        array("tokenizer.ggml.scores", 6, [struct.pack("<f", -i) for i in range(len(tokens))]),
        array("tokenizer.ggml.token_type", 5, [struct.pack("<i", kind) for kind in kinds]),
        *(pair(f"tokenizer.ggml.{name}_token_id", 4, struct.pack("<I", i)) for name, i in
          (("unknown", 256), ("bos", 257), ("eos", 258))),
    ]  # fmt: skip
    shapes = {"token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,)}
    layer = {"attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
             "ffn_norm": (32,), "ffn_gate": (32, 32), "ffn_up": (32, 32), "ffn_down": (32, 32)}  # fmt: skip
    shapes |= {f"blk.0.{name}": shape for name, shape in layer.items()}
    entries, offset = b"", 0
    for name, shape in shapes.items():
        entries += text(f"{name}.weight") + struct.pack("<I", len(shape))
        entries += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", 0, offset)
        offset += 4 * int(np.prod(shape))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs)) + b"".join(pairs) + entries
    return head + bytes(-len(head) % 32) + bytes(offset)


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
            rewrite_weights(engine, lambda data, manifest: _spoil(rng, data, manifest["tensors"]))
        else:
            file = json.loads((engine / MANIFEST).read_text())
            part = rng.choice((file["engine"], file["engine"]["spec"], file["engine"]["weights"]))
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
    "tokenizers": fuzz_tokenizers,
    "quantized": fuzz_quantized,
    "engines": fuzz_engines,
}
