"""Writes GGUF files of tiny checkpoints with the gguf package, as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.tiny import BOS, CHAT_TEMPLATE, EOS, SPECIALS, VOCAB_SIZE

ARCHES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("o", "n"), ("Ġ", "a")]


def write_merging_tokenizer(path: Path) -> None:
    """Bytes, specials at the tiny models' ids, a few merges, fillers; words are split in GPT-2's way."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *SPECIALS, *("".join(pair) for pair in MERGES)]
    tokens += [f"<filler{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(path / "tokenizer.json"))


def turned(weight: Any, heads: int) -> Any:
    """The converter's reordering of Llama's queries and keys."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_tensor(writer: gguf.GGUFWriter, name: str, data: Any, kind: gguf.GGMLQuantizationType) -> None:
    """Matrices in `kind`, or in Q8_0 where their rows do not divide into its blocks; vectors in float32."""
    data = np.asarray(data, np.float32)
    if data.ndim < 2 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, data)
    elif kind == gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, data.astype(np.float16))
    elif kind == gguf.GGMLQuantizationType.BF16:
        bits = data.astype(ml_dtypes.bfloat16).view(np.uint8)
        writer.add_tensor(name, bits, raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    vocab = dict(content["model"]["vocab"])
    vocab.update({token["content"]: token["id"] for token in content["added_tokens"]})
    tokens = sorted(vocab, key=vocab.__getitem__)
    control = {token["content"] for token in content["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if t in control else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(
    directory: Path,
    path: Path,
    family: str = "llama",
    kind: str = "F32",
    extra: dict[str, Any] | None = None,
    split: int = 0,
    tensors: dict[str, Any] | None = None,
) -> Path:
    """The checkpoint in `directory` as a GGUF file whose matrices are of `kind`, tokenizer included."""
    config = json.loads((directory / "config.json").read_text())
    write_merging_tokenizer(directory)
    arch = ARCHES[family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=split)
    add_config(writer, config)
    add_tokenizer(writer, directory)
    for name, value in (extra or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, data in load_file(directory / "model.safetensors").items():
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            data = turned(data, heads)
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert called is not None, name
        add_tensor(writer, called, data, gguf.GGMLQuantizationType[kind])
    for name, data in (tensors or {}).items():
        add_tensor(writer, name, data, gguf.GGMLQuantizationType.F32)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
