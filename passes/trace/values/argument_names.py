"""What modules call the values that they are given: the parameters of their forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from pdcompile.ir.graph import Ref
from pdcompile.passes.trace.opaque.observed_calls import CallKey
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed
from pdcompile.releases.torch_internals import NoTorchFunction


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
