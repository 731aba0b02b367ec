"""A checkpoint as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcompile.units import format_bytes


def checkpoint_report(document: Mapping[str, Any]) -> str:
    """The text of `pdcompile checkpoint show`, of the document that --json prints."""
    optimizer = document["optimizer"] or "no optimizer"
    lines = [
        f"{document['checkpoint']}: {document['minibatches']} minibatches, "
        f"{format_bytes(document['bytes'])}",
        f"saved under {document['schedule']} with {document['microbatches']} microbatches on "
        f"{document['ranks']} ranks, {optimizer}"
        + "".join(f", scheduler {name}" for name in document["schedulers"]),
        "stage  tensors     weights   optimizer        rest  weights of update",
    ]
    for stage in document["stages"]:
        sizes = (stage[f"{kind}_bytes"] for kind in ("weights", "optimizer", "rest"))
        cells = "".join(f"{format_bytes(size):>12}" for size in sizes)
        waits = f", gradients of {stage['waiting']} wait" if stage["waiting"] else ""
        versions = ", ".join(map(str, stage["weights"]))
        lines.append(f"{stage['stage']:>5}  {stage['tensors']:>7}{cells}  {versions}{waits}")
    lines += [f"tied: {name} is {first}" for name, first in document["tied"]]
    if len(document["checkpoints"]) > 1:
        lines.append(f"in this folder: {', '.join(document['checkpoints'])}")
    if "damaged" in document:
        lines += [f"damaged: {one}" for one in document["damaged"]] or ["every byte is as written"]
    return "\n".join(lines)
