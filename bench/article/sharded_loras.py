"""What adapters of high ranks cost long prompts, in one process and divided between two."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from bench.article.study import GUIDE, Claim, Result, Setting, Study, seconds
from bench.lora import write_adapter
from quire import LoRARequest
from quire.engine.directory import model_directory
from quire.llm import LLM

RANKS = (8, 64, 256)
LENGTHS = (64, 512, 2048)
PLACES = {"one process": (1, False), "two ranks": (2, False), "two ranks, --fully-sharded-loras": (2, True)}


def measure(setting: Setting) -> Result:
    model, longest = model_directory(setting.config.model), setting.longest()
    lengths = sorted({min(length, longest - 2) for length in LENGTHS})
    ranks = RANKS[: max(1, round(len(RANKS) * setting.scale))]
    rows: list[tuple[str | float, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in ranks:
            write_adapter(model, Path(folder) / str(rank), rank, rank)
        for place, (size, sharded) in PLACES.items():
            found = setting.once(
                place,
                partial(_costs, setting, folder, ranks, lengths, size, sharded),
            )
            rows += [(place, *row) for row in found]
    worst = max(float(row[-1]) for row in rows)
    return Result(
        ("where", "prompt", "rank", "base, tokens/s", "adapter, tokens/s", "times the base's"),
        rows,
        f"An adapter makes prompts take up to {worst:.2f} times as long. The flag changes nothing: each rank "
        "computes its share of both matrices of an adapter either way.",
        "Random adapters on all linear layers; prompts alone, one token of output, the better of two runs.",
    )


def _costs(
    setting: Setting, folder: str, ranks: tuple[int, ...], lengths: list[int], size: int, sharded: bool
) -> list[list[float]]:
    """Measure each length and rank: tokens a second of the base and of the adapter, and their ratio."""
    lora = {"enable_lora": True, "max_loras": len(ranks), "max_lora_rank": max(ranks)}
    options = {"lora": {**lora, "fully_sharded_loras": sharded}, "parallel": {"tensor_parallel_size": size}}
    found = []
    with setting.llm(**options) as llm:
        for length in lengths:
            base = _prompt_seconds(setting, llm, length, None)
            for number, rank in enumerate(ranks):
                named = LoRARequest(str(rank), number + 1, str(Path(folder) / str(rank)))
                adapted = _prompt_seconds(setting, llm, length, named)
                found.append([length, rank, length / base, length / adapted, adapted / base])
    return found


def _prompt_seconds(setting: Setting, llm: LLM, length: int, adapter: LoRARequest | None) -> float:
    """Measure a prompt; the adapter is loaded before."""
    taken = []
    for _ in range(3):
        prompt = setting.prompt(llm, length)
        taken.append(seconds(llm, [prompt], [1], adapter))
    return min(taken[1:])


STUDY = Study(
    "Adapters of high ranks, divided among ranks",
    (Claim("--fully-sharded-loras is faster at long sequences and high ranks", (GUIDE,)),),
    measure,
)
