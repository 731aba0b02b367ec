"""Attempts: record the model in both modes at several sizes, under assumptions.

A recording that refutes assumptions names the next ones; recordings that still hold are kept.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pdcompile.batch import FlatCall
from pdcompile.eager.modes import in_mode
from pdcompile.errors import TraceError
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.passes.trace.assemble import assemble
from pdcompile.passes.trace.assumptions import Assumptions, Expected, Refuted, Trial, Undecided
from pdcompile.passes.trace.attribute_reads import AttributeReads
from pdcompile.passes.trace.batch_sizes import (
    MANY_OPS,
    DiffersBySize,
    alone,
    fails_at,
    few_sizes,
    narrowed,
    size_range,
    usual_sizes,
)
from pdcompile.passes.trace.call_order import Kind, check_order
from pdcompile.passes.trace.opaque.opaque_modules import adds_little, enlarged
from pdcompile.passes.trace.python_state import State
from pdcompile.passes.trace.refusals import Ended, ForwardRaised, SizeByValues
from pdcompile.passes.trace.subject import Subject
from pdcompile.passes.trace.tape.run import Recording, record
from pdcompile.passes.trace.tape.tape import Tape

MAX_TEXT = 64  # characters of the model's own error text in a check

Found = TypeVar("Found")


def settled_on(attempt: Callable[[Assumptions], Found], assumed: Assumptions) -> Found:
    """The result of the attempt under the first assumptions that the model does not refute."""
    while True:
        try:
            return attempt(assumed)
        except Refuted as refuted:
            assumed = refuted.instead


class Attempts:
    """Attempts at one capture."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._size, self._splits = subject.size, subject.layout.splits
        self._recordings: dict[Kind, Recording] = {}
        self._recorded_for: tuple[str, ...] | None = None
        self._before: State | None = None  # of the model, in the mode that is being recorded
        self.assumed = Assumptions()  # of the last attempt

    def __call__(self, assumed: Assumptions) -> Capture:
        """The capture under these assumptions.

        Raises:
            Refuted: the model is not as assumed.
            TraceError: it is refused under any assumptions.
        """
        self.assumed = assumed
        recorded_for = tuple(assumed.opaque)
        if recorded_for != self._recorded_for:
            self._recorded_for = recorded_for
            self._recordings.clear()
            subject = self._subject
            subject.proofs.clear()
            self._reads = AttributeReads(subject.model, subject.loss_fn)
        try:
            return self._captured()
        except TraceError as error:
            subject, opaque = self._subject, assumed.opaque
            of_size = isinstance(error, DiffersBySize) and self._splits and not assumed.one_size
            if of_size and not adds_little(subject, opaque, error):
                raise Refuted(replace(assumed, one_size=True)) from error
            opaque = enlarged(subject, opaque, error)
            instead = replace(assumed, opaque=opaque, sizes_vary=frozenset(), refusal=None)
            raise Refuted(instead) from error

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """The recordings that the capture is made of."""
        return tuple(self._recordings.values())

    def _captured(self) -> Capture:
        subject = self._subject
        train = self._of_mode(not subject.evaluates, None)
        evaluation = train if subject.evaluates else self._of_mode(False, train)
        check_order(
            subject.model,
            self._kinds(train),
            lambda kind: self._recorded(*kind, settle=False),
            subject.cached_tensors,
            self._recordings,
        )
        numbers = {fqn for each in self.recordings for fqn in each.findings.constants}
        return Capture(train, evaluation, self._reads.places, tuple(sorted(numbers)))

    def _recorded(self, training: bool, size: int, **how: Any) -> Recording:
        call, before = self._subject.call(size), self._before
        return recorded(self._subject, call, self.assumed, training, before=before, **how)

    def _kinds(self, graph: OpGraph) -> list[Kind]:
        """The calls that may follow one another: in each mode with the usual size and another."""
        one_size = graph.sizes.is_one or len(graph.ops) > MANY_OPS
        found = []
        for mode in dict.fromkeys(training for training, _ in self._recordings):
            sizes = [b for training, b in self._recordings if training == mode]
            others = [b for b in sizes if b != self._size and graph.sizes.holds(b) and not one_size]
            found += [(mode, size) for size in (self._size, *others[:1])]
        return found

    def _recording(self, training: bool, size: int, like: Recording | None = None) -> Recording:
        """A recording; one that is to be `like` another ends where it differs."""
        kind = training, size
        if kind not in self._recordings:
            try:
                self._recordings[kind] = self._recorded(training, size, like=like)
            except Ended as ended:
                assert like is not None
                self._recordings[kind] = replace(like, graph=replace(like.graph, ops=ended.args[0]))
            except ForwardRaised as error:
                if size == self._size:
                    raise
                raise fails_at(size, error) from error
            self._check_constants()
        return self._recordings[kind]

    def _check_constants(self) -> None:
        """Refutes constants: a counter that one call reads may be written by another one."""
        every = self._recordings.items()
        written = self.assumed.rewritten.union(*(r.findings.written for _, r in every))
        wrong = [kind for kind, r in every if written & r.findings.constants]
        for kind in wrong:
            del self._recordings[kind]
        if wrong:
            raise Refuted(replace(self.assumed, rewritten=written))

    def _of_mode(self, training: bool, train: OpGraph | None) -> OpGraph:
        """A graph of one mode, into which the model is put once: what its own ``train()`` reads and
        writes is not read and written by calls."""
        with in_mode(self._subject.model, training), self._reads.noted():
            self._before = State(self._subject.model)
            return self._graph(training, train)

    def _graph(self, training: bool, train: OpGraph | None) -> OpGraph:
        """A graph for many batch sizes; for this one alone where that is assumed and needed.

        Args:
            train: the graph of training, where this is that of evaluation.
        """
        first = self._recording(training, self._size)
        few, twice = few_sizes(self._size), (self._size,) * 2  # a call must not change the next
        if not self._splits:
            return self._fitted(training, first, *twice)
        large = len(first.graph.ops) > MANY_OPS or (train is not None and train.sizes.is_one)
        attempts = [few] if self._size == 1 and large else [few, usual_sizes(self._size)]
        for sizes in attempts:
            try:
                every, graph = sizes, self._fitted(training, first, *sizes)
                # Any numbers at two sizes lie on a line: those at the lower end have to, too.
                if len(sizes) == 2 and graph.sizes.smallest == min(sizes):
                    every = (*sizes, 3 - self._size % 2)  # both even and odd numbers
                    graph = self._fitted(training, first, *every, alike=2)
                one = partial(self._recording, training, like=first)
                return replace(graph, sizes=narrowed(one, every, graph.sizes))
            except TraceError as error:
                failure = error
        if self.assumed.one_size:
            with suppress(TraceError):
                graph = self._fitted(training, first, *twice)
                return replace(graph, sizes=alone(self._size, failure))
        raise failure

    def _fitted(self, training: bool, first: Recording, *sizes: int, alike: int = 1) -> OpGraph:
        """The graph of recordings at these sizes, of which so many are known to be `alike`."""
        if sizes[0] == sizes[1]:
            return assemble([first, self._recorded(training, sizes[1])], sizes, training=training)
        record = partial(self._recording, training, like=first)
        recordings = [first, record(sizes[1])]
        if alike < 2 and any((training, size) not in self._recordings for size in sizes[2:]):
            assemble(recordings, sizes[:2], training=training)  # before more is recorded
        recordings += map(record, sizes[2:])
        graph = assemble(recordings, sizes, training=training)
        return replace(graph, sizes=size_range(record, recordings, sizes))


def recorded(
    subject: Subject, call: FlatCall, assumed: Assumptions, training: bool, **how: Any
) -> Recording:
    """One recording under assumptions; `how`: see `record`.

    Raises:
        Refuted: the model is not as assumed.
        TraceError: it cannot be recorded under any assumptions.
    """
    try:
        return record(subject, call, assumed, training=training, **how)
    except Undecided as read:
        expected = _tried(subject, call, assumed, training, read)
        raise Refuted(replace(assumed, reads={**assumed.reads, read.site: expected})) from None
    except SizeByValues as error:
        if training in assumed.sizes_vary:
            raise
        modes = assumed.sizes_vary | {training}
        raise Refuted(replace(assumed, sizes_vary=modes, refusal=error)) from None


def _tried(
    subject: Subject, call: FlatCall, assumed: Assumptions, training: bool, read: Undecided
) -> Expected | None:
    """The value with which the model goes on after a read: it runs once with each."""
    raised: dict[bool, str] = {}
    for value in (False, True):
        trial = Trial(read.site, value)
        try:
            record(subject, call, replace(assumed, trial=trial), training=training)
        except ForwardRaised as error:
            text = _raised_on_purpose(error)
            if trial.begun and text is not None:
                raised[value] = text
        except (TraceError, Ended, Refuted):
            continue
    if len(raised) != 1:
        return None
    ((value, text),) = raised.items()
    return Expected(not value, text)


def _raised_on_purpose(error: ForwardRaised) -> str | None:
    """Kind and first line of what a raise statement or an assert of the model's Python raised, with
    fake tensors called tensors; None for other errors."""
    cause = error.__cause__
    if cause is None or not _on_purpose(cause):
        return None
    line = str(cause).strip().partition("\n")[0].replace("FakeTensor", "Tensor")
    line = line if len(line) <= MAX_TEXT else line[:MAX_TEXT].rpartition(" ")[0] + " …"
    return f"{type(cause).__name__}: {line}" if line else type(cause).__name__


def _on_purpose(error: BaseException) -> bool:
    """True if a raise statement or an assert of Python raised it, outside of any operator."""
    at, operator = error.__traceback__, Tape.__torch_function__.__code__
    while at is not None and at.tb_frame.f_code is not operator and at.tb_next is not None:
        at = at.tb_next
    if at is None or at.tb_frame.f_code is operator:
        return False
    return at.tb_frame.f_code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]
