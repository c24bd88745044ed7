"""Identifies what an engine computes: engines of one identity give the same answers, bit for bit.

Weights are told apart by their files: names and sizes, and the content of one page in each MiB, of the first MiB (where
headers lie) and of the last page. Files up to WHOLE bytes are read whole. An engine that was built holds the checksums
of its weights in its manifest, which is read whole.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from quire import __version__
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.plan import EnginePlan
from quire.engine.verbs import Identify
from quire.model.info import ModelInfo
from quire.ranks.options import ParallelConfig

WHOLE = 1 << 26
PAGE, STRIDE = 1 << 12, 1 << 20
FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".json", ".model", ".txt", ".jinja", ".tiktoken")


class Identifier:
    """Obeys Identify beside the steps."""

    def __init__(self, core: EngineCore, plan: EnginePlan) -> None:
        self._plan = plan
        core.handlers[Identify] = self.identify

    def identify(self, verb: Identify) -> Future[str]:
        """Digest the engine's facts and files, on a thread."""
        thread = ThreadPoolExecutor(1, "identity")
        try:
            return thread.submit(identity, self._plan)
        finally:
            thread.shutdown(wait=False)


def identity(plan: EnginePlan) -> str:
    """Digest everything of an engine that its answers depend on."""
    config, model, asked = plan.config, plan.model, plan.config.model
    facts = (
        plan.backend.name,
        facts_of(config, model, plan.backend.fingerprint),
        None if config.parallel.exact_across_ranks else layout_of(config.parallel),
        asked.logprobs_mode,
        asked.logits_processors,
        files_digest(model.directory),
        [_told(text) for text in (asked.tokenizer, asked.chat_template)],
    )
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def _told(text: str | None) -> str | None:
    """Digest the files that an option names, or return its own text: a template of any length is no path."""
    return files_digest(Path(text)) if text and os.path.exists(text) else text


def files_digest(path: Path) -> str:
    """Digest the files of a model, a directory or one file, as the module's docstring says."""
    digest = xxhash.xxh3_128()
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in FILES)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
        with file.open("rb") as opened:
            if size <= WHOLE:
                digest.update(opened.read())
                continue
            # Before the first read, so that none reads ahead: that takes longer than the pages.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            digest.update(opened.read(STRIDE))
            for place in (*range(STRIDE, size - PAGE, STRIDE), size - PAGE):
                opened.seek(place)
                digest.update(opened.read(PAGE))
    return digest.hexdigest()


def agreement(config: EngineConfig, model: ModelInfo, fingerprint: str) -> str:
    """Digest all that must be the same on each rank, so that they compute one model together."""
    facts = (facts_of(config, model, fingerprint), layout_of(config.parallel))
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def facts_of(config: EngineConfig, model: ModelInfo, fingerprint: str) -> tuple[object, ...]:
    """Collect what a model's values depend on, without its weights and their layout."""
    lora = config.lora
    adapters = lora.enable_lora, lora.max_lora_rank, lora.lora_dtype, lora.spare_tokens
    values = model.spec, model.dtype, model.quantized, model.num_parameters, config.cache.kv_cache_dtype
    return (__version__, fingerprint, *values, adapters)


def layout_of(parallel: ParallelConfig) -> tuple[object, ...]:
    """Collect how a model is divided among ranks."""
    return (
        (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.nnodes),
        (parallel.exact_across_ranks, parallel.enable_expert_parallel, parallel.disable_custom_all_reduce),
    )
