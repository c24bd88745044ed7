"""The drawings of docs are what the scheduler does today."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

PLACE = Path(__file__).parents[1] / "docs" / "images" / "drawings.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawings", PLACE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_makes_the_drawings_of_the_docs() -> None:
    module = script()
    made = dict(module.drawings())
    assert {path.name: path.read_text() for path in module.FOLDER.iterdir()} == made
    for text in made.values():
        assert ET.fromstring(text).tag.endswith("svg")
        assert len(text) < 8000
    shown = "".join(page.read_text() for page in PLACE.parents[1].glob("*.md"))
    for name in made:
        theme = name.removesuffix(".svg").rpartition("-")[2]
        assert f"(images/drawings/{name}#gh-{theme}-mode-only)" in shown


def test_a_stream_has_a_token_in_every_step_beside_a_prompt() -> None:
    module = script()
    machine = module.Machine(4, budget=8)
    machine.add("stream", [1, 2], 9)
    machine.step()
    machine.add("prompt", list(range(10, 34)), 1)
    while len(machine.names) < 2:
        machine.step()
    for _ in range(2):
        batch = machine.step()
        sizes = {machine.names[seq.slot]: len(seq.tokens) for seq in batch.seqs}
        assert sizes == {"stream": 1, "prompt": 7}
