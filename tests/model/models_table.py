"""The table of decoders in docs/models.md, from the families and from what the tests check.

`python -m tests.model.models_table` prints it; tests/model/test_models_page.py compares the page with it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import transformers

from quire.model.families import DECODERS, load_family, read_config
from quire.model.pack import wanted_tensors
from tests.model.tiny_models import FAMILIES, VARIANTS

ROOT = Path(__file__).parents[2]
HEAD = (
    "| architecture | model_type | models | runs | verified against | quantized checkpoints | GGUF | own drafts |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
OTHERS = (
    "| any other causal language model of `transformers` | | those whose layers keep keys and values alone | "
    "through `quire[transformers]` | itself, at each start | none | no | |\n"
)
# Compared with another class of transformers, or with its weights under other names.
KIN = {
    "DeciLMForCausalLM": "Llama",
    "BailingMoeForCausalLM": "AriaText",
    "BailingMoeV2ForCausalLM": "Glm4Moe",
    "Step3p5ForCausalLM": "Step3p7",
}


def tiny_config(family: str) -> dict[str, Any]:
    """The config of a tiny model of the tests, as transformers writes it."""
    name, common = FAMILIES[family]
    own = next(options for kind, options in VARIANTS.values() if kind == family)
    config = getattr(transformers, f"{name}Config")(**{**common, **own})
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def checked() -> dict[str, str]:
    """The family of tiny models that checks each class."""
    found = {}
    for family in FAMILIES:
        values = tiny_config(family)
        kind = values["model_type"]
        for name in DECODERS:
            if load_family(name).model_type == kind:
                found[name] = family
    return found


def gguf_classes() -> set[str]:
    """The classes that the readers of GGUF architectures name."""
    sources = (ROOT / "src" / "quire" / "weights" / "gguf" / "architectures").glob("*.py")
    return {
        name
        for path in sources
        for name in re.findall(r'"(\w+(?:ForCausalLM|LMHeadModel))"', path.read_text())
    }


def facts(name: str, family: str | None) -> tuple[str, str]:
    """Which quantized matrices are read, and whether a layer of the checkpoint drafts."""
    if family is None:
        return "all", ""
    spec, names = read_config({**tiny_config(family), "architectures": [name]})
    stacked = any(not n.endswith((".weight", "bias")) and "expert" in n for n in wanted_tensors(spec, names))
    methods = ", ".join(sorted(load_family(name).quantized))
    readers = f"all; stacked experts: {methods or 'none'}" if stacked else "all"
    drafts = names.is_ignored(f"{names.layer.format(i=spec.num_layers)}eh_proj.weight")
    return readers, "MTP" if drafts else ""


def markdown() -> str:
    """A row for each family, in the order of the registry, and one for all that is not a family."""
    by_class, gguf = checked(), gguf_classes()
    rows = []
    for name in DECODERS:
        family, tiny = load_family(name), by_class.get(name)
        against = f"transformers ({KIN[name]})" if name in KIN else "transformers" if tiny else "its config"
        readers, drafts = facts(name, tiny)
        in_gguf = "yes" if name in gguf else "no"
        known = name, family.model_type, family.models, "natively"
        rows.append(f"| {' | '.join((*known, against, readers, in_gguf, drafts))} |\n")
    return HEAD + "".join(rows) + OTHERS


if __name__ == "__main__":
    print(markdown(), end="")
