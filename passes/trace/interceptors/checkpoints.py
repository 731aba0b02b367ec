"""Regions of torch.utils.checkpoint, which eager runs a second time in backward.

In a graph a region is its operators; the plan decides what to recompute.  That is the same
computation as long as the second run only repeats the first: it must not write buffers again or
draw other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

from pdcompile.errors import some
from pdcompile.ir.graph import Op, TensorInfo
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed, patched
from pdcompile.releases.torch_internals import CHECKPOINT_REGION, region_preserves_rng

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape


class Checkpoints(Interceptor):
    """Regions of torch.utils.checkpoint become their operators."""

    def apply(self, cls: type, plain: Callable[..., Any], args: Any, proceed: Proceed) -> Any:
        if cls is checkpoint.CheckpointFunction:
            return _reentrant(self.tape, *args)
        return proceed(cls, plain, args)

    def around(self) -> AbstractContextManager[None]:
        """Checks regions that are not reentrant, where backward would run them again."""
        home, name = CHECKPOINT_REGION
        plain = getattr(home, name)

        def region(*args: Any, **kwargs: Any) -> Iterator[None]:
            start, recomputed = len(self.tape.ops), torch.is_grad_enabled()
            yield from plain(*args, **kwargs)
            if recomputed:
                check_region(self.tape.ops[start:], region_preserves_rng(args, kwargs))

        return patched((home, name, region))


def _reentrant(tape: Tape, function: Any, preserve: bool, *inputs: Any) -> Any:
    """Records the ops of ``CheckpointFunction.apply``.

    As in eager, parameters get no gradient when no input of the region does, and the gradients
    for an input are summed in the region before they meet those of its other readers.
    """
    needed = [isinstance(x, torch.Tensor) and x.requires_grad for x in inputs]
    if not (any(needed) and torch.is_grad_enabled()):
        with torch.no_grad():
            return function(*inputs)
    pairs = zip(inputs, needed, strict=True)
    inside = [tape.call(torch.Tensor.view_as, (x, x)) if own else x for x, own in pairs]
    start = len(tape.ops)
    result = function(*inside)
    check_region(tape.ops[start:], preserve)
    tape.regions.append(frozenset(op.name for op in tape.ops[start:]))
    return result


def summed_apart(
    ops: Sequence[Op], regions: Sequence[frozenset[str]], tensors: Mapping[str, TensorInfo]
) -> tuple[str, ...]:
    """A note on parameters that reentrant regions share with other ops, if there are any.

    A reentrant region has its own backward, which adds to ``.grad`` separately; in a graph all
    uses of a parameter are summed first.  From the second microbatch on, when ``.grad`` is not
    empty, the order of the sum differs.
    """
    uses: dict[str, set[str]] = {}
    for op in ops:
        for fqn in op.parameters if op.grad_enabled else ():
            if tensors[fqn].requires_grad:
                uses.setdefault(fqn, set()).add(op.name)
    shared = [
        fqn
        for fqn, names in uses.items()
        if any(not names.isdisjoint(region) and not names <= region for region in regions)
    ]
    if not shared:
        return ()
    return (
        f"{some(shared)}: used in a region of torch.utils.checkpoint and elsewhere. "
        "With use_reentrant=True eager adds the gradient of the region to .grad apart from the "
        "others, the stages add their sum: from the second microbatch on, last bits may differ "
        "(use_reentrant=False is exact)",
    )


def check_region(ops: list[Op], preserve: bool) -> None:
    """Raises NeverOpaque where a second run of these ops would not only repeat the first."""
    for op in ops:
        if op.buffers_written:
            refusal = refusals.RECOMPUTED_WRITE
        elif op.draw is not None and not preserve:
            refusal = refusals.RECOMPUTED_DRAW
        else:
            continue
        shown = repr(op.module_path or op.target.rpartition(".")[2])
        raise refusals.error(refusal, shown, op.source, refusals.NeverOpaque)
