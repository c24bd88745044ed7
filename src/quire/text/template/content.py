"""Finds out from a template's syntax tree which content of messages it expects."""

from __future__ import annotations

from jinja2 import nodes


def reads_parts(tree: nodes.Template) -> bool:
    """Whether some loop runs over a message's content, also through variables and parameters of macros."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    while True:
        before = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                given = zip(macros[call.node.name].args, call.args, strict=False)
                names.update(param.name for param, arg in given if _is_content(arg, names))
        if len(names) == before:
            break
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def needs_parts(tree: nodes.Template) -> bool:
    """Whether a template reads content as parts and never asks whether it is a string."""
    tests = {test.name for test in tree.find_all(nodes.Test)}
    return reads_parts(tree) and not tests & {"string", "iterable", "sequence", "mapping"}


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
