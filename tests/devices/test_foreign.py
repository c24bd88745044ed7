"""Models of other families run through transformers' code over the paged cache, and write what that library writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, cache_utils
from transformers.cache_utils import DynamicLayer

from quire import LLM, SamplingParams
from quire.config import ModelConfig
from quire.devices.protocol import ModelInput
from quire.devices.torch.foreign import TransformersBackend
from quire.devices.torch.run import TorchExecutable, TorchLogits
from quire.engine.source import find_files
from quire.errors import ConfigError, ModelError, UnknownArchitectureError
from quire.model.families import SUPPORTED

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# A family of Quire's own, soft-caps and windows, sinks and experts, learned positions, and one without any of these.
CONFIGS = {
    "Llama": SHAPE,
    "Gemma2": {**SHAPE, "head_dim": 8, "sliding_window": 8},
    "GptOss": {**SHAPE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "GPT2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "eos_token_id": None},
    "Helium": {**SHAPE, "head_dim": 8},
}
# Models that must be refused.
REFUSED: dict[str, dict[str, Any]] = {
    "DiffLlama": SHAPE,
    "Roberta": {**SHAPE, "is_decoder": True, "pad_token_id": 1},
    "Whisper": {
        "vocab_size": 300,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}
PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11], list(range(20, 37))]


def save(name: str, directory: Path) -> Any:
    """A random model of `transformers`, saved; its weights are wide enough that greedy text is no loop of one token."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(CONFIGS | REFUSED)[name])
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(directory)
    return model


def foreign(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), model_impl="transformers", skip_tokenizer_init=True, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    wanted = []
    for tokens in PROMPTS:
        made = model.generate(torch.tensor([tokens]), max_new_tokens=10, do_sample=False)
        wanted.append(made[0, len(tokens) :].tolist())
    params = SamplingParams(temperature=0, max_tokens=10, detokenize=False)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    # Chunks smaller than a prompt, blocks smaller than a window, and too few of them for all at once.
    llm = foreign(tmp_path, max_num_batched_tokens=10, block_size=4, num_gpu_blocks_override=20)
    for _ in range(2):  # the second time from the prefix cache
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == wanted


def test_scores_of_a_prompt(tmp_path: Path) -> None:
    model = save("Gemma2", tmp_path)
    llm = foreign(tmp_path, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    tokens = list(range(3, 90))  # more rows than are held at a time
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for i, entry in enumerate((output.prompt_logprobs or [])[1:]):
        assert entry is not None
        assert entry[tokens[i + 1]].logprob == pytest.approx(float(wanted[i, tokens[i + 1]]), abs=1e-3)


def test_the_choice_of_implementation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("Helium", tmp_path)
    assert LLM(str(tmp_path), skip_tokenizer_init=True).report.backend.startswith("native")
    monkeypatch.delitem(cast(dict[str, str], SUPPORTED), "HeliumForCausalLM")
    assert LLM(str(tmp_path), skip_tokenizer_init=True).report.backend.startswith("transformers' own code")
    assert "slower" in caplog.text
    with pytest.raises(UnknownArchitectureError, match="HeliumForCausalLM is not supported"):
        LLM(str(tmp_path), model_impl="quire", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="model_impl"):
        LLM(str(tmp_path), model_impl="other")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="HeliumForCausalLM runs through transformers, not backend native"):
        LLM(str(tmp_path), backend="native", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("Zamba", SHAPE, "hybrid keep what"),
        ("Rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300}, "0 of 2 layers"),
    ],
)
def test_other_states_are_refused(name: str, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(**fields)
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=said):
        find_files(ModelConfig(model=str(tmp_path)))


def test_what_is_right_for_a_prompt_and_wrong_after_it_is_refused(tmp_path: Path) -> None:
    save("DiffLlama", tmp_path)
    with pytest.raises(ModelError, match="gives other logits over a paged cache than by itself"):
        foreign(tmp_path)


def test_the_decoder_of_a_speech_model_is_refused(tmp_path: Path) -> None:
    save("Whisper", tmp_path)
    with pytest.raises(
        ModelError, match="WhisperForCausalLM is the decoder of a model that reads input_features"
    ):
        find_files(ModelConfig(model=str(tmp_path)))


def test_errors_of_the_library_are_model_errors(tmp_path: Path) -> None:
    save("Roberta", tmp_path)
    with pytest.raises(ModelError, match="transformers cannot run this model: TypeError"):
        foreign(tmp_path)


def test_what_the_library_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodysModel"], "model_type": "nobodys"}')
    with pytest.raises(
        ModelError, match=r"NobodysModel is not supported.*transformers cannot run this model"
    ):
        find_files(ModelConfig(model=str(tmp_path)))


@pytest.mark.parametrize("name", CONFIGS)
def test_each_missing_tensor_is_an_error_by_its_name(name: str, tmp_path: Path) -> None:
    """The library would draw it at random."""
    save(name, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    for missing in whole:
        save_file({k: v for k, v in whole.items() if k != missing}, path, {"format": "pt"})
        with pytest.raises(ModelError) as error:
            find_files(ModelConfig(model=str(tmp_path), model_impl="transformers")).load(
                TransformersBackend(1)
            )
        assert "missing" in str(error.value), (missing, error.value)
        if name != "GptOss":  # whose experts the library names anew
            assert missing.removeprefix("model.") in str(error.value)


def test_surplus_and_misshapen_tensors_are_errors(tmp_path: Path) -> None:
    save("Helium", tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    files = find_files(ModelConfig(model=str(tmp_path), model_impl="transformers"))
    save_file({**whole, "model.other.weight": torch.ones(3)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"unexpected .*model\.other\.weight"):
        files.load(TransformersBackend(1))
    save_file({**whole, "model.norm.weight": torch.ones(3)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        files.load(TransformersBackend(1))


EVIL = """
from pathlib import Path
from transformers import {base} as Known
Path({mark!r}).touch()
class Evil(Known):
    pass
"""
AUTO = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}


CODE: list[tuple[str, dict[str, Any]]] = [
    ("config.json", {"model_type": "vit", "architectures": ["Evil"], "auto_map": AUTO}),
    ("config.json", {"model_type": "clip_text_model", "architectures": ["Evil"], "auto_map": AUTO}),
    ("config.json", {"model_type": "evil", "architectures": ["Evil"], "auto_map": AUTO}),
    ("config.json", {"model_type": "llava", "text_config": {"model_type": "evil", "auto_map": AUTO}}),
    (
        "config.json",
        {"model_type": "helium", "architectures": ["X"], "_attn_implementation": "evil/kernel"},
    ),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
    ("processor_config.json", {"auto_map": {"AutoProcessor": "evil.Evil"}}),
    ("adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "BASE", "auto_map": AUTO}),
]
TRIES = """
import sys
from quire import LLM
from quire.errors import ModelError
for directory in sys.argv[1:]:
    try:
        LLM(directory, model_impl="transformers", skip_tokenizer_init=True)
    except ModelError as error:
        print("refused", error)
"""


def test_no_directory_runs_code_whatever_is_answered(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    save("Helium", tmp_path / "model")
    directories = []
    for number, (file, content) in enumerate(CODE):
        directory = tmp_path / str(number)
        directories.append(str(shutil.copytree(tmp_path / "model", directory)))
        (directory / "evil.py").write_text(EVIL.format(base="PretrainedConfig", mark=str(mark)))
        (directory / file).write_text(json.dumps(content).replace("BASE", str(directory)))
    run = [sys.executable, "-c", TRIES, *directories]
    result = subprocess.run(run, input="y\n" * 100, capture_output=True, text=True)
    refused = [line for line in result.stdout.splitlines() if line.startswith("refused")]
    assert len(refused) == len(CODE), result.stderr[-2000:]
    assert "[y/N]" not in result.stdout + result.stderr
    assert not mark.exists()


# Models that see or hear, by the name of their config, with the fields of their tower and of themselves. Their text is
# a family of Quire's own or none.
WIDTHS = "hidden_size", "intermediate_size", "image_size", "d_model", "encoder_ffn_dim", "out_hidden_size"
COUNTS = "num_hidden_layers", "num_attention_heads", "num_heads", "encoder_layers", "depth"
TOWER: dict[str, Any] = {
    **dict.fromkeys(WIDTHS, 32),
    **dict.fromkeys(COUNTS, 2),
    "encoder_attention_heads": 2,
    "patch_size": 8,
    "num_mel_bins": 16,
    "max_source_positions": 30,
    "projection_dim": 32,
    "fullatt_block_indexes": [1],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
COMPOSITES: dict[str, dict[str, Any]] = {
    "Llava": {"text": "llama", "tower": "clip_vision_model", "image_token_index": 290},
    "SmolVLM": {"text": "llama", "tower": None, "image_token_id": 290},
    "Idefics3": {"text": "llama", "tower": None, "image_token_id": 290},
    "InternVL": {
        "text": "qwen3",
        "tower": None,
        "image_token_id": 290,
        "image_size": [32, 32],
        "patch_size": [8, 8],
    },
    "PaliGemma": {
        "text": "gemma",
        "tower": "siglip_vision_model",
        "image_token_id": 290,
        "projection_dim": 32,
    },
    "AyaVision": {
        "text": "cohere2",
        "tower": "siglip_vision_model",
        "image_token_index": 290,
        "sliding_window": 8,
    },
    "Qwen2_5_VL": {"text": None, "tower": None, "image_token_id": 290, "rope_parameters": ROPE},
    "Voxtral": {"text": "llama", "tower": "voxtral_encoder", "audio_token_id": 290},
    "Qwen2Audio": {"text": "qwen2", "tower": "qwen2_audio_encoder", "audio_token_index": 290},
}


def composite(name: str, directory: Path) -> Any:
    """A tiny random model that sees or hears, saved by its own class."""
    fields = dict(COMPOSITES[name])
    text, tower = fields.pop("text"), fields.pop("tower")
    inner = {key: fields.pop(key) for key in ("rope_parameters", "sliding_window") if key in fields}
    sound = name in ("Voxtral", "Qwen2Audio")
    sizes = {key: fields.pop(key) for key in ("image_size", "patch_size") if key in fields}
    parts: dict[str, Any] = {
        "text_config": {**SHAPE, "head_dim": 8, **inner, **({"model_type": text} if text else {})},
        "audio_config" if sound else "vision_config": {
            **{k: v for k, v in TOWER.items() if k != "hidden_size" or name != "Voxtral"},
            **sizes,
            **({"model_type": tower} if tower else {}),
        },
    }
    config = getattr(transformers, f"{name}Config")(**parts, **fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", sorted(set(COMPOSITES) - {"PaliGemma"}))
def test_models_that_see_or_hear_answer_texts_with_their_own_weights(name: str, tmp_path: Path) -> None:
    model = composite(name, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=10, detokenize=False)
    prompts = [*PROMPTS, [5, 290, 6, 290]]  # what stands for a picture is a token like others
    wanted = []
    for tokens in prompts:
        made = model.generate(torch.tensor([tokens]), max_new_tokens=10, do_sample=False)
        wanted.append(made[0, len(tokens) :].tolist())
    for _ in range(2):  # the same at each load
        llm = foreign(tmp_path, max_num_batched_tokens=10, block_size=4)
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == wanted


def test_a_model_that_sees_its_whole_prompt_at_once_is_refused(tmp_path: Path) -> None:
    """It is causal in its forward pass, and not when it generates."""
    composite("PaliGemma", tmp_path)
    with pytest.raises(
        ModelError, match="PaliGemmaForConditionalGeneration gives other logits over a paged cache"
    ):
        find_files(ModelConfig(model=str(tmp_path), model_impl="transformers")).load(TransformersBackend(1))


def test_a_model_that_needs_a_picture_is_refused(tmp_path: Path) -> None:
    config = transformers.IdeficsConfig(**SHAPE, additional_vocab_size=0, cross_layer_interval=2)
    config.architectures = ["IdeficsForVisionText2Text"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"cannot run this model.*pixel_values"):
        find_files(ModelConfig(model=str(tmp_path), model_impl="transformers"))


@pytest.mark.parametrize(
    "part",
    [
        "vision_tower",
        "multi_modal_projector",
        "layers.1.mlp",
        "model.norm",
        "lm_head",
    ],
)
def test_weights_of_every_part_are_there(part: str, tmp_path: Path) -> None:
    composite("Llava", tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    missing = next(name for name in whole if part in name)
    files = find_files(ModelConfig(model=str(tmp_path), model_impl="transformers"))
    save_file({k: v for k, v in whole.items() if k != missing}, path, {"format": "pt"})
    with pytest.raises(ModelError, match="missing for LlavaForConditionalGeneration"):
        files.load(TransformersBackend(1))
    save_file({**whole, missing: torch.ones(3)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match="mismatched for LlavaForConditionalGeneration"):
        files.load(TransformersBackend(1))


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("LlamaForCausalLM", "missing for LlamaForCausalLM"),
        ("LlavaModel", "LlavaModel is not a class of transformers that generates text"),
        ("pipeline", "pipeline is not a class"),
        ("GPT2LMHeadModel", "GPT2LMHeadModel is not made of a config of model_type llama"),
    ],
)
def test_the_class_that_is_named_is_the_one_that_is_made(named: str, said: str, tmp_path: Path) -> None:
    composite("Llava", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": [named]}))
    with pytest.raises(ModelError, match=said):
        find_files(ModelConfig(model=str(tmp_path), model_impl="transformers")).load(TransformersBackend(1))


def test_tokens_that_depend_on_the_longest_neighbour_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=rope)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="rope_type dynamic is not supported through transformers"):
        find_files(ModelConfig(model=str(tmp_path), model_impl="transformers"))


def test_the_check_reaches_beyond_a_window(tmp_path: Path) -> None:
    """A class that forgets what is 20 tokens back is right for the first ones."""
    save("Helium", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pooling": {"pool_size": 20}}))
    files = find_files(ModelConfig(model=str(tmp_path), model_impl="transformers"))
    lengths = []
    whole = TorchExecutable.run

    def run(self: TorchExecutable, inputs: ModelInput) -> TorchLogits:
        lengths.append(int(inputs.positions_T.max()))
        return whole(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchExecutable, "run", run)
        files.load(TransformersBackend(1))
    assert max(lengths) > 20


def test_layers_that_choose_blocks_of_keys_are_refused(tmp_path: Path) -> None:
    config = getattr(transformers, "MiniMaxM3VLTextConfig", None)
    if config is None:
        pytest.skip("this transformers has no MiniMax-M3")
    made = config(**SHAPE, layer_types=["full_attention", "minimax_m3_sparse", "full_attention"])
    made.architectures = ["MiniMaxM3VLForCausalLM"]
    made.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="minimax_m3_sparse keep what a paged cache"):
        find_files(ModelConfig(model=str(tmp_path), model_impl="transformers"))


def test_caches_that_hold_more_than_keys_and_values_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the layers are called: their cache is the plain or the sliding one, and no subclass."""
    save("Helium", tmp_path)

    class Indexed(DynamicLayer):  # type: ignore[no-untyped-call]
        """Holds a third kind of rows in other models."""

    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Indexed)
    with pytest.raises(ModelError, match="HeliumForCausalLM keeps Indexed, which holds more"):
        find_files(ModelConfig(model=str(tmp_path), model_impl="transformers"))
