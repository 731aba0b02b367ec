"""Evaluation of calls that are unlike the captured one: each is captured on its own, once.

A model that has its loss inside is trained with labels and asked without them; other arguments are
there in one of the two alone.  Such a call becomes stages of its own, on the tensors that the
pipeline has, and is what evaluates while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from pdcompile.batch import FlatCall
from pdcompile.compiled import Compiled
from pdcompile.errors import InputError, PdcompileError, some
from pdcompile.ir.opaque import instance
from pdcompile.ir.stage_wiring import Wiring
from pdcompile.options import Options
from pdcompile.passes.check.programs import Programs
from pdcompile.plan import Edge
from pdcompile.runtime.calls import default_of, of_target
from pdcompile.runtime.session import Session, wirings
from pdcompile.runtime.stage.weights import places
from pdcompile.runtime.transport import launch
from pdcompile.runtime.transport.links import pairs
from pdcompile.runtime.watch.attribute_watch import AttributeWatch
from pdcompile.runtime.watch.same_model import forward_allowed
from pdcompile.schedule.spec import with_edges
from pdcompile.warn import warn
from pdcompile.weights.source import set_tensor

#: values whose text is all of them
PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
MOST = 8  # forms of calls: one whose arguments never come twice would be captured at every call
UNSENT = Edge("", -1, (), 0, gradient=False)

Recompile = Callable[[nn.Module, FlatCall, Options, Compiled], Compiled]
#: path of an argument, and how it is unlike the captured call's
Unlike = tuple[tuple[str, str], ...]


@dataclass
class Form:
    """The stages of one form of call, and the programs that run them."""

    compiled: Compiled
    programs: Programs
    wirings: dict[tuple[int, bool], Wiring]
    modules: list[nn.Module]  # of each worker
    first_output: int
    attributes: AttributeWatch

    @contextmanager
    def evaluating(self, session: Session) -> Iterator[None]:
        """Context of a call in which the session evaluates this form."""
        usual = session.compiled, session.evaluation_programs, session.wirings
        session.compiled, session.evaluation_programs = self.compiled, self.programs
        first, session.first_output = session.first_output, self.first_output
        session.wirings = session.wirings | self.wirings
        for worker, module in zip(session.workers, self.modules, strict=True):
            worker.weights.evaluators = [module] * worker.weights.versions
        try:
            yield
        finally:
            session.compiled, session.evaluation_programs, session.wirings = usual
            session.first_output = first
            for worker in session.workers:
                worker.weights.evaluators = worker.weights.modules

    def take_tensors(self, session: Session) -> None:
        """The stages get the newest tensors, of which none is in flight."""
        for worker, module in zip(session.workers, self.modules, strict=True):
            interface = self.compiled.interfaces[worker.stage]
            constants = self.compiled.capture.eval.tensor_values
            for name, fqn in places(module, interface).items():
                own = fqn in interface.constants
                found = constants[fqn] if own else session.state.tensors[fqn]
                set_tensor(module, name, session.device.place(found) if own else found)


class Evaluations:
    """The forms of evaluation calls that one session has met."""

    def __init__(self, session: Session, recompile: Recompile) -> None:
        self._session, self._recompile = session, recompile
        self._forms: dict[Unlike, Form] = {}
        self._num_edges = len(session.compiled.eval_edges)  # of all forms
        self._num_outputs = len(session.compiled.interfaces[-1].eval.outputs)

    def of(self, flat: FlatCall, minibatch: int) -> Form | None:
        """The form of a call of `eval_step` or `predict`; None where it is the captured one's.

        Every rank that makes this call comes here.

        Raises:
            InputError: the call is unlike the captured one, and cannot be captured.
        """
        unlike = _unlike(self._session, flat)
        if not unlike:
            return None
        form = self._forms.get(unlike)
        if form is None:
            form = self._forms[unlike] = self._made(unlike, flat, minibatch)
        form.attributes.check(self._session.model.training)
        return form

    def _made(self, unlike: Unlike, flat: FlatCall, minibatch: int) -> Form:
        session, world = self._session, self._session.world
        session.check_running()
        if session.compiled.sources.edited:
            raise _refused(unlike, "and stages that were edited run no other call")
        if len(self._forms) == MOST:
            raise _refused(unlike, f"and {MOST} other forms of it were captured already")
        with session.guard():
            session.agree("capture", minibatch)

        def made() -> Compiled:
            constants = dict(session.compiled.capture.eval.constants)
            absent = [path for path, leaf in flat.leaves.items() if leaf is None]
            lacking = [path for path in absent if path not in constants and not of_target(path)]
            if lacking and world is not None:
                raise _refused(unlike, f"and rank 0, which captures it, has no {some(lacking)}")
            try:
                model = session.state.undivided()
                found = self._recompile(model, flat, session.options, session.compiled)
            except PdcompileError as error:
                raise _refused(unlike, f"and cannot be captured: {error.message}") from error
            if world is not None:
                self._check_held(unlike, found)
            return found

        if world is None:
            compiled = made()
        else:
            with forward_allowed(session.model), launch.start_up(session.options) as start:
                compiled = launch.from_rank0(start, made)
        edges = (*(UNSENT,) * self._num_edges, *compiled.eval_edges)  # channels of its own
        first = self._num_outputs
        self._num_edges = len(edges)
        self._num_outputs += len(compiled.interfaces[-1].eval.outputs)
        modules = list[nn.Module]()
        for stage in (worker.stage for worker in session.workers):
            interface = compiled.interfaces[stage]
            modules.append(instance(compiled.stage_classes[stage], interface, session.model).eval())
            session.streams.attach(modules[-1], interface)
        warn(f"{_said(unlike)}: this form of call was captured on its own, once")
        return Form(
            compiled,
            Programs(session.plan, edges, ordered=session.ordered),
            wirings(compiled, session.stages, edges),
            modules,
            first,
            AttributeWatch(session.model, session.options.loss_fn, compiled),
        )  # fmt: skip

    def _check_held(self, unlike: Unlike, found: Compiled) -> None:
        """Refuse what the stages of other ranks do not have."""
        usual = self._session.compiled
        for ours, theirs in zip(found.interfaces, usual.interfaces, strict=True):
            held = {*theirs.parameters, *theirs.buffers}
            if missing := [f for f in (*ours.parameters, *ours.buffers) if f not in held]:
                what = f"and reads {some(missing)}, which stage {ours.index} does not have"
                raise _refused(unlike, what)
        spec = self._session.spec
        known, needed = (with_edges(spec, one.eval_edges) for one in (usual, found))
        if self._session.ordered and not {*pairs(spec, known)}.issuperset(pairs(spec, needed)):
            raise _refused(unlike, "and sends values between ranks that have no connection")


def _unlike(session: Session, flat: FlatCall) -> Unlike:
    """Differences of a call from the captured one: arguments that are in one of the two alone.

    Under torchrun None may stand for a tensor that this rank does not need.
    """
    if flat.whole is not None:
        return ()
    compiled, alone = session.compiled, session.world is None
    constants = dict(compiled.capture.eval.constants)
    captured = [path for path in (*compiled.layout.dims, *constants) if not of_target(path)]
    found = {}
    for path in captured:
        if path not in flat.leaves:
            if constants.get(path) != repr(default_of(flat, path)):
                found[path] = "left out"
        elif alone and flat.leaves[path] is None and path not in constants:
            found[path] = "None"
    for path, leaf in flat.leaves.items():
        if path in captured or of_target(path):
            continue
        if isinstance(leaf, Tensor):
            found[path] = f"added, {leaf.dim()}-dimensional {leaf.dtype}"
        else:
            found[path] = f"added as {leaf!r}"
            if not isinstance(leaf, PLAIN):  # its text does not tell what is in it
                raise _refused(
                    ((path, found[path]),), "and what is in it may be another at any call"
                )
    return tuple(sorted(found.items()))


def _said(unlike: Unlike) -> str:
    shown = some([f"{path} is {how}" for path, how in unlike])
    return f"the captured call had other arguments ({shown})"


def _refused(unlike: Unlike, why: str) -> InputError:
    return InputError(
        f"{_said(unlike)}, {why}",
        where=unlike[0][0],
        remedy="evaluate with the arguments of the first call (on rank 0 all of them), or by the "
        "model itself: pipe.to_model()",
    )
