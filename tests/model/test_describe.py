"""`quire inspect` on models: what a family makes of their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli import main
from tests.tiny import write_checkpoint


def test_a_model_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_checkpoint(tmp_path, "gpt_oss")
    main(["inspect", str(model), "--json"])
    found = json.loads(capsys.readouterr().out)
    spec = found["spec"]
    assert found["weight_bytes"] == 4 * found["parameters"]
    assert (spec["architecture"], spec["num_layers"]) == ("GptOssForCausalLM", 3)
    scores = spec["layers"]["mixer"]["scores"]
    assert scores["sinks"]
    assert scores["window"] == {"layers 0, 2": 24, "layers 1": None}
    assert spec["layers"]["mlp"]["routing"]["num_experts"] == 4
    assert "alibi" not in scores, "a default was printed"
    main(["inspect", str(model)])
    assert "clamped_swiglu" in capsys.readouterr().out


def test_a_config_alone_is_described_as_another_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_checkpoint(tmp_path, "llama", architectures=["OursForCausalLM"]) / "config.json"
    with pytest.raises(SystemExit):
        main(["inspect", str(config)])
    assert "OursForCausalLM is not supported" in capsys.readouterr().err
    main(["inspect", str(config), "--architecture", "mistral", "--json"])
    assert json.loads(capsys.readouterr().out)["spec"]["architecture"] == "MistralForCausalLM"
