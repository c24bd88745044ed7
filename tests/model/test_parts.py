"""Kinds of parts: layers of several kinds side by side, and what a kind declares of itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from quire.devices.protocol import KVLayer, StateSpec
from quire.errors import ModelError
from quire.model.families import read_model
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.latent import LatentConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.part import PARTS, Mixer, ModelAdditions, Part, config_of, kind_of
from quire.model.parts.rope import RopeSpec
from quire.model.parts.streams import HyperConfig, StreamEndsConfig
from quire.model.shard import Shard
from quire.model.tree import make_decoder
from tests.models import inspect_model
from tests.tiny import write_checkpoint


class RecurrenceConfig(Mixer, msgspec.Struct, frozen=True, tag="recurrence"):
    """Keeps a matrix for each head and the last inputs of a convolution, and no keys."""

    num_heads: int
    size: int

    @property
    def separable(self) -> bool:
        return True

    def heads(self, shard: Shard) -> tuple[range, range]:
        return shard.heads(self.num_heads, self.num_heads, True)

    def cache(self, shard: Shard) -> KVLayer:
        count = len(self.heads(shard)[0])
        return KVLayer(0, 1, states=(StateSpec((count, self.size, self.size)), StateSpec((3, self.size))))

    def messages(self, shard: Shard) -> list[int]:
        return [48]


def tree(directory: Path, family: str = "llama", **config: Any) -> DecoderConfig:
    found = inspect_model(write_checkpoint(directory, family, **config)).spec
    assert isinstance(found, DecoderConfig)
    return found


def with_recurrences(config: DecoderConfig) -> DecoderConfig:
    """Every layer but the last has a recurrence in place of attention."""
    recurrent = [msgspec.structs.replace(one, mixer=RecurrenceConfig(4, 8)) for one in config.layers[:-1]]
    return msgspec.structs.replace(config, layers=(*recurrent, config.layers[-1]))


def test_a_layer_may_keep_states_beside_layers_that_keep_keys(tmp_path: Path) -> None:
    plain = tree(tmp_path)
    mixed = with_recurrences(plain)
    mixed.check("here")
    kv, own = mixed.kv_spec("bfloat16"), plain.kv_spec("bfloat16")
    states = mixed.num_layers - 1
    assert kv.bytes_per_state(0) == states * (4 * 8 * 8 * 4 + 3 * 8 * 4)
    assert kv.bytes_per_token == own.bytes_per_token // plain.num_layers
    assert own.bytes_per_state(0) == 0
    half = mixed.kv_spec("bfloat16", Shard(0, 2))
    assert half.bytes_per_state(0) == states * (2 * 8 * 8 * 4 + 3 * 8 * 4)
    assert (mixed.head_dim, mixed.windows) == (plain.head_dim, plain.windows)


class IndexedConfig(RecurrenceConfig, frozen=True, tag="indexed"):
    """Keeps two layers of index keys beside, and no keys."""

    def further(self, shard: Shard) -> tuple[KVLayer, ...]:
        return KVLayer(1, 4, value_dim=4, every=4), KVLayer(1, 8, 8, 8)


def test_layers_kept_beside_come_last_in_the_cache(tmp_path: Path) -> None:
    plain = tree(tmp_path)
    layers = [msgspec.structs.replace(one, mixer=IndexedConfig(4, 8)) for one in plain.layers[:2]]
    config = msgspec.structs.replace(plain, layers=(*layers, *plain.layers[2:]))
    kv, count = config.kv_spec("float32"), plain.num_layers
    assert kv.layers is not None
    assert [layer.every for layer in kv.layers] == [1] * count + [4, 1] * 2
    assert kv.bytes_per_token == (count - 2) * plain.kv_spec("float32").bytes_per_token // count + 2 * (
        4 + 32
    )
    assert config.further(range(count)) == {0: range(count, count + 2), 1: range(count + 2, count + 4)}
    assert config.further(range(1, count)) == {1: range(count - 1, count + 1)}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3", "gemma3n_text", "gemma4_text"])
def test_the_tree_is_read_back_from_its_plain_form(family: str, tmp_path: Path) -> None:
    config = tree(tmp_path, family)
    written = msgspec.json.encode(config)
    assert msgspec.json.decode(written, type=DecoderConfig, dec_hook=config_of) == config


@pytest.mark.parametrize("kind", ["recurrence", None, ["mlp"], "mlp"])
def test_a_kind_that_is_none_or_of_another_role_is_refused(kind: Any, tmp_path: Path) -> None:
    plain = msgspec.to_builtins(tree(tmp_path))
    plain["layers"][0]["mixer"]["type"] = kind
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain, DecoderConfig, dec_hook=config_of)


def test_every_kind_has_its_name() -> None:
    for kind, place in PARTS.items():
        module, name = place.split(":")
        config = getattr(importlib.import_module(f"quire.model.parts.{module}"), name)
        assert (config.__struct_config__.tag, issubclass(config, Part)) == (kind, True)


def test_sizes_of_all_parts_are_checked(tmp_path: Path) -> None:
    config = tree(tmp_path, "deepseek_v3")
    first = msgspec.structs.replace(config.layers[0].mixer, kv_rank=1 << 20)  # type: ignore[type-var]
    layers = msgspec.structs.replace(config.layers[0], mixer=first), *config.layers[1:]
    with pytest.raises(ModelError, match="kv_rank"):
        msgspec.structs.replace(config, layers=layers).check("here")


def test_a_family_says_by_layer_what_mixes_tokens() -> None:
    norm = NormConfig("rms", 1e-6)
    latent = {
        "q_rank": None,
        "kv_rank": 8,
        "nope_dim": [4, 6, 4],
        "rope_dim": 4,
        "value_dim": 4,
        "norm": norm,
    }
    config = make_decoder(
        "Some",
        vocab_size=9,
        hidden_size=16,
        num_layers=3,
        max_position=32,
        activation="silu",
        kinds=["attention", "latent", None],
        mixers={"latent": latent},
        norm_kind="rms",
        norm_eps=1e-6,
        attention_num_heads=2,
        attention_num_kv_heads=1,
        attention_head_dim=8,
        attention_rope=RopeSpec("default", 1e4, 4),
        scores_scale=0.5,
        mlp_intermediate_size=[0, 8, 8],
    )
    config.check("here")
    mixers = [layer.mixer for layer in config.layers]
    assert [None if mixer is None else kind_of(mixer) for mixer in mixers] == ["attention", "latent", None]
    assert [layer.mlp is None for layer in config.layers] == [True, False, False]
    assert cast(LatentConfig, mixers[1]).nope_dim == 6


def test_kinds_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="kind has 2 entries for 3 layers"):
        make_decoder("Some", vocab_size=9, hidden_size=16, num_layers=3, max_position=32, activation="silu",
                     kinds=["attention", None], norm_kind="rms", norm_eps=1e-6)  # fmt: skip


def test_only_a_recurrence_may_lie_beside_attention() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "mamba_d_ssm": 96, "mamba_n_heads": 8}
    heads = {"num_attention_heads": 8, "num_hidden_layers": 1, "vocab_size": 64}
    config, _ = read_model({"architectures": ["FalconH1ForCausalLM"], **sizes, **heads})
    config.check("here")
    layer = config.layers[0]
    mixers = {"mixer": layer.mixer, "second": layer.second}
    for changes in ({"second": layer.mixer}, {"mixer": layer.second}, {"mixer": None}):
        changed = msgspec.structs.replace(layer, **{**mixers, **changes})
        with pytest.raises(ModelError, match="a second mixer must be"):
            msgspec.structs.replace(config, layers=(changed,)).check("here")


def test_streams_survive_their_plain_form() -> None:
    ends = StreamEndsConfig(2, HyperConfig(2, NormConfig("rms", 1e-6, False), 1e-6, joins=False))
    plain = msgspec.to_builtins(ends)
    assert config_of(ModelAdditions, plain) == ends
