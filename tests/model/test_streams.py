"""Several residual streams against the modules of transformers, and what a layer with streams refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.hy_v4 import modeling_hy_v4 as hy
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4

from quire.devices.ops import Scale
from quire.devices.protocol import Backend
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.torch.backend import TorchBackend
from quire.errors import ModelError
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.source import Given, Listing
from quire.model.parts.streams import GatedStreamsConfig, HyperConfig, StreamEndsConfig
from quire.model.shard import Shard
from quire.model.tree import make_decoder
from tests.devices.native_cases import apply_rows, native

D, N, EPS = 12, 3, 3e-2
NORM = NormConfig("rms", 2e-3, weight=False)
BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend(), "native": native(), "torch": TorchBackend(1)}


class Config:
    hidden_size, hc_mult, hc_eps, rms_norm_eps = D, N, EPS, 2e-3
    hc_sinkhorn_iters, hc_magnitude = 5, 1.5


MADE: dict[str, tuple[type[torch.nn.Module], HyperConfig]] = {
    "v4": (v4.DeepseekV4HyperConnection, HyperConfig(N, NORM, EPS, 5)),
    "hy": (hy.HYV4HyperConnection, HyperConfig(N, NORM, EPS, 0, 1.5, EPS)),
    "v4-end": (v4.DeepseekV4HyperHead, HyperConfig(N, NORM, EPS, joins=False)),
    "hy-end": (hy.HYV4HyperHead, HyperConfig(N, NORM, EPS, joins=False)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", MADE)
def test_streams_are_those_of_transformers(kind: str, backend: str) -> None:
    made, config = MADE[kind]
    module, rng = made(Config()), np.random.default_rng(7)
    values = {
        name.removeprefix("hc_"): rng.normal(size=tuple(one.shape)).astype(np.float32)
        for name, one in module.named_parameters()
    }
    for name, one in module.named_parameters():
        one.data = torch.from_numpy(values[name.removeprefix("hc_")])
    x = rng.normal(size=(5, N * D)).astype(np.float32)
    streams = torch.from_numpy(x).reshape(1, 5, N, D)
    with torch.no_grad():
        want: Any = module(streams)
    device = BACKENDS[backend]
    weights = {
        "here.gates": device.matrix([values["fn"]], "float32"),
        "here.scales": values["scale"],
        "here.biases": values["base"],
    }
    part = config.make(Given(weights), "here", D)
    read = apply_rows(device, x, lambda g, t: part.read(g, t)[0], D)
    if not config.joins:
        np.testing.assert_allclose(read, want[0].numpy(), atol=2e-5)
        return
    collapsed = want[-1]
    np.testing.assert_allclose(read, collapsed[0].numpy(), atol=2e-5)

    def block(g: Any, t: Any) -> Any:
        own, put = part.read(g, t)
        return put(g(Scale(own, 3.0)))

    joined = want[0].unsqueeze(-1) * (3 * collapsed).unsqueeze(-2)
    joined = joined + (want[1].transpose(-1, -2) @ streams if kind == "v4" else streams)
    np.testing.assert_allclose(
        apply_rows(device, x, block, N * D), joined[0].reshape(5, -1).numpy(), atol=5e-5
    )


def decoder(**fields: Any) -> DecoderConfig:
    """A decoder whose streams end as their mean unless `fields` say otherwise."""
    sizes = {"vocab_size": 90, "hidden_size": 48, "num_layers": 2, "max_position": 64, "activation": "silu"}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "rope": None}
    about = {"norm_kind": "rms", "norm_eps": 1e-6, "scores_scale": 0.3, "mlp_intermediate_size": 64}
    given: dict[str, Any] = {
        "additions": StreamEndsConfig(N),
        "streams": HyperConfig(N, NORM, EPS, 5),
        "head_tied": False,
        **about,
        **{f"attention_{name}": value for name, value in heads.items()},
    }
    return make_decoder("Tiny", **sizes, **{**given, **fields})  # type: ignore[arg-type]


def test_a_stage_passes_all_streams_on() -> None:
    model = decoder()
    model.check("here")
    assert model.passed_bytes(Shard(stage=0, stages=2)) == 4 * N * 48
    plain = decoder(additions=None, streams=None)
    listed, other = Listing(), Listing()
    Decoder(model, listed)
    Decoder(plain, other)
    added = {piece.path for piece in listed.pieces} - {piece.path for piece in other.pieces}
    kinds = "gates.weight", "scales", "biases"
    blocks = [f"layers.{i}.{block}_streams" for i in range(2) for block in ("attention", "mlp")]
    assert added == {f"{block}.{kind}" for block in blocks for kind in kinds}
    ended = decoder(additions=StreamEndsConfig(N, HyperConfig(N, NORM, EPS, joins=False)))
    listed = Listing()
    Decoder(ended, listed, Shard(stage=0, stages=2))
    assert not any(piece.path.startswith("streams") for piece in listed.pieces)
    Decoder(ended, listed, Shard(stage=1, stages=2))
    assert {piece.path for piece in listed.pieces} >= {f"streams.{kind}" for kind in kinds}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"placement": "parallel"}, "one after the other"),
        ({"placement": "post"}, "one after the other"),
        ({"multiplier": 0.5}, "one after the other"),
        ({"streams": HyperConfig(0, NORM, EPS, 5)}, "streams must be from 1 to 16"),
        ({"streams": HyperConfig(N, NORM, EPS, 10**6)}, "iterations must be from 0 to 1000"),
        ({"streams": HyperConfig(N, NORM, float("inf"), 5)}, "eps must be a number"),
        (
            {"additions": StreamEndsConfig(N, HyperConfig(99, NORM, EPS, joins=False))},
            "streams must be from 1 to 16",
        ),
    ],
)
def test_streams_that_do_not_fit_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        decoder(**fields).check("here")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("joins", [True, False])
def test_gated_streams_are_those_of_transformers(joins: bool, backend: str) -> None:
    about = SimpleNamespace(hc_count=N, hidden_size=D, hc_lowrank=5, rms_norm_eps=2e-3)
    module, rng = qwen4.Qwen4ExpTextGatedResidual(about, joins), np.random.default_rng(8)
    for one in module.parameters():
        one.data = torch.from_numpy(rng.normal(size=tuple(one.shape)).astype(np.float32))
    values = {name.removesuffix(".weight"): one.detach().numpy() for name, one in module.named_parameters()}
    device = BACKENDS[backend]
    names = {"down": "input_mix_weight_down", "up": "input_mix_weight_up", "join": "block_inject_weight"}
    weights: dict[str, Any] = {
        f"here.{path}": device.matrix([values[name]], "float32")
        for path, name in names.items()
        if name in values
    }
    weights["here.norm.weight"] = 1 + values["hc_norm"]
    config = GatedStreamsConfig(N, NormConfig("rms", 2e-3), 5, joins)
    part = config.make(Given(weights), "here", D)
    x = rng.normal(size=(6, N * D)).astype(np.float32)
    with torch.no_grad():
        found: Any = module(torch.from_numpy(x))
    mixed, streams, joined = found if joins else (found, None, None)
    got = apply_rows(device, x, lambda g, t: part.read(g, t)[0], D)
    np.testing.assert_allclose(got, mixed.numpy(), atol=2e-5)
    if not joins:
        return

    def block(g: Any, t: Any) -> Any:
        own, put = part.read(g, t)
        return put(g(Scale(own, 3.0)))

    want = streams + ((3 * mixed).unsqueeze(-2) * joined.unsqueeze(-1)).flatten(-2)
    np.testing.assert_allclose(apply_rows(device, x, block, N * D), want.numpy(), atol=5e-5)
