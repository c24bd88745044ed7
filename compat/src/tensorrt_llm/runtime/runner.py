"""`ModelRunner`: an engine directory, opened."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM
from quire.errors import ConfigError
from tensorrt_llm.options import SERVING
from tensorrt_llm.runtime.sampling import SamplingConfig


class ModelRunner:
    """An engine that continues batches of token ids."""

    def __init__(self, llm: LLM, max_output_len: int | None = None) -> None:
        self.llm, self.max_output_len = llm, max_output_len

    @classmethod
    def from_dir(
        cls,
        engine_dir: str | Path,
        rank: int = 0,
        max_output_len: int | None = None,
        lora_dir: Any = None,
        debug_mode: bool = False,
        **options: Any,
    ) -> "ModelRunner":
        """Open an engine. All its ranks run, whichever `rank` asks. `options` are those of LLM."""
        if lora_dir is not None:
            raise ConfigError("lora_dir is not supported: use LLM(enable_lora=True) and LoRARequest")
        own = SERVING.translated(options)
        return cls(LLM(str(engine_dir), skip_tokenizer_init=True, **own), max_output_len)

    @property
    def vocab_size(self) -> int:
        return self.llm.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self.llm.max_model_len

    def generate(
        self,
        batch_input_ids: Sequence[Any],
        sampling_config: SamplingConfig | None = None,
        lora_uids: Any = None,
        streaming: bool = False,
        **changes: Any,
    ) -> Any:
        """Continue a batch of prompts; `changes` replace fields of the config.

        Returns ids of shape [batch, beams, length]: the prompt, what follows it, then padding. They are a tensor of
        PyTorch if the prompts are, else a numpy array. With `return_dict` they are "output_ids" of a dict that also
        has "sequence_lengths" [batch, beams], and "cum_log_probs" if asked for.
        """
        if streaming or lora_uids is not None:
            raise ConfigError("streaming and lora_uids are not supported here: use LLM.generate_async")
        config = (sampling_config or SamplingConfig()).with_changes(changes)
        if self.max_output_len is not None:
            config.max_new_tokens = min(config.max_new_tokens, self.max_output_len)
        prompts = [np.asarray(prompt).reshape(-1).tolist() for prompt in batch_input_ids]
        pads = [token for token in (config.pad_id, config.end_id, 0) if token is not None]
        found = self.llm.generate_ids(prompts, config.params(), pads[0])
        ids, lengths, scores = found.ids, found.lengths, found.cumulative_logprobs
        if hasattr(batch_input_ids[0], "new_tensor"):
            like = batch_input_ids[0]
            ids, lengths = like.new_tensor(ids.tolist()), like.new_tensor(lengths.tolist())
            scores = like.float().new_tensor(scores.tolist())
        if not (config.return_dict or config.output_sequence_lengths):
            return ids
        named = {"output_ids": ids, "sequence_lengths": lengths}
        return {**named, "cum_log_probs": scores} if config.output_cum_log_probs else named


# TensorRT-LLM's runner in C++ has the same interface.
ModelRunnerCpp = ModelRunner
