"""Refuses models that cannot be captured, before anything runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pdcompile.errors import TraceError

_WRAPPERS = {
    "DistributedDataParallel": "pass the inner model (ddp.module): replicas are planned here",
    "DataParallel": "pass the inner model (parallel.module)",
    "FullyShardedDataParallel": "pass the model as it was before it was wrapped",
    "OptimizedModule": "pass the model as it was before torch.compile (compiled._orig_mod)",
}


def check_model(model: Any) -> None:
    """Raises TraceError for wrapped, scripted, uninitialised or sparse models."""
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"the model is a {type(model).__qualname__}, not a torch.nn.Module",
            remedy="wrap the function in an nn.Module with a forward method",
        )
    for path, module in model.named_modules():
        where = path or "the model"
        if flaw := _flaw(module):
            raise TraceError(f"{where} {flaw[0]}", where=where, remedy=flaw[1])
        for name, child in module.named_children():
            if getattr(module, name, None) is not child:  # the name of a method leads to that
                fqn = f"{path}.{name}" if path else name
                raise TraceError(
                    f"the submodule {fqn!r} is hidden by the attribute {name!r} of "
                    f"{type(module).__name__}",
                    where=fqn,
                    remedy="give it another name",
                )
        if not path and has_backward_hook(module):
            raise backward_hook(where)
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for fqn, tensor in tensors:
        if is_lazy(tensor):
            raise TraceError(
                f"the lazy parameter {fqn!r} is not initialised",
                where=fqn,
                remedy="run the model once on example inputs first",
            )
        if tensor.layout is not torch.strided:
            raise TraceError(
                f"{fqn!r} has layout {tensor.layout}; only dense tensors can be captured",
                where=fqn,
                remedy="store it dense: tensor.to_dense()",
            )
    _refuse_shared_memory(dict(tensors))


def _flaw(module: nn.Module) -> tuple[str, str] | None:
    """Fault for which a module cannot be captured, and what to pass instead; None where it can."""
    cls = type(module)
    if cls.__name__ in _WRAPPERS and cls.__module__.startswith("torch."):
        return f"is wrapped in {cls.__name__}", _WRAPPERS[cls.__name__]
    if isinstance(module, torch.jit.ScriptModule):
        return "is a TorchScript module", "pass the Python module"
    if getattr(vars(module).get("train"), "__module__", "").startswith("torch.export"):
        return "was made by torch.export, and has no training mode", "pass the Python module"
    if module._compiled_call_impl is not None:
        return "was compiled in place by module.compile()", "pass the model before module.compile()"
    return None


def has_backward_hook(module: nn.Module) -> bool:
    """True if the user registered a hook on the module's backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def backward_hook(where: str) -> TraceError:
    """The refusal of a module with a hook on its backward."""
    return TraceError(
        f"{where} has a hook on its backward, which stages would not run",
        where=where,
        remedy="remove it; gradients of parameters can be changed by "
        "Parameter.register_hook, or between forward_backward and the update",
    )


def _refuse_shared_memory(tensors: dict[str, torch.Tensor]) -> None:
    """Refuses two tensors in one memory, one of them trained: on two stages they would differ."""
    spans: dict[tuple[torch.device, int], list[tuple[int, int, str, int]]] = {}
    for fqn, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        start = int(tensor.storage_offset())
        extent = int(sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
        begin = start * tensor.element_size()
        end = (start + extent + 1) * tensor.element_size()
        key = (tensor.device, tensor.untyped_storage().data_ptr())
        for other_begin, other_end, other, identity in spans.get(key, []):
            trained = isinstance(tensor, nn.Parameter) or isinstance(tensors[other], nn.Parameter)
            overlap = begin < other_end and other_begin < end
            if identity != id(tensor) and trained and overlap:
                raise TraceError(
                    f"{fqn!r} and {other!r} are different tensors in the same memory",
                    where=fqn,
                    remedy="tie them by assigning the same Parameter object to both modules",
                )
        spans.setdefault(key, []).append((begin, end, fqn, id(tensor)))
