"""RecurrentGemma, which is Griffin (De et al. 2024, arXiv:2402.19427): a gated recurrence, and windows of attention."""

from __future__ import annotations

import numpy as np

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, num_layers, read_activation, read_decoder
from quire.model.families.gemma import GEMMA_NAMES, cap
from quire.model.families.mamba import LONGEST
from quire.model.families.rope import rotary_dim
from quire.model.parts.decoder import DecoderConfig

RECURRENCE = "gated_recurrence"
BLOCKS = {"recurrent": RECURRENCE, "attention": "attention"}


def read_recurrent_gemma(config: ConfigReader) -> DecoderConfig:
    """Botev et al. 2024, arXiv:2404.07839. Blocks repeat; half of a head turns; the MLP is half of what is said."""
    hidden, heads, inner = map(config.integer, ("hidden_size", "num_attention_heads", "intermediate_size"))
    width = config.optional_integer("lru_width") or hidden
    for key, size, parts in (
        ("lru_width", width, heads),
        ("hidden_size", hidden, heads),
        ("intermediate_size", inner, 2),
    ):
        if size % parts:
            raise config.wrong(key, size, f"a multiple of {parts}")
    config.expect("head_dim", hidden // heads)
    config.expect("embeddings_scale_by_sqrt_dim", True)
    blocks = config.get("block_types")
    if not isinstance(blocks, list) or not blocks or any(block not in list(BLOCKS) for block in blocks):
        raise config.wrong("block_types", blocks, f"a list of {', '.join(BLOCKS)}")
    activation = read_activation(config, "hidden_activation")
    recurrence = {
        "num_heads": heads,
        "size": width // heads,
        "taps": config.integer("conv1d_width", low=2, high=64),
        "activation": activation,
    }
    return read_decoder(
        config,
        max_position=LONGEST,
        rotated=rotary_dim(config, hidden // heads, 0.5),
        activation=activation,
        embedding_scale=_rounded(hidden**0.5),
        attention_qkv_bias=config.boolean("attention_bias"),
        attention_out_bias=True,
        scores_window=config.integer("attention_window_size"),
        mlp_bias=True,
        intermediate_size=inner // 2,
        head_cap=cap(config, "logits_soft_cap"),
        kinds=[BLOCKS[blocks[i % len(blocks)]] for i in range(num_layers(config))],
        mixers={RECURRENCE: recurrence},
    )


def _rounded(value: float) -> float:
    """Round to bfloat16, as which the class keeps the number."""
    bits = int(np.float32(value).view(np.uint32))
    return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))


FAMILIES = {
    "RecurrentGemmaForCausalLM": Family(
        "RecurrentGemma 2B, 9B",
        read_recurrent_gemma,
        GEMMA_NAMES.changed(
            {
                "norm": "model.final_norm",
                "attention_norm": "temporal_pre_norm",
                "mlp_norm": "channel_pre_norm",
                "gated_recurrence": "temporal_block.",
                "rates": "softplus",
                **{f"attention.{name}": f"temporal_block.{name}_proj" for name in "qkv"},
                "attention.out": "temporal_block.o_proj",
                **{f"mlp.{name}": f"mlp_block.{name}_proj" for name in ("gate", "up", "down")},
            }
        ),
        {
            "num_key_value_heads": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "block_types": ["recurrent", "recurrent", "attention"],
            "attention_window_size": 2048,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        unused="w_init_variance_scale final_w_init_variance_scale",
    )
}
