"""Compares stages with eager where the model is in memory: step after step, both modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pdcompile.batch import BatchLayout, FlatCall, follow_batch
from pdcompile.eager.module_copies import copy_of
from pdcompile.eager.randomness import preserved_rng
from pdcompile.eager.stage_compiler import Backend, name_of
from pdcompile.errors import PdcompileError, VerifyError
from pdcompile.hardware import devices
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.codegen import generate
from pdcompile.passes.codegen.body import cloned_buffers
from pdcompile.passes.stages.boundaries import staged
from pdcompile.passes.stages.chain import Chain
from pdcompile.passes.trace.comparison.step_values import StepValues, differing
from pdcompile.passes.trace.comparison.steps import (
    AsksForGradients,
    ModelFails,
    Step,
    eager_values,
    recorded,
)
from pdcompile.passes.trace.interceptors.process_state import GENERAL_PATH
from pdcompile.passes.trace.python_state import preserved_state
from pdcompile.passes.trace.tape.tape import SCRIPTED
from pdcompile.passes.verify.parts_chain import PartsChain
from pdcompile.passes.verify.retrace import retraced
from pdcompile.passes.verify.step_runs import advance, needs_gradients, restored_weights, stages
from pdcompile.passes.verify.verification import (
    Compared,
    Difference,
    Verification,
    counted,
    mode_of,
)
from pdcompile.plan import Plan

AnyChain: TypeAlias = Chain | PartsChain


@dataclass
class Comparison:
    """Compares one model with its stages; `found` and `rows` hold the results so far."""

    capture: Capture
    plan: Plan
    sources: Sources
    model: nn.Module
    loss_fn: Callable[..., Any] | None
    layout: BatchLayout  # of the minibatch
    device: torch.device
    backend: Backend | None = None  # stages run through torch.compile
    found: list[Difference] = field(default_factory=list)
    rows: list[Compared] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # where differences begin
    in_float64: bool = False  # stages were equal up to rounding in that alone
    rounded: bool = False  # something was equal up to rounding only, as the graph's notes say

    @property
    def exact(self) -> bool:
        return devices.is_host(self.device) and self._as_eager and not self.rounded

    @property
    def _as_eager(self) -> bool:
        """True if stages compute in the order of eager: neither in parts nor compiled."""
        return self.capture.division.parts == 1 and self.backend is None

    def run(self, calls: list[FlatCall]) -> Verification:
        """Runs one step for each call; a step that differs is the last one.

        Raises:
            VerifyError: the model or a stage raises.
            SourceError: a source cannot be loaded.
        """
        chains = self._chains(self.sources)
        with restored_weights(self.model):
            for step, call in enumerate(calls):
                try:
                    eager = [self._compared(chain, call, step) for chain in chains]
                except ModelFails:
                    if step == 0:
                        raise
                    break  # inputs after the first may be made up, and ones that the model refuses
                if self.found or step + 1 == len(calls):
                    break
                advance(self.model, eager[0].gradients, eager[0].buffers)
        return Verification(
            self.capture.train.batch_size, tuple(self.rows), self.exact, self.sources.edited,
            tuple(self.found), places=tuple(dict.fromkeys(self.places)),
            in_float64=self.in_float64, compiled=name_of(self.backend),
        )  # fmt: skip

    def _chains(self, sources: Sources) -> list[AnyChain]:
        """Those of training and of evaluation."""
        on_stages, seed = staged(self.capture, self.plan), self.plan.training.seed
        division = self.capture.division
        whole = partial(Chain, backend=self.backend)
        chain = whole if division.parts == 1 else partial(PartsChain, division)
        return [
            chain(mode.graph, mode.edges, self.plan.tied, sources, self.model, seed)
            for mode in (on_stages.train, on_stages.eval)[not self.capture.train.training :]
        ]

    def _compared(self, chain: AnyChain, call: FlatCall, number: int) -> StepValues:
        """Compares one step in the mode of the chain; returns what the model leaves behind."""
        graph, training = chain.graph, self.plan.training
        size = follow_batch(call, self.layout).size
        step = Step(
            self.model, graph, call, size, self.loss_fn, training.autocast, training.seed, number,
            tied=self.plan.tied,
        )  # fmt: skip
        with self._around(graph):
            expected, failed = eager_values(step)
            try:
                got = step.values(partial(stages, chain, step))
            except VerifyError:  # of an opaque module, which records nothing in evaluation either
                if failed is None:
                    raise
                raise needs_gradients(failed) from failed.__cause__
        self.rows.append(counted(expected, graph, number, size))
        if found := self._differences(step, expected, got):
            self.found += found
            self.places += self._places(step, found[0], got)
        return expected

    @contextmanager
    def _around(self, graph: OpGraph) -> Iterator[None]:
        """Context of runs, which leave the model as it was."""
        with preserved_rng(self.device), preserved_state(self.model, graph.training):
            yield

    def _values(self, sources: Sources, step: Step) -> StepValues:
        """The values of these stages in a step."""
        chain = self._chains(sources)[not step.graph.training]
        with self._around(step.graph):
            return step.values(partial(stages, chain, step))

    def _differences(self, step: Step, expected: StepValues, got: StepValues) -> list[Difference]:
        """The differences of a step."""
        found = self._unlike(step, expected, got, exact=self.exact)
        rounds = not {GENERAL_PATH, SCRIPTED}.isdisjoint(step.graph.notes)
        if found and rounds and not self._unlike(step, expected, got, exact=False):
            self.rounded, found = True, []
        if found and self._equal_in_float64(step):
            self.in_float64, found = True, []
        if not found and self.rounded and self.sources.edited:
            # An edit may change less than rounding does, and is no rounding.
            unedited = self._values(generate(self.capture, self.plan), step)
            return self._unlike(step, unedited, got, exact=True)
        return found

    def _equal_in_float64(self, step: Step) -> bool:
        """True if stages and the model are equal up to rounding in float64: then it is the order of
        sums that makes a difference in the model's own dtype, where large terms cancel."""
        if self._as_eager or step.autocast is not None:  # casts no float64
            return False
        wide = replace(self, model=copy_of(step.model).double())
        leaves = {
            path: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            for path, leaf in step.call.leaves.items()
        }
        own = replace(step, model=wide.model, call=FlatCall(leaves, step.call.spec))
        try:
            with wide._around(step.graph):
                expected, _ = eager_values(own)
            got = wide._values(self.sources, own)
        except PdcompileError:  # a constant or a call has a dtype of its own
            return False
        return not wide._unlike(own, expected, got, exact=False)

    def _unlike(
        self, step: Step, expected: StepValues, got: StepValues, *, exact: bool
    ) -> list[Difference]:
        """Outputs, the loss, gradients and buffers that differ, each with its first stage."""
        graph, interfaces = step.graph, self.sources.interfaces
        held = ((one.index, (*one.parameters, *one.buffers)) for one in reversed(interfaces))
        home = {fqn: index for index, names in held for fqn in names}
        return [
            Difference(
                mode_of(graph), kind,
                graph.loss or name if kind == "loss" else name,
                len(interfaces) - 1 if kind in ("output", "loss") else home.get(name, 0), largest,
                step.minibatch,
            )
            for kind, name, largest in differing(expected, got, exact=exact, held=home)
        ]  # fmt: skip

    def _places(self, step: Step, first: Difference, got: StepValues) -> list[str]:
        """Ops that the sources do not compute in the mode of a step; else the op of the capture,
        which they are then, that makes what differs `first` or uses it last.

        Raises:
            AsksForGradients: the model computes what was `got` where autograd records.
        """
        try:
            _, unlike = retraced(self.capture, self.plan, self.sources)
        except VerifyError:  # an edited stage may raise without values
            return []
        if places := [one.first for one in unlike if one.mode == mode_of(step.graph)]:
            return places
        makers = [op for op in step.graph.ops if first.name in (op.name, *op.used_tensors)]
        where = makers[-1].source if makers else None
        with self._around(step.graph):
            again = recorded(step)
        if again is not None and not any(differing(again, got, exact=self.exact)):
            raise AsksForGradients(f"{first.what} {first.name!r}", where)
        return [f"{op.name} ({op.target}) at {op.source}, in the capture" for op in makers[-1:]]


def difference_error(
    found: Sequence[Difference], places: Sequence[str], graph: OpGraph, compiled: str = ""
) -> VerifyError:
    """The error for sources that nobody edited, which begin to differ at `places`; `graph` is the
    one of training, `compiled` the backend that compiled the stages."""
    gradients_alone = all(one.what == "gradient" for one in found)
    if gradients_alone and (cause := _unseen_write(graph)) is not None:
        return cause
    first = found[0]
    kind = f"stages, compiled by {compiled}," if compiled else "generated stages"
    return VerifyError(
        f"the {kind} differ from the model: {first}"
        + "".join(f"; first at {place}" for place in places[:1]),
        where=f"stage_{first.stage}.py",
        remedy="verify without stage_compiler: if that is equal, it is the backend's doing"
        if compiled
        else "please report this model; "
        + ("parts=1" if graph.parts > 1 else "in Python, verify='off'")
        + " runs it all the same",
    )


def _unseen_write(graph: OpGraph) -> VerifyError | None:
    """The error for a buffer that is written through ``.data`` after an op that may save it.

    Autograd does not notice: eager's backward computes with the value that was written later, a
    stage's with the one that was used, because in a pipeline further microbatches write before.
    """
    aliased = {
        fqn for op in graph.ops if op.kind == "getattr" and op.target == "data"
        for fqn in op.attributes
    }  # fmt: skip
    for i, op in enumerate(graph.ops):
        for fqn in sorted(cloned_buffers(op, graph) & aliased):
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
