"""Branches on values that are computed: both ways are captured, and each call takes its own.

``if not torch.isfinite(h).all(): h = h.clamp(…)`` is recorded twice, once for each way.  The
operators of both ways are entered, and where the ways meet again ``(h, clamped)[decided]`` goes
on with the one that eager would have: autograd sees only that one.  This is sound for operators
that write nothing and draw nothing.  Whether one decision changes what another one leads to is
tried with several mixtures of outcomes: what the graph does then must be what the model does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdcompile.errors import TraceError
from pdcompile.passes.trace.joining import (
    CannotJoin,
    Join,
    Joined,
    form_of,
    refs_of,
    with_end,
    with_refs,
)
from pdcompile.passes.trace.reads import MAX_DECISIONS, Decision, Key, Reads, Undecided

if TYPE_CHECKING:
    from pdcompile.passes.trace.session import Recording

Once = Callable[[Mapping[Key, bool]], "Recording"]

MAX_ALONE = 32  # decisions that are tried one at a time where two groups were not enough
MAX_NESTED = 4  # decisions inside of each other; a loop until a value is reached has no end of them
MAX_EXHAUSTED = 4  # decisions whose mixtures of outcomes are all tried
MIXTURES = 6  # more than those that have every pair of outcomes


def both_ways(once: Once, reads: Reads | None, training: bool) -> Recording:
    """A recording that holds for every outcome of the decisions that the model takes.

    Args:
        once: records the model with given outcomes; a decision that is not given is False.
    """
    while True:
        base = once({})
        if not base.decisions:
            return base
        assert reads is not None
        try:
            return _Ways(once, reads, training).joined(base, {}).recording
        except CannotJoin as failed:
            # The next recording raises there, as for any value that cannot be known.
            reads.one_way.update(decision.key[2] for decision in failed.decisions)


@dataclass(slots=True)
class _Ways:
    once: Once
    reads: Reads
    training: bool

    def joined(self, base: Recording, given: Mapping[Key, bool], depth: int = 0) -> Joined:
        """A recording made with these outcomes, and both ways of its other decisions.

        `depth`: how many decisions deep, each met only where the one before it was True.
        """
        decisions = tuple(d for d in base.decisions if d.key not in given)
        if not decisions:
            return Joined(base, {}, {})
        if len(decisions) > MAX_DECISIONS or depth > MAX_NESTED:
            raise CannotJoin(decisions)
        ways = [[decisions[0::2], decisions[1::2]]] if len(decisions) > 2 else []
        if len(decisions) <= MAX_ALONE:
            ways.append([(one,) for one in decisions])
        for groups in ways:
            try:
                return self._joined(base, decisions, groups, given, depth)
            except CannotJoin:
                if groups is ways[-1]:
                    raise
        raise CannotJoin(decisions)

    def _joined(
        self,
        base: Recording,
        decisions: Sequence[Decision],
        groups: Sequence[Sequence[Decision]],
        given: Mapping[Key, bool],
        depth: int,
    ) -> Joined:
        join = Join(base, decisions)
        waiting = list(groups)
        known = {decision.key: False for decision in decisions}
        while waiting:
            group = waiting.pop(0)
            outcomes = {**given, **{decision.key: True for decision in group}}
            known_there = {**given, **known, **outcomes}
            other = self.joined(self._run(outcomes, decisions), known_there, depth + 1)
            waiting += [(decision,) for decision in join.add(other, group)]
        found = join.finished()
        shape = (self.training, tuple(given.items()), tuple(known), len(groups))
        if shape not in self.reads.mixed:
            keys = list(dict.fromkeys([*known, *(key for *_, key in found.choices.values())]))
            for mixture in _mixtures(keys):
                outcomes = {**mixture, **given}
                if not predicts(found, self._run(outcomes, decisions), outcomes):
                    raise CannotJoin(decisions)
            self.reads.mixed.add(shape)
        return found

    def _run(self, outcomes: Mapping[Key, bool], decisions: Sequence[Decision]) -> Recording:
        try:
            return self.once(outcomes)
        except Undecided:
            raise
        except TraceError:
            if self.reads.trial is not None:
                raise
            raise CannotJoin(decisions) from None


def _mixtures(keys: Sequence[Key]) -> Iterator[dict[Key, bool]]:
    """Outcomes to try: with few decisions every mixture, else every mixture of any two of them.

    Of two numbers some binary digit differs: outcomes by that digit, and their opposites, have
    each decision True where the other one is False.
    """
    if len(keys) <= MAX_EXHAUSTED:
        for number in range(2 ** len(keys)):
            yield {key: bool(number >> i & 1) for i, key in enumerate(keys)}
        return
    yield dict.fromkeys(keys, True)
    for digit in range((len(keys) - 1).bit_length()):
        for opposite in (False, True):
            yield {key: bool(i >> digit & 1) != opposite for i, key in enumerate(keys)}
    chance = random.Random(0)
    for _ in range(MIXTURES):
        yield {key: chance.random() < 0.5 for key in keys}


def predicts(joined: Joined, actual: Recording, outcomes: Mapping[Key, bool]) -> bool:
    """Whether the graph does with these outcomes what the model did."""
    names: dict[str, str] = {}

    def resolved(name: str) -> str:
        while name in joined.choices:
            no, yes, key = joined.choices[name]
            name = yes if outcomes.get(key, False) else no
        return name

    expected = []
    for op in with_end(joined.recording):
        runs = all(outcomes.get(k, False) == v for k, v in joined.when.get(op.name, {}).items())
        if runs and op.name not in joined.choices:
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
