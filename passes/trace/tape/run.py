"""Runs the model's own Python under the tape, at one batch size, in one mode."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from pdcompile.batch import FlatCall, flatten_output, unflatten_output
from pdcompile.eager.autocast import OFF, autocast_region
from pdcompile.eager.modes import in_mode, modes
from pdcompile.eager.module_copies import buffers_of, write_rebound
from pdcompile.eager.randomness import LOSS_PATH
from pdcompile.errors import InputError, PdcompileError, TraceError
from pdcompile.hardware import devices
from pdcompile.ir.graph import Argument, Attr, GraphInput, OpGraph, Ref
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.assumptions import Assumptions, Findings, Refuted
from pdcompile.passes.trace.attribute_reads import is_plain_object
from pdcompile.passes.trace.cached_tensors import Computations, attribute_tensors
from pdcompile.passes.trace.constants import example_calls
from pdcompile.passes.trace.opaque.probe import probe
from pdcompile.passes.trace.python_state import State, lines_of_assignments
from pdcompile.passes.trace.refusals import (
    COMPILED,
    ForwardRaised,
    remedy,
    remedy_of_loss,
    tell_of_loss,
)
from pdcompile.passes.trace.selections import Policy, Selections, with_made_up_sizes
from pdcompile.passes.trace.subject import Subject, device_of, of_region
from pdcompile.passes.trace.tape.arguments import to_argument
from pdcompile.passes.trace.tape.fake_tensors import KEEP, FakeTensors
from pdcompile.passes.trace.tape.observer import Observer, source_of_traceback
from pdcompile.passes.trace.tape.results import find_loss, structure
from pdcompile.passes.trace.tape.tape import Tape
from pdcompile.releases.gpu_casts import layers_of_cudnn
from pdcompile.releases.torch_internals import (
    NO_GPU,
    TWO_DEVICES,
    FakeTensorMode,
    gpu_autocast_anywhere,
    quiet_shape_errors,
)


@dataclass(frozen=True, slots=True)
class Recording:
    """The result of one run; all sizes of the graph are concrete."""

    graph: OpGraph
    computation: tuple[Any, ...] = ()
    regions: tuple[frozenset[str], ...] = ()  # names of the ops of each reentrant checkpoint
    chosen: tuple[tuple[str, int], ...] = ()  # (module, elements) of each choice by made-up sizes
    findings: Findings = field(default_factory=Findings)
    after: State | None = None  # of the model, where the run changed it

    @property
    def returned(self) -> tuple[Argument, Argument]:
        """The output and the loss."""
        loss = self.graph.loss
        return self.graph.output, Ref(loss) if loss is not None else None


def record(
    subject: Subject,
    call: FlatCall,
    assumed: Assumptions,
    *,
    training: bool,
    settle: bool = True,
    before: State | None = None,
    like: Recording | None = None,
) -> Recording:
    """Records the model on fake tensors, in as many runs as sizes that depend on values need.

    Opaque modules become one op each; for them the model also runs on real tensors.  Without
    `settle` the model stays as the run left it, in its present mode; else it is restored.  A run
    after another one, which only has to be the same computation, is made at the usual sizes alone.
    `before`: the state of the model in this mode, where it is known.
    `like`: a recording whose ops this one has to have.

    Raises:
        TraceError: the run cannot be recorded faithfully, or the model itself failed.
        Refuted, Undecided, SizeByValues, OutsideDraw: these assumptions do not hold.
        Ended: with the ops until the first that is not `like` the other's.
    """
    observed = probe(subject, call, assumed.opaque, training=training) if assumed.opaque else {}

    def recorded() -> Recording:
        findings = Findings()

        def once(sizes: Policy | None = None) -> Recording:
            one = _Run(subject, call, assumed, sizes, findings)
            one.tape.opaque = observed
            if like is not None and sizes is None:  # else several runs tell what it depends on
                one.tape.like = {(n, op.kind, op.target) for n, op in enumerate(like.graph.ops, 1)}
            with subject.global_state.as_before():
                return one.recording()

        if training not in assumed.sizes_vary:
            return once()
        before = State(subject.model)

        def run(sizes: Policy | None = None) -> Recording:
            before.restore()
            return once(sizes)

        proofs = subject.proofs
        if not settle and training in proofs:
            return run(proofs[training].usual)
        elements = sum(leaf.numel() for leaf in tensors_among(list(call.leaves.values())))
        found = with_made_up_sizes(run, proofs, training, elements)
        if found is None:
            assert assumed.refusal is not None
            raise assumed.refusal
        return found

    return _restored(subject, recorded, training, before) if settle else recorded()


def _restored(
    subject: Subject, recorded: Callable[[], Recording], training: bool, before: State | None
) -> Recording:
    """A recording, with the state after it where that is another one; the model is as before.

    What later calls make of such a state is for `check_order`.
    """
    model, kept = subject.model, subject.cached_tensors
    with in_mode(model, training):
        before, flags, changed = before or State(model), modes(model), True
        try:
            found = recorded()
            change = before.change(found.findings.assigned)
            changed = change is not None
            # What forward switches stays so in the next call, until the model's own mode changes.
            if change is not None and modes(model) != flags and not same(found, recorded()):
                raise change
            kept.change = kept.change or change
            return replace(found, after=State(model)) if changed else found
        finally:
            if changed:  # also by a run that failed
                before.restore()


def same(one: Recording, other: Recording) -> bool:
    """True if two recordings are the same computation."""
    return one.computation == other.computation


class _Run:
    """One run of the model's own Python."""

    def __init__(
        self,
        subject: Subject,
        call: FlatCall,
        assumed: Assumptions,
        sizes: Policy | None,
        findings: Findings,
    ) -> None:
        self._subject = subject
        self._findings = findings
        self._mode = FakeTensorMode()
        home = device_of(subject.model, call)
        device = of_region(subject.autocast, home)
        fakes = FakeTensors(subject.table, self._mode, device, subject.cached_tensors, home)
        fakes.findings, fakes.rewritten = findings, assumed.rewritten
        fakes.unnamed.update(_unregistered(subject.model, subject.loss_fn))
        self._observer = observer = Observer()
        self.tape = tape = Tape(subject.table, fakes, observer)
        if sizes is not None:
            observer.selections = Selections(sizes, lambda: tape.path)
        self._inputs: list[GraphInput] = []
        self._constants: list[tuple[str, str]] = []  # path and text
        self._arguments = call.unflatten(self._leaves(call))
        tape.assumed = assumed
        inputs = tuple(self._inputs)
        tape.examples = partial(example_calls, subject.flat, subject.layout, inputs, call)

    def recording(self) -> Recording:
        """Runs the model and returns the recording."""
        try:
            with ExitStack() as stack:
                for each in self._around():
                    stack.enter_context(each)
                output, loss = self._run()
        except TraceError as error:
            error.module_path = self.tape.failed
            raise
        return self._finished(output, loss)

    def _around(self) -> tuple[AbstractContextManager[Any], ...]:
        """Everything that sees the run: interceptors, patched calls, modes."""
        tape, fakes = self.tape, self.tape.fakes
        device = fakes.device.type
        # What the model makes of nothing is on the device when a stage runs there.
        making = nullcontext() if fakes.home == fakes.device else devices.making(fakes.device)
        layers = nullcontext() if devices.is_host(fakes.device) else layers_of_cudnn()
        return (
            *(interceptor.around() for interceptor in tape.interceptors),
            tape.watching(),
            lines_of_assignments(self._findings.assigned, tape.where),
            quiet_shape_errors(),
            gpu_autocast_anywhere(),
            layers,
            autocast_region(self._subject.autocast or f"{device}:{OFF}"),
            torch.enable_grad(),
            self._mode,
            making,
            self._observer,
            tape,
        )

    def _run(self) -> tuple[Any, Any]:
        """(output, loss) of the model's own Python; failures of it become TraceErrors."""
        model, loss_fn, tape = self._subject.model, self._subject.loss_fn, self.tape
        args, kwargs, target = self._arguments
        buffers = buffers_of(model.modules())
        try:
            output = model(*args, **kwargs)
            output = _own_tensors_cloned(output, tape.fakes)
            write_rebound(buffers, tape.fakes.known)
            loss = None
            if loss_fn is not None:
                tape.region, tape.stack[:] = "loss", [(LOSS_PATH, 0)]
                loss = loss_fn(output, target)
            tape.begin()  # as before a further op
        except TraceError as refusal:
            if tape.region == "loss":
                tell_of_loss(refusal)
            raise
        except (PdcompileError, Refuted):
            raise
        except Exception as error:
            if isinstance(error, TypeError) and tape.handed_out is not None:
                raise tape.handed_out from error  # torch does not take a DrawnArray for an array
            what = "loss_fn" if tape.region == "loss" else "the model's forward"
            said = f"{what} raised {type(error).__name__}: {error}"
            lost = tape.region == "loss"
            if lost and target is None:
                hint = "pass target=… to step (example_target= to compile)"
                raise InputError(
                    f"the target is missing: {said}", where="target", remedy=hint
                ) from error
            hint = remedy_of_loss(target) if lost else remedy(args, kwargs)
            if type(error).__module__.startswith("torch._dynamo"):
                said, hint = f"{what} calls a function that torch.compile has made", COMPILED
            if "Mixing fake modes" in str(error):  # torch's words for a tensor of another recording
                said, hint = f"{what} uses a tensor that it kept from an earlier call", KEEP
            if (
                any(words in str(error) for words in TWO_DEVICES)
                and tape.fakes.home != tape.fakes.device
            ):
                said = f"{what} computes with a tensor of the CPU and one of a GPU: {error}"
                hint = "make tensors on the device of an input: torch.ones(n, device=x.device)"
            if any(words in str(error) for words in NO_GPU):  # of autograd's engine
                said = f"{what} differentiates, on fake tensors of a GPU, which takes a GPU"
                hint = "have model and minibatch on a GPU, or plan without autocast"
            raise ForwardRaised(said, where=source_of_traceback(error), remedy=hint) from error
        return output, loss

    def _leaves(self, call: FlatCall) -> dict[str, Any]:
        """The leaves of the call, fakes for its tensors, which become inputs of the graph; others
        are constants of it."""
        fakes, leaves = self.tape.fakes, dict[str, Any]()
        for path, leaf in call.leaves.items():
            if not isinstance(leaf, torch.Tensor):
                if type(leaf).__qualname__ == "BlockMask":  # its text is that of another function
                    raise refusals.error(refusals.BLOCK_MASK, path, path)
                if is_plain_object(leaf) and not isinstance(leaf, Enum | Namespace):
                    raise refusals.error(refusals.OBJECT, f"{path} ({type(leaf).__name__})", path)
                leaves[path] = leaf
                if path != "target" or leaf is not None:
                    self._constants.append((path, repr(leaf)))
                continue
            name = self.tape.results.new_name(path)
            leaves[path] = fakes.fake_like(leaf)
            fakes.add(name, leaves[path])
            self._inputs.append(GraphInput(name, path, self._subject.layout.dims.get(path)))
        return leaves

    def _finished(self, output: Any, loss: Any) -> Recording:
        subject, tape, fakes = self._subject, self.tape, self.tape.fakes
        if subject.autocast is not None:
            off = f"{fakes.device.type}:{OFF}"
            tape.ops = [op if op.autocast else replace(op, autocast=off) for op in tape.ops]
        output_argument, output_spec = structure(
            output, lambda leaf: to_argument(leaf, fakes.name, fakes.device)
        )
        found_loss = find_loss(output, loss, fakes.name, given=subject.loss_fn is not None)
        returned = (output_argument, Ref(found_loss) if found_loss else None)
        ops = tape.ops
        inputs = {entry.name for entry in self._inputs}
        values = {
            name: replace(value, producer=None) if name in inputs else value
            for name, value in fakes.values().items()
        }
        names, tensors = fakes.value_names, subject.table.tensors
        computations = Computations(ops, values, fakes.cached, tensors)
        subject.cached_tensors.note(subject.model, names, computations)
        subject.global_state.check(lambda tensor: computations.again(names.get(id(tensor), ""))[1])
        graph = OpGraph(
            training=tape.training,
            ops=tuple(ops),
            values=values,
            inputs=tuple(self._inputs),
            tensors={  # without constants that only an earlier recording came across
                fqn: info
                for fqn, info in tensors.items()
                if info.kind != "constant" or fqn in fakes.constants
            },
            output=output_argument,
            loss=found_loss,
            batch_size=subject.size,
            constants=tuple(self._constants),
            classes=subject.table.classes,
            passed=tape.passed,
            output_spec=output_spec,
            tensor_values=fakes.constants,
        )
        return Recording(
            graph,
            computation=(computations.argument(returned), tuple(computations.effects)),
            regions=tuple(tape.regions),
            chosen=tuple(self._observer.selections.found) if self._observer.selections else (),
            findings=self._findings,
        )


def _own_tensors_cloned(output: Any, fakes: FakeTensors) -> Any:
    """The output with parameters and buffers in it cloned: later updates must not change them."""
    leaves, spec = flatten_output(output)
    own = [isinstance(leaf, torch.Tensor) and isinstance(fakes.name(leaf), Attr) for leaf in leaves]
    if not any(own):
        return output
    cloned = [leaf.clone() if mine else leaf for leaf, mine in zip(leaves, own, strict=True)]
    return unflatten_output(cloned, spec)


def _unregistered(model: nn.Module, loss_fn: Any) -> dict[int, str]:
    """Tensors that are plain attributes of modules (or of loss_fn): id to path."""
    found: dict[int, str] = {}
    for place, tensor in attribute_tensors(model, depth=0):
        found.setdefault(id(tensor), place)
    if isinstance(loss_fn, nn.Module):
        for name, value in (*loss_fn.named_buffers(), *loss_fn.named_parameters()):
            found.setdefault(id(value), f"loss_fn.{name}")
    return found
