"""Tables of hashed n-grams against the module of transformers, and what a model with them refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4

from quire.devices.graph import record
from quire.devices.ops import Embed, Linear, SelectRows
from quire.devices.protocol import Backend, KVLayer, KVSpec, Limits, ModelInput, StateInput
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.torch.backend import TorchBackend
from quire.errors import ConfigError, ModelError
from quire.model.parts.ngrams import LIMB_BITS, LIMBS, NgramsConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.source import Given, Recording
from quire.model.shard import WHOLE
from tests.devices.native_cases import native
from tests.model.test_streams import D, N, decoder

BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend(), "native": native(), "torch": TorchBackend(1)}
VOCAB, END, LONGEST, EACH, WIDTH, TAPS = 50, 7, 4, 2, 3, 3


def module(rng: np.random.Generator) -> Any:
    """The module of the second of two layers with tables, with drawn weights."""
    tables = (LONGEST - 1) * EACH
    about = SimpleNamespace(
        hidden_size=D,
        hc_count=N,
        ple_embed_dim=tables * WIDTH,
        ple_conv_kernel_size=TAPS,
        ngram_size=LONGEST,
        heads_per_ngram=EACH,
        vocab_size=VOCAB,
        ngram_vocab_size_base=23,
        seed=5,
        eos_token_id=[END, 8],
        make_ngram_vocab_size_divisible_by=16,
        rms_norm_eps=1e-5,
    )
    made = qwen4.Qwen4ExpTextPLELayer(about, 1, 1)
    for one in made.parameters():
        one.data = torch.from_numpy(rng.normal(size=tuple(one.shape)).astype(np.float32))
    return made


def weights_of(made: Any, device: Backend, config: NgramsConfig) -> dict[str, Any]:
    values = {name: one.detach().numpy() for name, one in made.named_parameters()}
    table, first, found = values["ple_embedding.ngram_embedding.weight"], 0, dict[str, Any]()
    for i, rows in enumerate(config.rows):
        found[f"here.ngrams.table.{i}"] = device.matrix([table[first : first + rows].copy()], "float32")
        first += rows
    multipliers = made.ple_embedding.layer_multipliers.numpy()
    limbs = multipliers[:, None] >> (np.arange(LIMBS) * LIMB_BITS) & ((1 << LIMB_BITS) - 1)
    found["here.ngrams.multipliers"] = limbs.reshape(-1).astype(np.float32)
    for path, name in (("key", "key_proj"), ("value", "value_proj")):
        found[f"here.ngrams.{path}"] = device.matrix([values[f"{name}.weight"]], "float32")
    for path, name in (("key_norm", "norm_key"), ("query_norm", "norm_query"), ("taps_norm", "norm_conv")):
        found[f"here.ngrams.{path}.weight"] = 1 + values[f"{name}.weight"]
    found["here.ngrams.taps.weight"] = values["conv1d.weight"].reshape(-1)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_are_those_of_transformers(backend: str) -> None:
    rng, device = np.random.default_rng(3), BACKENDS[backend]
    made = module(rng)
    sizes = tuple(made.ple_embedding.head_vocab_sizes)
    config = NgramsConfig(N, NormConfig("rms", 1e-5), sizes, WIDTH, LONGEST, TAPS, END, VOCAB)
    states = config.states(D)
    part = config.make(Given(weights_of(made, device, config)), "here", (0, 1), D, 0)
    x = rng.normal(size=(VOCAB, N * D)).astype(np.float32)
    table, head = (device.matrix([one], "float32") for one in (x, np.ones((VOCAB, N * D), np.float32)))

    def body(g: Any) -> Any:
        return g(SelectRows(part.around(Recording(g), g(Embed(table)), lambda r, value: value)))

    graph = record(body, lambda g, h: g(Linear(h, head)), VOCAB, N * D)
    spec = KVSpec(1, 1, 4, "float32", layers=(KVLayer(1, 4, states=states),))
    kv = device.kv_cache(spec, 4, 16, 1, 0)
    executable = device.compile(graph, kv, Limits(64, 1, 64))
    tokens = rng.integers(0, VOCAB, 40)
    tokens[[9, 17, 18, 30]] = END
    for start, stop in ((0, 1), (1, 19), (19, 40)):  # the last ids live from step to step
        count = stop - start
        numbers = np.arange(start, stop, dtype=np.int32)
        one = [np.array([n], np.int32) for n in (0, 0, count)]
        inputs = ModelInput(
            tokens[start:stop].astype(np.int32),
            numbers,
            np.array([0, count], np.int32),
            np.array([stop], np.int32),
            np.zeros(1, np.int32),
            np.arange(4, dtype=np.int32)[None],
            np.arange(count, dtype=np.int32),
            states=StateInput(*one, np.zeros((0, 3), np.int32)),
        )
        executable.run(inputs)
        streams = torch.from_numpy(x[tokens[:stop]])[None]
        with torch.no_grad():
            want = streams + made(streams, torch.from_numpy(tokens[:stop])[None], None)
        np.testing.assert_allclose(executable.hidden(), want[0, start:stop].numpy(), rtol=1e-4, atol=5e-5)


NGRAMS = NgramsConfig(N, NormConfig("rms", 1e-6), (11, 13), 4, 3, 4, 2, 90)


def test_models_with_tables_of_ngrams_refuse_tokens_of_adapters_and_sizes_that_do_not_fit() -> None:
    model = decoder(layer_additions=[None, NGRAMS])
    model.check("here")
    with pytest.raises(ConfigError, match="a table of tokens for some layers"):
        model.with_spare_tokens(8)
    for changes, says in (
        ({"rows": (11, 13, 17)}, "3 tables for numbers of tokens from 2 to 3"),
        ({"rows": ()}, "0 tables"),
        ({"rows": (0, 1)}, "rows must be from 1"),
        ({"longest": 1}, "longest must be from 2"),
        ({"taps": 65}, "taps must be from 2 to 64"),
        ({"end": -1}, "end must be from 0"),
    ):
        wrong = NgramsConfig(**{**{f: getattr(NGRAMS, f) for f in NGRAMS.__struct_fields__}, **changes})
        with pytest.raises(ModelError, match=says):
            decoder(layer_additions=[None, wrong]).check("here")


def test_tables_keep_their_states_after_those_of_the_layer() -> None:
    layer = decoder(layer_additions=[NGRAMS, None]).layers[0]
    first, second = NGRAMS.states(48)
    assert layer.cache(WHOLE, 12).states == (first, second)
    assert (first.shape, second.shape) == ((2, 1), (9, N * 48))
