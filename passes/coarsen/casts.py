"""Weights that an autocast region casts once and uses often."""

from __future__ import annotations

from pdcompile.ir.graph import Op, OpGraph
from pdcompile.passes.coarsen.groups import Groups

CAST = "uses of one weight that autocast casts once"

# Ops that run in the lower precision; views of a weight are cast anew each time.
_CASTING = frozenset((
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "einsum",
    "bilinear", "conv1d", "conv2d", "conv3d", "convtranspose1d", "convtranspose2d",
    "convtranspose3d", "convtbc", "chainmatmul", "multidot", "scaleddotproductattention",
    "multiheadattention", "multiheadattentionforward", "lstm", "gru", "rnn", "lstmcell",
    "grucell", "rnncell", "rnntanhcell", "rnnrelucell", "prelu", "vecdot", "tensordot",
))  # fmt: skip


def join_casts(graph: OpGraph, groups: Groups) -> None:
    """Join the ops that share a weight's cast: its gradients are summed in the lower precision
    before they are cast back, which two stages, each with a cast of its own, would not do."""
    users: dict[tuple[str, str], list[int]] = {}
    for i, op in enumerate(graph.ops):
        if op.autocast is None or op.autocast.endswith(":off") or not _casts(op):
            continue
        for fqn in dict.fromkeys((*op.parameters, *op.attributes)):
            info = graph.tensors.get(fqn)
            if info is not None and info.requires_grad and info.dtype == "float32":
                users.setdefault((op.autocast, fqn), []).append(i)
    for members in users.values():
        groups.join(members, CAST)


def _casts(op: Op) -> bool:
    return op.opaque or op.target.rpartition(".")[2].lower().replace("_", "") in _CASTING
