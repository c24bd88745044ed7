"""DeepSeek-V4 and GLM-5.3-Flash: configs and files that do not fit, published forms of the weights, what is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.devices.protocol import KVLayer
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import ConfigError, ModelError
from quire.model.families import read_model
from quire.spec_decode.heads.pair import read_mtp
from tests.model.tiny_models import Session
from tests.models import load_model
from tests.tiny import CONFIG, STREAMS, write_checkpoint

PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 90, 40)]
V4, GLM = "deepseek_v4", "glm5_next_text"


def config_of(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    found = {**CONFIG, **STREAMS[family], **changes}
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (V4, {"compress_ratios": [0, 4, 128]}, "compress_ratios must be 4 to 4 entries"),
        (V4, {"compress_ratios": [0, 4, 128, 4, 0]}, "compress_ratios must be 4 to 4 entries"),
        (V4, {"compress_ratios": [0] * 6, "num_nextn_predict_layers": 1}, "must be 4 to 5 entries"),
        (V4, {"compress_ratios": [0, 4, 128, 5]}, "each 0, 4 or 128"),
        (V4, {"compress_ratios": [0, 4, 128, True]}, "each 0, 4 or 128"),
        (V4, {"compress_ratios": "4"}, "compress_ratios must be"),
        (V4, {"layer_types": ["sliding_attention"] * 4}, "layer_types must be as compress_ratios says"),
        (V4, {"compress_rate_csa": 1}, "compress_rate_csa must be an integer from 2"),
        (V4, {"compress_rates": {"compressed_sparse_attention": 0}}, "compressed_sparse_attention must be"),
        (V4, {"compress_rates": {"other": 4}}, "other"),
        (V4, {"hc_mult": 0}, "hc_mult must be an integer from 1 to 16"),
        (V4, {"hc_mult": 17}, "hc_mult must be an integer from 1 to 16"),
        (V4, {"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters must be an integer from 1 to 1000"),
        (V4, {"hc_sinkhorn_iters": 10**9}, "hc_sinkhorn_iters must be an integer from 1 to 1000"),
        (V4, {"hc_eps": 0.0}, "hc_eps must be greater than 0"),
        (V4, {"num_hash_layers": 5}, r"num_hash_layers must be at most num_hidden_layers \(4\)"),
        (V4, {"mlp_layer_types": ["moe", "dense", "moe", "moe"]}, "mlp_layer_types must be"),
        (V4, {"scoring_func": "tanh"}, "scoring_func must be one of"),
        (V4, {"scoring_func": ["sigmoid"]}, "scoring_func must be one of"),
        (V4, {"o_groups": 3}, "o_groups must be a divisor"),
        (V4, {"qk_rope_head_dim": 64}, "qk_rope_head_dim must be an even number of at most"),
        (V4, {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be an even number"),
        (V4, {"index_head_dim": 6}, "index_head_dim must be at least"),
        (V4, {"sliding_window": 0}, "sliding_window must be an integer from 1"),
        (V4, {"num_key_value_heads": 2}, "num_key_value_heads must be 1"),
        (V4, {"n_shared_experts": 2}, "n_shared_experts must be 1"),
        (V4, {"swiglu_limit": 0.0}, "swiglu_limit must be greater than 0"),
        (V4, {"compress_rope_theta": 0.5}, "rope_theta must be greater than 1"),
        (GLM, {"hc_mult": 0}, "hc_mult must be an integer from 1 to 16"),
        (GLM, {"mhc": False}, "mhc must be True"),
        (GLM, {"qk_rope_head_dim": 8}, "qk_rope_head_dim must be 0"),
        (GLM, {"index_kpool": 3}, r"index_topk must be a multiple of index_kpool \(3\)"),
        (GLM, {"index_kpool": 1}, "index_kpool must be an integer from 2"),
        (GLM, {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail must be True"),
        (GLM, {"num_key_value_heads": 2}, "num_key_value_heads must be 4"),
        (GLM, {"linear_lower_bound": 1.0}, "gate_lower_bound must be a number from -10000 to 0"),
        (GLM, {"linear_attn_config": {"gate_lower_bound": "-5"}}, "gate_lower_bound must be a number"),
        (GLM, {"linear_attn_config": {"kda_layers": [1, 2]}}, "kda_layers must be"),
        (GLM, {"linear_attn_config": {"short_conv_kernel_size": 1}}, "short_conv_kernel_size must be"),
        (GLM, {"layer_types": ["linear_attention", "mamba"] * 2}, "layer_types must be 4 entries"),
        (GLM, {"indexer_types": ["full", "shared", "full", "full"]}, "full in the first layer"),
        (GLM, {"q_lora_rank": None}, "q_lora_rank is missing"),
    ],
)
def test_fields_that_disagree_are_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_model(config_of(family, changes))[0].check("here")
    assert "\n" not in str(caught.value)


def test_lists_of_layers_count_from_0_or_1() -> None:
    for first in (0, 1):
        lists = {"kda_layers": [first, first + 3], "full_attn_layers": [first + 1, first + 2]}
        read_model(config_of(GLM, {"linear_attn_config": lists}))


def test_compressed_layers_keep_a_window_entries_and_open_rows() -> None:
    kv = read_model(config_of(V4, {}))[0].kv_spec("float32")
    assert kv.layers is not None
    window = KVLayer(1, 16, 7, value_dim=16)
    assert kv.layers[:4] == (window,) * 4
    entries, keys = KVLayer(1, 16, value_dim=16, every=4), KVLayer(1, 12, value_dim=12, every=4)
    csa = (entries, KVLayer(1, 64, 8, value_dim=64), keys, KVLayer(1, 48, 8, value_dim=48))
    hca = KVLayer(1, 16, value_dim=16, every=6), KVLayer(1, 32, 6, value_dim=32)
    assert kv.layers[4:] == (*csa, *hca, *csa)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "plain", V4)


def logits(directory: Path) -> Any:
    backend = ReferenceBackend()
    return Session(load_model(directory, backend, "float32"), backend).feed(PROMPT)


def copied(plain: Path, path: Path, tensors: dict[str, Any], **changes: Any) -> Path:
    path.mkdir()
    config = json.loads((plain / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def published(name: str) -> str:
    """The name of a tensor in the files of the maker."""
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
    return name.replace("embed_tokens", "embed")


def test_published_names_are_read(plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    renamed = {published(name): value for name, value in tensors.items()}
    renamed["mtp.0.e_proj.weight"] = np.ones((3, 3), np.float32)
    np.testing.assert_array_equal(logits(copied(plain, tmp_path / "hub", renamed)), logits(plain))
    saved = {name.replace("attn.kv_norm", "attn.norm"): value for name, value in tensors.items()}
    np.testing.assert_array_equal(logits(copied(plain, tmp_path / "saved", saved)), logits(plain))


def test_published_fp8_and_fp4_weights_are_read(plain: Path, tmp_path: Path) -> None:
    """Scales are exponents, of blocks of FP8 codes and of 32 pairs of 4-bit codes in int8."""
    rng, held, values = np.random.default_rng(5), dict[str, Any](), dict[str, Any]()
    wide: dict[str, Any] = {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "compress_ratios": [0, 4],
    }
    plain = write_checkpoint(tmp_path / "wide", V4, **wide)
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    for name, value in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        powers: Any
        if re.search(r"experts\.\d+\.w\d$", module):
            codes = rng.integers(0, 16, value.shape).astype(np.uint8)
            powers = rng.integers(122, 126, (len(value), value.shape[1] // 32)).astype(np.uint8)
            held[name] = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8)
            values[name] = fp4[codes] * np.ldexp(np.float32(1), powers.astype(int) - 127).repeat(32, 1)
        elif (
            re.search(r"(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w\d)$", module)
            and "compressor" not in module
        ):
            eight = (value * 64).astype(ml_dtypes.float8_e4m3fn)
            powers = np.full((-(-len(value) // 128), -(-value.shape[1] // 128)), 121, np.uint8)
            held[name], values[name] = eight, eight.astype(np.float32) / 64
        else:
            held[name] = values[name] = value
            continue
        held[f"{module}.scale"] = powers.view(ml_dtypes.float8_e8m0fnu)
    about = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    found = copied(plain, tmp_path / "fp8", held, quantization_config=about, expert_dtype="fp4")
    np.testing.assert_array_equal(logits(found), logits(copied(plain, tmp_path / "floats", values)))
    kept = load_model(found, ReferenceBackend())
    assert kept.info.quantized
    assert np.isfinite(Session(kept, ReferenceBackend()).feed(PROMPT)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table + 6, "names experts beyond the 6"),
        (lambda table: table - 1 - table.max(), "names experts beyond the 6"),
        (lambda table: table.astype(np.float32), "tid2eid is float32; supported are int32, int64"),
        (lambda table: table[:-1], "tid2eid is"),
    ],
)
def test_a_table_that_names_no_expert_is_refused(plain: Path, change: Any, message: str) -> None:
    file = plain / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.ffn.gate.tid2eid"
    save_file({**tensors, name: np.ascontiguousarray(change(tensors[name]))}, file)
    with pytest.raises(ModelError, match=message):
        load_model(plain, ReferenceBackend())


def test_tokens_of_adapters_have_no_row_in_the_table() -> None:
    spec = read_model(config_of(V4, {}))[0]
    with pytest.raises(
        ConfigError, match="--lora-extra-vocab-size: DeepseekV4ForCausalLM has a table of tokens"
    ):
        spec.with_spare_tokens(4)


@pytest.mark.parametrize("family", [V4, GLM])
def test_rows_of_all_kinds_of_cache_give_finite_logits(family: str, tmp_path: Path) -> None:
    directory, backend = write_checkpoint(tmp_path / "model", family), ReferenceBackend()
    model = load_model(directory, backend)
    exact = Session(model, backend).feed(PROMPT)
    near = Session(model, backend, kv_dtype="int8").feed(PROMPT)
    assert np.median(np.abs(near - exact)) < 0.2 * exact.std()


def test_layers_that_predict_further_tokens_are_refused_by_name(tmp_path: Path) -> None:
    directory, backend = write_checkpoint(tmp_path / "model", GLM), ReferenceBackend()
    with pytest.raises(ModelError, match="Glm5NextForCausalLM read several residual streams"):
        read_mtp(backend, load_model(directory, backend), False)
