"""Why sources that nobody edited can differ from a model that was captured rightly."""

from __future__ import annotations

from collections.abc import Sequence

from pdcompile.errors import VerifyError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.codegen.body import copied_buffers
from pdcompile.passes.verify.report import Difference


def unlike(found: Sequence[Difference], graph: OpGraph) -> VerifyError:
    """The error for sources that nobody edited; `graph` is the one of training."""
    if all(one.what == "gradient" for one in found):
        cause = _unseen_write(graph)
        if cause is not None:
            return cause
    first = found[0]
    return VerifyError(
        f"the generated stages differ from the model: {first}"
        + (f"; first at {first.first}" if first.first else ""),
        where=f"stage_{first.stage}.py",
        remedy="please report this model; verify='off' runs it all the same",
    )


def _unseen_write(graph: OpGraph) -> VerifyError | None:
    """A write into a buffer through ``.data``, after something used it that may keep it.

    Autograd does not notice: eager's backward computes with what was written later, a stage's
    with what was used, because in a pipeline further microbatches write before that backward.
    """
    aliased = {
        fqn for op in graph.ops if op.kind == "getattr" and op.target == "data"
        for fqn in op.attributes
    }  # fmt: skip
    for i, op in enumerate(graph.ops):
        for fqn in sorted(copied_buffers(op, graph) & aliased):
            later = (other for other in graph.ops[i + 1 :] if fqn in other.buffers_written)
            write = next(later, None)
            if write is not None:
                return VerifyError(
                    f"forward writes the buffer {fqn!r} through .data after {op.name} "
                    f"({op.target}, {op.source}) has used it, which autograd does not notice: "
                    "gradients are then computed with the value that was written later, and no "
                    "pipeline has that value alone",
                    where=write.source,
                    remedy=f"write it before it is used, or use a copy ({fqn}.clone()), whose "
                    "gradient is that of the value in use",
                )
    return None
