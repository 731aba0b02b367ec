"""Properties of tensors: reading a tensor is an op; only requires_grad may be set."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.ir.graph import Ref
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed, patched
from pdcompile.passes.trace.tape.observer import storage_key
from pdcompile.releases.torch_internals import MODULE_MOVE, NoTorchFunction, no_dispatch_modes


class Properties(Interceptor):
    """``tensor.name``, ``tensor.name = …`` and ``requires_grad_()``."""

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        if func is torch.Tensor.requires_grad_:
            return self._require_gradient(*args, **kwargs)
        if getattr(func, "__name__", "") not in ("__get__", "__set__", "__delete__"):
            return proceed(func, args, kwargs)
        owner = func.__self__
        name = str(getattr(owner, "__name__", None) or getattr(owner.fget, "__name__", ""))
        if func.__name__ == "__set__" and name == "requires_grad" and args[1]:
            self._require_gradient(args[0])
            return None
        tape = self.tape
        if func.__name__ != "__get__":
            raise refusals.error(refusals.ASSIGNED, f"tensor.{name} = …", tape.where())
        tape.begin()
        result = func(*tape.fakes.faked(args))
        if isinstance(result, torch.Tensor):
            return tape.record("getattr", name, "", (args[0],), {}, result, None)
        return result

    def _require_gradient(self, tensor: torch.Tensor, requires_grad: bool = True) -> Any:
        """Records the call even where the result requires grad: it need not in the other mode."""
        tape = self.tape
        fake = tape.fakes.faked(tensor)
        if not isinstance(tape.fakes.name(fake), Ref) or not requires_grad:
            if fake.requires_grad == requires_grad:
                return tensor
            raise refusals.error(refusals.ASSIGNED, "tensor.requires_grad = …", tape.where())
        tape.begin()
        fake.requires_grad_()
        # The flag is visible to all who hold the tensor.
        tape.observer.written = {storage_key(fake)}
        tape.record("method", "requires_grad_", "requires_grad_", (fake,), {}, fake, None)
        return tensor


class UnmovedModules(Interceptor):
    """Makes ``module.to(dtype)`` do nothing where all tensors have the dtype and device: it would
    assign every parameter's ``data`` to itself."""

    def around(self) -> AbstractContextManager[None]:
        home, name = MODULE_MOVE
        plain = getattr(home, name)

        def move(self: nn.Module, change: Callable[[Tensor], Tensor], *args: Any) -> Any:
            tensors = (*self.parameters(), *self.buffers())
            with torch.no_grad(), no_dispatch_modes(), NoTorchFunction():
                if all(change(tensor) is tensor for tensor in tensors):
                    return self
            return plain(self, change, *args)

        return patched((home, name, move))
