"""`GenerationSession`: an engine and the sizes of its model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM
from quire.build import BuiltEngine
from quire.errors import ConfigError
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.runner import ModelRunner
from tensorrt_llm.runtime.sampling import SamplingConfig


@dataclass(slots=True)
class ModelConfig:
    """The sizes of a model, compared with those of the engine that runs."""

    max_batch_size: int | None = None
    max_beam_width: int | None = None
    vocab_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    hidden_size: int | None = None
    gpt_attention_plugin: Any = None
    dtype: str = ""
    remove_input_padding: bool = True
    paged_kv_cache: bool = True
    head_size: int | None = None
    model_name: str = ""
    tokens_per_block: int | None = None


class GenerationSession:
    """Continues batches of token ids: `setup` gives their sizes, `decode` the tokens."""

    def __init__(
        self, model_config: ModelConfig, engine: BuiltEngine | str | Path, mapping: Mapping | None = None
    ) -> None:
        """ConfigError if the engine has other sizes than `model_config` says."""
        if isinstance(engine, (str, Path)):
            engine = BuiltEngine(Path(engine))
        elif not isinstance(engine, BuiltEngine):
            raise ConfigError("a session takes what build_engine returned, or the directory of an engine")
        engine.check(
            vocab_size=model_config.vocab_size,
            num_layers=model_config.num_layers,
            num_heads=model_config.num_heads,
            num_kv_heads=model_config.num_kv_heads,
            hidden_size=model_config.hidden_size,
            head_dim=model_config.head_size,
        )
        self._engine = engine  # a temporary one is removed with its last user
        self.runner = ModelRunner(LLM(str(engine.directory), skip_tokenizer_init=True))
        self._sizes: tuple[int, int, int, int] | None = None

    def setup(
        self,
        batch_size: int,
        max_context_length: int,
        max_new_tokens: int,
        beam_width: int = 1,
        **ignored: Any,
    ) -> None:
        """Say how large the next batches are at most. ConfigError if they do not fit the engine."""
        longest = self.runner.max_seq_len
        if max_context_length + max_new_tokens > longest:
            raise ConfigError(
                f"max_context_length {max_context_length} and max_new_tokens {max_new_tokens} are more than the "
                f"engine's {longest} positions"
            )
        self._sizes = batch_size, max_context_length, max_new_tokens, beam_width

    def decode(
        self,
        input_ids: Any,
        context_lengths: Any,
        sampling_config: SamplingConfig,
        **changes: Any,
    ) -> Any:
        """Continue rows of `input_ids` [batch, length], or rows put one after the other, of which `context_lengths`
        are prompts. Returns what `ModelRunner.generate` does.
        """
        lengths = np.asarray(context_lengths).reshape(-1)
        packed = len(np.shape(input_ids)) == 1 or (np.shape(input_ids)[0] == 1 and len(lengths) > 1)
        flat = input_ids.reshape(-1) if hasattr(input_ids, "reshape") else np.reshape(input_ids, -1)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows = (
            [flat[a:b] for a, b in pairwise(starts)]
            if packed
            else [row[:n] for row, n in zip(input_ids, lengths, strict=True)]
        )
        return self.decode_batch(rows, sampling_config, **changes)

    def decode_batch(self, input_ids: Sequence[Any], sampling_config: SamplingConfig, **changes: Any) -> Any:
        """Continue prompts of token ids."""
        if self._sizes is None:
            raise ConfigError("call setup(batch_size, max_context_length, max_new_tokens) before decode")
        batch, longest, new, beams = self._sizes
        if len(input_ids) > batch or max(map(len, input_ids)) > longest:
            raise ConfigError(
                f"{len(input_ids)} prompts of at most {max(map(len, input_ids))} tokens do not fit setup's "
                f"batch_size {batch} and max_context_length {longest}"
            )
        config = sampling_config.with_changes({"max_new_tokens": new, "num_beams": beams, **changes})
        return self.runner.generate(input_ids, config)
