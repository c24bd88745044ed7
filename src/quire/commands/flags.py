"""Prints docs/flags.md: `python -m quire.commands.flags > docs/flags.md`."""

from __future__ import annotations

from dataclasses import fields

from quire.config import SECTIONS, EngineConfig
from quire.flags.table import engine_flags, vllm_data
from quire.serve.options import ServerConfig

HEAD = """# vLLM's flags

`quire serve` and `LLM(...)` take vLLM's launch lines. This page lists every flag of `vllm serve` 0.32:

- **option**: it does here what it does there.
- **accepted**: it changes no result here. One line on standard error says why.
- **refused**: it would change a result. The error names the nearest option. `accepted if 1` means that this value is
  accepted and all others are refused.

Values are written as vLLM takes them: several values after one flag (`--served-model-name a b`), JSON lists
(`--allowed-origins '["http://ui"]'`), sizes (`--max-model-len 4k` is 4000, `4K` is 4096), `--dtype half`, underscores
(`--max_model_len`), `--no-` before switches, and dotted keys of JSON options (`--hf-overrides.rope_theta 1e6`).

A launch line of vLLM's, as it is:

    quire serve --enforce-eager --tensor-parallel-size 2 --max-model-len 1k --dtype half \\
        --served-model-name stories tales --disable-log-requests

The table is `quire/flags/vllm.yaml`; `python -m quire.commands.flags` prints this page.

| Flag | Here | Why, or what it does |
|---|---|---|
"""


def page() -> str:
    """Make the text of docs/flags.md."""
    helps = {
        f.name: str(f.metadata["help"]) for part in (*SECTIONS.values(), ServerConfig) for f in fields(part)
    }
    helps["seed"] = str(next(f.metadata["help"] for f in fields(EngineConfig) if f.name == "seed"))
    helps["config"] = "YAML file of options; flags override it."
    lines = {name: ("option", helps.get(name, "")) for name in vllm_data()["options"].split()}
    older: dict[str, tuple[str, str]] = {}
    for flag in engine_flags().values():
        if flag.name in helps:  # an option of the server; only LLM(...) does nothing with it
            lines[flag.name] = ("option", helps[flag.name])
            continue
        nearest = f"; nearest is {flag.nearest}" if flag.nearest else ""
        (older if flag.older else lines)[flag.name] = (flag.fate, flag.why + nearest + ".")
    rows = [_row(name, *lines[name]) for name in sorted(lines)]
    end = "\nFlags of earlier versions:\n\n| Flag | Here | Why |\n|---|---|---|\n"
    return HEAD + "".join(rows) + end + "".join(_row(name, *older[name]) for name in sorted(older))


def _row(name: str, fate: str, why: str) -> str:
    text = why[0].upper() + why[1:] if why else ""
    return f"| `--{name.replace('_', '-')}` | {fate} | {text.replace('|', '/')} |\n"


if __name__ == "__main__":
    print(page(), end="")
