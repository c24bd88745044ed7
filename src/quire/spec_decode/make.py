"""Makes a proposer from options: finds the drafter, counts what it needs, and puts it together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.config import SpeculativeOptions
from quire.devices.protocol import Backend, Graph, KVCache, KVSpec
from quire.engine.directory import WITHOUT_MODEL
from quire.engine.drafter_config import read_drafter
from quire.engine.feature import Joined
from quire.engine.plan import Need, Planning
from quire.errors import ConfigError, ModelError
from quire.model.info import Asked
from quire.model.load import open_files
from quire.model.loaded import LoadedModel, ServedModel
from quire.progress import progress
from quire.spec_decode.block import BlockProposer
from quire.spec_decode.blocks import DraftBlocks, scratch_blocks
from quire.spec_decode.chain import ChainProposer
from quire.spec_decode.draft_pass import Pass, Picker
from quire.spec_decode.head import MEDUSA_FILES, Head, HeadSource
from quire.spec_decode.heads.dflash import read_dflash
from quire.spec_decode.heads.eagle3 import read_eagle3
from quire.spec_decode.heads.pair import read_eagle, read_mtp, read_mtp_file
from quire.spec_decode.heads.stages import read_medusa, read_mlp_speculator
from quire.spec_decode.lookup import NgramProposer
from quire.spec_decode.proposer import Proposer
from quire.spec_decode.stages import StageProposer
from quire.spec_decode.suffix import SuffixProposer
from quire.spec_decode.target import drafting_target, own_head_bytes
from quire.spec_decode.token_map import TokenMap, map_tokens
from quire.weights.hub import find_model, open_tokenizer
from quire.weights.schemes import scheme

LOOKUP_TOKENS = 5
DRAFT_MODEL_TOKENS = 4
NO_CACHE = KVSpec(1, 1, 16, "float32")
HEADS = {
    "eagle": read_eagle,
    "eagle3": read_eagle3,
    "medusa": read_medusa,
    "mlp_speculator": read_mlp_speculator,
    "dflash": read_dflash,
    "mtp": read_mtp_file,
}


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter that is found and not loaded. `path` is None for those without files of their own."""

    method: str
    options: SpeculativeOptions
    path: Path | None = None

    @property
    def runs_model(self) -> bool:
        return self.method not in ("ngram", "suffix")

    def head(self, backend: Backend, served: ServedModel, outline: bool) -> Head:
        """Read the graphs over `backend`'s weights. ModelError, ConfigError: the drafter does not fit the target."""
        target = served.own(f"speculation with method {self.method}")
        if self.method == "mtp" and self.path is None:
            return read_mtp(backend, target, outline)
        assert self.path is not None
        if self.method == "draft_model":
            return self._draft_model(backend, target, outline)
        return HEADS[self.method](HeadSource.open(self.path, backend, target, outline), target)

    def _draft_model(self, backend: Backend, target: LoadedModel, outline: bool) -> Head:
        assert self.path is not None
        quantized = scheme(self.options.quantization, 64, True, False)
        files = open_files(self.path, Asked(quantized=quantized, max_len=self.options.max_model_len))
        if outline:
            model = files.outline(backend)
        else:
            with progress(f"loading {self.path}", files.info.weight_bytes) as told:
                model = files.load(backend, told=told)
        spec = model.spec
        if spec.bidirectional:
            raise ModelError(f"{self.path}: an encoder cannot draft: choose a model that generates")
        tokens = self._token_map(target, spec.vocab_size)
        longest = self.options.max_model_len or spec.max_position
        return Head(
            first=model.graph,
            kv_spec=model.info.kv_spec(model.dtype),
            num_tokens=DRAFT_MODEL_TOKENS,
            max_len=longest,
            weight_bytes=model.weight_bytes,
            draft_ids=tokens.draft_ids if tokens else _within(spec.vocab_size, target.spec.vocab_size),
            target_ids=None if tokens is None else tokens.target_ids,
        )

    def _token_map(self, target: LoadedModel, draft_size: int) -> TokenMap | None:
        """Map the tokens; None if the vocabularies are the same but for padding, by their sizes without tokenizers."""
        assert self.path is not None
        target_size = target.spec.vocab_size
        try:
            tokenizers = open_tokenizer(self.path), open_tokenizer(target.info.directory)
        except ModelError:
            if abs(draft_size - target_size) > max(draft_size, target_size) // 100:  # more than padding
                raise ModelError(
                    f"{self.path}: the draft model has {draft_size} tokens and the target {target_size}, and without "
                    "their tokenizers they cannot be mapped: add tokenizer.json to both"
                ) from None
            return None
        return map_tokens(tokenizers[0], draft_size, tokenizers[1], target_size)

    def limit(self, head: Head | None) -> int:
        """Return the most tokens of a draft. ConfigError if options ask for more than the drafter can make."""
        wanted = self.options.num_speculative_tokens
        if self.method == "ngram":
            return wanted or LOOKUP_TOKENS
        if self.method == "suffix":
            return wanted or self.options.suffix_decoding_max_tree_depth
        assert head is not None
        if (wanted or 0) > head.most:
            raise ConfigError(
                f"--speculative-config: num_speculative_tokens {wanted} is more than the {head.most} that this drafter "
                "makes: lower it"
            )
        return wanted or head.num_tokens

    def ahead(self, head: Head) -> int:
        """Return the most positions after the known ones that one draft computes."""
        return self.limit(head) if head.block is None else head.most


def _within(draft: int, target: int) -> Any:
    """Return ids for a draft model whose table is shorter: tokens beyond it are padding, which nothing samples."""
    return None if draft >= target else np.minimum(np.arange(target), draft - 1).astype(np.int32)


def find_drafter(options: SpeculativeOptions | None, download_dir: str | None = None) -> Drafter | None:
    """Find the drafter that the options ask for. ModelError: there is none at that place, or its kind is unknown."""
    if options is None:
        return None
    method = options.method
    if method is not None and method in WITHOUT_MODEL and (method != "mtp" or options.model is None):
        if options.model is not None:
            raise ConfigError(
                f"--speculative-config: method {method} uses no model: leave out model {options.model!r}"
            )
        return Drafter(method, options)
    if options.model is None:
        what = "a method or a model" if options.method is None else f"a model for method {options.method}"
        raise ConfigError(f"--speculative-config: give {what}")
    path = find_model(options.model, options.revision, download_dir)
    return Drafter(options.method or detect(path), options, path)


def detect(path: Path) -> str:
    """Return the method of a drafter's files."""
    if any((path / name).exists() for name, _ in MEDUSA_FILES):
        return "medusa"
    config = read_drafter(path) if (path / "config.json").exists() else {}
    library = config.get("speculators_model_type")
    kind = library or config.get("model_type")
    names = " ".join(map(str, config.get("architectures") or ()))
    if library is not None and library not in HEADS:
        raise ModelError(f"{path}: drafters of speculators_model_type {library!r} are not supported")
    if kind in HEADS:
        return str(kind)
    for mark, method in (("DFlash", "dflash"), ("Eagle3", "eagle3"), ("EagleLlama", "eagle")):
        if mark in names:
            return method
    name = path.name.lower()
    if "eagle3" in name or "eagle-3" in name:
        return "eagle3"
    return "eagle" if "eagle" in name else "draft_model"


def plan_draft(drafter: Drafter, planning: Planning) -> Need:
    """Return what a drafter takes. The backend of `planning` is one that only plans."""
    if not drafter.runs_model:
        return Need(most_draft=drafter.limit(None))
    backend, limits, block_size = planning.backend, planning.limits, planning.config.cache.block_size
    target = drafting_target(planning.share, backend, True)
    head = drafter.head(backend, target, outline=True)
    spec = head.kv_spec or NO_CACHE
    workspace = sum(backend.workspace_bytes(graph, spec, limits) for graph in head.graphs)
    per_token = 0 if head.kv_spec is None else spec.bytes_per_token
    own = limits.max_seqs * scratch_blocks(drafter.ahead(head), block_size)
    workspace += own * block_size * per_token
    # A head's KV at a position depends on the token after it too.
    reads_pairs = head.kv_spec is not None and not head.stages and head.again is not None
    weights = head.weight_bytes + own_head_bytes(target, planning.share)
    if spec.bytes_per_state(1):
        raise ConfigError(
            "--speculative-config: a model with recurrent states cannot draft; choose another one"
        )
    return Need(weights, workspace, per_token, head.taps, reads_pairs, drafter.limit(head))


def make_proposer(drafter: Drafter, engine: Joined) -> tuple[Proposer, int, KVCache | None]:
    """Load a drafter. Returns its proposer, its most tokens for a sequence, and its KV cache, if it has one."""
    if drafter.method == "ngram":
        return NgramProposer(*drafter.options.lookup_range), drafter.limit(None), None
    if drafter.method == "suffix":
        return SuffixProposer(drafter.options), drafter.limit(None), None
    backend, limits, memory = engine.plan.backend, engine.plan.limits, engine.plan.memory
    target: Any = drafting_target(engine.model, backend)
    head = drafter.head(backend, target, outline=False)
    limit, block_size, max_seqs = drafter.limit(head), memory.block_size, limits.max_seqs
    greedy = drafter.options.draft_sample_method == "greedy"
    picker = Picker(engine.sampler, target.spec.vocab_size, head, greedy)

    def passes(graphs: Iterable[Graph], kv: KVCache) -> list[Pass]:
        return [Pass(backend.compile(graph, kv, limits), limits.max_logit_rows) for graph in graphs]

    if head.stages:
        stages = passes(head.stages, backend.kv_cache(NO_CACHE, 1, block_size))
        return StageProposer(head, stages, picker, max_seqs), limit, None
    assert head.kv_spec is not None
    own = max_seqs * scratch_blocks(drafter.ahead(head), block_size)
    kv = backend.kv_cache(head.kv_spec, memory.num_blocks + own, block_size)
    blocks = DraftBlocks(kv, memory.num_blocks, max_seqs, memory.max_blocks, drafter.ahead(head))
    first, *rest = passes(head.graphs, kv)
    kind = ChainProposer if head.block is None else BlockProposer
    again = rest[-1] if rest else first
    return kind(head, first, again, blocks, picker, limits.max_tokens), limit, blocks
