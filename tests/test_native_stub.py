"""Types of the native module: the package ships them, and they are those of the module that was built."""

import ast
from pathlib import Path

from nanobind.stubgen import StubGen

import quire
from quire import _native

PACKAGE = Path(quire.__file__).parent


def test_stub_is_current() -> None:
    """`make stub` writes it again."""
    generator = StubGen(_native)
    generator.put(_native)
    assert ast.dump(ast.parse((PACKAGE / "_native.pyi").read_text())) == ast.dump(ast.parse(generator.get()))


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
