"""Dead code elimination, of ops only whose absence nobody could notice."""

from __future__ import annotations

from pdcompile.ir.graph import CHECK, Argument, Op, Ref, walk


def prune(ops: tuple[Op, ...], roots: Argument) -> tuple[Op, ...]:
    """Without the ops that are unused, draw no random numbers, write and check nothing."""
    used = {ref.name for ref in walk(roots, Ref)}
    kept: list[Op] = []
    for op in reversed(ops):
        impure = op.draw is not None or op.mutates or op.buffers_written or op.opaque
        if impure or op.target == CHECK or op.name in used:
            kept.append(op)
            used.update(op.inputs)
    return tuple(reversed(kept))
