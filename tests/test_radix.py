"""The radix tree against a plain dict of keys, and what each call says it changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.radix import RadixTree

KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def shape(tree: RadixTree[int]) -> list[tuple[int, list[int], int | None]]:
    return [(node.depth, list(node.edge), node.value) for node in tree.walk()]


def common(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


class AgainstDict(RuleBasedStateMachine):
    """The same calls on a tree and on a dict from keys to values."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: RadixTree[int] = RadixTree()
        self.model: dict[tuple[int, ...], int] = {}
        self.nodes: dict[tuple[int, ...], object] = {}

    @rule(key=KEYS, value=st.integers())
    def insert(self, key: list[int], value: int) -> None:
        node = self.tree.insert(key, value)
        assert node.value == self.model.setdefault(tuple(key), value)
        assert node.depth == len(key)
        assert self.nodes.setdefault(tuple(key), node) is node

    @rule(key=KEYS, cut=st.integers(0, 8), value=st.integers())
    def insert_below(self, key: list[int], cut: int, value: int) -> None:
        upper = tuple(key[:cut])
        rest = key[cut:]
        if upper in self.model and rest:
            node = self.tree.insert(rest, value, self.nodes[upper])  # type: ignore[arg-type]
            assert node.value == self.model.setdefault(tuple(key), value)
            assert self.nodes.setdefault(tuple(key), node) is node

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.model:
            key = data.draw(st.sampled_from(sorted(self.model)))
            del self.model[key]
            self.tree.remove(self.nodes.pop(key))  # type: ignore[arg-type]

    @rule(key=KEYS)
    def match(self, key: list[int]) -> None:
        before = shape(self.tree)
        node, length = self.tree.match(key)
        assert shape(self.tree) == before
        assert length == max((common(key, list(k)) for k in self.model), default=0)
        assert node.depth - len(node.edge) < length <= node.depth or node is self.tree.root

    @invariant()
    def same_content(self) -> None:
        self.tree.check()
        found, paths = {}, {}
        for node in self.tree.walk():
            paths[node] = (*(paths[node.parent] if node.parent else ()), *node.edge)
            if node.value is not None:
                found[paths[node]] = node
        assert {key: node.value for key, node in found.items()} == self.model
        assert all(found[key] is node for key, node in self.nodes.items())
        assert len(paths) <= 2 * len(self.model) + 1


AgainstDict.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstDict = AgainstDict.TestCase


def test_match_ends_inside_an_edge_without_splitting_it() -> None:
    tree: RadixTree[str] = RadixTree()
    leaf = tree.insert([1, 2, 3, 4], "a")
    assert tree.match([1, 2, 9]) == (leaf, 2)
    assert tree.match([1, 2, 3, 4, 5]) == (leaf, 4)
    assert tree.match([7]) == (tree.root, 0)
    assert tree.match([]) == (tree.root, 0)
    assert len(list(tree.walk())) == 2


def test_split_keeps_the_lower_node_and_makes_a_branch_point() -> None:
    tree: RadixTree[str] = RadixTree()
    leaf = tree.insert([1, 2, 3], "a")
    upper = tree.split(leaf, 1)
    assert (upper.edge, upper.depth, upper.value) == ([1], 1, None)
    assert (leaf.edge, leaf.depth, leaf.value, leaf.parent) == ([2, 3], 3, "a", upper)
    for at in (0, 2):
        with pytest.raises(ValueError, match="cannot split"):
            tree.split(leaf, at)
    with pytest.raises(ValueError, match="cannot split"):
        tree.split(tree.root, 0)


def test_branch_points_inherit_values_if_asked_to() -> None:
    tree: RadixTree[set[str]] = RadixTree(inherit=set)
    low = tree.insert("hello world", {"worker 1"})
    branch = tree.insert("hello there", {"worker 2"}).parent
    assert branch is not None
    assert (branch.edge, branch.value) == ("hello ", {"worker 1"})
    assert branch.value is not low.value
    assert tree.match("hello world!") == (low, 11)


def test_remove_merges_what_no_longer_branches() -> None:
    tree: RadixTree[int] = RadixTree()
    a, b = tree.insert("abcd", 1), tree.insert("abxy", 2)
    tree.remove(b)
    assert (a.edge, a.parent) == ("abcd", tree.root)
    assert b.parent is None
    inner = tree.insert("ab", 3)
    tree.remove(inner)
    assert (a.edge, a.depth, a.value) == ("abcd", 4, 1)
    tree.remove(a)
    assert list(tree.walk()) == [tree.root]


@given(keys=st.lists(KEYS, max_size=10))
def test_clear_detaches_every_node(keys: list[list[int]]) -> None:
    tree: RadixTree[int] = RadixTree()
    nodes = [tree.insert(key, 1) for key in keys]
    tree.clear()
    assert list(tree.walk()) == [tree.root]
    assert all(node.parent is None for node in nodes)
