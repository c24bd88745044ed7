"""Options of llama.cpp, TGI and Ollama, for a command line that has one: Quire's option, or why there is none.

Loaded when an option is unknown.
"""

from __future__ import annotations

from collections.abc import Container

# One of these options does the same; the first that the command has is named.
_SAME = {
    "--model": "-m --model-id --hf-repo -hf -hfr",
    "--max-model-len": "-c --ctx-size --max-total-tokens --max-input-tokens --max-input-length --num-ctx",
    "--max-tokens": "-n --predict --n-predict --num-predict --max-new-tokens",
    "--chat-template": "--chat-template-file",
    "--max-num-seqs": "-np --parallel --num-parallel --max-concurrent-requests --max-batch-size",
    "--max-num-batched-tokens": "-b -ub --batch-size --ubatch-size --max-batch-prefill-tokens --max-batch-total-tokens",
    "--threads": "-t -tb --threads-batch",
    "--kv-cache-dtype": "-ctk -ctv --cache-type-k --cache-type-v",
    "--tensor-parallel-size": "--num-shard --sharded",
    "--quantization": "--quantize",
    "--gpu-memory-utilization": "--cuda-memory-fraction",
    "--served-model-name": "-a --alias",
    "--temperature": "--temp",
    "--repetition-penalty": "--repeat-penalty",
    "--system": "-sys --system-prompt",
    "--port": "-p",
    "--device": "-dev",
    "--hf-token": "-hft",
    "--lora-modules": "--lora --lora-adapters",
    "--speculative-config": "-md --model-draft --draft-max --draft --speculate",
}
_LAYERS = "a model lies whole in one device's memory, which --device chooses"
_ALWAYS = "it is always on"
NEEDLESS = {
    **dict.fromkeys(
        ("-ngl", "--n-gpu-layers", "--gpu-layers", "--num-gpu", "-ts", "--tensor-split"), _LAYERS
    ),
    **dict.fromkeys(("-fa", "--flash-attn", "-cb", "--cont-batching", "--jinja", "--metrics"), _ALWAYS),
    **dict.fromkeys(("--mlock", "--mmap", "--no-mmap"), "weights are packed into memory of their own"),
    **dict.fromkeys(("-dt", "--defrag-thold"), "blocks of the cache need no defragmentation"),
    **dict.fromkeys(
        ("-kvu", "--kv-unified", "--cache-reuse", "--cache-prompt"), "all requests share one cache"
    ),
    "--keepalive": "a model alone stays loaded; with many, see --models-idle",
    "--disable-custom-kernels": "there are no others",
}
OPTIONS = {word: option for option, words in _SAME.items() for word in words.split()}
"""OPTIONS do the same here; NEEDLESS ones have nothing to change."""


def advice(word: str, options: Container[str]) -> str:
    """Say what a command with `options` has for an option of another program; empty if it is none of theirs."""
    if OPTIONS.get(word) in options:
        return f"; did you mean {OPTIONS[word]}?"
    return f": {NEEDLESS[word]}" if word in NEEDLESS else ""
