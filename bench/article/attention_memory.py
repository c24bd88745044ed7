"""The working memory of attention: tiles beside a matrix of all scores."""

from __future__ import annotations

from bench.article.curves import Curves
from bench.article.study import ENGINES, Claim, Result, Setting, Study
from quire.engine.plan import plan_engine
from quire.errors import ConfigError
from quire.model.parts.decoder import DecoderConfig

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def measure(setting: Setting) -> Result:
    rows: list[tuple[str | float, ...]] = []
    curves: dict[str, list[tuple[float, float]]] = {"tiles": [], "all scores": []}
    most = setting.longest()
    for length in LENGTHS:
        if length > most and rows:
            break
        length = min(length, most)
        scheduler = {"max_num_seqs": 1, "max_num_batched_tokens": length}
        plan = plan_engine(setting.with_options(model={"max_model_len": length}, scheduler=scheduler))
        spec = plan.model.spec
        if not isinstance(spec, DecoderConfig):
            raise ConfigError("attention-memory needs a model that Quire runs natively")
        tiles, scores = plan.memory.workspace / 1e6, 4 * spec.num_heads * length**2 / 1e6
        rows.append((f"{length:,}", tiles, 1e3 * tiles / length, scores, f"{scores / tiles:.1f} x"))
        curves["tiles"].append((length, tiles))
        curves["all scores"].append((length, scores))
    return Result(
        ("tokens", "workspace, MB", "KB per token", "one layer's scores, MB", ""),
        rows,
        f"The workspace of a step grows with its tokens ({rows[0][2]:.1f} to {rows[-1][2]:.1f} KB each), the matrix "
        "of all scores with their square.",
        "The workspace, all layers' activations included, is that of the memory plan for a prompt in one step; "
        "scores in float32. A step has at most --max-num-batched-tokens tokens, so in service it does not grow with "
        "the prompt at all.",
        Curves("tokens", "MB", curves),
    )


STUDY = Study(
    "Memory of attention",
    (
        Claim("FlashAttention needs memory O(N) instead of O(N^2)", (ENGINES,)),
        Claim(
            "FlashAttention 3 is 2.6 times as fast as 2",
            (ENGINES,),
            "Its paper gives 1.5 to 2.0; 2.6 is how much smaller its numerical error in FP8 is.",
        ),
    ),
    measure,
)
