"""Prints docs/compat-sglang.md: `python -m quire_compat.sglang.page > docs/compat-sglang.md`."""

from __future__ import annotations

from quire.serve.field_docs import section
from quire_compat.sglang.fields import GENERATE, SAMPLING
from quire_compat.sglang.flags import FOREIGN, NAMES, meaning
from quire_compat.sglang.scoring import LABELS

HEAD = """# SGLang's flags and fields

<!-- Printed by `python -m quire_compat.sglang.page`. -->

They come with the package [`quire-compat`](compat.md): `pip install . ./compat`.

## Flags

`python -m sglang.launch_server`, `sglang serve` and `sglang.Engine(...)` take these options. So does `quire serve`, but
a flag that vLLM has too means what it means there.

| Flag | Here | Option of Quire, or why |
|---|---|---|
"""
GENERATE_HEAD = """
## /generate

With `quire-compat` installed, a server has `/generate`, `/get_model_info` and `/flush_cache` beside Quire's endpoints.
Its `/tokenize` takes a list of prompts too, which it answers with lists. Choices of `/v1/completions` and
`/v1/chat/completions` have `matched_stop`: the text or token that ended them.

"""
SAMPLING_HEAD = """
## sampling_params of /generate

Defaults are SGLang's (temperature 1, 128 new tokens), not the model's own.

"""
SCORE_HEAD = """
## /v1/score

With these fields a score is the probability of a token after a prompt. Quire's own body scores pairs of texts as ever.

"""


def page() -> str:
    """Write the text of docs/compat-sglang.md."""
    rows = "".join(_row(name) for name in NAMES)
    return (
        HEAD
        + rows
        + GENERATE_HEAD
        + section(GENERATE)
        + SAMPLING_HEAD
        + section(SAMPLING)
        + SCORE_HEAD
        + section(LABELS)
    )


def _row(name: str) -> str:
    flag = FOREIGN.get(name)
    if flag is None:
        fate, why = "option", f"`{meaning(name)}`"
    else:
        nearest = f"; nearest is {flag.nearest}" if flag.nearest else ""
        fate, why = flag.fate, f"{flag.why[0].upper()}{flag.why[1:]}{nearest}."
    return f"| `--{name.replace('_', '-')}` | {fate} | {why.replace('|', '/')} |\n"


if __name__ == "__main__":
    print(page(), end="")
