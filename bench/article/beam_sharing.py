"""KV blocks that the beams of a search share."""

from __future__ import annotations

from bench.article.curves import Curves
from bench.article.study import GUIDE, Claim, Result, Setting, Study
from quire.client.beams import BeamSearchParams
from quire.llm import LLM
from quire.sched import Scheduler

WIDTHS = (2, 4, 6, 8, 16)
PROMPTS = (16, 128)  # tokens


def saved(llm: LLM, prompt: dict[str, list[int]], width: int, outputs: int) -> tuple[float, float]:
    """Mean number of blocks that a search holds per step, and what its beams would hold as copies."""
    distinct = held = steps = 0

    def count(scheduler: Scheduler) -> None:
        nonlocal distinct, held, steps
        tables = scheduler.block_tables
        distinct += len({block for table in tables for block in table})
        held += sum(map(len, tables))
        steps += 1

    llm.watch_steps(count)
    llm.beam_search([prompt], BeamSearchParams(beam_width=width, max_tokens=outputs, ignore_eos=True))
    llm.watch_steps(None)
    return distinct / steps, held / steps


def measure(setting: Setting) -> Result:
    outputs, repeats = setting.count(96, 8), setting.count(8)
    rows: list[tuple[str | float, ...]] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    with setting.llm() as llm:
        for length in PROMPTS:
            for width in WIDTHS:
                found = [saved(llm, setting.prompt(llm, length), width, outputs) for _ in range(repeats)]
                distinct, held = (sum(values) / repeats for values in zip(*found, strict=True))
                share = 1 - distinct / held
                rows.append((f"{length}", width, distinct, held, f"{share:.0%}"))
                curves.setdefault(f"prompts of {length} tokens", []).append((width, 100 * share))
    shares = [y for points in curves.values() for _, y in points]
    return Result(
        ("prompt tokens", "width", "blocks held", "as copies", "saved"),
        rows,
        f"Sharing saves {min(shares):.0f} to {max(shares):.0f}% of the blocks; more with longer prompts and more "
        "beams.",
        f"Beam searches of {outputs} tokens; blocks counted after each step.",
        Curves("beam width", "blocks saved (%)", curves),
    )


STUDY = Study(
    "Blocks that beams share",
    (Claim("sharing blocks saves up to 55% of the memory of a beam search", (GUIDE,)),),
    measure,
)
