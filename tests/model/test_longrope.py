"""longrope turns at the frequencies of short texts where no text can be long, in every form of a model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.build import build_engine
from quire.config import EngineConfig
from quire.convert import convert_checkpoint
from quire.devices.cpu.backend import NativeBackend
from quire.devices.reference.backend import ReferenceBackend
from quire.model.info import Asked, EngineLimits
from quire.model.load import open_files
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.rope import RopeSpec, make_rope
from tests.model.tiny_models import Session, make_model
from tests.near import assert_near
from tests.tiny import write_checkpoint

SHORT, LONG = tuple(1 + i / 8 for i in range(8)), tuple(2.0 + i for i in range(8))
PHI: dict[str, Any] = {
    "rope_scaling": {"type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG)},
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 256,
}


def factors(files: Any) -> set[tuple[float, ...]]:
    spec = files.info.spec
    assert isinstance(spec, DecoderConfig)
    return {layer.mixer.rope.factors for layer in spec.layers if layer.mixer is not None and layer.mixer.rope}


@pytest.mark.parametrize("asked", [24, 32, 33, 128, None])
def test_logits_equal_transformers_for_texts_of_every_length_that_is_asked_for(
    asked: int | None, tmp_path: Path
) -> None:
    """transformers chooses by the text's own length."""
    scaling = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0]}
    model = make_model(
        "phi3-longrope",
        rope_parameters={"rope_type": "longrope", "rope_theta": 100.0, **scaling},
        original_max_position_embeddings=32,
    )
    model.save_pretrained(tmp_path)
    short = asked is not None and asked <= 32
    prompt = [(7 * i) % 90 + 3 for i in range(20 if short else 60)]
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0].numpy()
    backend = ReferenceBackend()
    loaded = open_files(tmp_path, Asked(max_len=asked)).load(backend)
    assert_near(Session(loaded, backend).feed(prompt), wanted)


@pytest.mark.parametrize("form", ["built", "limited", "converted"])
def test_built_and_converted_models_choose_by_the_length_they_are_served_with(
    form: str, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "model", "phi3", **PHI)
    config = EngineConfig.from_options(model=str(model))
    if form == "converted":
        config = EngineConfig.from_options(model=str(model), max_model_len=48)
        convert_checkpoint(config, tmp_path / "out")
    else:
        limits = EngineLimits(max_seq_len=64 if form == "limited" else None)
        build_engine(config, tmp_path / "out", limits)
    whole = (1.0, 1.125) if form == "limited" else (2.0, 3.0)
    for asked, first in ((None, whole), (48, (1.0, 1.125)), (64, (1.0, 1.125))):
        files = open_files(tmp_path / "out", Asked(max_len=asked))
        assert {one[:2] for one in factors(files)} == {first}
        loaded = files.load(NativeBackend(1))
        assert loaded.spec == files.info.spec


def test_the_scale_of_angles_does_not_depend_on_the_length() -> None:
    rope = RopeSpec(
        "longrope", 1e4, 16, factor=4.0, original_max_position=64, factors=LONG, short_factors=SHORT
    )
    short = rope.for_length(64)
    assert (short.factors, short.short_factors, rope.for_length(65)) == (SHORT, (), rope)
    assert short.for_length(256) == short
    assert make_rope(short).scale == make_rope(rope).scale != 1
