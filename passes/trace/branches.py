"""Branches on computed values: both ways are captured, and each call takes its own.

``if not torch.isfinite(h).all(): h = h.clamp(…)`` is recorded twice, once for each way.  The
operators of both ways are entered, and where the ways meet again ``(h, clamped)[decided]`` chooses
the value that eager would have: autograd sees only that one.  This is sound for operators that
write nothing; draws have their own streams.  Python may keep one decision until another one (a
flag, a count): so the model is recorded with every mixture of outcomes, and the graph must run the
same ops as the model with each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdcompile.errors import TraceError
from pdcompile.passes.trace.assumptions import Assumptions, Decision, Key
from pdcompile.passes.trace.branch_merge import (
    BranchMerge,
    CannotMerge,
    MergedBranches,
    refs_of,
    with_end,
    with_refs,
)
from pdcompile.passes.trace.conditional_code import form_of

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.run import Recording

Once = Callable[[Mapping[Key, bool]], "Recording"]

MAX_DECISIONS = 6  # of which all mixtures of outcomes are tried
MAX_NESTED = 4  # decisions inside each other; a loop until a value is reached has no last one


def both_ways(once: Once, assumed: Assumptions, mixed: set[Any], training: bool) -> Recording:
    """A recording that holds for every outcome of the decisions that the model takes.

    Args:
        once: records the model with given outcomes; a decision that is not given is False.
        mixed: decisions of which all mixtures were tried; filled in.

    Raises:
        CannotMerge: the ways of some decisions do not fit into one graph.
    """
    base = once({})
    if not base.decisions:
        return base
    trial = assumed.trial is not None
    return _Ways(once, mixed, training, trial=trial).merged(base, {}).recording


@dataclass(slots=True)
class _Ways:
    once: Once
    mixed: set[Any]
    training: bool
    trial: bool

    def merged(self, base: Recording, given: Mapping[Key, bool], depth: int = 0) -> MergedBranches:
        """A recording made with these outcomes, and both ways of its other decisions.

        `depth` counts the decisions that had to be True for these to be reached.
        """
        decisions = tuple(d for d in base.decisions if d.key not in given)
        if not decisions:
            return MergedBranches(base, {}, {})
        if len(decisions) > MAX_DECISIONS or depth > MAX_NESTED:
            raise CannotMerge(decisions)
        if len(decisions) > 2:
            with suppress(CannotMerge):
                halves = decisions[0::2], decisions[1::2]
                return self._merged(base, decisions, halves, given, depth)
        return self._merged(base, decisions, [(one,) for one in decisions], given, depth)

    def _merged(
        self,
        base: Recording,
        decisions: Sequence[Decision],
        groups: Sequence[Sequence[Decision]],
        given: Mapping[Key, bool],
        depth: int,
    ) -> MergedBranches:
        merge = BranchMerge(base, decisions)
        waiting = list(groups)
        known = {decision.key: False for decision in decisions}
        while waiting:
            group = waiting.pop(0)
            outcomes = {**given, **{decision.key: True for decision in group}}
            known_there = {**given, **known, **outcomes}
            other = self.merged(self._run(outcomes, decisions), known_there, depth + 1)
            waiting += [(decision,) for decision in merge.add(other, group)]
        found = merge.finished()
        if depth == 0:
            self._check(found, decisions, len(groups))
        return found

    def _check(self, found: MergedBranches, decisions: Sequence[Decision], groups: int) -> None:
        """Tries every mixture of outcomes.

        Raises:
            CannotMerge: with one of them the model runs other ops than the graph.
        """
        keys = sorted(found.met, key=repr)
        if len(keys) > MAX_DECISIONS:
            raise CannotMerge(decisions)
        shape = (self.training, tuple(keys), groups)
        if shape in self.mixed:
            return
        for number in range(2 ** len(keys)):
            outcomes = {key: bool(number >> i & 1) for i, key in enumerate(keys)}
            actual = self._run(outcomes, decisions)
            met = {decision.key for decision in actual.decisions}
            if not met <= found.met or not predicts(found, actual, outcomes):
                raise CannotMerge(decisions)
        self.mixed.add(shape)

    def _run(self, outcomes: Mapping[Key, bool], decisions: Sequence[Decision]) -> Recording:
        try:
            return self.once(outcomes)
        except TraceError:
            if self.trial:
                raise
            raise CannotMerge(decisions) from None


def predicts(merged: MergedBranches, actual: Recording, outcomes: Mapping[Key, bool]) -> bool:
    """Whether the graph runs the same ops with these outcomes as the model did."""
    names: dict[str, str] = {}

    def resolved(name: str) -> str:
        while name in merged.choices:
            no, yes, key = merged.choices[name]
            name = yes if outcomes.get(key, False) else no
        return name

    expected = []
    for op in with_end(merged.recording):
        runs = all(outcomes.get(k, False) == v for k, v in merged.when.get(op.name, {}).items())
        if runs and op.name not in merged.choices:
            expected.append(with_refs(op, [resolved(name) for name in refs_of(op)]))
    ran = with_end(actual)
    if len(ran) != len(expected):
        return False
    for want, did in zip(expected, ran, strict=True):
        if form_of(want) != form_of(did):
            return False
        if [names.get(name, name) for name in refs_of(did)] != refs_of(want):
            return False
        names[did.name] = want.name
    return True
