"""A backward in two parts: to what earlier stages wait for, and to the other parameters.

Autograd's graph of a stage is walked once.  *Early* are the nodes that lead to a wanted leaf: an
entrance, or a parameter whose gradient is passed on.  They run first, and what each early node
got is kept if a parameter hangs on it by an edge that leaves the early nodes.  Later such a node
runs again, for that edge alone.  The sum of a parameter's uses is autograd's own only if autograd
makes it in one run: so a parameter that hangs on several early nodes is wanted early, too.

Wanted early as well are parameters with hooks, those that a Function of Python's uses (it would
run as a whole twice) and those that were written through a view.  A stage with opaque modules is
not split at all: whatever they hang onto the graph runs once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class Entrance:
    """A received value under autograd.

    The stage computes with `value`, a view of a `leaf`: backward has to stop before a leaf, where
    nothing is accumulated.  After backward `gradient` is the summed gradient in the layout of
    autograd's kernels, None if there was none.
    """

    __slots__ = ("_found", "leaf", "value")

    def __init__(self, received: Tensor) -> None:
        self.leaf = received.detach().requires_grad_()
        self.value = self.leaf.view_as(self.leaf)
        self._found: list[Tensor | None] = []
        get_gradient_edge(self.value).node.register_prehook(_keeper(self._found, (None,)))

    @property
    def gradient(self) -> Tensor | None:
        return self._found[0] if self._found else None

    def take(self) -> Tensor | None:
        """The gradient; autograd's graph does not keep it alive from now on."""
        return self._found.pop() if self._found else None


def _keeper(found: list[Tensor | None], passed_on: tuple[None, ...] | None = None) -> Any:
    """A hook that keeps the gradients that a node gets, and passes on these, or others instead.

    It refers to the list alone: a reference to the tensor would keep it alive for ever, because
    Python's collector does not see autograd's nodes.
    """

    def keep(gradients: tuple[Tensor | None, ...]) -> tuple[None, ...] | None:
        found[:] = gradients
        return passed_on

    return keep


Root: TypeAlias = tuple[Tensor | GradientEdge, Tensor | None]  # with its gradient


class Rest:
    """The second part of one microbatch's backward; `run` it once."""

    def __init__(self) -> None:
        self.sent: set[int] = set()  # memory of what the first part gave to others
        self._runs: list[tuple[list[Root], list[Tensor]]] = []  # roots, and the leaves to reach

    def add(self, roots: list[Root], leaves: list[Tensor]) -> None:
        if roots and leaves:
            self._runs.append((roots, leaves))

    def run(self) -> None:
        """Accumulate the gradients of the parameters that are left."""
        while self._runs:
            roots, leaves = self._runs.pop()
            accumulate(roots, leaves)

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients that are kept until then."""
        return [one for roots, _ in self._runs for _, one in roots if one is not None]


def accumulate(
    roots: Sequence[Root], leaves: Sequence[Tensor] | None = None, *, again: bool = False
) -> None:
    """Run backward from the roots, in their order, to these leaves (None: to all)."""
    tensors: Any = [one for one, _ in roots]  # tensors and gradient edges may be mixed
    torch.autograd.backward(
        tensors, [one for _, one in roots], retain_graph=again, inputs=leaves or None
    )


def first_part(roots: Sequence[Root], wanted: Iterable[Tensor]) -> Rest:
    """Run backward as far as it leads to the `wanted` leaves; returns what is left to do."""
    graph, rest = _Graph(roots), Rest()
    early, ends = graph.parted(wanted)
    kept: dict[Node, list[Tensor | None]] = {node: [] for node in ends if node is not None}
    handles = [node.register_prehook(_keeper(found)) for node, found in kept.items()]
    try:
        leaves = [one for node, one in graph.leaves.items() if node in early]
        if leaves:
            accumulate(roots, leaves, again=bool(ends))
    finally:
        for handle in handles:
            handle.remove()
    outside = [root for root, node in zip(roots, graph.roots, strict=True) if node not in early]
    rest.add(outside, ends.pop(None, []))
    for node, leaves in ends.items():
        assert node is not None
        found = [
            (GradientEdge(node, n), one) for n, one in enumerate(kept[node]) if one is not None
        ]
        rest.add([*found], leaves)
    return rest


@dataclass
class _Graph:
    """Autograd's nodes behind some roots; a node comes after all nodes that lead to it."""

    given: Sequence[Root]
    roots: list[Node] = field(default_factory=list)
    following: dict[Node, list[Node]] = field(default_factory=dict)
    leaves: dict[Node, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for one, _ in self.given:
            edge = one if isinstance(one, GradientEdge) else get_gradient_edge(one)
            self.roots.append(edge.node)
        begun: dict[Node, list[Node]] = {}
        ended, stack = list[Node](), list[Any](self.roots)
        while stack:
            node = stack.pop()
            if node is None:  # all behind the node before it has ended
                ended.append(stack.pop())
            elif node not in begun:
                begun[node] = following = [one for one, _ in node.next_functions if one is not None]
                stack += [node, None, *(one for one in following if one not in begun)]
                # a node that accumulates into a leaf ends there
                variable = None if following else getattr(node, "variable", None)
                if isinstance(variable, Tensor):
                    self.leaves[node] = variable
        self.following = {node: begun[node] for node in reversed(ended)}

    def parted(self, wanted: Iterable[Tensor]) -> tuple[set[Node], dict[Node | None, list[Tensor]]]:
        """The nodes that run first: all that lead to a wanted leaf, or to one that joins them; and
        the leaves that come later, by the early node that they hang on (None: on none)."""
        among = {id(one) for one in wanted}
        first = {n for n, leaf in self.leaves.items() if id(leaf) in among or _hooked(leaf)}
        while True:
            early = set(first)
            for node in reversed(self.following):
                if not early.isdisjoint(self.following[node]):
                    early.add(node)
            later = self._ends(early)
            more = {
                leaf
                for leaf, ends in later.items()
                if len(ends) > 1 or any(end is not None and _whole(end) for end in ends)
            }
            if not more:
                break
            first |= more
        found: dict[Node | None, list[Tensor]] = {}
        for leaf, (end,) in later.items():
            found.setdefault(end, []).append(self.leaves[leaf])
        return early, found

    def _ends(self, early: set[Node]) -> dict[Node, set[Node | None]]:
        """Early nodes whose edges lead, by others, to each leaf that comes later."""
        ends: dict[Node, set[Node | None]] = {n: {None} for n in self.roots if n not in early}
        for node, following in self.following.items():
            mine: set[Node | None] = {node} if node in early else ends[node]
            for one in following:
                if one not in early:
                    ends[one] = ends[one] | mine if one in ends else mine
        return {leaf: ends[leaf] for leaf in self.leaves if leaf not in early}


def _hooked(leaf: Tensor) -> bool:
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def _whole(node: Node) -> bool:
    """True if the node runs as a whole, whatever is asked of it."""
    return isinstance(node, BackwardCFunction) or "CopySlices" in node.name()
