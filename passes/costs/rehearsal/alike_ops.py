"""AlikeOps: ops of equal layers run once, and what autograd keeps of the others follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdcompile.ir.graph import GRADIENT, Attr, Op, OpGraph, Ref, walk
from pdcompile.passes.costs.costed_op import CostedOp, structural_key
from pdcompile.passes.costs.rehearsal.rehearse import Stage
from pdcompile.releases.known_results import Known, made_like

Saved = Mapping[int, torch.UntypedStorage]


class _Run(NamedTuple):
    """One run of an op; storages are numbered, those of operands first, then those of results."""

    container: type | None
    results: tuple[tuple[Known, bool, int], ...]  # form, needs a gradient, number of its storage
    kept: tuple[tuple[int, int], ...]  # numbers and bytes


@dataclass
class AlikeOps:
    """Runs of the ops of a stage, by all that decides what they give and what autograd keeps.

    Results that follow from an earlier run have no history: where ops write in place or
    differentiate, every op runs.
    """

    stage: Stage
    _runs: dict[Any, _Run] = field(default_factory=dict)
    _others: Iterator[int] = field(default_factory=lambda: count(-1, -1))

    @staticmethod
    def known_of(graph: OpGraph) -> bool:
        """True if results without history do for the ops of a graph."""
        return not any(op.mutates or op.enables_grad or op.target == GRADIENT for op in graph.ops)

    def key(self, op: Op, env: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
        """All that decides, and the operands; None for an op that is to run."""
        names = dict.fromkeys((*op.inputs, *op.used_tensors))
        read = [env[n] if n in env else self.stage.fakes.tensor(n) for n in names]
        if op.buffers_written or op.name in self.stage.footprints or not read:
            return None, read
        if not all(isinstance(one, Tensor) and one.layout == torch.strided for one in read):
            return None, read
        order, numbers = [*names], _numbers(read)
        used = walk((op.args, op.kwargs), (Ref, Attr))
        places = tuple(order.index(one.name if isinstance(one, Ref) else one.fqn) for one in used)
        forms = tuple(
            (one.stride(), one.storage_offset(), one.requires_grad, one.untyped_storage().nbytes(),
             numbers[one.untyped_storage()._cdata]) for one in read
        )  # fmt: skip
        return (structural_key(CostedOp(op, self.stage.index)), places, forms), read

    def note(self, key: Any, read: list[Tensor], result: Any, saved: Saved) -> None:
        """Remember a run, if results like its own can be made."""
        made = result if type(result) in (tuple, list) else (result,)
        if key is None or not all(isinstance(one, Tensor) for one in made):
            return
        numbers, found = _numbers(read), list[tuple[Known, bool, int]]()
        for one in made:
            storage = one.untyped_storage()
            form = Known.of(one, views=storage._cdata in numbers)
            number = numbers.setdefault(storage._cdata, len(numbers))
            if (
                not form.views
                and made_like(form, read).untyped_storage().nbytes() != storage.nbytes()
            ):
                return
            found.append((form, one.requires_grad, number))
        kept = ((numbers.get(at, -1), storage.nbytes()) for at, storage in saved.items())
        container = None if made[0] is result else type(result)
        self._runs[key] = _Run(container, tuple(found), tuple(kept))

    def again(self, key: Any, read: list[Tensor]) -> tuple[Any, dict[int, int]] | None:
        """The result of an op like one that ran, and the bytes that are kept by storage."""
        if (run := self._runs.get(key)) is None:
            return None
        numbered = {i: at for at, i in _numbers(read).items()}
        holders, made = {one.untyped_storage()._cdata: one for one in read}, list[Tensor]()
        for form, needs_gradient, number in run.results:
            one = made_like(form, [holders[numbered[number]]] if form.views else read)
            made.append(one.requires_grad_(needs_gradient))
            at = numbered[number] = one.untyped_storage()._cdata
            holders.setdefault(at, one)
        kept = {numbered[i] if i >= 0 else next(self._others): size for i, size in run.kept}
        return made[0] if run.container is None else run.container(made), kept


def _numbers(read: list[Tensor]) -> dict[int, int]:
    """Numbers of the storages of tensors, by address."""
    found: dict[int, int] = {}
    for one in read:
        found.setdefault(one.untyped_storage()._cdata, len(found))
    return found
