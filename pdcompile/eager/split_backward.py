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

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import lru_cache
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pdcompile.releases.torch_internals import Root, run_backward

_NOWHERE = -1  # in place of a node's number, of what hangs on none
_FIRST, _LATER = "first", "later"  # in place of a node's kind, of one that accumulates into a leaf
_ACCUMULATES: type = type(get_gradient_edge(torch.zeros(0, requires_grad=True)).node)


class Entrance:
    """A received value under autograd.

    The stage computes with `value`, a view of a `leaf`: nothing is accumulated there, as a hook on
    the leaf's node keeps what comes: the summed gradient, in the layout of autograd's kernels.
    Once that is taken it waits among the `idle` ones for another value of the same shape: hooks
    cost more than all else here.
    """

    __slots__ = ("_found", "_idle", "_node", "_nothing", "leaf", "value")

    def __init__(self, received: Tensor, idle: list[Entrance] | None = None) -> None:
        self.leaf = received.detach().requires_grad_()
        self.value: Tensor = self.leaf.view_as(self.leaf)
        self._found: list[Tensor | None] = []
        self._idle, self._nothing = idle, received.new_empty(0)
        made: Any = self.value.grad_fn
        self._node = made.next_functions[0][0]  # autograd itself would make it anew each time
        self._node.register_prehook(_keeper(self._found, (None,)))

    @staticmethod
    def of(received: Tensor, idle: list[Entrance]) -> Entrance:
        """One for this value, from the idle ones where there are any."""
        found = idle.pop() if idle else Entrance(received, idle)
        found.leaf.data = received
        found.value = found.leaf.view_as(found.leaf)
        return found

    def take(self) -> Tensor | None:
        """The gradient, None if there was none; it and the value are not kept any longer."""
        found = self._found.pop() if self._found else None
        if self._idle is not None:
            self.leaf.data = self.value = self._nothing
            self._idle.append(self)
        return found


def _keeper(found: list[Tensor | None], passed_on: tuple[None, ...] | None = None) -> Any:
    """A hook that keeps the gradients that a node gets, and passes on these, or others instead.

    It refers to the list alone: a reference to the tensor would keep it alive for ever, because
    Python's collector does not see autograd's nodes.
    """

    def keep(gradients: tuple[Tensor | None, ...]) -> tuple[None, ...] | None:
        found[:] = gradients
        return passed_on

    return keep


class Rest(list[tuple[list[Root], list[Tensor]]]):
    """The second part of one microbatch's backward: runs, from their roots to leaves."""

    def run(self) -> None:
        """Accumulate the gradients of the parameters that are left; once."""
        while self:
            run_backward(*self.pop())

    @property
    def gradients(self) -> Iterator[Tensor]:
        """Gradients that are kept until then."""
        return (one for roots, _ in self for _, one in roots if one is not None)


def first_part(roots: Sequence[Root], wanted: Iterable[Tensor]) -> Rest:
    """Run backward as far as it leads to the `wanted` leaves; returns what is left to do."""
    begins: list[Any] = [
        one.node if isinstance(one, GradientEdge) else one.grad_fn or get_gradient_edge(one).node
        for one, _ in roots
    ]
    nodes, rest = [*dict.fromkeys(begins)], Rest()
    numbers = tuple(map(nodes.index, begins))
    early, first, ends = _parted(_form(nodes, {id(one) for one in wanted}), numbers)
    kept: dict[int, list[Tensor | None]] = {end: [] for end, _ in ends if end != _NOWHERE}
    for end, found in kept.items():
        nodes[end].register_prehook(_keeper(found))
    if first:
        run_backward(roots, [nodes[n].variable for n in first], again=bool(ends))
    for end, later in ends:
        if end == _NOWHERE:
            left = [root for root, n in zip(roots, numbers, strict=True) if n not in early]
        else:
            node, came = nodes[end], enumerate(kept[end])
            left = [(GradientEdge(node, n), one) for n, one in came if one is not None]
            kept[end].clear()  # the hook has it until the node goes
        if left:
            rest.append((left, [nodes[n].variable for n in later]))
    return rest


def _form(nodes: list[Any], wanted: Container[int]) -> tuple[Any, ...]:
    """Form of autograd's graph behind some nodes, which are joined by those that they lead to: of
    each its kind, of a leaf whether its gradient is wanted first, then numbers of the next ones."""
    numbers, form, count = {node: n for n, node in enumerate(nodes)}, list[Any](), len(nodes)
    numbers[None] = _NOWHERE
    for node in nodes:  # more come meanwhile
        kind: Any = type(node)
        if kind is _ACCUMULATES:
            leaf = node.variable
            hooked = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
            form.append(_FIRST if hooked or id(leaf) in wanted else _LATER)
            continue  # it leads nowhere
        form.append(kind)
        for following, _ in node.next_functions:
            if (number := numbers.get(following)) is None:
                numbers[following] = number = count
                nodes.append(following)
                count += 1
            form.append(number)
    return tuple(form)


@lru_cache(maxsize=64)
def _parted(
    form: tuple[Any, ...], roots: tuple[int, ...]
) -> tuple[set[int], list[int], list[tuple[int, list[int]]]]:
    """The nodes that run first: all that lead to a wanted leaf, or to one that joins them; these
    leaves; and those that come later, by the early node that they hang on (`_NOWHERE`: on none).

    Microbatches have nodes of their own, in the same form: it is divided once.
    """
    starts = [n for n, one in enumerate(form) if not isinstance(one, int)]
    forms = [form[a:b] for a, b in pairwise([*starts, len(form)])]
    following = {n: [k for k in one[1:] if k != _NOWHERE] for n, one in enumerate(forms)}
    ended = [*TopologicalSorter(following).static_order()]  # each after all that it leads to
    leaves = [n for n, (kind, *_) in enumerate(forms) if kind in (_FIRST, _LATER)]
    first = {n for n in leaves if forms[n][0] is _FIRST}
    while True:
        early = set(first)
        for node in ended:
            if not early.isdisjoint(following[node]):
                early.add(node)
        # Early nodes whose edges lead, by others, to each node that comes later.
        ends = {n: {_NOWHERE} for n in roots if n not in early}
        for node in reversed(ended):
            mine = {node} if node in early else ends[node]
            for one in following[node]:
                if one not in early:
                    ends[one] = ends[one] | mine if one in ends else mine
        later = {leaf: ends[leaf] for leaf in leaves if leaf not in early}
        more = {leaf for leaf, found in later.items() if len(found) > 1 or _whole(forms, *found)}
        if not more:
            break
        first |= more
    hanging: dict[int, list[int]] = {}
    for leaf, (end,) in later.items():
        hanging.setdefault(end, []).append(leaf)
    return early, [n for n in leaves if n in early], [*hanging.items()]


def _whole(forms: Sequence[Sequence[Any]], end: int) -> bool:
    """True if a node runs as a whole, whatever is asked of it."""
    kind = object if end == _NOWHERE else forms[end][0]
    return issubclass(kind, BackwardCFunction) or kind.__name__ == "CopySlices"
