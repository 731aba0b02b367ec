"""Lists of all slices of a tensor, where the number of slices may be that of the samples.

``torch.cat(list(x))`` is one operator for each sample; written as ``torch.cat(x.unbind(0))`` it is
the same computation at every batch size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from pdcompile.ir.graph import Argument, ListOf, Op, Ref, walk

_JOINS = ("torch.cat", "torch.concat", "torch.concatenate", "torch.stack")


def with_unbound(ops: list[Op], output: Argument) -> tuple[list[Op], set[str]]:
    """(the ops with such lists replaced by the unbind, the slices that no op reads any more)."""
    makers = {op.name: op for op in ops}
    slices = Counter(str(_container(op)) for op in ops if _container(op) is not None)
    found: list[Op] = []
    unbound: set[str] = set()
    for op in ops:
        if op.target in _JOINS and op.args and isinstance(op.args[0], ListOf | tuple):
            first = op.args[0].items if isinstance(op.args[0], ListOf) else op.args[0]
            name = _all_slices(first, makers, slices)
            if name is not None:
                unbound.add(name)
                op = replace(op, args=(Ref(name), *op.args[1:]))
        found.append(op)
    if not unbound:
        return ops, set()
    used = {ref.name for ref in walk((output, *((op.args, op.kwargs) for op in found)), Ref)}
    used.update(name for op in found for name in op.mutates)
    left_out = {op.name for op in found if _container(op) in unbound} - used
    return numbered([op for op in found if op.name not in left_out]), left_out


def _container(op: Op) -> str | None:
    """The container that the op takes one item from, or None."""
    if op.target != "operator.getitem" or not isinstance(op.args[0], Ref):
        return None
    return op.args[0].name if type(op.args[1]) is int else None


def _all_slices(
    items: tuple[Argument, ...], makers: dict[str, Op], slices: Counter[str]
) -> str | None:
    """The unbind of which these are all the results, each once and in order."""
    names = [item.name for item in items if isinstance(item, Ref)]
    takers = [makers[name] for name in names if name in makers]
    if not takers or len(takers) < len(items):
        return None
    container = _container(takers[0])
    maker = makers.get(container or "")
    if container is None or maker is None or maker.target.rpartition(".")[2] != "unbind":
        return None
    expected = [(container, i) for i in range(slices[container])]
    taken = [(_container(op), op.args[1]) for op in takers]
    return container if taken == expected else None


def numbered(ops: Iterable[Op]) -> list[Op]:
    """The ops with their call indices counted anew."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for op in ops:
        key = (op.module_path, op.target)
        found.append(op if op.call_index == seen[key] else replace(op, call_index=seen[key]))
        seen[key] += 1
    return found
