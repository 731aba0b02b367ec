"""Unsized: values whose shape depends on integer inputs, such as the labels behind a mask.

The model's Python must not read such a shape, and a stage boundary must not cut such a value.
Inside one stage it may be used: ops run on the values that the example's integers give, and on
made-up integers, which show whether the shape of a result depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdcompile.ir.graph import Ref
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.trace.values import real_shapes
from pdcompile.passes.trace.values.constants import evaluate
from pdcompile.releases.torch_internals import (
    DynamicOutputShapeException,
    NoTorchFunction,
    no_dispatch_modes,
)

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape

SHAPELESS = frozenset(
    ("dtype", "device", "layout", "requires_grad", "ndim", "is_cuda", "dim", "is_nested")
)


class Unsized:
    """The values of one recording whose shapes depend on values."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._fakes = tape.fakes

    def among(self, arguments: Any) -> bool:
        """Whether there is such a value among the arguments of a call."""
        known = self._fakes.unsized
        return bool(known) and any(id(tensor) in known for tensor in tensors_among(arguments))

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any, *, closed: bool = True) -> Any:
        """``call(*args, **kwargs)`` on fakes, as `real_shapes.run` does it.

        Raises the error of the call on fakes where a real run does not show the result.
        """
        unknown = DynamicOutputShapeException(torch.ops.aten.masked_select.default)
        among, of_example = self.among((args, kwargs)), self._tape.assumed.sizes_of_example
        if not among:
            try:
                if of_example:
                    return call(*args, **kwargs)
                return real_shapes.run(call, args, kwargs, closed=closed)
            except DynamicOutputShapeException as error:
                unknown = error
            except Exception:
                if not of_example:
                    raise
                return real_shapes.run(call, args, kwargs, closed=closed)
        found = self._really(call, args, kwargs, known=of_example and not among)
        if found is None and of_example and not among:
            return real_shapes.run(call, args, kwargs, closed=closed)
        if found is None:
            raise unknown
        result, sized = found
        with NoTorchFunction():
            made = real_shapes.rebuilt(result, self._fakes.device)
        if not sized:
            self._fakes.unsized.add(id(made))
        return made

    def _really(
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
                    result = call(
                        *real_shapes.replaced(args, reals), **real_shapes.replaced(kwargs, reals)
                    )
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
