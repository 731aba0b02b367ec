"""Loops over the indices that a mask chooses (``for expert in hit.nonzero(): …``).

They are recorded as loops over all indices, with ``mask & hit[i]`` for each ``mask`` in iteration
i: an iteration that forward would leave out then works on empty tensors (`conditional_code` checks
that).  The indices are constants, so that they may name submodules; asking for their number is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Op, Ref
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.assumptions import Refuted, Site
from pdcompile.passes.trace.example_sizes import SHAPELESS
from pdcompile.passes.trace.selections import is_mask
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed
from pdcompile.passes.trace.tape.observer import storage_key

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape

_VIEWS = frozenset(
    ("flatten", "squeeze", "view", "reshape", "ravel", "to", "long", "int", "cpu", "detach",
     "contiguous")
)  # fmt: skip
_THROUGH = _VIEWS | {"getitem", "unbind"}
_CHOOSES = {"nonzero": {"as_tuple"}, "argwhere": set(), "where": set()}  # and their options


class ChosenLoops(Interceptor):
    """The loops of one recording."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self._chosen: dict[str, Site] = {}  # name of chosen indices -> place of the choice
        self._all: dict[int, Tensor] = {}  # id of all indices of a vector -> the vector
        self._kept: list[Tensor] = []
        self._hit: Tensor | None = None  # whether forward makes the running iteration
        self._masks: dict[int, Tensor] = {}  # storage of a mask -> mask of this iteration
        self._gates: set[int] = set()

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        name = str(getattr(func, "__name__", ""))
        if name == "tolist":
            self.listed(args[0])
            return self.items(args[0], proceed(func, args, kwargs))
        if name in refusals.READS or name == "__format__":
            return proceed(func, args, kwargs)
        if name == "unbind" and (len(args) < 2 or args[1] == 0) and not kwargs:
            self.listed(args[0])
            found = proceed(func, args, kwargs)
            return self.items(args[0], list(found)) if id(args[0]) in self._all else found
        if self._all and any(id(each) in self._all for each in args if isinstance(each, Tensor)):
            return self._of_all(proceed, func, name, args, kwargs)
        vector = _chooses(name, args, kwargs)
        if vector is None:
            return proceed(func, self._gated(name, args), kwargs)
        site = self.tape.site()
        if vector.dim() == 1 and site in self.tape.assumed.loops and self._hit is None:
            return self._everything(name, vector, kwargs)
        before = len(self.tape.ops)
        result = proceed(func, (self._with_hit(vector),), kwargs)
        if vector.dim() == 1:
            self._chosen.update((op.name, site) for op in self.tape.ops[before:])
        return result

    def iterations_of(self, tensor: Tensor, items: Sequence[Any]) -> Iterator[Any]:
        """The items of a loop through a tensor; sets the hit of each iteration."""
        vector = self._all[id(tensor)]
        if self._hit is not None:
            raise self._refusal("a loop inside of a loop")
        if self.tape.observer.selections is None:
            raise self._refusal("a loop")
        tape = self.tape
        for i in self.tape.iterations(len(items)):
            hit = tape.call(torch.Tensor.__getitem__, (vector, i))
            self._hit = hit if hit.dtype is torch.bool else tape.call(torch.ne, (hit, 0))
            self._masks = {}
            try:
                yield items[i]
            finally:
                self._hit = None

    def items(self, tensor: Tensor, numbers: list[Any]) -> list[Any]:
        """The list that ``tensor.tolist()`` or ``tensor.unbind()`` gives."""
        return _Numbers(self, tensor, numbers) if id(tensor) in self._all else numbers

    def asked(self, tensor: Any, name: str) -> None:
        if id(tensor) in self._all and name not in SHAPELESS:
            raise self._refusal(name)

    def listed(self, tensor: Tensor) -> None:
        """Raises `Refuted` before a tensor that a mask chose becomes a list: forward may loop."""
        name = self.tape.fakes.name(tensor)
        ops = {op.name: op for op in self.tape.ops} if self._chosen else {}
        while isinstance(name, Ref) and name.name in ops:
            op: Op = ops[name.name]
            if op.name in self._chosen:
                assumed = self.tape.assumed
                raise Refuted(replace(assumed, loops=assumed.loops | {self._chosen[op.name]}))
            if op.target.rpartition(".")[2] not in _THROUGH or not op.args:
                return
            name = op.args[0]

    def _everything(self, name: str, vector: Tensor, kwargs: Any) -> Any:
        """All indices of a vector, in place of the chosen ones."""
        tape = self.tape
        found = tape.call(torch.arange, (vector.shape[0],), {"device": vector.device})
        column = name == "nonzero" and not kwargs.get("as_tuple")
        if column:
            found = tape.call(torch.Tensor.reshape, (found, (-1, 1)))
        self._enter(found, vector)
        return found if column else (found,)

    def _enter(self, tensor: Tensor, vector: Tensor) -> None:
        self._all[id(tensor)] = vector
        self._kept.append(tensor)

    def _of_all(self, plain: Any, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in SHAPELESS:
            return plain(func, args, kwargs)
        column = name == "__getitem__" and _takes_column(args[1])
        if name not in _VIEWS and not column:
            raise self._refusal(refusals.name_of(func))
        result = plain(func, args, kwargs)
        if isinstance(result, Tensor) and result.numel() == args[0].numel():
            self._enter(result, self._all[id(args[0])])
        return result

    def _gated(self, name: str, args: Any) -> Any:
        """The arguments with masks that are empty in an iteration that forward leaves out."""
        if self._hit is None or name not in ("__getitem__", "__setitem__", "masked_select"):
            return args
        if name == "masked_select":
            return (args[0], self._with_hit(args[1]), *args[2:])
        index = args[1]
        if is_mask(index):
            index = self._with_hit(index)
        elif isinstance(index, tuple):
            index = tuple(self._with_hit(i) if is_mask(i) else i for i in index)
        return (args[0], index, *args[2:])

    def _with_hit(self, mask: Tensor) -> Tensor:
        if self._hit is None:
            return mask
        key = storage_key(self.tape.fakes.faked(mask))
        if key not in self._masks:
            made = self.tape.call(torch.logical_and, (mask, self._hit))
            self._masks[key] = made
            self._kept.append(made)
            self._gates.add(storage_key(made))
        return self._masks[key]

    def allows(self, mask: Tensor) -> bool:
        """Whether this mask is empty in an iteration that forward leaves out."""
        return self._hit is None or storage_key(mask) in self._gates

    def _refusal(self, what: str) -> TraceError:
        return refusals.error(refusals.BY_VALUE, what, self.tape.where())


class _Numbers(list[Any]):
    def __init__(self, loops: ChosenLoops, tensor: Tensor, numbers: list[Any]) -> None:
        super().__init__(numbers)
        self._loops = loops
        self._tensor = tensor

    def __iter__(self) -> Iterator[Any]:
        return self._loops.iterations_of(self._tensor, list(super().__iter__()))

    def __len__(self) -> int:
        raise self._loops._refusal("len")


def _chooses(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """The mask of a call that returns the indices where it is true; None for other calls."""
    fits = name in _CHOOSES and not set(kwargs) - _CHOOSES[name]
    return args[0] if fits and len(args) == 1 and isinstance(args[0], Tensor) else None


def _takes_column(index: Any) -> bool:
    """Whether an index is ``[:, 0]``, which takes all rows."""
    everything = isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None)
    return everything and index[1] == 0
