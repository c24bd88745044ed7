"""Bytes of KV cache by the formula 2 x layers x KV heads x head_dim x bytes x tokens."""

from __future__ import annotations

from bench.article.configs import LLAMA_2_70B, LLAMA_3_70B, MANY_KV_HEADS, outline
from bench.article.study import GUIDE, LESSON, OPTIMIZE, Claim, Result, Setting, Study

CASES = (
    ("Llama 3 70B", LLAMA_3_70B, 4096),
    ("Llama 2 70B", LLAMA_2_70B, 2048),
    ("the same with 64 KV heads", MANY_KV_HEADS, 2048),
)
CARD = 80.0  # GB of an A100


def measure(setting: Setting) -> Result:
    rows: list[tuple[str | float, ...]] = []
    for name, config, tokens in CASES:
        model = outline(config)
        per_token = model.info.kv_spec(model.info.dtype).bytes_per_token
        rows.append(
            (name, model.spec.num_kv_heads, f"{per_token:,}", f"{tokens:,}", per_token * tokens / 1e9)
        )
    weights = 2 * outline(LLAMA_3_70B).info.num_parameters / 1e9
    return Result(
        ("model", "KV heads", "bytes per token", "tokens", "GB"),
        rows,
        f"4,096 tokens of Llama 3 70B take {rows[0][-1]:.2f} GB, 2,048 of Llama 2 70B {rows[1][-1]:.2f} GB. In 16 bits "
        f"its {weights:.0f} GB of weights leave nothing of {CARD:.0f} GB; 35 GB of 4-bit weights leave "
        f"{0.9 * CARD - 35:.0f} GB at --gpu-memory-utilization 0.9.",
        "Arithmetic, by the code that plans Quire's memory.",
    )


STUDY = Study(
    "KV cache of a 70B model",
    (
        Claim(
            "one request of 4,096 tokens to Llama 3 70B takes 40 GB",
            (OPTIMIZE,),
            "It has 8 KV heads: 1.34 GB. 40 GB hold 122,000 tokens.",
        ),
        Claim("Llama 2 70B has 64 KV heads", (GUIDE,), "It has 64 query heads and 8 KV heads."),
        Claim(
            "a sequence of 2,048 tokens takes 5.24 GB",
            (GUIDE,),
            "With 64 KV heads it would be 5.37 GB, or 5.00 GiB: the text mixes both. With 8 it is 0.67 GB.",
        ),
        Claim("a single sequence needs 5 GB", (GUIDE,), "0.67 GB with the model's 8 KV heads."),
        Claim(
            "35 GB of weights leave 40 GB of an A100 for the cache",
            (GUIDE,),
            "35 GB are 4 bits per weight, not the 16 that the text names; those need 140 GB.",
        ),
        Claim(
            "gpu_memory_utilization is the share of memory for the KV cache",
            (LESSON,),
            "It is the share for weights, workspace and cache together.",
        ),
    ),
    measure,
)
