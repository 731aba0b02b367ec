"""Tape: records every public torch call of the running model as one op.

The model's own Python runs once, on fake tensors, under a TorchFunctionMode.  A call that returns
no tensor and writes none (shape, dim) is not recorded; a call that reads a value fails, because
fake tensors have none.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count, takewhile
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pdcompile.eager.randomness import CallKey, is_random_function
from pdcompile.errors import TraceError
from pdcompile.ir.graph import Attr, Op, walk
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.trace import real_shapes, refusals
from pdcompile.passes.trace.assumptions import Assumptions, Site
from pdcompile.passes.trace.interceptors.order import INTERCEPTORS
from pdcompile.passes.trace.opaque.probe import ObservedCall
from pdcompile.passes.trace.tape.arguments import (
    NO_OP_CASTS,
    open_autocast,
    target_of,
    to_arguments,
    without_defaults,
)
from pdcompile.passes.trace.tape.fake_tensors import FakeTensors
from pdcompile.passes.trace.tape.interceptor import patched
from pdcompile.passes.trace.tape.module_table import ModuleTable
from pdcompile.passes.trace.tape.observer import Observer, frames_of_model, instruction_of, locate
from pdcompile.passes.trace.tape.results import Results
from pdcompile.releases.torch_internals import maybe_current_level
from pdcompile.warn import warn

SCRIPTED = "TorchScript's optimiser rounds differently from a function's second call on"


class Tape(TorchFunctionMode):
    """Collects `ops` and, in `fakes`, their results.

    Args:
        table: the model's names.
        fakes: fake tensors for the model's tensors and inputs.
        observer: the dispatch mode that runs below.
    """

    #: `example_calls`, set before a run
    examples: Callable[[], Iterator[Mapping[str, torch.Tensor]]]

    def __init__(self, table: ModuleTable, fakes: FakeTensors, observer: Observer) -> None:
        super().__init__()
        self.table = table
        self.fakes = fakes
        self.observer = observer
        self.results = Results(fakes)
        self.ops = self.results.ops
        self.training = table.modules[""].training
        self.region: Any = "forward"
        self.regions: list[frozenset[str]] = []  # names of the ops of each reentrant checkpoint
        self.passed: dict[str, dict[str, str]] = {}  # see `OpGraph.passed`
        self.failed: str | None = None  # the innermost module that an error came from
        # Given for this run.
        self.assumed = Assumptions()
        self.like: set[tuple[int, str, str]] | None = None  # number, kind, target of the only ops
        self.opaque: Mapping[CallKey, ObservedCall] = {}  # as a real run showed them
        # Found in this run.
        self.handed_out: TraceError | None = None  # refusal of a `DrawnArray` that Python got
        self.within = 0  # in a leaf module or another call that is one op
        self.stack: list[CallKey] = [("", 0)]  # calls of modules that are running
        self._module_calls: dict[str, Iterator[int]] = defaultdict(count)
        self._draws: dict[str, Iterator[int]] = defaultdict(count)
        self.interceptors = tuple(kind(self) for kind in INTERCEPTORS)
        self._recorded = self._hooks("recorded")
        self._call = self._chain("call", self.call)
        self._module = self._chain("module", self._inside_module)
        self._apply = self._chain("apply", lambda cls, plain, args: self.call(plain, args, {}))

    def _chain(self, hook: str, last: Callable[..., Any]) -> Callable[..., Any]:
        """The interceptors that have this hook, each of which may proceed to the next one."""
        for each in reversed(self._hooks(hook)):
            last = partial(each, proceed=last)
        return last

    def _hooks(self, name: str) -> list[Callable[..., Any]]:
        own = [each for each in self.interceptors if name in vars(type(each))]
        return [getattr(each, name) for each in own]

    # Called by the interpreter.

    def watching(self) -> AbstractContextManager[None]:
        """Sees calls that pass no torch function: of modules, autograd.Function, TorchScript."""
        plain_call = torch.nn.Module.__call__
        plain_apply = vars(torch.autograd.Function)["apply"]

        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.call_module(plain_call, module, args, kwargs)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            plain = plain_apply.__get__(None, cls)
            return plain(*self.fakes.faked(args)) if self.within else self._apply(cls, plain, args)

        def scripted(script: Any, *args: Any, **kwargs: Any) -> Any:
            # It is an optimised graph that detaches.
            self.fakes.findings.rounded.add(SCRIPTED)
            warn(f"the TorchScript function {script.name!r} is captured as its source: {SCRIPTED}")
            return script._torchdynamo_inline(*args, **kwargs)

        return patched(
            (torch.nn.Module, "__call__", __call__),
            (torch.jit.ScriptFunction, "__call__", scripted),
            (torch.autograd.Function, "apply", classmethod(apply)),
        )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.within:
            return func(*self.fakes.faked(args), **self.fakes.faked(kwargs))
        if getattr(func, "__name__", "") == "__iter__":
            return iter(self._call(torch.Tensor.unbind, (args[0], 0), {}))
        return self._call(func, args, kwargs)

    def call_module(
        self, plain: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Runs and records ``module(*args, **kwargs)``."""
        path = self.table.names.get(id(module))
        if self.within or path is None:
            return plain(module, *args, **kwargs)
        call = path, next(self._module_calls[path])
        result = self._module(call, partial(plain, module), args, kwargs)
        self.failed = None
        return result

    def _inside_module(
        self, call: CallKey, plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        with self.running(call):
            result = plain(*args, **kwargs)
            self.begin()
            self._tell(self.table.classes[call[0]][1])
            self.fakes.made_in(result, call[0])
        return result

    @contextmanager
    def running(self, call: CallKey, *, opaque: bool = False) -> Iterator[None]:
        """Attributes ops inside to this call of a module, and failures unless it is opaque."""
        self.stack.append(call)
        try:
            yield
        except Exception:
            self.failed = self.failed or (None if opaque else call[0])
            raise
        finally:
            self.stack.pop()

    def _tell(self, source: str) -> None:
        for recorded in self._recorded:
            recorded(source)

    # One op.

    def begin(self) -> None:
        """Called before each op: refuses transforms, and unrecorded writes and draws since the
        last one."""
        if maybe_current_level() is not None:
            raise refusals.error(refusals.TRANSFORM, self.path or "operators", self.where())
        if self.observer.moved:
            raise refusals.error(refusals.STORAGE, "set_, before this line", self.where())
        if self.observer.seeded or self.fakes.own_any(self.observer.written):
            raise refusals.error(refusals.UNTRACKED, "before this line", self.where())
        self.observer.clear()

    def where(self) -> str:
        """The line of the model that is running."""
        return locate()[0]

    def site(self) -> Site:
        """The running place: the frames from here to the innermost module's call."""
        end = Tape.call_module.__code__
        inside = takewhile(lambda frame: frame.f_code is not end, frames_of_model(sys._getframe(1)))
        return tuple((frame.f_code, instruction_of(frame)) for frame in inside)

    @property
    def path(self) -> str:
        """FQN of the innermost running module."""
        return self.stack[-1][0]

    def draw(self) -> int:
        """The index of a random op that the innermost module makes."""
        return next(self._draws[self.path])

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """The result of a torch function, recorded without asking any interceptor."""
        kwargs = kwargs or {}
        draw = self.draw() if is_random_function(func) else None
        self.begin()
        with self.inside(), refusals.as_refusals(func):
            result = real_shapes.run(func, self.fakes.faked(args), self.fakes.faked(kwargs))
        if not tensors_among(result) and not self.fakes.own_any(self.observer.written):
            self.observer.clear()
            return result
        if func in NO_OP_CASTS and result is self.fakes.faked(args[0]):
            # As in eager, the tensor stays the same.  An op here would be a place to cut at, and
            # gradients of one tensor under two names would be summed in another order.
            self.observer.clear()
            return args[0]
        if self.observer.seeded and draw is None:
            raise refusals.error(refusals.UNKNOWN_DRAW, refusals.name_of(func), self.where())
        kind, target, args = target_of(func, args, kwargs)
        kwargs = without_defaults(func, kwargs)
        return self.record(kind, target, target.rpartition(".")[2], args, kwargs, result, draw)

    def record(
        self,
        kind: Any,
        target: str,
        base: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        draw: int | None,
        **facts: Any,
    ) -> Any:
        """The result for the model's Python; `facts`: further fields of the op."""
        path, module_call = self.stack[-1]
        source, variable = locate()
        self._tell(source)
        try:
            arguments, named = to_arguments(args, kwargs, self.fakes.name, self.fakes.device)
        except TraceError as error:
            self.failed = self.fakes.origin_of((args, kwargs))
            if error.where is None:
                raise TraceError(error.message, where=source, remedy=error.remedy) from None
            raise
        written = set(self.observer.written)
        self.observer.clear()
        name = self.results.new_name(base or target)
        index = self.results.call_index(path, target)
        attributes = [attr.fqn for attr in walk((arguments, named), Attr)]
        if kind in ("module", "opaque"):
            attributes += self.table.tensors_of(path)
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
            buffers_written=self.fakes.buffers_in(written, source),
            mutates=self.fakes.values_in(written, (arguments, named)),
            draw=draw,
            region=self.region,
            grad_enabled=torch.is_grad_enabled(),
            autocast=open_autocast(self.fakes.device.type),
            constructor=(self.table.constructor(path, self.training) or ())
            if kind == "module"
            else (),
            **facts,
        )
        self.ops.append(op)
        if self.like is not None and (len(self.ops), op.kind, op.target) not in self.like:
            raise refusals.Ended(tuple(self.ops))
        return self.results.deliver(op, result, written)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Makes calls inside part of the op that is being recorded.

        The mode stays on, because the model's tensors still have to be replaced by fakes.
        """
        self.within += 1
        try:
            yield
        finally:
            self.within -= 1
