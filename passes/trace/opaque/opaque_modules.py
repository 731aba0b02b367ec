"""Modules that are kept whole: what cannot be captured inside becomes one op of the graph.

A refusal inside of a submodule makes the innermost running module one op, and capture starts
again; where that module's call cannot be one op either (what it takes or returns, what it reads
or writes), its caller takes its place.  The root is never kept whole: that would leave nothing to
cut, so the refusal stands.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.errors import TraceError
from pdcompile.ir.opaque import tensors_at
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.interceptors.generators import OutsideDraw
from pdcompile.passes.trace.opaque.outcomes import CallKey, Made, Outcome
from pdcompile.passes.trace.preconditions import backward_hook, has_backward_hook
from pdcompile.passes.trace.refusals import Unrepeatable
from pdcompile.passes.trace.subject import Subject
from pdcompile.passes.trace.tape.fake_tensors import FakeTensors
from pdcompile.warn import warn

OPAQUE_SHARE = 1 / 8  # of all parameters: modules with no more are kept whole


Opaque = Mapping[str, TraceError]  # path to the refusal that the module is kept for


def hooked(subject: Subject) -> Opaque:
    """The modules that have to be opaque because something runs in their backward."""
    opaque: Opaque = {}
    for path, module in subject.table.modules.items():
        if path and has_backward_hook(module) and not _covered(path, opaque):
            opaque = _with(subject, opaque, [path], backward_hook(path))
    return opaque


def enlarged(subject: Subject, opaque: Opaque, error: TraceError) -> Opaque:
    """With one opaque module more; raises the error where there is none that helps."""
    path = error.module_path
    if isinstance(error, Unrepeatable):
        error.where = opaque[error.opaque_path].where
    if isinstance(error, OutsideDraw | refusals.Unkept) or path not in subject.table.modules:
        raise error
    while path and _covered(path, opaque):
        path = path.rpartition(".")[0]
    first = next((e for p, e in opaque.items() if below(p, path)), error)
    if not path:
        raise first from (error if first is not error else None)
    return _with(subject, opaque, [path, *_alike(subject, opaque, path)], first, error)


def spares(subject: Subject, opaque: Opaque, error: TraceError) -> bool:
    """Whether `enlarged` would add so little that the model can still be cut."""
    path, modules = error.module_path, subject.table.modules
    if not path or path not in modules or _covered(path, opaque):
        return False
    added = [modules[p] for p in (path, *_alike(subject, opaque, path))]
    return held_share(added, subject.model) <= OPAQUE_SHARE


def _with(
    subject: Subject,
    opaque: Opaque,
    chosen: list[str],
    reason: TraceError,
    error: TraceError | None = None,
) -> Opaque:
    error = error or reason
    tensors = [*subject.model.named_parameters(), *subject.model.named_buffers()]
    meta = [fqn for fqn, tensor in tensors if tensor.is_meta]
    if meta:
        error.remedy = (
            f"{error.remedy or ''}; {chosen[0]!r} could be kept whole if the model could run "
            f"once to see what it returns, but {meta[0]!r} is on the meta device"
        ).removeprefix("; ")
        raise error
    kept = {p: e for p, e in opaque.items() if not any(below(p, new) for new in chosen)}
    return {**kept, **dict.fromkeys(chosen, reason)}


def _alike(subject: Subject, opaque: Opaque, path: str) -> list[str]:
    """Modules of the same class in the same place of other layers, which will fail alike."""
    modules = subject.table.modules
    kind = type(modules[path])
    if kind.__module__.startswith("torch.nn."):
        return []
    place = _place(path)
    return [
        other
        for other, module in modules.items()
        if other != path
        and type(module) is kind
        and _place(other) == place
        and not _covered(other, opaque)
    ]


def warn_of(subject: Subject, opaque: Opaque) -> None:
    """Tell which modules are opaque, and why."""
    reasons: dict[int, tuple[TraceError, list[str]]] = {}
    for path, error in opaque.items():
        reasons.setdefault(id(error), (error, []))[1].append(path)
    for error, paths in reasons.values():
        names = [f"{path!r} ({subject.table.classes[path][0]})" for path in paths[:3]]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        place = f" ({error.where})" if error.where else ""
        warn(f"kept whole as one op: {', '.join(names)}{more}, because {error.message}{place}")


def held_share(modules: Iterable[nn.Module], model: nn.Module) -> float:
    """How much of the model's parameters these modules hold, 0 to 1."""
    total = {p: p.numel() for p in model.parameters()}
    held = {p for module in modules for p in module.parameters()}
    return sum(total[p] for p in held) / max(sum(total.values()), 1)


def below(path: str, ancestor: str) -> bool:
    """Whether a module is another one or inside of it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def _covered(path: str, paths: Iterable[str]) -> bool:
    return any(below(path, other) for other in paths)


def _place(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def refuse_parts(path: str, opaque: Mapping[CallKey, Outcome], where: str) -> None:
    """Raise TraceError when a part of a module that is kept whole runs outside of it."""
    for owner, _ in opaque:
        if path != owner and below(path, owner):
            raise TraceError(
                f"{path!r} runs outside of {owner!r}, which has to be kept whole",
                where=where,
                remedy=f"call it only in the forward of {owner!r}",
            )


def replay(outcome: Outcome, fakes: FakeTensors, args: Any, kwargs: Any) -> Any:
    """Fake tensors in the place of what a call returned when it really ran."""
    inputs = [tensor for _, tensor in tensors_at((fakes.faked(args), fakes.faked(kwargs)))]
    outputs: list[Tensor] = []
    for made in outcome.made:
        outputs.append(_fake(made, inputs, outputs, outcome.made, fakes.device))
    return _filled(outcome.result, iter(outputs))


def _fake(
    made: Made,
    inputs: list[Tensor],
    outputs: list[Tensor],
    others: tuple[Made, ...],
    device: torch.device,
) -> Tensor:
    if made.shares is None:
        # As long as all that lies in the storage, and no leaf: it may be written in place.
        index = len(outputs)
        same = [made, *(other for other in others if other.shares == ("output", index))]
        base = torch.empty(max(_end(one) + one.offset for one in same) + made.offset,
                           dtype=made.dtype, device=device)  # fmt: skip
        if any(one.requires_grad for one in same):
            base = base.requires_grad_().clone()
        offset = made.offset
    else:
        kind, index = made.shares
        base = inputs[index] if kind == "input" else outputs[index]
        offset = made.offset + int(base.storage_offset())
    fake = base.as_strided(made.shape, made.stride, offset)
    return fake if fake.requires_grad == made.requires_grad else fake.detach()


def _end(made: Made) -> int:
    if 0 in made.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(made.shape, made.stride, strict=True))


def _filled(result: Any, outputs: Any) -> Any:
    """The same structure with fakes for tensors."""
    if isinstance(result, Tensor):
        return next(outputs)
    if isinstance(result, dict):
        found = copy.copy(result)
        for key, item in result.items():
            found[key] = _filled(item, outputs)
        return found
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(_filled(item, outputs) for item in result))
    if isinstance(result, tuple | list):
        return type(result)(_filled(item, outputs) for item in result)
    return result
