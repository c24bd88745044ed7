"""Reads a drafter's config.json: the keys that its own code reads, with their types. Its layers' keys are a model's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from quire.errors import ModelError
from quire.files import read_json

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Layers = list[Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]]


class Verifier(msgspec.Struct):
    name_or_path: str | None = None


class Proposal(msgspec.Struct):
    speculative_tokens: Count | None = None


class Speculators(msgspec.Struct):
    proposal_methods: list[Proposal] | None = None
    verifier: Verifier | None = None


class Eagle(msgspec.Struct):
    eagle_aux_hidden_state_layer_ids: Layers | None = None


class DFlash(msgspec.Struct):
    target_layer_ids: Layers | None = None
    mask_token_id: Count | None = None


class DrafterConfig(msgspec.Struct):
    """Keys of all kinds of drafters."""

    architectures: list[str] | None = None
    model_type: str | None = None
    speculators_model_type: str | None = None
    speculators_config: Speculators | None = None
    transformer_layer_config: dict[str, Any] | None = None
    eagle_config: Eagle | None = None
    eagle_aux_hidden_state_layer_ids: Layers | None = None
    dflash_config: DFlash | None = None
    block_size: Count | None = None
    n_predict: Count | None = None
    emb_dim: Count | None = None
    inner_dim: Count | None = None
    vocab_size: Count | None = None
    fc_norm: bool | None = None
    norm_before_fc: bool | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    tie_weights: bool | None = None
    scale_input: bool | None = None


def read_drafter(directory: Path) -> dict[str, Any]:
    """Read a drafter's config as it is, nulls left out. ModelError for a key of another type."""
    path = directory / "config.json"
    config: dict[str, Any] = read_json(path)
    try:
        msgspec.convert(config, DrafterConfig)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ModelError(f"{path}: {error}") from error
    return {
        key: value for key, value in config.items() if value is not None or not hasattr(DrafterConfig, key)
    }
