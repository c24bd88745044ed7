"""Fuzzes adapters, drafters and rules of quantized checkpoints: patterns against names, configs, tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from quire.config import SpeculativeOptions
from quire.devices.reference.backend import ReferenceBackend
from quire.engine.directory import verifier_of
from quire.lora.options import LoraConfig
from quire.lora.reader import adapter_reader
from quire.spec_decode.make import detect, find_drafter
from quire.weights.readers.quark import QuarkModules
from quire.weights.readers.rules import Dynamic, Rules, Targets
from tests.adapter_files import write_adapter
from tests.drafter_files import write_eagle3
from tests.fuzz.mutate import mutate_json
from tests.fuzz.quantized import spoil
from tests.models import load_model
from tests.tiny import write_checkpoint

Case = Callable[[Random], None]
PIECES = ("a", ".*", "(a|aa)", "(.*)", r"\.", "x{0,99}", "(a+)", "[a-z.]", "layers", "{12}", "*", "+", "?", "|",
          "(", ")", "$", "^", "(?!", r"\1", "[", "(?:", "{9999}", "é", "\ud800")  # fmt: skip
PATTERNS = (
    "(.*){12}!",
    "(a+)+$",
    ".*" * 40 + "!",
    "(" * 900 + ")" * 900,
    "((a{0,999}){0,999}){999}",
    ".*q_proj",
    "q_proj",
)
NAMES = (
    "a" * 250,
    "a.b" * 80,
    "model.layers.0.self_attn.q_proj",
    "aa" * 99 + "!",
    "",
    ".",
    "\n" * 200,
    "é" * 99,
    "x" * 100_000,
)


def _pattern(rng: Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(PATTERNS)
    return "".join(rng.choices(PIECES, k=rng.randint(1, 12)))


def fuzz_rules(folder: Path) -> Case:
    def case(rng: Random) -> None:
        many = rng.choice((1, 5, 5, 3000))
        patterns = [_pattern(rng) for _ in range(many)]
        marked = [rng.choice(("re:", "", "")) + pattern for pattern in patterns]
        group = {"targets": marked, "input_activations": None}
        made = rng.choice((
            lambda: Rules.skipped({rng.choice(("ignore", "exclude")): marked}).first,
            lambda: Targets({"config_groups": {"g": group}}).group,
            lambda: Dynamic({"dynamic": {rng.choice(("+:", "-:")) + p: {"bits": 4} for p in patterns}}).changes,
            lambda: QuarkModules({"layer_quant_config": {key: {} for key in marked}}).of,
        ))  # fmt: skip
        match = made()
        for name in rng.choices(NAMES, k=20):
            match(name[: rng.randint(0, len(name))])

    return case


def fuzz_adapters(folder: Path) -> Case:
    model = write_checkpoint(folder / "model", "llama")
    base = load_model(model, ReferenceBackend())
    adapter = Path(write_adapter(folder / "adapter", model, 0, tables=True))
    path, sound = adapter / "adapter_config.json", json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / "adapter_model.safetensors")
    read = adapter_reader(lambda: base, ReferenceBackend(), LoraConfig(enable_lora=True))

    def case(rng: Random) -> None:
        config: dict[str, Any] = dict(sound)
        if rng.random() < 0.5:
            config[rng.choice(("rank_pattern", "alpha_pattern"))] = {_pattern(rng): 4, "q_proj": 4}
        tensors = {name: np.array(values) for name, values in weights.items()}
        for _ in range(rng.randint(0, 2)):
            spoil(rng, tensors)
        if rng.random() < 0.2:
            tensors[rng.choice(NAMES).replace("\n", "n") + ".lora_A.weight"] = np.ones((4, 8), np.float32)
        path.write_text(json.dumps(mutate_json(rng, config) if rng.random() < 0.6 else config))
        save_file(
            {k: np.ascontiguousarray(v) for k, v in tensors.items()}, adapter / "adapter_model.safetensors"
        )
        read(adapter)[1]()

    return case


def fuzz_drafters(folder: Path) -> Case:
    target = load_model(write_checkpoint(folder / "target", "llama"), ReferenceBackend())
    drafter = folder / "drafter"
    drafter.mkdir()
    sound = json.loads((write_eagle3(drafter, target.spec) / "config.json").read_text())
    sound |= {
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 3}],
            "verifier": {"name_or_path": "x"},
        }
    }
    weights = load_file(drafter / "model.safetensors")

    def case(rng: Random) -> None:
        tensors = {name: np.array(values) for name, values in weights.items()}
        if rng.random() < 0.3:
            spoil(rng, tensors)
        (drafter / "config.json").write_text(json.dumps(mutate_json(rng, sound)))
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, drafter / "model.safetensors")
        detect(drafter)
        verifier_of(drafter)
        found = find_drafter(SpeculativeOptions(model=str(drafter)))
        assert found is not None
        found.head(ReferenceBackend(), target, outline=False)

    return case
