"""Layers that predict further tokens in checkpoints of hybrids (`mtp.*`): logits as by transformers' own layers."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.model.families import load_family
from tests.model.tiny_models import make_model
from tests.near import assert_near
from tests.spec_decode.test_published import drafting, outputs

# The target's layers that the further ones are like.
LAYERS = {
    "qwen3_5": [1],
    "qwen3_5_moe": [1],
    "qwen3_next": [1],
    "nemotron_h": [3, 1],
    "nemotron_h-latent": [3, 1],
}
TOKENS = random.Random(3).choices(range(3, 90), k=40)


@dataclass
class Written:
    """A checkpoint with further layers, and the modules that compute what they must."""

    path: Path
    model: Any
    join: torch.Tensor
    norms: list[Any]
    layers: list[Any]

    def drafts(self, tokens: list[int], count: int) -> list[np.ndarray]:
        """Compute the logits of each of `count` drafted tokens behind `tokens`."""
        base, found = self.model.model, list[np.ndarray]()
        token_norm, hidden_norm, norm = self.norms
        with torch.no_grad():
            hidden, ids = base(torch.tensor([tokens[:-1]])).last_hidden_state, tokens[1:]
            for _ in range(count):
                embedded = base.get_input_embeddings()(torch.tensor([ids]))
                x = torch.cat([token_norm(embedded), hidden_norm(hidden)], -1) @ self.join.T
                seen = {"attention_mask": torch.full((len(ids),) * 2, -1e30).triu(1)[None, None]}
                if hasattr(base, "rotary_emb"):
                    seen["position_embeddings"] = base.rotary_emb(x, torch.arange(len(ids))[None])
                for layer in self.layers:
                    x = layer(x, **seen)
                x = norm(x)[:, -1:]
                found.append(self.model.lm_head(x)[0, 0].numpy())
                hidden, ids = torch.cat([hidden, x], 1), [*ids, int(found[-1].argmax())]
        return found


def write(path: Path, variant: str, factor: float = 1.0, copies: bool = False) -> Written:
    """`factor` scales what layers add to the stream; with `copies` the further layers start from the token alone."""
    model, other = make_model(variant, vocab_size=260), make_model(variant, vocab_size=260)
    with torch.no_grad():
        for n, each in enumerate((model, other)):
            for name, parameter in each.named_parameters():
                parameter += n * 0.3 * torch.randn_like(parameter)
                if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                    parameter *= factor
    other.save_pretrained(path)
    drawn = load_file(path / "model.safetensors")
    model.save_pretrained(path)
    tensors, width = load_file(path / "model.safetensors"), model.config.hidden_size
    nemotron = variant.startswith("nemotron")
    start = next(name for name in drawn if ".layers." in name).partition("layers.")[0]
    for place, i in enumerate(LAYERS[variant]):
        prefix = f"{start}layers.{i}."
        tensors |= {
            f"mtp.layers.{place}.{name.removeprefix(prefix)}": tensor
            for name, tensor in drawn.items()
            if name.startswith(prefix)
        }
    join = torch.randn(width, 2 * width) / (2 * width) ** 0.5
    if copies:
        join = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    norms = [copy.deepcopy(model.model.norm_f if nemotron else model.model.norm) for _ in range(3)]
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    if nemotron:
        names = ("layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm")
    for name, norm in zip(names, norms, strict=True):
        with torch.no_grad():
            norm.weight += 0.0 if copies else 0.3 * torch.randn(width)
        tensors[f"mtp.{name}.weight"] = norm.weight.detach()
    tensors["mtp.layers.0.eh_proj.weight" if nemotron else "mtp.fc.weight"] = join
    save_file(tensors, path / "model.safetensors")
    return Written(path, model, join, norms, [other.model.layers[i] for i in LAYERS[variant]])


def start(path: Path, **options: Any) -> LLM:
    config = {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "adaptive": False,
        "draft_sample_method": "greedy",
    }
    options = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 22, "skip_tokenizer_init": True, **options}
    return LLM(str(path), dtype="float32", speculative_config=config, **options)


@pytest.mark.parametrize("variant", LAYERS)
def test_logits_are_those_of_the_library_s_layers(variant: str, tmp_path: Path) -> None:
    written = write(tmp_path, variant)
    llm = start(tmp_path)
    _, picker = drafting(llm)
    for count in (5, 17, 30):
        picker.seen = []
        params = SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=[TOKENS[count]])
        llm.generate({"prompt_token_ids": TOKENS[:count]}, params, use_tqdm=False)
        for found, wanted in zip(picker.seen[:3], written.drafts(TOKENS[: count + 1], 3), strict=True):
            assert_near(found, wanted, slack=10)
    llm.shutdown()


@pytest.mark.parametrize("variant", ["qwen3_5", "nemotron_h"])
def test_tokens_are_those_of_the_target_alone_and_drafts_are_accepted(variant: str, tmp_path: Path) -> None:
    """In batches and chunks, from the prefix cache, after preemption: refused drafts leave no trace in states."""
    write(tmp_path, variant, factor=0.1, copies=True)
    alone = LLM(str(tmp_path), dtype="float32", max_model_len=128, skip_tokenizer_init=True)
    wanted = outputs(alone, TOKENS)
    alone.shutdown()
    for options in ({}, {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 16}):
        llm = start(tmp_path, **options)
        for _ in range(2):
            assert outputs(llm, TOKENS) == wanted
        llm._core.scheduler.check()
        stats = llm.stats()
        assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
        llm.shutdown()


def test_further_layers_may_keep_experts_otherwise_than_the_rest() -> None:
    names = load_family("Qwen3_5MoeForCausalLM").names
    stacked, split = "mlp.experts.gate_up_proj", "mlp.experts.0.gate_proj.weight"
    assert names.fitted([f"model.layers.0.{stacked}", f"mtp.layers.0.{split}"]).expert_stack
    assert not names.fitted([f"model.layers.0.{split}", f"mtp.layers.0.{stacked}"]).expert_stack
    assert not names.changed({"ignored": ()}).fitted([f"mtp.layers.0.{split}"]).expert_stack
