"""Modules of torch.nn that are one op each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdcompile.eager.randomness import is_random_module
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
