"""A sample of random configs against transformers; `python -m tests.model.fuzz_configs` runs thousands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.fuzz_configs import compare, compare_random, config_of
from tests.model.tiny_models import LONGROPE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [*range(24), 2458, 3026, 3398])  # the last ones were wrong once
def test_a_changed_config_is_refused_or_computed_as_transformers_does(seed: int, tmp_path: Path) -> None:
    result, what = compare_random(seed, tmp_path)
    assert result != "different", what


ABSENT = "absent"
LONG_INSIDE = {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 32}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LAYERS = {"full_attention": YARN | {"truncate": False}, "sliding_attention": {"rope_type": "default"}}


def older(theta: float, **rope: Any) -> dict[str, Any]:
    """The older spelling of a rope."""
    return {"rope_parameters": ABSENT, "rope_theta": theta, "rope_scaling": rope}


NO_ROPE = dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"), ABSENT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("variant", "changes", "expected"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, "equal"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None}, "equal"),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": None}, "equal"),
        ("gpt-oss", NO_ROPE, "equal"),  # its class default is YaRN
        ("gpt-neox", {**NO_ROPE, "rotary_emb_base": 700.0, "rotary_pct": 0.5}, "equal"),
        ("gpt-neox", {**NO_ROPE, "rotary_emb_base": 700.0, "rope_theta": 300.0, "rotary_pct": 0.5}, "refused"),
        ("gpt-neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.5}, "equal"),
        ("phi3-longrope", LONG_INSIDE | {"original_max_position_embeddings": 32}, "equal"),
        ("phi3-longrope", LONG_INSIDE | {"original_max_position_embeddings": 64}, "refused"),
        ("phi3-longrope", LONG_INSIDE | {"original_max_position_embeddings": ABSENT}, "refused"),  # 4096 by default
        ("deepseek-v3", {"rope_interleave": None}, "equal"),
        ("deepseek-v3", {"n_group": None, "topk_group": None, "first_k_dense_replace": 3}, "equal"),
        ("deepseek-v2-lite", {"n_group": None, "topk_group": None}, "equal"),
        ("cohere2", {"_sliding_window_pattern": 4}, "equal"),
        ("deepseek-v2-lite", {"num_experts_per_tok": None, "first_k_dense_replace": 3}, "equal"),
        ("gemma3", older(5000.0, **YARN), "equal"),
        ("gemma3", older(5000.0, type="yarn", factor=4.0), "refused"),  # the class knows rope_type alone
        ("gemma3", {"rope_parameters": LAYERS}, "refused"),  # the class knows no truncate of one kind of layers
        ("minimax-rotary", {"head_dim": ABSENT}, "refused"),  # half of 128 elements, and 8 of them
        ("minimax-rotary", {"rope_parameters": ABSENT}, "equal"),
        ("laguna-elements", {"rope_parameters": ABSENT}, "equal"),  # a theta for each kind of layers
        ("longcat_flash", {"q_lora_rank": None}, "refused"),
        ("olmo3", older(5e5, **YARN), "equal"),
        ("olmo_hybrid-plain", older(5000.0, rope_type="default", rope_theta=None), "equal"),  # no rope
        ("deepseek_v4", older(5000.0, **YARN, truncate=False), "refused"),  # the class overlooks it
        ("bailing_hybrid", older(5000.0, rope_type="yarn", factor=4.0), "refused"),  # the class's own length
        ("olmo3", older(5000.0, **YARN), "refused"),  # the class's sliding layers have 5e5
    ],
)  # fmt: skip
def test_configs_that_were_read_wrongly(
    variant: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """`equal` is what transformers computes; "refused" where two spellings of one thing disagree."""
    config = {**config_of(variant), **changes}
    config = {key: value for key, value in config.items() if value != ABSENT}
    result, what = compare(variant, config, tmp_path, f"{variant}, {changes}")
    assert result == expected, what
