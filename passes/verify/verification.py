"""What a verification found: every difference by name, op and line, and what was compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from pdcompile.ir.graph import OpGraph


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step of one mode leaves behind, copied: everything by name."""

    outputs: dict[str, torch.Tensor]
    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]

    def counted(self, graph: OpGraph, step: int, samples: int) -> Compared:
        """How much was compared with it."""
        return Compared(
            mode_of(graph),
            step,
            samples,
            outputs=len(self.outputs) + (self.loss is not None),
            gradients=sum(gradient is not None for gradient in self.gradients.values()),
            buffers=len(self.buffers),
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that the stages make otherwise than the model.

    `first` names the first op whose value (or gradient) differs, with the user's line and the
    line of the generated stage; "" where none could be found.
    """

    mode: str  # train | eval
    what: str  # output | loss | gradient | buffer
    name: str
    stage: int
    largest: float  # absolute difference; infinite where shape or dtype differ
    step: int = 0
    first: str = ""

    def __str__(self) -> str:
        gap = f"by up to {self.largest:.3g}"
        if self.largest == float("inf"):
            gap = "(missing, not finite, or of another shape or dtype)"
        step = f", in step {self.step + 1} only" if self.step else ""
        return (
            f"{self.what} {self.name!r} of stage {self.stage} in {self.mode} mode differs "
            f"{gap}{step}"
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """How many tensors one step of one mode compared, of eager and stages."""

    mode: str  # train | eval
    step: int
    samples: int
    outputs: int  # the loss among them
    gradients: int
    buffers: int


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared and what differs; nothing does for sources that nobody edited.

    `outputs`, `gradients` and `buffers` count the tensors of one step, training and evaluation
    together.  `steps` follow each other, with updated weights and buffers, each on inputs of its
    own.  `blocks` says what was compared instead where the whole model does not fit, and
    `left_out` what was not compared at all.  `notes` are differences from one full-batch step of
    eager that are meant to be, and what hints at a wrong option.  `rows` count what each step
    compared.
    """

    microbatch_size: int
    outputs: int
    gradients: int
    buffers: int
    exact: bool  # compared bit for bit; otherwise within rounding (not on a CPU)
    edited: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    unverified: str = ""  # why nothing was compared
    steps: int = 1
    graph: bool = False  # the captured graph was compared as well, apart from the stages
    blocks: str = ""
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rows: tuple[Compared, ...] = ()

    def __str__(self) -> str:
        if self.unverified:
            return f"not verified: {self.unverified}"
        edited = f"edited ({', '.join(self.edited)}): " if self.edited else ""
        rest = [f"  not verified: {', '.join(self.left_out)}"] if self.left_out else []
        rest += [f"  note: {note}" for note in self.notes]
        if not self.differences:
            how = "bit for bit" if self.exact else "up to rounding"
            head = f"{edited}{self.blocks or 'the stages'} equal eager {how} ({self.compared})"
            return "\n".join([head, *rest])
        count = len(self.differences)
        lines = [f"{edited}the stages differ from eager in {count} places ({self.compared})"]
        lines += [f"  first at {place}" for place in self.places]
        lines += [f"  {difference}" for difference in self.differences[:10]]
        lines += [f"  and {count - 10} more"] if count > 10 else []
        return "\n".join([*lines, *rest])

    @property
    def compared(self) -> str:
        """How much was compared, in words."""
        steps = f"{self.steps} steps on {self.steps} inputs, " if self.steps > 1 else ""
        graph = "captured graph and stages, " if self.graph else ""
        return (
            f"{graph}{self.outputs} outputs and losses, {self.gradients} gradients, "
            f"{self.buffers} buffers, training and evaluation, {steps}"
            f"microbatch of {self.microbatch_size}"
        )

    @property
    def places(self) -> tuple[str, ...]:
        """The ops at which differences begin, each once."""
        return tuple(dict.fromkeys(one.first for one in self.differences if one.first))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def differences(
    graph: OpGraph,
    expected: Outcome,
    got: Outcome,
    home: Mapping[str, int],
    last: int,
    *,
    exact: bool,
    step: int = 0,
    first: str = "",
) -> list[Difference]:
    """All tensors that differ: outputs, the loss, gradients, buffers.

    Args:
        home: the first stage that holds a parameter or buffer, by FQN.
        last: the last stage, which has the outputs.
    """
    rows = [
        *(("output", name, one, got.outputs.get(name)) for name, one in expected.outputs.items()),
        ("loss", graph.loss or "loss", expected.loss, got.loss),
        *(("gradient", name, g, got.gradients.get(name)) for name, g in expected.gradients.items()),
        *(
            ("buffer", name, one, got.buffers.get(name))
            for name, one in expected.buffers.items()
            if name in home or name in got.buffers  # else forward makes it anew where it is missing
        ),
    ]
    return [
        Difference(
            mode_of(graph), what, name,
            last if what in ("output", "loss") else home.get(name, 0), largest, step, first,
        )
        for what, name, one, other in rows
        if (largest := distance(one, other, exact=exact)) is not None
    ]  # fmt: skip


def mode_of(graph: OpGraph) -> str:
    """What reports call the mode of a graph."""
    return "train" if graph.training else "eval"


def distance(one: torch.Tensor | None, other: torch.Tensor | None, *, exact: bool) -> float | None:
    """The largest absolute difference; None where there is none that counts."""
    if one is None or other is None:
        # A parameter that got no gradient and one that got zeros update alike in most optimizers,
        # but not in all: it is a difference.
        return None if one is other else float("inf")
    one, other = (t.to_dense() if t.layout != torch.strided else t for t in (one, other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.numel() == 0 or torch.equal(one, other):
        return None
    if not (one.is_floating_point() or one.is_complex()):
        return float((one.to(torch.float64) - other.to(torch.float64)).abs().max())
    equal = (one == other) | ((one != one) & (other != other))
    if bool(equal.all()) or (not exact and torch.allclose(one, other, equal_nan=True)):
        return None
    gap = (one - other).abs()
    return float(gap.max()) if bool(torch.isfinite(gap).all()) else float("inf")
