"""Values that depend on nothing but constants may be read: they are computed for real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pdcompile.graph import Attr, Op, Ref, walk
from pdcompile.graph_module import Lookup, run_op
from pdcompile.passes.trace.tensors import FakeTensors

MAX_ELEMENTS = 65_536


def read(
    func: Callable[..., Any], args: Any, kwargs: Any, ops: Sequence[Op], fakes: FakeTensors
) -> tuple[Any] | None:
    """(what a call that reads values returns,), when all its tensors are constants; else None."""

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        name = fakes.name(value)
        found = evaluate(name.name, ops, fakes.objects) if isinstance(name, Ref) else None
        if found is None:
            raise LookupError
        return found

    try:
        arguments, named = [real(a) for a in args], {k: real(v) for k, v in kwargs.items()}
    except LookupError:
        return None
    with _disable_current_modes():
        return (func(*arguments, **named),)


def evaluate(name: str, ops: Sequence[Op], fakes: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The real tensor for a value, or None when inputs, the model's tensors or chance are in it.

    Only creation functions and pure ops on their results qualify; something written in place
    anywhere disqualifies it.
    """
    by_name = {op.name: op for op in ops}
    needed: list[Op] = []
    stack = [name]
    seen: set[str] = set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        op = by_name.get(current)
        if op is None or op.kind not in ("function", "method", "getattr"):
            return None
        if op.draw is not None or op.mutates or walk((op.args, op.kwargs), Attr):
            return None
        if current in fakes and fakes[current].numel() > MAX_ELEMENTS:
            return None
        needed.append(op)
        stack.extend(op.inputs)
    if any(seen.intersection(op.mutates) for op in ops):
        return None
    env: dict[str, Any] = {}
    order = {op.name: i for i, op in enumerate(ops)}
    lookup = Lookup(torch.nn.Module(), b=0)
    with _disable_current_modes():
        for op in sorted(needed, key=lambda one: order[one.name]):
            env[op.name] = run_op(op, env, lookup)
    found = env[name]
    return found if isinstance(found, torch.Tensor) else None
