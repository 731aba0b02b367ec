"""Sizes that depend on the integers of the inputs, such as the number of labels behind a mask.

The model's Python must not read such a size, and a stage boundary must not cut such a value.
Inside one stage it may be used: ops run on the values that the example's integers give, and on
made-up integers, which show whether the shape of a result depends on them.

``hidden[input_ids == end].view(b, -1, d)`` needs the number of chosen rows.  Where an operator
needs such a size, the capture is made for the one that the example's integers give, which has to
be the same for every sample; a check refuses calls with another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdcompile.ir.graph import Ref
from pdcompile.ir.opaque import tensors_among
from pdcompile.ir.value_checks import CAPTURED
from pdcompile.passes.trace import real_shapes, refusals
from pdcompile.passes.trace.constants import evaluate
from pdcompile.passes.trace.interceptors.value_reads import (
    DIFFERS,
    check,
    file_and_line,
    may_be_opaque,
    number,
    values_of_example,
)
from pdcompile.passes.trace.packed import Packed
from pdcompile.passes.trace.selections import Selections, is_mask, mask_key
from pdcompile.releases.torch_internals import (
    DynamicOutputShapeException,
    NoTorchFunction,
    no_dispatch_modes,
)

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape

_CHOICES = frozenset(
    ("__getitem__", "__setitem__", "masked_select", "nonzero", "where", "argwhere")
)
_REPEATS = "repeat_interleave"
SHAPELESS = frozenset(
    ("dtype", "device", "layout", "requires_grad", "ndim", "is_cuda", "dim", "is_nested")
)


class ExampleSizes:
    """The sizes of one recording that depend on values."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._fakes = tape.fakes
        self._packed = Packed()
        self._differs = False  # between samples of the example

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func(*args, **kwargs)`` on fakes, as part of the op that is recorded next.

        Raises:
            SizeByValues: the size of the result depends on values that are not known; or Python
                asks for such a size.
        """
        while True:
            try:
                return self._once(func, args, kwargs)
            except refusals.SizeByValues as error:
                self._differs = False
                if not self._settled(func, args, kwargs):
                    if self._differs:
                        error.message += DIFFERS
                    raise

    def asked(self, tensors: Any, name: str) -> None:
        """Called before a property is read that is not a tensor."""
        among = self._among(tensors) and name not in SHAPELESS
        if among and not self._settled(None, tensors, {}):
            raise self._refusal(name)

    def returned(self, output: Any) -> None:
        """Called before the model's output is entered, where every shape has to be known.

        Raises:
            SizeByValues: one is unknown; names the line that made it.
        """
        tape = self._tape
        for tensor in tensors_among(output):
            if not self._among(tensor):
                continue
            with NoTorchFunction():
                name = tape.fakes.name(tensor)
                where = [op.source for op in tape.ops if name == Ref(op.name)][-1]
                settled = self._settled(None, (tensor,), {}, where)
            if not settled:
                raise refusals.error(refusals.BY_VALUE, "the model's output", where)

    def _once(self, func: Any, args: Any, kwargs: Any) -> Any:
        tape = self._tape
        with tape.inside(), refusals.as_refusals(func, tape.boundary):
            given = tape.fakes.faked(args), tape.fakes.faked(kwargs)
            module = tape.table.modules.get(tape.path)
            result = self._packed.result(func, given[0], module)
            if result is None:
                result = self.run(func, *given)
                self._packed.made(func, given[0], result)
        if self._among(given) and not tensors_among(result):
            raise self._refusal(refusals.name_of(func))
        return result

    def _settled(self, func: Any, args: Any, kwargs: Any, where: str = "") -> bool:
        """Takes sizes from the example where that is assumed; whether one is newly known."""
        tape = self._tape
        if not tape.assumed.sizes_of_example or may_be_opaque(tape):
            return False
        name = str(getattr(func, "__name__", ""))
        given = tape.fakes.faked((args, kwargs))
        before = len(tape.ops)
        tensors = tensors_among(given)
        found = [self._shape(t) for t in tensors if id(t) in tape.fakes.unsized]
        if not any(found) and name in _CHOICES:
            found = [self._count(t, torch.count_nonzero) for t in tensors if is_mask(t)]
        elif not any(found) and name == _REPEATS:
            found = [self._count(t, torch.sum) for t in tensors if not t.is_floating_point()]
        # The variable of the line is not the name of these ops.
        tape.ops[before:] = [
            replace(op, variable="", source=where or op.source) for op in tape.ops[before:]
        ]
        if any(found):
            tape.fakes.findings.sized[where or tape.where()] = None
        return any(found)

    def _shape(self, tensor: Tensor) -> bool:
        """Gives a value the shape that it has in the example, with a check."""
        if self._same(tensor, lambda value: tuple(value.shape)) != tuple(tensor.shape):
            return False
        tape = self._tape
        size = number(tape, "method", "size", (tensor,))
        same = number(tape, "function", "operator.eq", (size, tuple(tensor.shape)))
        tape.fakes.unsized.discard(id(tensor))
        check(tape, same, self._words("this shape"))
        return True

    def _count(self, tensor: Tensor, counted: Callable[..., Any]) -> bool:
        """Lets a mask choose as many elements as in the example, with a check."""
        tape = self._tape
        selections = tape.observer.selections
        count = self._same(tensor, lambda value: int(counted(value)))
        key = mask_key(tensor)
        if count is None or not isinstance(selections, Selections):
            return False
        if selections.fixed.get(key) == count:
            return False
        found = tape.call(counted, (tensor,))
        check(tape, tape.call(torch.eq, (found, count)), self._words("this number of rows"))
        selections.fixed[key] = count
        return True

    def _same(self, tensor: Tensor, of: Callable[[Tensor], Any]) -> Any:
        """The value of `of` that all samples of the example have; None where they differ."""
        name = self._tape.fakes.name(tensor)
        if not isinstance(name, Ref):
            return None
        found = values_of_example(self._tape, name.name, of, floats=True)
        self._differs = self._differs or len(found) > 1
        return found[0] if len(found) == 1 else None

    def _words(self, what: str) -> str:
        place = file_and_line(self._tape.where())
        return f"{place}: {CAPTURED} {what} is that of the example"

    def _refusal(self, what: str) -> Exception:
        return refusals.error(refusals.BY_VALUE, what, self._tape.where())

    def _among(self, arguments: Any) -> bool:
        """Whether there is such a value among the arguments of a call."""
        known = self._fakes.unsized
        return bool(known) and any(id(tensor) in known for tensor in tensors_among(arguments))

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any, *, closed: bool = True) -> Any:
        """``call(*args, **kwargs)`` on fakes, as `real_shapes.run` does it.

        Raises the error of the call on fakes where a real run does not show the result.
        """
        among, of_example = self._among((args, kwargs)), self._tape.assumed.sizes_of_example
        really = partial(real_shapes.run, call, args, kwargs, closed=closed)
        try:
            if among:
                raise DynamicOutputShapeException(torch.ops.aten.masked_select.default)
            return call(*args, **kwargs) if of_example else really()
        except DynamicOutputShapeException as error:
            unknown = error
        except Exception:
            if not of_example:
                raise
            return really()
        known = of_example and not among
        found = self._on_integers(call, args, kwargs, known=known)
        if found is None:
            if known:
                return really()
            raise unknown
        result, sized = found
        with NoTorchFunction():
            made = real_shapes.rebuilt(result, self._fakes.device)
        if not sized:
            self._fakes.unsized.add(id(made))
        return made

    def _on_integers(
        self, call: Callable[..., Any], args: Any, kwargs: Any, *, known: bool
    ) -> tuple[Tensor, bool] | None:
        """(the result on the example's integers, whether other integers give the same shape).

        `known`: the shape depends on values even where all of these agree (of one sample).
        """
        found: list[tuple[Any, Tensor]] = []
        for given in self._tape.examples.variants():
            reals = self._reals((args, kwargs), given, zeros=not known)
            if reals is None:
                return None
            with no_dispatch_modes(), NoTorchFunction():
                try:
                    result = real_shapes.called(call, args, kwargs, reals)
                except Exception:  # of made-up integers only the example's have to be possible
                    if not found:
                        return None
                    continue
            if not isinstance(result, Tensor):
                return None
            shapes = [tuple(real.shape) for real in reals.values()]
            found.append((shapes, result))
        if not found:
            return None
        first = found[0][1]
        sized = not known and all(result.shape == first.shape for _, result in found)
        varied = any(shapes != found[0][0] for shapes, _ in found)
        if (sized and not varied) or (
            not sized and (first.requires_grad or first.is_floating_point())
        ):
            return None
        return first, sized

    def _reals(self, arguments: Any, given: Any, *, zeros: bool) -> dict[int, Tensor] | None:
        """Real tensors for the fakes: values for these integers, with `zeros` 0 for floats."""
        reals: dict[int, Tensor] = {}
        for fake in tensors_among(arguments):
            name = self._fakes.name(fake)
            found = None
            if isinstance(name, Ref):
                found = evaluate(name.name, self._tape.ops, self._fakes, given)
            if found is None:
                unsized = id(fake) in self._fakes.unsized
                if unsized or not zeros or not fake.is_floating_point():
                    return None
                with no_dispatch_modes():
                    found = torch.zeros(fake.shape, dtype=fake.dtype, device=self._fakes.home)
                    found.requires_grad_(fake.requires_grad)
            reals[id(fake)] = found
        return reals
