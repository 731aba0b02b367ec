"""Compiled: everything that one compilation produced, each form under its own name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.check import Proof
from pdcompile.plan import Edge, Plan

if TYPE_CHECKING:
    from pdcompile.batch import BatchLayout
    from pdcompile.passes.verify import Verification


@dataclass(frozen=True, slots=True)
class Compiled:
    """What rank 0 makes and every rank receives.

    `sources` is None where only a plan was asked for, of a model that cannot be compared;
    `verification` is None with ``verify="off"``; `eval_edges` are the values that cross stages
    in evaluation; `pass_seconds` says how long each pass took.
    """

    capture: Capture
    plan: Plan
    sources: Sources | None
    eval_edges: tuple[Edge, ...]
    layout: BatchLayout
    proof: Proof
    verification: Verification | None
    pass_seconds: tuple[tuple[str, float], ...] = ()

    def explain(self) -> str:
        """The plan as a table with its certificate, what was proved, and what was verified."""
        from pdcompile.report.plan_table import explain

        parts = [explain(self.plan).rstrip(), str(self.proof)]
        if self.verification is None:
            parts.append("not verified (verify='off')")
        elif not (self.verification.unverified and self._said):
            parts.append(str(self.verification))
        return "\n".join(parts)

    @property
    def _said(self) -> bool:
        """Whether a note of the plan says already why nothing was verified."""
        return any(note.startswith("not verified: ") for note in self.plan.notes)

    def dump(self, folder: str, model: Any = None) -> None:
        """Write stage_0.py, stage_1.py, …, pipeline.py and plan.json into a folder."""
        from pdcompile.passes import codegen

        assert self.sources is not None, "only a plan was asked for"
        codegen.write(self.sources, folder, model=model)
