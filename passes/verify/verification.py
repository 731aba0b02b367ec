"""Verification: the differences by name, op and line, and the counts of compared tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from pdcompile.ir.graph import OpGraph
from pdcompile.passes.trace.comparison.step_values import StepValues

ROUNDED = "1 in 100000; of bfloat16 1.6 %, of float16 1 in 1000"
SHOWN = 10  # differences, of the many that one wrong op makes


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that differs between stages and model, or one op that a source does not compute.

    `first` names that op, with the user's line and the line of the generated stage.
    """

    mode: str  # train | eval
    what: str  # output | loss | gradient | buffer | op
    name: str
    stage: int
    largest: float  # absolute difference; infinite where shape or dtype differ
    step: int = 0
    first: str = ""

    def __str__(self) -> str:
        gap = f"by up to {self.largest:.3g}"
        if self.what == "op":
            return f"op {self.name!r} of stage {self.stage} in {self.mode} mode differs"
        if self.largest == float("inf"):
            gap = "(missing, not finite, or of another shape or dtype)"
        step = f", in step {self.step + 1} only" if self.step else ""
        return (
            f"{self.what} {self.name!r} of stage {self.stage} in {self.mode} mode differs "
            f"{gap}{step}"
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """The numbers of tensors that one step of one mode compared."""

    mode: str  # train | eval
    step: int
    samples: int
    outputs: int  # the loss among them
    gradients: int
    buffers: int


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification; sources that nobody edited have no differences.

    `rows` count the tensors of each step and mode; steps follow each other, with updated weights
    and buffers, each on its own inputs.  `ops` counts those that were compared with the capture's,
    in all sources; `unverified` says why no numbers were.  `casts_of` is the autocast region of a
    GPU, where model and stages were compared on the CPU, with its casts.  `notes` are intended
    differences from one full-batch step of eager, and hints at a wrong option.  `places` are the
    ops where differences begin.
    """

    microbatch_size: int
    rows: tuple[Compared, ...] = ()
    exact: bool = True  # compared bit for bit; otherwise within rounding (not on a CPU)
    edited: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    unverified: str = ""
    ops: int = 0
    casts_of: str = ""
    notes: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    compiled: str = ""  # the backend of torch.compile that compiled the stages
    in_float64: bool = False  # sums that cancel were equal in that dtype alone

    @property
    def steps(self) -> int:
        return len({row.step for row in self.rows})

    def __str__(self) -> str:
        edited = f"edited ({', '.join(self.edited)}): " if self.edited else ""
        more = len(self.differences) - SHOWN
        lines = [f"{edited}{self.verdict} ({self.compared})"]
        lines += [f"  first at {place}" for place in self.places]
        lines += [f"  {difference}" for difference in self.differences[:SHOWN]]
        lines += [f"  and {more} more"] if more > 0 else []
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    @property
    def verdict(self) -> str:
        """The finding, in words."""
        if self.differences:
            return f"the stages differ from eager in {self.share}"
        if self.unverified:
            return "the stages have the ops of the model, no numbers were compared"
        wide = "; in float64, where sums that cancel differ by more" * self.in_float64
        how = "bit for bit" if self.exact else f"up to rounding ({ROUNDED}{wide})"
        place = f" on the CPU, with the casts of {self.casts_of}" if self.casts_of else ""
        stages = f"the stages, compiled by {self.compiled}," if self.compiled else "the stages"
        return f"{stages} equal eager {how}{place}"

    @property
    def share(self) -> str:
        """The number of differences, of how many ops or of tensors in all steps."""
        if self.unverified:
            return f"{len(self.differences)} places of {self.ops} ops, no numbers were compared"
        total = sum(one.outputs + one.gradients + one.buffers for one in self.rows)
        return f"{len(self.differences)} places of {total} compared"

    @property
    def compared(self) -> str:
        """The counts of compared ops and tensors, in words."""
        if self.unverified:
            return f"{self.ops} ops, training and evaluation: {self.unverified}"
        steps = f"{self.steps} steps on {self.steps} inputs, " if self.steps > 1 else ""
        first = [row for row in self.rows if row.step == 0]
        trains = any(row.mode == "train" for row in first)
        modes = "training and evaluation" if trains else "evaluation"
        return (
            f"{sum(row.outputs for row in first)} outputs and losses, "
            f"{sum(row.gradients for row in first)} gradients, "
            f"{sum(row.buffers for row in first)} buffers, {modes}, {steps}"
            f"microbatch of {self.microbatch_size}"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def counted(values: StepValues, graph: OpGraph, step: int, samples: int) -> Compared:
    """The numbers of tensors that one step compares."""
    outputs = sum(isinstance(one, torch.Tensor) for one in values.outputs.values())
    return Compared(
        mode_of(graph),
        step,
        samples,
        outputs=outputs + (values.loss is not None),
        gradients=sum(gradient is not None for gradient in values.gradients.values()),
        buffers=len(values.buffers),
    )


def mode_of(graph: OpGraph) -> str:
    """The name of a graph's mode in reports."""
    return "train" if graph.training else "eval"
