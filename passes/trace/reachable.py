"""Removes unused ops, and marks the values that need a gradient, from the last op to the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pdcompile.ir.graph import CHECK, Argument, Op, Ref, Value, walk

MAX_TRIED = 10  # decisions whose mixtures of outcomes are all tried


def with_gradients(
    ops: tuple[Op, ...], values: dict[str, Value], loss: str | None, output: Argument
) -> dict[str, Value]:
    """The values with `needs_gradient` and `conditional` filled in.

    Without a loss every output that requires grad is a root.  A value whose storage an op
    writes depends on that op too: after ``y = x[0]; y.add_(w)`` the gradient of x reaches w.
    """
    roots = [loss] if loss is not None else [ref.name for ref in walk(output, Ref)]
    passing = [_Passing.of(op, values) for op in reversed(ops) if op.grad_enabled]
    needed = _reached(passing, values, roots, {})
    always = needed
    # The other ops pass no gradients, whichever way is taken.
    passing = [each for each in passing if each.written or each.name in needed]
    for taken in _outcomes({each.decider for each in passing if each.decider}):
        always = always & _reached(passing, values, roots, taken)
    return {
        name: replace(
            value,
            needs_gradient=value.is_tensor and name in needed,
            conditional=value.is_tensor and name in needed and name not in always,
        )
        for name, value in values.items()
    }


@dataclass(frozen=True, slots=True)
class _Passing:
    """What an op passes gradients to; for choices, by outcome of the decision (None: neither)."""

    name: str
    written: frozenset[int]  # storages
    inputs: tuple[str, ...]
    decider: str
    sides: Mapping[bool | None, tuple[str, ...]]

    @staticmethod
    def of(op: Op, values: Mapping[str, Value]) -> _Passing:
        def among(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(n for n in names if values[n].requires_grad or not values[n].is_tensor)

        written = frozenset(values[name].storage for name in op.mutates if values[name].is_tensor)
        decider = _decider(op)
        sides: dict[bool | None, tuple[str, ...]] = {None: ()}
        if decider:
            for outcome in (False, True):
                part = op.args[0][outcome]  # type: ignore[index]
                sides[outcome] = among([part.name]) if isinstance(part, Ref) else ()
        return _Passing(op.name, written, among(op.inputs), decider, sides)


def _reached(
    passing: Sequence[_Passing],
    values: Mapping[str, Value],
    roots: Sequence[str],
    taken: Mapping[str, bool | None],
) -> set[str]:
    """Values that get a gradient with these outcomes of decisions; ops from last to first.

    A choice passes it to both sides where its decision is not given, to neither where it is None.
    """
    needed = {n for n in roots if values[n].requires_grad or not values[n].is_tensor}
    storages = {values[name].storage for name in needed if values[name].is_tensor}
    for op in passing:
        if op.name in needed or not op.written.isdisjoint(storages):
            into = op.sides[taken[op.decider]] if op.decider in taken else op.inputs
            needed.update(into)
            storages.update(values[name].storage for name in into if values[name].is_tensor)
    return needed


def _decider(op: Op) -> str:
    """The decision by which the op chooses between two values (`branches`), "" if it does not."""
    if op.target != "operator.getitem" or not isinstance(op.args[0], tuple):
        return ""
    return op.args[1].name if isinstance(op.args[1], Ref) else ""


def _outcomes(deciding: set[str]) -> Iterator[dict[str, bool | None]]:
    """Every mixture of outcomes; for too many, the one in which no choice passes gradients."""
    if len(deciding) > MAX_TRIED:
        yield dict.fromkeys(deciding)
        return
    for outcomes in product((False, True), repeat=len(deciding)):
        yield dict(zip(sorted(deciding), outcomes, strict=True))


def with_consumers(ops: tuple[Op, ...], values: dict[str, Value]) -> dict[str, Value]:
    """The values with the names of the ops that read them, in order."""
    readers: dict[str, list[str]] = {name: [] for name in values}
    for op in ops:
        for name in op.inputs:
            readers[name].append(op.name)
    return {name: replace(value, consumers=tuple(readers[name])) for name, value in values.items()}


def prune(ops: tuple[Op, ...], roots: Argument) -> tuple[Op, ...]:
    """Removes unused pure ops: those that draw, write or check remain."""
    used = {ref.name for ref in walk(roots, Ref)}
    kept: list[Op] = []
    for op in reversed(ops):
        impure = op.draw is not None or op.mutates or op.buffers_written or op.opaque
        if impure or op.target == CHECK or op.name in used:
            kept.append(op)
            used.update(op.inputs)
    return tuple(reversed(kept))
