"""What tensors hold that a converter joined or reordered, and under which names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.errors import ModelError
from quire.weights.gguf.container import TensorEntry
from quire.weights.gguf.kinds import KINDS
from quire.weights.gguf.pieces import Heads, places
from tests.gguf_files import turned

HEADS = Heads([(4, 2)] * 2)


def entries(**shapes: tuple[int, ...]) -> dict[str, TensorEntry]:
    return {f"blk.1.{name}": TensorEntry(KINDS[0], shape, 0, 0) for name, shape in shapes.items()}


def shapes(found: dict[str, Any]) -> dict[str, Any]:
    return {name: (place.shape, place.index) for name, place in found.items()}


def test_experts_that_the_file_stacks_are_tensors_of_their_own() -> None:
    stacked = {"ffn_up_exps.weight": (3, 48, 32), "ffn_up_exps.bias": (3, 48), "ffn_up_shexp.weight": (8, 32)}
    others = {"ffn_gate_inp_shexp.weight": (32,), "exp_probs_b.bias": (3,), "ffn_down_exps.scale": (3,)}
    found = places(entries(**stacked, **others), HEADS, "m.gguf")
    assert shapes(found) == {
        **{f"blk.1.exps.{e}.ffn_up.weight": ((48, 32), e) for e in range(3)},
        **{f"blk.1.exps.{e}.ffn_up.bias": ((48,), e) for e in range(3)},
        "blk.1.shexp.ffn_up.weight": ((8, 32), None),
        "blk.1.ffn_gate_inp_shexp.weight": ((1, 32), None),
        "blk.1.exp_probs_b": ((3,), None),
        "blk.1.ffn_down_exps.scale": ((3,), None),
    }


def test_gates_beside_ups_come_apart() -> None:
    found = places(entries(**{"ffn_gate_up_exps.weight": (2, 8, 4)}), HEADS, "m.gguf")
    expert = np.arange(32).reshape(8, 4)
    for name, rows in (("gate", slice(0, 4)), ("up", slice(4, 8))):
        place = found[f"blk.1.exps.1.ffn_{name}.weight"]
        assert (place.index, place.shape) == (1, (4, 4))
        assert place.take is not None
        assert np.array_equal(place.take(expert), expert[rows])


@pytest.mark.parametrize("is_turned", [False, True])
def test_queries_keys_and_values_come_apart(is_turned: bool) -> None:
    parts = [np.arange(rows * 3).reshape(rows, 3) + 1000 * rows for rows in (16, 8, 8)]
    q, k, v = parts
    stored = np.concatenate([turned(q, 4), turned(k, 2), v] if is_turned else parts)
    found = places(entries(**{"attn_qkv.weight": (32, 3)}), Heads([(4, 2)] * 2, is_turned), "m.gguf")
    for name, wanted in zip("qkv", parts, strict=True):
        place = found[f"blk.1.attn_{name}.weight"]
        assert place.take is not None
        assert place.shape == wanted.shape
        assert np.array_equal(place.take(stored), wanted)


def test_reordered_rows_come_back() -> None:
    found = places(entries(**{"attn_q.weight": (32, 3)}), Heads([(4, 2)] * 2, turned=True), "m.gguf")
    take, weight = found["blk.1.attn_q.weight"].take, np.arange(96).reshape(32, 3)
    assert take is not None
    assert np.array_equal(take(turned(weight, 4)), weight)


def test_keys_and_values_of_latent_attention_are_one_matrix() -> None:
    found = places(entries(**{"attn_k_b.weight": (2, 5, 3), "attn_v_b.weight": (2, 4, 5)}), HEADS, "m.gguf")
    (place,) = found.values()
    assert list(found) == ["blk.1.attn_kv_b.weight"]
    assert (place.shape, place.second) == ((14, 5), "blk.1.attn_v_b.weight")
    keys, values = np.arange(30).reshape(2, 5, 3), np.arange(40).reshape(2, 4, 5)
    assert place.take is not None
    assert np.array_equal(place.take(keys, values)[7:10], keys[1].T)
    assert np.array_equal(place.take(keys, values)[10:], values[1])


def test_tensors_of_other_shapes_keep_their_names() -> None:
    odd = {
        "attn_qkv.weight": (33, 3),
        "attn_k_b.weight": (2, 5, 3),
        "attn_v_b.weight": (2, 4, 6),
        "ffn_up_exps.weight": (4,),
        "something_new.weight": (32,),
    }
    found = places(entries(**odd), HEADS, "m.gguf")
    assert shapes(found) == {f"blk.1.{name}": (shape, None) for name, shape in odd.items()}


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ModelError, match=r"both hold blk\.1\.attn_q\.weight"):
        places(entries(**{"attn_qkv.weight": (32, 3), "attn_q.weight": (16, 3)}), HEADS, "m.gguf")
