"""The problem as columns: one `Menu` for each tensor-parallel degree (and group of widths)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.published.piper_model import MenuNode, MenuProblem, Variant

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Items:
    """A node's variants that are not dominated, for one degree and one group of widths.

    `seconds` are those of the whole batch on one replica, i.e. d times the seconds per sample,
    with what is resent of the weights where variants differ in it.  A stage with y microbatches
    in flight needs first + moving·(y − 1) bytes.
    """

    positions: tuple[int, ...]  # in the node's list of variants
    seconds: Floats
    moving: Floats
    first: Floats
    entering: tuple[tuple[int, Floats], ...]  # (source, bytes by variant beyond the least)
    leaving: tuple[tuple[int, Floats], ...]  # (target, …)


@dataclass(frozen=True, slots=True)
class Menu:
    """Stages of one tensor-parallel degree whose data-parallel degree is one of `widths`.

    `entering[e]` and `leaving[e]`: bytes, both directions of training, at the stage that holds the
    target (source) of edge e when it is cut.  `resent[v]`: d·seconds for each replica beyond the
    first.
    `missing`: mask of the nodes that have no variant here.
    """

    degree: int
    widths: tuple[int, ...]
    items: tuple[Items | None, ...]
    missing: int
    entering: Floats
    leaving: Floats
    resent: Floats

    @property
    def uneven(self) -> bool:
        """Variants of one node differ in what they add to an edge that leaves the stage."""
        return any(item is not None and item.leaving for item in self.items)


def menus(problem: MenuProblem) -> list[Menu]:
    """All menus; a degree whose variants differ in weights has one for each width."""
    snap = _snap(problem)
    found = []
    for degree in sorted({t for node in problem.nodes for t in node.variants}):
        widths = divisors(problem.batch, problem.devices // degree)
        if not widths:
            continue
        lists = [_undominated(node, degree) for node in problem.nodes]
        weights = [{v.parameter_bytes for _, v in variants} for variants in lists]
        split = any(len(sizes) > 1 for sizes in weights)
        for group in [(d,) for d in widths] if split else [widths]:
            found.append(_menu(problem, degree, group, lists, snap))
    return found


def divisors(number: int, most: int) -> tuple[int, ...]:
    """Divisors of `number` up to `most`, ascending."""
    return tuple(d for d in range(1, min(number, most) + 1) if number % d == 0)


def _menu(
    problem: MenuProblem,
    degree: int,
    widths: tuple[int, ...],
    lists: list[list[tuple[int, Variant]]],
    snap: Callable[[float], float],
) -> Menu:
    n = len(problem.nodes)
    entering = np.array([2 * edge.bytes for edge in problem.edges], dtype=np.float64)
    leaving = entering.copy()
    resent = np.zeros(n)
    again = 4 / (problem.batch * problem.bytes_per_second)
    ins: list[list[int]] = [[] for _ in range(n)]
    outs: list[list[int]] = [[] for _ in range(n)]
    for e, edge in enumerate(problem.edges):
        ins[edge.target].append(e)
        outs[edge.source].append(e)
    items: list[Items | None] = []
    for v, variants in enumerate(lists):
        if not variants:
            items.append(None)
            continue
        chosen = [variant for _, variant in variants]
        extra: list[list[tuple[int, Floats]]] = [[], []]
        for e in ins[v]:
            u = problem.edges[e].source
            sync = np.array([2 * c.sync_forward.get(u, 0.0) for c in chosen])
            entering[e] += sync.min()
            if sync.max() > sync.min():
                extra[0].append((u, sync - sync.min()))
        for e in outs[v]:
            w = problem.edges[e].target
            sync = np.array([2 * c.sync_backward.get(w, 0.0) for c in chosen])
            leaving[e] += sync.min()
            if sync.max() > sync.min():
                extra[1].append((w, sync - sync.min()))
        seconds = np.array([c.seconds for c in chosen])
        weights = np.array([c.parameter_bytes for c in chosen])
        if weights.max() > weights.min():
            seconds = seconds + (widths[0] - 1) * again * weights
        else:
            resent[v] = again * weights[0]
        items.append(
            Items(
                tuple(position for position, _ in variants),
                seconds,
                np.array([snap(c.moving_bytes) for c in chosen]),
                np.array([snap(c.moving_bytes + c.fixed_bytes) for c in chosen]),
                tuple(extra[0]),
                tuple(extra[1]),
            )
        )
    missing = sum(1 << v for v, item in enumerate(items) if item is None)
    return Menu(degree, widths, tuple(items), missing, entering, leaving, resent)


def _undominated(node: MenuNode, degree: int) -> list[tuple[int, Variant]]:
    """Variants that no other one equals or beats in everything that counts."""
    variants = list(enumerate(node.variants.get(degree, ())))
    figures = [
        (
            v.seconds,
            v.parameter_bytes,
            v.moving_bytes,
            v.moving_bytes + v.fixed_bytes,
            *(v.sync_forward[u] for u in sorted(v.sync_forward)),
            *(v.sync_backward[w] for w in sorted(v.sync_backward)),
        )
        for _, v in variants
    ]
    kept = []
    for i, mine in enumerate(figures):
        beaten = any(
            all(a <= b for a, b in zip(other, mine, strict=True)) and (other != mine or j < i)
            for j, other in enumerate(figures)
            if j != i
        )
        if not beaten:
            kept.append(variants[i])
    return kept


def _snap(problem: MenuProblem) -> Callable[[float], float]:
    """Rounds bytes to a power of two that makes every sum of them exact.

    Integers below 2^52 in sum stay as they are.  Without it, equal sums of fractions in unequal
    order would differ in the last digit, and none would dominate the other.
    """
    total = math.fsum(
        max(v.moving_bytes + v.fixed_bytes for vs in node.variants.values() for v in vs)
        for node in problem.nodes
    )
    quantum = 2.0 ** (math.ceil(math.log2(total)) - 52) if total > 0 else 1.0
    return lambda number: round(number / quantum) * quantum
