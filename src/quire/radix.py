"""A radix tree from key sequences to values. Knows nothing of tokens, blocks or workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

V = TypeVar("V")


class RadixNode(Generic[V]):
    """One edge and its end point.

    `edge` holds the key elements between the parent and this node (empty only at the root); `depth` is their number
    from the root on. `value` is None at pure branch points. A removed node has no parent and no children.
    """

    __slots__ = ("children", "depth", "edge", "parent", "value")

    def __init__(self, edge: Sequence[Hashable], depth: int, parent: RadixNode[V] | None) -> None:
        self.edge = edge
        self.depth = depth
        self.parent = parent
        self.value: V | None = None
        self.children: dict[Hashable, RadixNode[V]] = {}

    def above(self, depth: int) -> RadixNode[V]:
        """Find the lowest node on the path from the root to this one, itself included, that is at most at `depth`."""
        node = self
        while node.depth > depth and node.parent is not None:
            node = node.parent
        return node


def _common(edge: Sequence[Hashable], key: Sequence[Hashable], at: int) -> int:
    """Count the elements of `edge` that equal `key` from `at` on."""
    size = len(edge)
    if key[at : at + size] == edge:
        return size
    size = min(size, len(key) - at)
    for i in range(size):
        if edge[i] != key[at + i]:
            return i
    return size


class RadixTree(Generic[V]):
    """A map from keys to values that finds the longest stored prefix of a key, element by element.

    Keys are slices of one sequence type per tree (all lists, or all str, ...), since edges are compared as
    slices. Invariant: every node but the root has a value or at least two children, so a tree of n values
    has fewer than 2n + 1 nodes. Nodes with a value keep their identity until they are removed: users may
    hold on to them.

    `inherit` makes the value of a new branch point from the value of the node below it; without it, branch points
    have no value.
    """

    def __init__(self, inherit: Callable[[V], V] | None = None) -> None:
        self.root: RadixNode[V] = RadixNode((), 0, None)
        self._inherit = inherit

    def match(self, key: Sequence[Hashable], at: RadixNode[V] | None = None) -> tuple[RadixNode[V], int]:
        """Follow `key` from node `at` (default: the root) as far as it matches. Splits no node.

        Returns (node, length): `length` elements of `key` are in the tree, the last of them on the edge into
        `node`, which may itself lie deeper. Every key below `node` begins with the matched elements.
        """
        node = at or self.root
        length, size = 0, len(key)
        while length < size:
            child = node.children.get(key[length])
            if child is None:
                break
            shared = _common(child.edge, key, length)
            node, length = child, length + shared
            if shared < len(child.edge):
                break
        return node, length

    def insert(self, key: Sequence[Hashable], value: V, at: RadixNode[V] | None = None) -> RadixNode[V]:
        """Store `value` at the end of `key`, counted from node `at` (default: the root); keep a value already there.

        Adds at most one leaf and splits at most one edge, where `key` leaves or ends. Returns the node at the end
        of `key`, whose value shows which one was kept.
        """
        node = at or self.root
        done, size = 0, len(key)
        while done < size:
            child = node.children.get(key[done])
            if child is None:
                child = RadixNode(key[done:], node.depth + size - done, node)
                node.children[key[done]] = child
                node = child
                break
            shared = _common(child.edge, key, done)
            node = child if shared == len(child.edge) else self.split(child, shared)
            done += shared
        if node.value is None and node is not self.root:
            node.value = value
        return node

    def split(self, node: RadixNode[V], at: int) -> RadixNode[V]:
        """Cut the edge into `node` after `at` elements (0 < at < len(edge)) and return the new branch point.

        `node` stays the lower part: its depth, value, children and identity do not change.
        """
        parent = node.parent
        if parent is None or not 0 < at < len(node.edge):
            raise ValueError(f"cannot split an edge of {len(node.edge)} elements after {at}")
        upper: RadixNode[V] = RadixNode(node.edge[:at], parent.depth + at, parent)
        if self._inherit is not None and node.value is not None:
            upper.value = self._inherit(node.value)
        parent.children[node.edge[0]] = upper
        node.edge = node.edge[at:]
        node.parent = upper
        upper.children[node.edge[0]] = node
        return upper

    def remove(self, node: RadixNode[V]) -> None:
        """Remove the value of `node`, and every branch point that then no longer branches.

        A leaf leaves the tree (this is how users evict). A node with several children stays; one with a single child
        merges into that child's edge. No other node loses its value or its identity.
        """
        node.value = None
        while node.value is None and len(node.children) < 2:
            parent = node.parent
            if parent is None:
                return
            first = node.edge[0]
            if node.children:
                (child,) = node.children.values()
                child.edge = node.edge + child.edge  # type: ignore[operator]  # both slices of keys
                child.parent = parent
                parent.children[first] = child
            else:
                del parent.children[first]
            node.parent = None
            node.children = {}
            node = parent

    def walk(self, node: RadixNode[V] | None = None) -> Iterator[RadixNode[V]]:
        """All nodes from `node` (default: the root) down, parents first. Do not change the tree meanwhile."""
        stack = [node or self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def clear(self) -> None:
        """Remove every node but the root."""
        for node in list(self.walk()):
            node.parent = None
            node.children = {}
            node.value = None

    def check(self) -> None:
        """Assert the class's invariants. O(nodes)."""
        for node in self.walk():
            if node is not self.root:
                assert len(node.edge) > 0
                assert node.parent is not None
                assert node.parent.children[node.edge[0]] is node
                assert node.depth == node.parent.depth + len(node.edge)
                assert node.value is not None or len(node.children) > 1
