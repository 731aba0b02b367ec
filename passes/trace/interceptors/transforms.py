"""torch.func (vmap, grad, jvp) inside of forward: recorded as the ATen operators that remain.

A transform rewrites each call of the model into other calls, on tensors that are wrapped once for
each level.  Below all levels only ATen operators on plain tensors remain, and autograd of the
training step sees these in eager too.  So while a level is open the tape records there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pdcompile.ir.execution import Lookup, run_op
from pdcompile.ir.graph import Op, Ref
from pdcompile.ir.opaque import tensors_among
from pdcompile.ir.targets import name_of
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed, patched
from pdcompile.passes.trace.tape.observer import effects, storage_key, written_by
from pdcompile.releases.torch_internals import (
    TRANSFORM_LEVELS,
    TRANSFORM_WRAPS,
    VJP,
    FakeTensor,
    NoTorchFunction,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    no_dispatch_modes,
    pytree,
    temporarily_clear_interpreter_stack,
)

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape

_LIFT = torch.ops.aten.lift_fresh.default  # of what torch.tensor makes from numbers
MAX_ELEMENTS = 4096  # of a tensor that is written down number by number


class Transforms(Interceptor):
    """Records the transforms of one run; `tape.depth` counts those that are open."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        tape.observer.ran = self.ran
        self._grad_enabled = True  # around the outermost level
        self._detached: dict[int, torch.Tensor] = {}  # id of a value -> as evaluation has it
        self._made: list[Op] = []

    def around(self) -> AbstractContextManager[None]:
        """Patches torch.func so that transforms open levels and get fake tensors."""

        def level(enter: Callable[..., Any]) -> Callable[..., Any]:
            @contextmanager
            def nesting(*args: Any, **kwargs: Any) -> Iterator[Any]:
                with self.level(), enter(*args, **kwargs) as entered:
                    yield entered

            return nesting

        def wrap(plainly: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(tensor: Any, *args: Any) -> Any:
                return plainly(self.given(tensor), *args)

            return wrapped

        def begun(plainly: Callable[..., Any]) -> Callable[..., Any]:
            def vjp(*args: Any, **kwargs: Any) -> Any:
                first, backward, *more = plainly(*args, **kwargs)
                return first, within(backward), *more

            return vjp

        def within(plainly: Callable[..., Any]) -> Callable[..., Any]:
            def backward(*args: Any, **kwargs: Any) -> Any:
                with self.level():
                    return plainly(*self.given(args), **kwargs)

            return backward

        changes = (
            *((place, level) for place in TRANSFORM_LEVELS),
            *((place, wrap) for place in TRANSFORM_WRAPS),
            (VJP, begun),
        )
        return patched(*((*place, change(getattr(*place))) for place, change in changes))

    @contextmanager
    def level(self) -> Iterator[None]:
        """Opens one more level.

        The operators that a transform makes depend on which operands need a gradient: in
        evaluation activations need none, although they do in its recording.
        """
        if not self.tape.depth:
            self._grad_enabled = torch.is_grad_enabled()
            self.tape.fakes.findings.transformed = True
        self.tape.depth += 1
        try:
            with nullcontext() if self.tape.depth > 1 or self.tape.training else torch.no_grad():
                yield
        finally:
            self.tape.depth -= 1

    def given(self, value: Any) -> Any:
        """Arguments with fake tensors for the model's tensors."""
        fakes = self.tape.fakes
        value = fakes.faked(value)
        if self.tape.training:
            return value
        return pytree.tree_map_only(torch.Tensor, self._evaluated, value)

    def _evaluated(self, tensor: torch.Tensor) -> torch.Tensor:
        fakes = self.tape.fakes
        if is_functorch_wrapped_tensor(tensor) or not tensor.is_floating_point():
            return tensor
        if not isinstance(fakes.name(tensor), Ref):
            return tensor
        if id(tensor) not in self._detached:
            with self.tape.inside(), temporarily_clear_interpreter_stack():
                self._detached[id(tensor)] = fakes.detached(tensor)
        return self._detached[id(tensor)]

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Runs a torch function inside a transform: the resulting operators are recorded below."""
        if not self.tape.depth:
            return proceed(func, args, kwargs)
        with refusals.as_refusals(func, self.tape.boundary):
            return func(*self.given(args), **self.given(kwargs))

    def apply(self, cls: type, plain: Callable[..., Any], args: Any, proceed: Proceed) -> Any:
        """Runs an autograd.Function inside a transform.

        Raises:
            TraceError: its backward may be needed, which its ATen operators do not have.
        """
        if not self.tape.depth:
            return proceed(cls, plain, args)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if torch.is_grad_enabled() and any(_needs_gradient(tensor) for tensor in tensors):
            where = self.tape.where()
            raise refusals.error(refusals.TRANSFORM, "an autograd.Function", where)
        return plain(*self.given(args))

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Records an ATen operator that ran below all transforms."""
        tape = self.tape
        if not tape.depth or tape.within or not tensors_among(result):
            return
        source = tape.where()
        name = func._schema.name.rpartition("::")[2]
        if tape.observer.moved:
            raise refusals.error(refusals.STORAGE, name, source)
        if effects(func)[0]:
            raise refusals.error(refusals.TRANSFORM, f"random numbers ({name})", source)
        tape.observer.written = {storage_key(t) for t in written_by(func, args, kwargs)}
        grad = torch.is_grad_enabled() if tape.training else self._grad_enabled
        if func is _LIFT and not isinstance(args[0], FakeTensor):
            if args[0].numel() > MAX_ELEMENTS:
                raise refusals.error(refusals.TRANSFORM, "a tensor of much data", source)
            func, kwargs = torch.tensor, {"dtype": args[0].dtype, "device": args[0].device}
            with no_dispatch_modes():
                name, args = "tensor", (args[0].tolist(),)
        first = len(tape.ops)
        # Autocast has been applied above all levels already.
        off = torch.autocast(tape.fakes.device.type, enabled=False)
        with tape.inside(), NoTorchFunction(), torch.set_grad_enabled(grad), off:
            tape.record("function", name_of(func), name, args, kwargs, result, None)
        self._made += tape.ops[first:]

    def finished(self) -> None:
        """Finds which results need a gradient, by running each operator once more.

        Below autograd, where they were recorded, results have no such flag yet, and autograd may
        replace the recorded tensor by another one.
        """
        fakes = self.tape.fakes
        if not self._made:
            return
        known: dict[str, Any] = {}
        with self.tape.inside(), no_dispatch_modes(), fakes.mode:
            for op in self._made:
                env = {
                    name: known[name] if name in known
                    else _like(fakes.objects[name], fakes.requiring.get(name, False))
                    for name in op.inputs
                }  # fmt: skip
                held = {f: _like(fakes.faked(fakes.table.objects[f])) for f in op.attributes}
                made = run_op(op, env, Lookup(nn.Module(), 0, fakes.device, held))
                if isinstance(made, torch.Tensor):
                    fakes.requiring[op.name] = made.requires_grad
                else:
                    known[op.name] = made


def _like(tensor: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
    """A fake tensor of the same form, with its own storage, that is not a leaf."""
    shape, strides = tensor.shape, tensor.stride()
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    made = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    if tensor.requires_grad or requires_grad:
        made = made.requires_grad_().clone()
    return made.as_strided(shape, strides)


def _needs_gradient(tensor: torch.Tensor) -> bool:
    """Whether a tensor requires grad on any level: an outer level's flag is not seen inside."""
    while is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            return True
        tensor = get_unwrapped(tensor)
    with temporarily_clear_interpreter_stack():
        return tensor.requires_grad
