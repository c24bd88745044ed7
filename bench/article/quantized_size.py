"""What 4 bits save of a 70B model, scales and unquantized tables included."""

from __future__ import annotations

from bench.article.configs import AWQ, LLAMA_3_70B, outline
from bench.article.study import GUIDE, OPTIMIZE, Claim, Result, Setting, Study

CARD = 80e9


GROUP = 128


def measure(setting: Setting) -> Result:
    plain, packed = outline(LLAMA_3_70B), outline({**LLAMA_3_70B, "quantization_config": AWQ})
    count = plain.info.num_parameters
    tables = 2 * plain.spec.vocab_size * plain.spec.hidden_size  # embedding and head
    bits = 4 + 20 / GROUP  # a scale of 16 bits and a zero point of 4 per group
    sizes = {
        "16 bits": 2.0 * count,
        "16 bits, as Quire holds them": float(plain.weight_bytes),
        f"AWQ, groups of {GROUP}": (count - tables) * bits / 8 + 2 * tables,
        "AWQ, as Quire holds it": float(packed.weight_bytes),
    }
    whole, awq = 2.0 * count, sizes[f"AWQ, groups of {GROUP}"]
    rows: list[tuple[str | float, ...]] = [
        (name, size / 1e9, 8 * size / count, f"{1 - size / whole:.0%}", f"{-(-size // CARD):.0f}")
        for name, size in sizes.items()
    ]
    return Result(
        ("weights", "GB", "bits per weight", "saved", "cards of 80 GB"),
        rows,
        f"AWQ makes {whole / 1e9:.0f} GB into {awq / 1e9:.1f} GB, {1 - awq / whole:.0%} less: one card of 80 GB "
        "holds it instead of two.",
        "Arithmetic, and the plan of Quire's memory. With AVX2 or newer it packs bfloat16 in 12 bits, without loss.",
    )


STUDY = Study(
    "Llama 3 70B in 4 bits",
    (
        Claim(
            "AWQ shrinks Llama 3 70B from 140 GB to 35 GB",
            (OPTIMIZE,),
            "35 GB count 4 bits for all weights. Scales and zero points add 0.16 bit each, and embedding and head "
            "stay in 16 bits.",
        ),
        Claim("it fits on one A100 of 80 GB instead of two", (OPTIMIZE,)),
        Claim(
            "weights of a 70B model in FP16 take 35 GB",
            (GUIDE,),
            "They take 140 GB; 35 GB are 4 bits per weight.",
        ),
        Claim("4-bit quantization shrinks a model by 75%", (GUIDE,)),
    ),
    measure,
)
