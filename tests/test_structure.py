"""Holds the shape of the house: imports go one way, none hide in functions, files and functions stay small."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import get_args

import pytest

import quire
from quire.devices.registry import Isa

ROOT = Path(quire.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Each is a folder that plugs into the engine, which imports it by name when an option or a request asks for it.
FEATURES = {"lora", "grammar", "spec_decode", "pooling", "processors", "program", "ranks"}
# Each part may import parts of lower levels, and itself.
LEVELS = [
    {"errors", "lazy"},
    {
        "cgroups",
        "files",
        "fields",
        "hooks",
        "meter",
        "progress",
        "shapes",
        "shares",
        "sockets",
        "spelling",
        "state_rows",
    },
    {"pretrained"},
    {"params", "steps", "types", "radix", "logits_processor"},
    {"weights.types"},
    {"devices"},
    {"options"},
    {"feature options"},
    {"config"},
    {"flags"},
    {"sched", "text"},
    {"weights"},
    {"model"},
    {"runtime"},
    {"engine"},
    FEATURES,
    {"client"},
    {"llm", "build", "convert", "serve", "cluster", "quantize", "exits"},
    {"cli"},
    {"bench", "commands"},
]
# What devices know of weights: quantized tensors, their layouts and inputs, but no checkpoint and no reader.
WEIGHT_TYPES = {"tensor", "layouts", "schemes", "activations"}
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
# Parts of one level that may know each other, one way.
ALLOWED = {
    ("logits_processor", "params"),
    ("config", "errors"),
    ("lazy", "errors"),
    ("meter", "progress"),
    ("progress", "meter"),
    ("types", "params"),
    ("types", "steps"),
    ("commands", "bench"),
    ("program", "grammar"),
    ("ranks", "lora"),
    ("cluster", "serve"),
}
# The only modules of devices/ that other parts import: no backend is named outside.
DEVICE_NEUTRAL = {
    "adapters",
    "artifacts",
    "choices",
    "drafts",
    "exchanges",
    "foreign",
    "graph",
    "ops",
    "protocol",
    "recurrent_ops",
    "relative_ops",
    "stream_ops",
    "registry",
    "sampling",
    "hidden",
    "host",
    "inputs",
    "processed",
    "shared",
    "sparse_ops",
    "vectors",
}
ISAS = set(get_args(Isa)) - {"auto"}
# Optional extras and name-on-demand imports, in one place each.
INNER_IMPORTS: set[str] = set()


def part_of(path: Path) -> str:
    return part(*(name.removesuffix(".py") for name in path.relative_to(ROOT).parts))


def part(name: str, *inner: str) -> str:
    """The part that a module of `quire` belongs to."""
    if inner[:1] and (name == "weights" and inner[0] in WEIGHT_TYPES):
        return "weights.types"
    if name in FEATURES and inner[:1] == ("options",):
        return "feature options"
    return name


def imported_modules(tree: ast.AST) -> set[str]:
    """Every module that is imported, now or by a Lazy later, and every name imported from one."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Lazy", "lazy_methods"):
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def imported(tree: ast.AST) -> set[str]:
    """The parts of quire that are imported."""
    return {part(*name.split(".")[1:]) for name in imported_modules(tree) if name.startswith("quire.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    for other in imported(ast.parse(path.read_text())) - {part, "_native", "__version__"}:
        assert other in LEVEL, f"{path}: {other} has no place in the import order"
        below = LEVEL[other] < LEVEL[part] or (part, other) in ALLOWED
        assert below, f"{path}: {part} must not import {other}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if part_of(p) != "devices"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_only_devices_knows_a_backend(path: Path) -> None:
    for module in imported_modules(ast.parse(path.read_text())):
        if module.startswith("quire.devices."):
            assert module.split(".")[2] in DEVICE_NEUTRAL, f"{path} imports {module}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in ISAS, f"{path}:{node.lineno} names {node.value}"
            assert not node.value.startswith("quire.devices."), f"{path}:{node.lineno} names {node.value}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_import_hides_in_a_function(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
            assert not inner or str(path.relative_to(ROOT)) in INNER_IMPORTS, (
                f"{path}:{node.name} imports inside"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= 500, f"{path} has more than 500 lines: it is two things"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 80, f"{path}:{node.name} has {length} lines"


def test_import_is_light_and_never_brings_torch() -> None:
    heavy = {"torch", "triton", "transformers", "fastapi", "jinja2", "llguidance", "rich", "asyncio"}
    code = f"import sys; from quire import LLM; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_imports_no_command_and_no_library() -> None:
    heavy = {
        "torch",
        "triton",
        "transformers",
        "fastapi",
        "jinja2",
        "llguidance",
        "rich",
        "asyncio",
        "tokenizers",
        "uvicorn",
    }
    code = f"""
import sys
from quire import cli
cli.main(["--help"])
print(sorted({heavy!r} & set(sys.modules)), [name for name in sys.modules if name.startswith("quire.commands.")])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[] []"


def test_import_brings_no_family_of_models() -> None:
    """Families are imported when one of their models is loaded; what they share is what the registry needs."""
    shared = {"classifiers", "composite", "config", "family", "names", "rope"}
    start = "quire.model.families."
    code = f"import sys; from quire import LLM; print(*[m for m in sys.modules if m.startswith({start!r})])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.removeprefix(start) for name in result.stdout.split()} <= shared


def loaded_lines(code: str) -> tuple[int, set[str]]:
    """The lines of all modules of quire that a run of `code` imports, and their parts."""
    code += f"""
import sys
import tokenize
from pathlib import Path
root = Path({str(ROOT)!r})
files = {{Path(m.__file__) for n, m in sys.modules.items() if n.split(".")[0] == "quire" and m.__file__}}
files = [f for f in files if f.suffix == ".py" and root in f.parents]
print(sum(len(f.read_text().splitlines()) for f in files), *[f.relative_to(root) for f in files])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines, *files = result.stdout.splitlines()[-1].split()
    return int(lines), {str(file).removesuffix(".py").replace("/", ".") for file in files}


GENERATE = "from quire import LLM; LLM(max_model_len=64, threads=1).generate(['Once'], use_tqdm=False)"
# Before the first request: the process of `quire serve`, and that of its engine.
SERVER = """
from quire.client.client import AsyncEngine, ClientOptions
from quire.client.metrics import Metrics
from quire.commands.serve import EngineConfig, ServerConfig
from quire.serve import served, server
config = EngineConfig()
engine = AsyncEngine(config, ClientOptions(), Metrics("", "vllm:"))
served.prepare(engine, ServerConfig())
"""
ENGINE = """
from quire.config import EngineConfig
from quire.engine import process
process._load_maker("quire.client.start").start_core(EngineConfig.from_options(max_model_len=64, threads=1))
"""
MOST_LINES = {"generate": 20_660, "server": 21_070, "engine": 18_270}
"""Lines that a run imports at most. The aim is 15,000 for generate: lower a bound when less is imported."""
SPINE_ONLY = ("weights.gguf.", "weights.readers.", "text.formats.", "text.output.", "serve.")


@pytest.mark.parametrize(
    ("run", "code"),
    [("generate", GENERATE), ("server", SERVER), ("engine", ENGINE)],
    ids=["generate", "server", "engine"],
)
def test_a_plain_run_imports_no_feature(run: str, code: str) -> None:
    lines, modules = loaded_lines(code)
    assert lines <= MOST_LINES[run]
    for module in modules - {"program.frames"}:
        name, *inner = module.split(".")
        assert name not in FEATURES or inner in (["__init__"], ["options"]), f"{module} is imported"
        if run != "server":
            assert not module.startswith(SPINE_ONLY) or module.endswith("__init__"), f"{module} is imported"


# Lines of Python at most, of a feature and of the package.
# The aims are 2,500 and 62,000: lower a bound when less is left.
MOST_OF_FEATURE = {"program": 3_480, "spec_decode": 2_598}
MOST_OF_PACKAGE = 98_350


def count_lines(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in folder.rglob("*.py"))


def test_the_package_and_its_features_stay_small() -> None:
    for feature in FEATURES:
        assert count_lines(ROOT / feature) <= MOST_OF_FEATURE.get(feature, 2_500), f"{feature} has grown"
    assert count_lines(ROOT) <= MOST_OF_PACKAGE, "the package has grown: take something out first"


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_each_feature_can_be_taken_out(feature: str, tmp_path: Path) -> None:
    """The rest imports, starts a server and an engine, and generates what it generates with the feature."""
    package = tmp_path / "quire"
    package.mkdir()
    for path in ROOT.iterdir():
        if path.name not in (feature, "__pycache__"):
            (package / path.name).symlink_to(path)
    (package / feature).mkdir()
    for path in (ROOT / feature).glob("*.py"):
        if path.stem in ("__init__", "options"):  # its options are a section of the configuration
            (package / feature / path.name).symlink_to(path)
    for code in (SERVER, ENGINE):
        run_with(tmp_path, code)
    assert run_with(tmp_path, ANSWERS) == run_with(ROOT.parent, ANSWERS)


ANSWERS = """
from quire import LLM, SamplingParams
llm = LLM(max_model_len=256, threads=1)
print(llm.__class__.__module__)
params = SamplingParams(n=2, seed=3, max_tokens=12, logprobs=2)
prompts = ["Once upon a time", "The", "A dog and a cat"]
together = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
assert together == [llm.generate(prompt, params, use_tqdm=False)[0].outputs for prompt in prompts]
print([sample.token_ids for samples in together for sample in samples])
"""


def run_with(place: Path, code: str) -> str:
    """What `code` prints with the package quire that lies in `place`."""
    environment = {**os.environ, "PYTHONPATH": str(place)}
    check = f"import quire; assert quire.__file__.startswith({str(place)!r}), quire.__file__\n"
    run = [sys.executable, "-c", check + code]
    result = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


# Where an expression is no literal, and why no file and no request can make it slow. Expressions of files are
# for weights/expressions.py, which matches them in linear time.
MADE_EXPRESSIONS = {
    "grammar/quoted.py": "classes of a request's grammar, each compared with one character",
    "grammar/tags.py": "names, escaped",
    "model/families/names.py": "written in families, with escaped names",
    "program/language/expressions.py": "compiled for its error alone, in the user's own process",
    "text/stop_strings.py": "a class of characters, escaped",
    "text/output/literals.py": "made of constants",
    "text/output/reader.py": "a class of characters, escaped",
    "weights/expressions.py": "a class of an expression, compared with one character",
}


def test_expressions_of_files_and_requests_are_matched_in_linear_time() -> None:
    made = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("re", "fnmatch", "sre_parse"), f"{path}: import the module itself"
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            if called.startswith("fnmatch."):
                made.add(path.relative_to(ROOT).as_posix())
            literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
            if called.startswith("re.") and called != "re.escape" and not literal:
                made.add(path.relative_to(ROOT).as_posix())
    assert made == set(MADE_EXPRESSIONS)


def test_no_call_of_transformers_may_run_a_directory_s_code() -> None:
    """Each says so itself: what is left out becomes a question, which a "y" on standard input answers."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                if node.func.attr == "from_pretrained" or (
                    node.func.attr == "from_config" and "Auto" in called
                ):
                    given = [ast.unparse(k.value) for k in node.keywords if k.arg == "trust_remote_code"]
                    assert given == ["False"], (
                        f"{path}:{node.lineno}: {called} without trust_remote_code=False"
                    )


RIDDLE = re.compile(
    r"\bso many\b|\bwhoever\b|\blest\b|\b[Ww]hat (a|an|the|its|each|every)\b.{1,40}\bhas of\b"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_is_plain(path: Path) -> None:
    text = path.read_text()
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    prose = [token.string for token in tokens if token.type == tokenize.COMMENT]
    # A docstring, of a constant too, is a string that is a statement by itself.
    bare = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    prose += [node.value for node in bare if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [found[0] for part in prose if (found := RIDDLE.search(part))] == []
