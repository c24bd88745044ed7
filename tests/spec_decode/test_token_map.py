"""A draft model with another vocabulary: its tokens are mapped by their bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import ModelError
from tests.tiny import VOCAB_SIZE


def renumbered(source: Path, path: Path, moved: int) -> Path:
    """A copy of a model whose first `moved` tokens have other ids: the same model in another vocabulary."""
    shutil.copytree(source, path)
    order = np.arange(VOCAB_SIZE)
    order[:moved] = np.random.default_rng(0).permutation(moved)  # new id -> old id
    place = np.argsort(order)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: int(place[old]) for token, old in vocab.items()}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.ascontiguousarray(tensors[name][order])
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("temperature", "backend"), [(0.0, "auto"), (1.0, "auto"), (0.0, "torch"), (1.0, "torch")]
)
def test_drafts_are_mapped(
    temperature: float, backend: str, tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    target = tiny_model()
    draft = renumbered(Path(target), tmp_path / "draft", 200)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=60, ignore_eos=True, top_k=40)
    prompts = ["some text", "and another one"]
    wanted = [output.outputs for output in LLM(target).generate(prompts, params, use_tqdm=False)]
    config = {"model": str(draft), "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(target, speculative_config=config, backend=backend)
    assert [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)] == wanted
    stats = llm.stats()
    assert stats.spec_accepted_tokens > 0.6 * stats.spec_draft_tokens
    assert stats.spec_draft_tokens > 40


def test_vocabularies_with_little_in_common_are_refused(
    tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    target = tiny_model()
    draft = Path(shutil.copytree(target, tmp_path / "draft"))
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token + token if i > 60 else token: i for token, i in vocab.items()}
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="of its tokens with the target"):
        LLM(target, speculative_config={"model": str(draft)})
