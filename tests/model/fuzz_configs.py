"""Random changes to configs of tiny models: Quire refuses a changed config by name, or computes what transformers does.

By hand: `python -m tests.model.fuzz_configs 3000 SEED` changes 3,000 configs of any family, and
`python -m tests.model.fuzz_configs 200 0 llama gemma3n` 200 of each family named (`all`: of every family).
tests/model/test_fuzz_configs.py runs a sample.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from quire.devices.reference.backend import ReferenceBackend
from quire.errors import ModelError
from quire.model.families import read_model
from tests.model.tiny_models import FAMILIES, VARIANTS, Session, make_model, randomized, torch_logits
from tests.models import load_model

Config = dict[str, Any]
PROMPT = [int(t) for t in np.random.default_rng(11).integers(3, 97, 40)]
# Keys that say what the file is, not what the model computes.
KEPT = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "vocab_size"}
ROPES: tuple[Config, ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 16.0},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)


def rope(rng: random.Random, config: Config) -> str:
    """Another kind of rotary embedding, in the new spelling, the old one, or with the old name of its kind."""
    found = dict(rng.choice(ROPES))
    if rng.random() < 0.3:
        found["type"] = found.pop("rope_type")
    if rng.random() < 0.3:
        found["rope_theta"] = None
    key = "rope_parameters" if rng.random() < 0.5 else "rope_scaling"
    if key == "rope_scaling":
        config.pop("rope_parameters", None)
        config["rope_theta"] = 5000.0
    elif "rope_theta" not in found:
        found["rope_theta"] = 5000.0
    config[key] = found
    return f"{key} = {found}"


def _keys(config: Config, kind: type | tuple[type, ...] = object) -> list[str]:
    return [key for key, value in config.items() if key not in KEPT and isinstance(value, kind)]


def _change(pick: type | tuple[type, ...], new: Callable[[random.Random, Any], Any]) -> Callable[..., str]:
    def change(rng: random.Random, config: Config) -> str:
        key = rng.choice(_keys(config, pick) or _keys(config))
        config[key] = new(rng, config[key])
        return f"{key} = {config[key]!r}"

    return change


def drop(rng: random.Random, config: Config) -> str:
    """Leave a key out, so that the class's default holds."""
    key = rng.choice(_keys(config))
    del config[key]
    return f"without {key}"


def known(rng: random.Random, config: Config) -> str:
    """A field that many configs have."""
    key, value = rng.choice(
        [
            ("use_sliding_window", True),
            ("sliding_window", rng.choice([None, 9, 4096])),
            ("partial_rotary_factor", 0.5),
            ("rope_interleave", rng.choice([None, False])),
            ("n_group", None),
            ("topk_group", None),
            ("head_dim", None),
            ("attention_bias", True),
            ("original_max_position_embeddings", 16),
            ("rope_theta", 700.0),
            ("rotary_emb_base", 700.0),
            ("max_window_layers", 1),
            ("layer_types", None),
        ]
    )
    config[key] = value
    return f"{key} = {value!r}"


CHANGES: tuple[Callable[..., str], ...] = (
    _change(object, lambda rng, value: None),
    _change(bool, lambda rng, value: not value),
    _change(float, lambda rng, value: value * rng.choice([0.5, 2.0]) if isinstance(value, float) else value),
    drop,
    known,
    rope,
)


@cache
def original(variant: str) -> tuple[type, str]:
    """A variant's kind of config, and its whole config as transformers writes it."""
    model = make_model(variant)
    config: Config = json.loads(model.config.to_json_string(use_diff=False))
    return type(model.config), json.dumps({**config, "architectures": [type(model).__name__]})


def config_of(variant: str) -> Config:
    """The whole config of a variant, as transformers writes it."""
    config: Config = json.loads(original(variant)[1])
    return config


def changed(seed: int, variants: Sequence[str] = tuple(VARIANTS)) -> tuple[str, Config, str]:
    """One of the variants with one to three random changes: its name, its config, and a description."""
    rng = random.Random(seed)
    variant = rng.choice(variants)
    config = config_of(variant)
    changes = [rng.choice(CHANGES)(rng, config) for _ in range(rng.choice([1, 1, 2, 3]))]
    return variant, config, f"seed {seed}: {variant}, {'; '.join(changes)}"


def compare_random(seed: int, directory: Path, variants: Sequence[str] = tuple(VARIANTS)) -> tuple[str, str]:
    """The result of `compare` for one of the variants with one to three random changes."""
    variant, config, what = changed(seed, variants)
    return compare(variant, config, directory, what)


def compare(variant: str, config: Config, directory: Path, what: str) -> tuple[str, str]:
    """`equal`, `refused`, `no model` (transformers cannot make one either), or `different`; and a description.

    `config` is a changed one of the variant, `what` says how.
    """
    kind = original(variant)[0]
    try:
        read_model(copy.deepcopy(config))  # most refusals, without a model
    except ModelError as error:
        return "refused", f"{what}: {str(error)[:160]}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_config(kind.from_dict(copy.deepcopy(config)))
            model = randomized(model.eval().float(), 1)
            expected = torch_logits(model, PROMPT)
            model.save_pretrained(directory)
    except Exception as error:  # whatever transformers raises for a config that it cannot use
        return "no model", f"{what}: {type(error).__name__}: {str(error)[:100]}"
    if not np.isfinite(expected).all():
        return "no model", f"{what}: not finite"
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    try:
        loaded = load_model(directory, ReferenceBackend())
    except ModelError as error:
        return "refused", f"{what}: {str(error)[:160]}"
    got = Session(loaded, ReferenceBackend()).feed(PROMPT)
    error = float(np.abs(got - expected).max() / max(1.0, float(np.abs(expected).max())))
    states = loaded.info.kv_spec("float32").bytes_per_state(0) > 0
    bound = 8e-4 if states else 2e-4  # states carry errors on
    return ("equal" if error < bound else "different"), f"{what}: {error:.2g}"


def run(count: int, first: int, variants: Sequence[str]) -> Counter[str]:
    """Print what differs of `count` changed configs; how many had each result."""
    results: Counter[str] = Counter()
    known: dict[str, str] = {}  # of the same changes
    for seed in range(first, first + count):
        variant, config, what = changed(seed, variants)
        key = json.dumps([variant, config], sort_keys=True)
        if key not in known:
            with tempfile.TemporaryDirectory() as directory:
                known[key], what = compare(variant, config, Path(directory), what)
        result = known[key]
        results[result] += 1
        if result == "different":
            print(what, flush=True)
    return results


def main(count: int, first: int, families: Sequence[str]) -> int:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    different = 0
    for family in (list(FAMILIES) if "all" in families else families) or [""]:
        variants = [name for name, (own, _) in VARIANTS.items() if family in ("", own)]
        results = run(count, first, variants)
        different += results["different"]
        print(family, dict(results), flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, sys.argv[3:]))
