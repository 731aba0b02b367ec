"""Compiled: everything that one compilation produced, each form under its own name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from pdcompile.batch import BatchLayout
from pdcompile.ir.graph import Capture, written_buffers
from pdcompile.ir.stage_interface import Sources, StageInterface
from pdcompile.passes import codegen
from pdcompile.passes.schedules import Stream, make_stream
from pdcompile.passes.stages.boundaries import making_of_nothing, place_eval, stage_of_ops
from pdcompile.plan import Edge, Plan
from pdcompile.report.plan_table import explain

if TYPE_CHECKING:
    from pdcompile.passes.check import Proof
    from pdcompile.passes.verify import Verification


@dataclass(frozen=True)
class Compiled:
    """A planned, generated and proved pipeline: rank 0 makes it, and every rank receives it.

    `eval_edges` are the values that cross stages in evaluation, `layout` is that of the minibatch
    that was captured; `verification` is None with ``verify="off"``; `pass_seconds` says how long
    each pass took.
    """

    capture: Capture
    plan: Plan
    sources: Sources
    eval_edges: tuple[Edge, ...]
    layout: BatchLayout
    proof: Proof
    verification: Verification | None = None
    pass_seconds: tuple[tuple[str, float], ...] = ()

    @property
    def interfaces(self) -> tuple[StageInterface, ...]:
        """Inputs and outputs of each stage."""
        return self.sources.interfaces

    @cached_property
    def stage_classes(self) -> tuple[type[nn.Module], ...]:
        """The class of each stage, from a module of its own (the runtime puts its `draw` there)."""
        return codegen.stage_classes(self.sources)

    @cached_property
    def stream(self) -> Stream:
        """The programs of all ranks, call after call, from the first one on."""
        return make_stream(self.plan)

    @property
    def overlaps(self) -> bool:
        """True if minibatches are in flight between calls, on weights of several versions."""
        return self.stream.spec.kind.stream

    @property
    def stages_of_rank(self) -> dict[int, tuple[int, ...]]:
        """The stages that each rank holds."""
        return dict(sorted(self.stream.spec.holders))

    def edited(self, stage: int) -> bool:
        """True if a person has changed the source of a stage."""
        return any(f"stage_{stage}." in name for name in self.sources.edited)

    def written_buffers(self, stage: int) -> frozenset[str]:
        """Buffers that training may write on a stage: all of its own where its source was edited,
        and those of opaque modules, which may write them in some calls only."""
        held = (*self.interfaces[stage].buffers, *self.interfaces[stage].constants)
        if self.edited(stage):
            return frozenset(held)  # whatever a person wrote there
        ops = self.capture.train.ops
        inside = {fqn for op in ops if op.opaque for fqn in op.buffers_read}
        return (written_buffers(ops) | inside).intersection(held)

    def makes_tensors(self, stage: int) -> bool:
        """True if a stage may make tensors of nothing, which have to be on its device."""
        return stage in self._making or self.edited(stage)

    @cached_property
    def _making(self) -> set[int]:
        placed = stage_of_ops(self.capture.train, self.plan)
        evaluation = making_of_nothing(self.capture.eval, place_eval(self.capture, placed))
        return making_of_nothing(self.capture.train, placed) | evaluation

    def explain(self) -> str:
        """The plan as a table with its certificate, what was proved, and what was verified."""
        verified = self.verification
        said = "not verified (verify='off')" if verified is None else str(verified)
        return "\n".join([explain(self.plan).rstrip(), str(self.proof), said])

    def dump(self, folder: str, model: nn.Module | None = None) -> None:
        """Write stage_0.py, stage_1.py, …, pipeline.py and plan.json into a folder."""
        codegen.write(self.sources, folder, model=model)
