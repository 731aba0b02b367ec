"""Tape: every public torch call that the running model makes becomes one op.

The model's own Python runs once, on fake tensors, below a TorchFunctionMode.  A call that returns
no tensor and writes none (shape, dim) stays Python and leaves no trace; a call that would read a
value cannot succeed, because fake tensors have none.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode

from pdcompile.eager.randomness import LOSS_PATH, is_random_function, is_random_module
from pdcompile.errors import TraceError
from pdcompile.ir.graph import CHECK, Attr, Op, Ref, walk
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.assumptions import Assumptions, Site
from pdcompile.passes.trace.opaque.opaque_modules import refuse_parts, replay
from pdcompile.passes.trace.opaque.outcomes import CallKey, Outcome
from pdcompile.passes.trace.tape.arguments import device_of, to_argument, without_defaults
from pdcompile.passes.trace.tape.calls import (
    NO_OP_CASTS,
    autocast_region,
    is_public,
    target_of,
)
from pdcompile.passes.trace.tape.fake_tensors import FakeTensors, tensors_in
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed
from pdcompile.passes.trace.tape.module_table import ModuleTable
from pdcompile.passes.trace.tape.naming import Names
from pdcompile.passes.trace.tape.observer import Observer, locate, storage_key
from pdcompile.passes.trace.tape.results import Results
from pdcompile.passes.trace.tape.writes import mutated, written_tensors
from pdcompile.passes.trace.values.constants import evaluate, read
from pdcompile.passes.trace.values.example_sizes import ExampleSizes
from pdcompile.passes.trace.values.packed import takes_packed
from pdcompile.passes.trace.values.reads import Reading
from pdcompile.passes.trace.values.unsized import Unsized


class Tape(TorchFunctionMode):
    """Collects `ops` and, in `fakes`, the tensors that they make.

    Args:
        table: the model's names.
        fakes: fake tensors for the model's tensors and inputs.
        observer: the dispatch mode that runs below.
        interceptors: asked in this order before a call is recorded.
    """

    def __init__(
        self,
        table: ModuleTable,
        fakes: FakeTensors,
        observer: Observer,
        interceptors: Sequence[type[Interceptor]],
    ) -> None:
        super().__init__()
        self.table = table
        self.fakes = fakes
        self.observer = observer
        self.names = Names()
        self._results = Results(fakes, self.names)
        self.ops = self._results.ops
        self.boundary: CodeType | None = None
        self.assigned: dict[tuple[int, str], str] = {}  # (id of module, attribute) -> source
        self.region: Any = "forward"
        self.opaque: Mapping[CallKey, Outcome] = {}  # calls of modules that are kept whole
        self.failed: str | None = None  # the innermost module that an error came from
        self.reads = Reading(Assumptions(), fakes.findings)  # what may be known of values
        self._unsized = Unsized(fakes, self.ops, lambda: self.reads)
        self.sizes = ExampleSizes(self, self._unsized)
        self.turns: Callable[[int], Sequence[int]] = range  # of a loop those that are recorded
        self.depth = 0  # of torch.func transforms
        self.training = table.modules[""].training
        self.regions: list[frozenset[str]] = []  # names of ops, see `recomputed`
        self.within = 0  # in a leaf module or another call that is one op
        self._stack: list[tuple[str, int]] = [("", 0)]
        self._module_calls: dict[str, Iterator[int]] = defaultdict(count)
        self._draws: dict[str, Iterator[int]] = defaultdict(count)
        self.interceptors = tuple(kind(self) for kind in interceptors)
        self._chain: Proceed = self._unintercepted
        self._apply: Proceed = lambda cls, plain, args: self._call(plain, args, {})
        for each in reversed(self.interceptors):
            if type(each).call is not Interceptor.call:
                self._chain = partial(each.call, proceed=self._chain)
            if type(each).apply is not Interceptor.apply:
                self._apply = partial(each.apply, proceed=self._apply)
            if type(each).ran is not Interceptor.ran:
                observer.ran = each.ran

    # What the interpreter calls.

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.within:
            return func(*self.fakes.faked(args), **self.fakes.faked(kwargs))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__") and not self.depth:
            return self._property(func, getattr(func, "__self__", None), args)
        return self._chain(func, args, kwargs)

    def _unintercepted(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if (refusal := refusals.REFUSED.get(name)) is not None and is_public(func, name):
            if name in refusals.READS:
                return self.reads.answer(self, func, args, kwargs)
            raise refusals.error(refusal, name, self.where())
        if func is torch.Tensor.requires_grad_:
            return self._require_gradient(*args, **kwargs)
        if name == "__iter__":
            return iter(self._call(torch.Tensor.unbind, (args[0], 0), {}))
        if name == "__format__" and (known := read(func, args, kwargs, self.ops, self.fakes)):
            return known[0]
        return self._call(func, args, kwargs)

    def call_module(
        self, plain: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """What ``module(*args, **kwargs)`` does while recording."""
        path = self.table.names.get(id(module))
        if self.within or path is None or self.depth:
            return plain(module, *args, **kwargs)
        calls = next(self._module_calls[path])
        if (path, calls) in self.opaque:
            return self._opaque_call(path, calls, args, kwargs)
        refuse_parts(path, self.opaque, self.where())
        leaf = self.region == "forward" and path and self._constructor(path) is not None
        if leaf and not takes_packed(module, args, kwargs):
            try:
                return self._leaf(plain, module, path, calls, args, kwargs)
            except Exception:
                self.failed = path
                raise
        self._stack.append((path, calls))
        try:
            result = plain(module, *args, **kwargs)
            self._begin()
            self._tell(self.table.classes[path][1])
            self.fakes.made_in(result, path)
        except Exception:
            self.failed = path if self.failed is None else self.failed
            raise
        finally:
            self._stack.pop()
        self.failed = None
        return result

    def call_function_class(self, cls: type, plain: Callable[..., Any], args: Any) -> Any:
        """What ``Cls.apply(*args)`` of an autograd.Function does while recording."""
        if self.within:
            return plain(*self.fakes.faked(args))
        return self._apply(cls, plain, args)

    def _tell(self, source: str) -> None:
        for each in self.interceptors:
            each.recorded(source)

    def allows(self, mask: torch.Tensor) -> bool:
        """Whether a choice by the values of this mask may be recorded here."""
        return all(each.allows(mask) for each in self.interceptors)

    def _constructor(self, path: str) -> Any:
        return self.table.constructor(path, self.training)

    # One op.

    def _begin(self) -> None:
        """Before each call: what happened below since the last one passed no recorded op."""
        if self.observer.moved:
            raise refusals.error(refusals.STORAGE, "set_, before this line", self.where())
        if self.observer.seeded or self.fakes.own_any(self.observer.written):
            raise refusals.error(refusals.UNTRACKED, "before this line", self.where())
        self.observer.clear()

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on constants alone, so that its value can be read."""
        name = self.fakes.name(tensor)
        return isinstance(name, Ref) and evaluate(name.name, self.ops, self.fakes) is not None

    def finish(self) -> None:
        """After the last call."""
        self._begin()
        for each in self.interceptors:
            each.finished()

    def check(self, tensor: torch.Tensor, message: str, *, holds: bool = True) -> None:
        """An op that raises where the value of a tensor is not `holds`."""
        if not holds:
            tensor = self._call(torch.logical_not, (tensor,), {})
        self._begin()
        self.require(tensor, message)

    def require(self, condition: torch.Tensor | Ref, message: str) -> None:
        """An op that raises where a value is false."""
        self.record("function", CHECK, "check", (condition, message), {}, None, None)

    def number(self, kind: str, target: str, args: tuple[Any, ...], base: str = "") -> Ref:
        """An op whose result is a Python number or bool, or a tuple of them."""
        self._begin()
        self.record(kind, target, base or target.rpartition(".")[2], args, {}, None, None)
        return Ref(self.ops[-1].name)

    def decision(self, tensor: torch.Tensor) -> tuple[str, str, int]:
        """(an op that reads a value as a Python bool, the running module, which call of it)."""
        if tensor.dtype is not torch.bool:
            tensor = self._call(torch.ne, (tensor, 0), {})
        return self.number("method", "item", (tensor,), "decided").name, *self._stack[-1]

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """An op that the capture needs and the model does not make."""
        return self._call(func, args, kwargs or {})

    def draws(self) -> int:
        """How many ops so far draw random numbers."""
        return sum(op.draw is not None for op in self.ops)

    def where(self) -> str:
        """The line of the model that is running."""
        return locate(self.boundary)[0]

    def site(self) -> Site:
        """Where Python runs: the frames from here to the innermost module's call."""
        found: list[tuple[CodeType, int]] = []
        frame: FrameType | None = sys._getframe(1)
        ends = (self.boundary, Tape.call_module.__code__)
        while frame is not None and frame.f_code not in ends:
            found.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return tuple(found)

    @property
    def path(self) -> str:
        """FQN of the innermost running module."""
        return self._stack[-1][0]

    def _property(self, func: Any, owner: Any, args: tuple[Any, ...]) -> Any:
        name = str(getattr(owner, "__name__", None) or getattr(owner.fget, "__name__", ""))
        if func.__name__ == "__set__" and name == "requires_grad" and args[1]:
            self._require_gradient(args[0])
            return None
        if func.__name__ != "__get__":
            raise refusals.error(refusals.ASSIGNED, f"tensor.{name} = …", self.where())
        self._begin()
        given = self.fakes.faked(args)
        result = func(*given)
        if not isinstance(result, torch.Tensor):
            self.sizes.asked(given, name)
            for each in self.interceptors:
                each.asked(given[0], name)
            return result
        return self.record("getattr", name, "", (args[0],), {}, result, None)

    def _require_gradient(self, tensor: torch.Tensor, requires_grad: bool = True) -> Any:
        """``tensor.requires_grad = True`` and ``requires_grad_()``: returns the tensor.

        A result is marked even where it needs a gradient already: not every run needs one here.
        """
        fake = self.fakes.faked(tensor)
        name = self.fakes.name(fake)
        held = not isinstance(name, Ref)
        if held or not requires_grad:
            if fake.requires_grad == requires_grad:
                return tensor
            source = self.where()
            raise refusals.error(refusals.ASSIGNED, "tensor.requires_grad = …", source)
        self._begin()
        fake.requires_grad_()
        self.observer.written = {storage_key(fake)}  # everyone who has it sees the flag
        self.record("method", "requires_grad_", "requires_grad_", (fake,), {}, fake, None)
        return tensor

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if maybe_current_level() is not None:
            raise refusals.error(refusals.TRANSFORM, refusals.name_of(func), self.where())
        draw = next(self._draws[self.path]) if is_random_function(func) else None
        self._begin()
        result = self.sizes.result(func, args, kwargs)
        if not tensors_in(result) and not self.fakes.own_any(self.observer.written):
            self.observer.clear()
            return result
        if func in NO_OP_CASTS and result is self.fakes.faked(args[0]):
            # As in eager nothing happened.  An op here would be a place to cut at, and gradients
            # of the one tensor under two names would be summed in another order.
            self.observer.clear()
            return args[0]
        if self.observer.seeded and draw is None:
            raise refusals.error(refusals.UNKNOWN_DRAW, refusals.name_of(func), self.where())
        kind, target, args = target_of(func, args, kwargs)
        kwargs = without_defaults(func, kwargs)
        return self.record(kind, target, target.rpartition(".")[2], args, kwargs, result, draw)

    def _leaf(
        self,
        plain: Callable[..., Any],
        module: torch.nn.Module,
        path: str,
        calls: int,
        args: Any,
        kwargs: Any,
    ) -> Any:
        draw = next(self._draws[path]) if is_random_module(module) else None
        self._begin()
        with self.inside(), refusals.reads(module, self.boundary):
            result = self._unsized.run(
                partial(plain, module),
                self.fakes.faked(args),
                self.fakes.faked(kwargs),
                closed=not any(True for _ in (*module.parameters(), *module.buffers())),
            )
        self._stack.append((path, calls))
        try:
            target = self.table.classes[path][0]
            with torch._C.DisableTorchFunction():
                return self.record("module", target, path, args, kwargs, result, draw)
        finally:
            self._stack.pop()

    def _opaque_call(self, path: str, calls: int, args: Any, kwargs: Any) -> Any:
        """One call of a module that is not looked into: what it returned when it really ran."""
        outcome = self.opaque[path, calls]
        if outcome.reason:
            raise TraceError(
                f"{path!r} cannot be kept whole: it {outcome.reason}",
                where=self.where(),
            )
        self._begin()
        with self.inside(), torch._C.DisableTorchFunction():
            result = replay(outcome, self.fakes, args, kwargs)
            buffers = [self.table.objects[fqn] for fqn in outcome.buffers]
            self.observer.clear()
            self.observer.written = {storage_key(self.fakes.faked(b)) for b in buffers}
        self._stack.append((path, calls))
        try:
            target = self.table.classes[path][0]
            with torch._C.DisableTorchFunction():
                return self.record("opaque", target, path, args, kwargs, result, None, outcome)
        finally:
            self._stack.pop()

    def record(
        self,
        kind: Any,
        target: str,
        base: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        draw: int | None,
        outcome: Outcome | None = None,
    ) -> Any:
        path, module_call = self._stack[-1]
        source, variable = locate(self.boundary)
        self._tell(source)
        self.reads.recorded()
        argument = partial(to_argument, tensor=self.fakes.name, device=self.fakes.device)
        try:
            arguments = tuple(map(argument, args))
            named = tuple(
                (key, argument(device_of(value) if key == "device" else value))
                for key, value in kwargs.items()
            )
        except TraceError as error:
            self.failed = self.fakes.origin_of((args, kwargs))
            if error.where is None:
                raise TraceError(error.message, where=source, remedy=error.remedy) from None
            raise
        written = set(self.observer.written)
        self.observer.clear()
        name = self.names.new(base or target)
        index = self._results.call_index(path, target)
        attributes = [attr.fqn for attr in walk((arguments, named), Attr)]
        if kind in ("module", "opaque"):
            attributes += self.table.tensors_of(path, "parameter")
            attributes += self.table.tensors_of(path, "buffer")
        kinds = {f: self.table.tensors[f].kind for f in attributes if f in self.table.tensors}
        op = Op(
            name=name,
            kind=kind,
            target=target,
            args=arguments,
            kwargs=named,
            module_path=path,
            call_index=index,
            module_call=module_call,
            source=source,
            variable=variable,
            parameters=tuple(f for f, k in kinds.items() if k == "parameter"),
            buffers_read=tuple(f for f, k in kinds.items() if k != "parameter"),
            buffers_written=written_tensors(self.fakes, written, source),
            mutates=mutated(self.fakes, written, (arguments, named)),
            draw=draw,
            region=self.region,
            grad_enabled=torch.is_grad_enabled(),
            autocast=autocast_region(self.fakes.device.type),
            constructor=(self._constructor(path) or ()) if kind == "module" else (),
            returns=outcome.form if outcome else "",
            flops=outcome.flops if outcome else None,
            saved_bytes=outcome.saved_bytes if outcome else None,
        )
        self.ops.append(op)
        return self._results.deliver(op, result, written)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Calls in here are part of the op that is being recorded.

        The mode itself stays on, because the model's tensors still have to be replaced.
        """
        self.within += 1
        try:
            yield
        finally:
            self.within -= 1

    def enter_loss(self) -> None:
        """From now on ops belong to loss_fn."""
        self.region = "loss"
        self._stack[:] = [(LOSS_PATH, 0)]
