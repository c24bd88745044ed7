"""The table of GGUF architectures: which family's config each one becomes, and how its tensors are named.

Facts are llama.cpp's conversion/*.py, read backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.errors import UnknownArchitectureError
from quire.weights.gguf import namings
from quire.weights.gguf.architectures import dense, latent, mixtures, older, unlike
from quire.weights.gguf.config import Config, Keys, num_layers
from quire.weights.gguf.names import Naming
from quire.weights.gguf.parts import GGUFParts
from quire.weights.tensor import Array


def read_architecture(file: GGUFParts) -> tuple[Config, Naming, tuple[str, ...], Mapping[str, Array]]:
    """The config and the names of a file, how unused tensors begin, and tensors that the file has as keys.

    ModelError for anything not understood.
    """
    keys = Keys(file)
    reader = ARCHITECTURES.get(keys.architecture)
    if reader is None:
        raise UnknownArchitectureError(
            f"{file.path}: architecture {keys.architecture} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    config, naming = reader.read(keys), reader.naming
    if keys.architecture == "llama" and "num_local_experts" in config:
        naming = namings.MIXTRAL
    if keys.architecture == "falcon" and config.get("num_ln_in_parallel_attn") == 2:
        naming = namings.FALCON_TWO_NORMS
    blocks = range(num_layers(keys), keys.integer("block_count"))
    made = {} if reader.tensors is None else reader.tensors(keys)
    keys.finish()
    return config, naming, tuple(f"blk.{i}." for i in blocks), made


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one value of general.architecture is read. `tensors` gives those that its files have as keys."""

    read: Callable[[Keys], Config]
    naming: Naming
    tensors: Callable[[Keys], Mapping[str, Array]] | None = None


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(dense.llama, namings.TURNED),
    "smollm3": Architecture(dense.smollm3, namings.TURNED),
    "qwen2": Architecture(dense.qwen2, namings.PLAIN),
    "qwen3": Architecture(dense.qwen3, namings.PLAIN),
    "qwen2moe": Architecture(mixtures.qwen2_moe, namings.QWEN_MIXTURE),
    "qwen3moe": Architecture(mixtures.qwen3_moe, namings.QWEN_MIXTURE),
    "gemma": Architecture(dense.gemma, namings.GEMMA),
    "gemma2": Architecture(dense.gemma2, namings.GEMMA_SANDWICH),
    "gemma3": Architecture(dense.gemma3, namings.GEMMA_SANDWICH),
    "gemma3n": Architecture(unlike.gemma3n, namings.GEMMA3N),
    "gemma4": Architecture(unlike.gemma4, namings.GEMMA4),
    "phi2": Architecture(older.phi2, namings.PHI2),
    "phi3": Architecture(dense.phi3, namings.PHI3),
    "phimoe": Architecture(mixtures.phimoe, namings.PHIMOE),
    "gpt2": Architecture(older.gpt2, namings.GPT2),
    "gptneox": Architecture(older.gpt_neox, namings.GPT_NEOX),
    "gpt-oss": Architecture(mixtures.gpt_oss, namings.GPT_OSS),
    "llama4": Architecture(mixtures.llama4, namings.LLAMA4),
    "mistral3": Architecture(dense.mistral3, namings.TURNED),
    "starcoder": Architecture(older.starcoder, namings.STARCODER),
    "starcoder2": Architecture(older.starcoder2, namings.STARCODER2),
    "stablelm": Architecture(older.stablelm, namings.STABLELM),
    "olmo": Architecture(older.olmo, namings.TURNED),
    "olmo2": Architecture(dense.olmo2, namings.OLMO2),
    "olmoe": Architecture(mixtures.olmoe, namings.OLMOE),
    "granite": Architecture(dense.granite, namings.TURNED),
    "granitemoe": Architecture(mixtures.granite_moe, namings.GRANITE_MOE),
    "command-r": Architecture(dense.command_r, namings.PLAIN),
    "cohere2": Architecture(dense.cohere2, namings.PLAIN),
    "chatglm": Architecture(dense.chatglm, namings.CHATGLM),
    "glm4": Architecture(dense.glm4, namings.GLM4),
    "glm4moe": Architecture(mixtures.glm4_moe, namings.GLM4_MOE),
    "deepseek2": Architecture(latent.deepseek2, namings.DEEPSEEK2),
    "minicpm3": Architecture(latent.minicpm3, namings.MINICPM3),
    "dots1": Architecture(mixtures.dots1, namings.DOTS1),
    "ernie4_5": Architecture(dense.ernie4_5, namings.PLAIN),
    "ernie4_5-moe": Architecture(mixtures.ernie_moe, namings.ERNIE_MOE),
    "exaone": Architecture(dense.exaone, namings.EXAONE),
    "exaone4": Architecture(dense.exaone4, namings.OLMO2),
    "exaone-moe": Architecture(mixtures.exaone_moe, namings.EXAONE_MOE),
    "hunyuan-dense": Architecture(dense.hunyuan_dense, namings.HUNYUAN),
    "hunyuan-moe": Architecture(mixtures.hunyuan_moe, namings.HUNYUAN_MOE),
    "minimax-m2": Architecture(mixtures.minimax_m2, namings.MINIMAX_M2),
    "afmoe": Architecture(mixtures.afmoe, namings.AFMOE),
    "seed_oss": Architecture(dense.seed_oss, namings.SEED_OSS),
    "arcee": Architecture(dense.arcee, namings.TURNED),
    "bitnet": Architecture(dense.bitnet, namings.BITNET),
    "apertus": Architecture(dense.apertus, namings.APERTUS, dense.xielu_parameters),
    "bailingmoe": Architecture(mixtures.bailing, namings.BAILING),
    "bailingmoe2": Architecture(mixtures.bailing2, namings.BAILING2),
    "mimo2": Architecture(unlike.mimo2, namings.MIMO2),
    "deci": Architecture(unlike.deci, namings.TURNED),
    "qwen3vl": Architecture(dense.qwen3vl, namings.PLAIN),
    "qwen3vlmoe": Architecture(mixtures.qwen3vl_moe, namings.QWEN_MIXTURE),
    "jais2": Architecture(older.jais2, namings.PLAIN),
    "nemotron": Architecture(older.nemotron, namings.NEMOTRON),
    "bloom": Architecture(older.bloom, namings.BLOOM),
    "falcon": Architecture(older.falcon, namings.BLOOM),
    "mpt": Architecture(older.mpt, namings.MPT),
}
