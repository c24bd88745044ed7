"""Decoders without a language model's head: scores, rewards and classes of tokens, against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, RequestError
from quire.devices.protocol import Backend
from quire.devices.registry import make_backend
from quire.errors import ModelError
from quire.model.families import DECODERS, HEADLESS, load_family
from tests.model.test_encoders import SIZES, write_tokenizer
from tests.model.tiny_models import FAMILIES, VARIANTS, Session, randomized
from tests.models import load_model
from tests.near import assert_near

PROMPT = [int(t) for t in np.random.default_rng(7).integers(3, 97, 40)]
TASKS = ("ForSequenceClassification", "ForTokenClassification")
# Classes that transformers has, of the families of tiny_models.
CLASSES = sorted(
    (family, f"{name}{task}")
    for family, (name, _) in FAMILIES.items()
    for task in TASKS
    if hasattr(transformers, f"{name}{task}")
)
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "threads": 2}


@pytest.fixture(scope="module")
def native() -> Backend:
    return make_backend("native")


def test_every_decoder_has_its_classes() -> None:
    assert len(HEADLESS) == 5 * len(DECODERS)
    assert load_family("LlamaForSequenceClassification") is load_family("LlamaForCausalLM")
    assert len({family for family, _ in CLASSES}) > 40


@pytest.mark.parametrize(("family", "architecture"), CLASSES)
def test_scores_equal_transformers(family: str, architecture: str, native: Backend, tmp_path: Path) -> None:
    name, common = FAMILIES[family]
    options = {**common, **next(own for kind, own in VARIANTS.values() if kind == family)}
    config = getattr(transformers, f"{name}Config")(**options, num_labels=3)
    model = randomized(getattr(transformers, architecture)(config).eval(), 3)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, native)
    head = loaded.info.pooling
    assert head is not None
    assert head.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    hidden = Session(loaded, native).feed(PROMPT).astype(np.float64)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    if head.rows == "last":
        assert_near(head(hidden[-1]), expected)
    else:
        assert head.rows == "all"
        assert_near([head(row) for row in hidden], expected)


def small(kind: str, directory: Path, **changes: Any) -> Any:
    """A tiny Qwen2 of a class with a head, saved with a tokenizer."""
    config = transformers.Qwen2Config(**{**SIZES, "pad_token_id": 1, "num_key_value_heads": 2, **changes})
    model = randomized(getattr(transformers, f"Qwen2{kind}")(config).eval(), 4)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


def logits(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def test_a_decoder_classifies_and_scores(tmp_path: Path) -> None:
    model = small("ForSequenceClassification", tmp_path / "one", num_labels=1)
    llm = LLM(str(tmp_path / "one"), **OPTIONS)
    (score,) = llm.score("a b", "c d")
    expected = torch.sigmoid(torch.tensor(logits(model, score.prompt_token_ids)))[0]
    assert score.outputs.score == pytest.approx(float(expected), abs=2e-6)
    with pytest.raises(RequestError, match="makes vectors, not text"):
        llm.generate("a")


def test_an_adapter_of_a_classifier_brings_its_own_head(tmp_path: Path) -> None:
    """LoRA with a whole `score`, as PEFT saves it, classifies as the checkpoint does into which both are merged."""
    small("ForSequenceClassification", tmp_path / "base", num_labels=3)
    state, rng = load_file(tmp_path / "base" / "model.safetensors"), torch.Generator().manual_seed(1)
    module = "model.layers.0.self_attn.v_proj"
    out, width = state[f"{module}.weight"].shape
    down, up = torch.randn(2, width, generator=rng), torch.randn(out, 2, generator=rng)
    score = torch.randn(state["score.weight"].shape, generator=rng)
    prefix, folder = "base_model.model.", tmp_path / "adapter"
    adapter = {
        f"{prefix}{module}.lora_A.weight": down,
        f"{prefix}{module}.lora_B.weight": up,
        f"{prefix}score.weight": score,
    }
    about = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["v_proj"],
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({**about, "modules_to_save": ["classifier", "score"]})
    )
    save_file(adapter, folder / "adapter_model.safetensors")
    shutil.copytree(tmp_path / "base", tmp_path / "merged")
    merged = {**state, f"{module}.weight": state[f"{module}.weight"] + 2 * up @ down, "score.weight": score}
    save_file(merged, tmp_path / "merged" / "model.safetensors")
    llm, texts = LLM(str(tmp_path / "base"), **OPTIONS, enable_lora=True), ["a b", "c d e", "a b"]
    own = LoRARequest("own", 1, str(folder))
    found = [output.outputs.probs for output in llm.classify(texts, lora_request=[own, own, None])]
    wanted = [output.outputs.probs for output in LLM(str(tmp_path / "merged"), **OPTIONS).classify(texts[:2])]
    wanted += [output.outputs.probs for output in LLM(str(tmp_path / "base"), **OPTIONS).classify(texts[2])]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    adapter[f"{prefix}score.weight"] = score[:2].contiguous()
    save_file(adapter, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"score\.weight is \[2, 32\], the base has \[3, 32\]"):
        llm.classify(texts, lora_request=LoRARequest("own", 1, str(folder), load_inplace=True))


def test_tokens_are_classified_one_by_one_whatever_the_chunk(tmp_path: Path) -> None:
    model = small("ForTokenClassification", tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS, max_num_batched_tokens=8, enable_prefix_caching=True)
    texts = ["a b c d e f g h i j", "a b c d e f z"]
    for _ in range(2):  # the second time, prefixes are cached
        for output in llm.encode(texts, pooling_task="token_classify"):
            np.testing.assert_allclose(output.outputs.data, logits(model, output.prompt_token_ids), atol=2e-5)
    with pytest.raises(RequestError, match="classifies tokens, not texts"):
        llm.classify("a")


def test_a_reward_model_has_two_matrices(tmp_path: Path) -> None:
    model = small("Model", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    first, second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)
    head = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    state |= {f"score.{name}": tensor.detach() for name, tensor in head.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for kind in ("Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [kind]}))
        llm = LLM(str(tmp_path), **OPTIONS)
        (output,) = llm.reward("a b c")
        with torch.no_grad():
            hidden = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            expected = head(hidden).numpy()
        wanted = expected if "Process" in kind else expected[-1]
        np.testing.assert_allclose(output.outputs.data, wanted, atol=2e-5)


def test_a_reranker_scores_by_two_tokens_of_its_head(tmp_path: Path) -> None:
    model = small("ForCausalLM", tmp_path)
    changes = {"architectures": ["Qwen2ForSequenceClassification"], "classifier_from_token": ["n", "y"]}
    llm = LLM(str(tmp_path), **OPTIONS, hf_overrides=changes)
    (output,) = llm.score("a b", "c d")
    last = logits(model, output.prompt_token_ids)[-1]
    no, yes = (4 + "abcdefghijklmnopqrstuvwxyz".index(letter) for letter in "ny")
    assert output.outputs.score == pytest.approx(1 / (1 + np.exp(last[no] - last[yes])), abs=2e-6)
    with pytest.raises(ModelError, match="'maybe' is no token"):
        LLM(str(tmp_path), hf_overrides={**changes, "classifier_from_token": ["maybe"]})


@pytest.mark.parametrize("both", [True, False])
def test_embedding_gemma_sees_both_sides(both: bool, tmp_path: Path) -> None:
    options = {**SIZES, "head_dim": 8, "sliding_window": 8, "num_key_value_heads": 2, "pad_token_id": 1}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(
        **options, layer_types=kinds, use_bidirectional_attention=both, eos_token_id=2, bos_token_id=0
    )
    model = randomized(transformers.Gemma3TextModel(config).eval(), 4)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS)
    (output,) = llm.embed("a b c d e " * 6, pooling="mean")
    with torch.no_grad():
        hidden = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0].mean(0).numpy()
    np.testing.assert_allclose(output.outputs.embedding, hidden / np.linalg.norm(hidden), atol=2e-6)


def test_colbert_scores_by_late_interaction(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES)
    model = randomized(transformers.BertModel(config).eval(), 4)
    linear = torch.nn.Linear(32, 6, bias=False)
    state = {f"bert.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file({**state, "linear.weight": linear.weight.detach()}, tmp_path / "model.safetensors")
    config.architectures = ["HF_ColBERT"]
    config.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS)
    query, text = "a b c", "d e f g c"
    vectors = []
    for output in llm.encode([query, text]):
        with torch.no_grad():
            hidden = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            vectors.append(torch.nn.functional.normalize(linear(hidden), dim=-1).numpy())
        np.testing.assert_allclose(output.outputs.data, vectors[-1], atol=2e-6)
    expected = (vectors[0] @ vectors[1].T).max(1).sum()
    (score,) = llm.score(query, text)
    assert score.outputs.score == pytest.approx(float(expected), abs=1e-5)
    with pytest.raises(RequestError, match="not one embedding"):
        llm.embed(query)
