"""Calls of modules: those of torch.nn are one op each, others name the values that they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from pdcompile.eager.randomness import is_random_module
from pdcompile.ir.graph import Ref
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.opaque.observed_calls import CallKey
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed
from pdcompile.passes.trace.values.packed import takes_packed
from pdcompile.releases.torch_internals import NoTorchFunction


class LeafModules(Interceptor):
    """Records leaf modules that behave like their class as one op each."""

    def module(
        self, call: CallKey, plain: Callable[..., Any], args: Any, kwargs: Any, proceed: Proceed
    ) -> Any:
        tape, path = self.tape, call[0]
        module = tape.table.modules[path]
        leaf = path and tape.region == "forward"
        leaf = leaf and tape.table.constructor(path, tape.training) is not None
        if not leaf or takes_packed(module, args, kwargs):
            return proceed(call, plain, args, kwargs)
        with tape.running(call):
            draw = tape.draw() if is_random_module(module) else None
            tape.begin()
            with tape.inside(), refusals.as_refusals(module, tape.boundary):
                result = tape.unsized.run(
                    plain,
                    tape.fakes.faked(args),
                    tape.fakes.faked(kwargs),
                    closed=not any(True for _ in (*module.parameters(), *module.buffers())),
                )
            with NoTorchFunction():
                target = tape.table.classes[path][0]
                return tape.record("module", target, path, args, kwargs, result, draw)


class ArgumentNames(Interceptor):
    """Notes, at the first call of each module, under which name it takes each value."""

    def module(
        self, call: CallKey, plain: Callable[..., Any], args: Any, kwargs: Any, proceed: Proceed
    ) -> Any:
        path, number = call
        if number == 0 and path and self.tape.region == "forward":
            with NoTorchFunction():
                self.tape.passed[path] = self._names(path, args, kwargs)
        return proceed(call, plain, args, kwargs)

    def _names(self, path: str, args: Any, kwargs: Any) -> dict[str, str]:
        try:
            signature = inspect.signature(self.tape.table.modules[path].forward)
            given = signature.bind(*args, **kwargs).arguments
        except (TypeError, ValueError):  # the call will say so
            return {}
        fakes, found = self.tape.fakes, dict[str, str]()
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and fakes.known(value):
                argument = fakes.name(value)
                if isinstance(argument, Ref):
                    found.setdefault(argument.name, name)
        return found
