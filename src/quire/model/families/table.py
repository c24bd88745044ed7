"""The table of families in docs/models.md. `python -m quire.model.families.table` prints it."""

from __future__ import annotations

from quire.model.families import DECODERS, load_family

HEAD = "| architecture | model_type | models | runs |\n|---|---|---|---|\n"
OTHERS = (
    "| any other causal language model of `transformers` | | those whose layers keep keys and values alone | "
    "through `quire[transformers]` |\n"
)


def markdown() -> str:
    """A row for each family, in the order of the registry, and one for all that is not a family."""
    families = ((name, load_family(name)) for name in DECODERS)
    rows = (f"| {name} | {family.model_type} | {family.models} | natively |\n" for name, family in families)
    return HEAD + "".join(rows) + OTHERS


if __name__ == "__main__":
    print(markdown(), end="")
