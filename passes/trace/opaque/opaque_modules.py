"""Opaque modules: submodules that cannot be captured inside and become one op each.

A refusal inside a submodule makes the innermost running module one op, and capture starts again;
where that module's call cannot be one op either (because of what it takes, returns, reads or
writes), its caller takes its place.  The root is never opaque: that would leave nothing to cut, so
the refusal stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import nn

from pdcompile.errors import TraceError, some
from pdcompile.passes.stages.naming import below
from pdcompile.passes.trace.preconditions import backward_hook, has_backward_hook
from pdcompile.passes.trace.refusals import NeverOpaque
from pdcompile.passes.trace.subject import Subject
from pdcompile.passes.trace.tape.observer import NO_SOURCE
from pdcompile.warn import warn

OPAQUE_SHARE = 1 / 8  # of all parameters: modules with no more are opaque


Opaque = Mapping[str, TraceError]  # path to the refusal that makes the module opaque


def hooked(subject: Subject) -> Opaque:
    """The modules that must be opaque because of a hook on their backward."""
    opaque: Opaque = {}
    for path, module in subject.table.modules.items():
        if path and has_backward_hook(module) and not _covered(path, opaque):
            opaque = _with(subject, opaque, [path], backward_hook(path))
    return opaque


def enlarged(subject: Subject, opaque: Opaque, error: TraceError) -> Opaque:
    """The opaque modules and one more; raises the error where no further one helps."""
    path = error.module_path
    if isinstance(error, NeverOpaque) or path not in subject.table.modules:
        raise error
    while path and _covered(path, opaque):
        path = path.rpartition(".")[0]
    first = next((e for p, e in opaque.items() if below(p, path)), error)
    if not path:
        raise first from (error if first is not error else None)
    return _with(subject, opaque, [path, *_alike(subject, opaque, path)], first, error)


def adds_little(subject: Subject, opaque: Opaque, error: TraceError) -> bool:
    """True if `enlarged` adds few parameters, so that the model can still be cut."""
    path, modules = error.module_path, subject.table.modules
    if not path or path not in modules or _covered(path, opaque):
        return False
    added = [modules[p] for p in (path, *_alike(subject, opaque, path))]
    return parameter_share(added, subject.model) <= OPAQUE_SHARE


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
            f"{error.remedy or ''}; {chosen[0]!r} could be opaque if the model could run "
            f"once to see what it returns, but {meta[0]!r} is on the meta device"
        ).removeprefix("; ")
        raise error
    kept = {p: e for p, e in opaque.items() if not any(below(p, new) for new in chosen)}
    return {**kept, **dict.fromkeys(chosen, reason)}


def _alike(subject: Subject, opaque: Opaque, path: str) -> list[str]:
    """Modules of the same class in the same place of other layers, which would be refused too."""
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
    """Warns of the modules that are opaque, with the reasons."""
    reasons: dict[int, tuple[TraceError, list[str]]] = {}
    for path, error in opaque.items():
        reasons.setdefault(id(error), (error, []))[1].append(path)
    for error, paths in reasons.values():
        names = [f"{path!r} ({subject.table.classes[path][0]})" for path in paths]
        place = f" ({error.where})" if error.where not in (None, NO_SOURCE) else ""
        warn(f"captured as opaque: {some(names)}, because {error.message}{place}")


def parameter_share(modules: Iterable[nn.Module], model: nn.Module) -> float:
    """The share of the model's parameters in these modules, 0 to 1."""
    total = {p: p.numel() for p in model.parameters()}
    held = {p for module in modules for p in module.parameters()}
    return sum(total[p] for p in held) / max(sum(total.values()), 1)


def _covered(path: str, paths: Iterable[str]) -> bool:
    return any(below(path, other) for other in paths)


def _place(path: str) -> str:
    return re.sub(r"\d+", "*", path)
