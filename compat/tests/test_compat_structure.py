"""Other engines' dialects are small modules over Quire's public names; only a network knows the model's own parts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))
OWN = {path.name for path in (ROOT / "src").iterdir()}
# What compat may import of Quire: names that users import too, and the types of their values.
PUBLIC = {
    "quire.build",
    "quire.cli",
    "quire.client",
    "quire.config",
    "quire.convert",
    "quire.engine.local",
    "quire.engine.verbs",
    "quire.errors",
    "quire.flags",
    "quire.llm",
    "quire.logits_processor",
    "quire.params",
    "quire.program",
    "quire.types",
}
# What an endpoint is made of: `quire.serve.endpoints.Dialect` registers it.
SERVING = {"quire.engine.directory", "quire.serve", "quire.text.tokenizer"}
# What reads a network written in Python makes what a family makes of a checkpoint.
OPENS_NETWORKS = {"quire.devices.protocol", "quire.engine.source", "quire.model", "quire.weights"}
NETWORKS = {"tensorrt_llm/layers.py", "tensorrt_llm/lowering.py"}


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_are_thin(path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)
    assert source.count("\n") <= 500
    for name in imports(tree):
        if name.partition(".")[0] == "quire":
            place = path.relative_to(ROOT / "src")
            allowed = PUBLIC | (OPENS_NETWORKS if str(place) in NETWORKS else set())
            allowed |= SERVING if place.parts[0] == "quire_compat" else set()
            public = any(name == one or name.startswith(f"{one}.") for one in allowed)
            assert name == "quire" or public, f"{path} imports {name}, which is not public"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 80
            inner = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
            assert not inner, f"{path}:{node.name} imports inside"


def test_quire_never_imports_the_names() -> None:
    for path in Path(quire.__file__).parent.rglob("*.py"):
        for name in imports(ast.parse(path.read_text())):
            assert name.partition(".")[0] not in OWN, f"{path} imports {name}"
