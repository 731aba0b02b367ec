"""BranchMerge: recordings of one model that took different ways at branches, as one list of ops.

Two recordings differ from a decision on; where both end with the same operators the ways have met,
and an input that has another name in the other recording becomes a choice between the two values.
Operators count as the same only if all but their inputs is equal: matching fewer of them makes
more ops run, but never changes a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pdcompile.ir.graph import Op, Ref, Value, rewritten, walk
from pdcompile.passes.trace.assumptions import Decision, Key
from pdcompile.passes.trace.conditional_code import form_of, renamed
from pdcompile.passes.trace.slices import numbered
from pdcompile.passes.trace.tape.results import Names, beside

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.run import Recording

# Ops that may fail depending on values: they must not run where eager would not run them.
_MAY_FAIL = (
    "index", "gather", "scatter", "take", "embedding", "one_hot", "nll_loss", "cross_entropy",
    "linalg", "cholesky", "inverse", "solve", "multinomial", "bincount", "ctc", "assert",
    "Embedding", "NLLLoss", "CrossEntropyLoss", "svd", "eigh",
)  # fmt: skip


class CannotMerge(Exception):
    """Both ways of a branch do not fit into one graph."""

    def __init__(self, decisions: Sequence[Decision]) -> None:
        super().__init__()
        self.decisions = decisions


@dataclass(frozen=True, slots=True)
class MergedBranches:
    """A recording with several ways in it.

    choices: value -> (value if the decision is False, value if it is True, the decision).
    when: op -> the outcomes with which the model runs it; other ops always run.
    met: every decision that some way reaches, whether or not anything depends on it.
    """

    recording: Recording
    choices: Mapping[str, tuple[str, str, Key]]
    when: Mapping[str, Mapping[Key, bool]]
    met: frozenset[Key] = frozenset()


@dataclass(slots=True)
class _Region:
    """The ops of one decision: base ops from `start` to `end` if it is False, `ops` if True."""

    decision: Decision
    start: int  # index of the deciding op in the base
    end: int  # index in the base where both ways have met again
    ops: list[Op]  # with their final names


@dataclass(slots=True)
class _Other:
    """A recording that is entered: what its names and storages are in the base, and which decision
    first chose between two values."""

    merged: MergedBranches
    names: dict[str, str]
    storages: dict[int, int] = field(default_factory=dict)
    pairs: dict[tuple[str, str], Key] = field(default_factory=dict)


class BranchMerge:
    """Merges recordings of one model; in `base` these decisions are all False."""

    def __init__(self, base: Recording, decisions: Sequence[Decision]) -> None:
        self._base = base
        self._decisions = decisions
        self._inner: dict[str, tuple[str, str, Key]] = {}  # choices inside of other ways
        self._inner_when: dict[str, Mapping[Key, bool]] = {}
        self._index = {op.name: i for i, op in enumerate(base.ops)}
        self._values = dict(base.values)
        self._names = Names((*base.values, *(op.name for op in base.ops)))
        self._regions: dict[Key, _Region] = {}
        self._owner: dict[str, Key] = {}  # op of one way only -> decision
        self._others: dict[tuple[str, int], dict[Key, str]] = {}  # argument -> other values for it
        self._storages = 1 + max((v.storage for v in base.values.values()), default=0)
        self._selects: dict[tuple[str, str, Key], str] = {}
        self._ops: list[Op] = []
        self._met = {decision.key for decision in decisions}

    # Adding a recording.

    def add(self, merged: MergedBranches, flipped: Sequence[Decision]) -> list[Decision]:
        """Enters the ops of a recording in which these outcomes are True.

        Returns the decisions among them that it did not reach.
        """
        base, other = self._base, merged.recording
        self._met |= merged.met
        there = {decision.key: decision.op for decision in other.decisions}
        reached = [decision for decision in flipped if decision.key in there]
        positions = {op.name: i for i, op in enumerate(other.ops)}
        mine = [-1, *(self._index[decision.op] for decision in reached)]
        theirs = [-1, *(positions[there[decision.key]] for decision in reached)]
        inputs = {name: name for name, v in base.values.items() if v.producer is None}
        entered = _Other(merged, inputs)
        ours, others = with_end(base), with_end(other)
        keys = {d.op: d.key for d in base.decisions}, {d.op: d.key for d in other.decisions}
        mine.append(len(ours) - 1)
        theirs.append(len(others) - 1)
        if mine != sorted(mine) or theirs != sorted(theirs):
            raise CannotMerge(reached)
        for i in range(len(mine) - 1):
            left = ours[mine[i] + 1 : mine[i + 1] + 1]
            right = others[theirs[i] + 1 : theirs[i + 1] + 1]
            common = _common(left, right, keys)
            key = reached[i - 1].key if i else None
            if key is None and not common == len(left) == len(right):
                raise CannotMerge(reached)
            if common == 0:
                raise CannotMerge(reached)
            if key is not None:
                made = self._enter(right[: len(right) - common], entered, key)
                end = mine[i] + 1 + len(left) - common
                self._regions[key] = _Region(reached[i - 1], mine[i], end, made)
                _check_pure(left[: len(left) - common], self._decisions)
            for a, b in zip(left[-common:], right[-common:], strict=True):
                self._match(a, b, entered, key)
        return [decision for decision in flipped if decision.key not in there]

    def _enter(self, ops: Sequence[Op], other: _Other, key: Key) -> list[Op]:
        merged, names, storages = other.merged, other.names, other.storages
        _check_pure([op for op in ops if op.name not in merged.choices], self._decisions)
        found = []
        for op in ops:
            name = self._names.new(op.name)
            self._owner[name] = key
            value = merged.recording.values[op.name]
            if value.storage >= 0:
                if value.storage not in storages:
                    storages[value.storage] = self._storages
                    self._storages += 1
                value = replace(value, storage=storages[value.storage])
            self._values[name] = replace(value, name=name, producer=name)
            args, kwargs = renamed((op.args, op.kwargs), names)
            found.append(replace(op, name=name, args=args, kwargs=kwargs))
            names[op.name] = name
            self._inner_when[name] = merged.when.get(op.name, {})
            if op.name in merged.choices:
                no, yes, inner = merged.choices[op.name]
                self._inner[name] = (names[no], names[yes], inner)
        return found

    def _match(self, a: Op, b: Op, other: _Other, key: Key | None) -> None:
        """Matches an op of both recordings."""
        names, pairs = other.names, other.pairs
        here = [self._regions[key].decision] if key is not None else self._decisions
        for i, (mine, theirs) in enumerate(zip(refs_of(a), refs_of(b), strict=True)):
            alternative = names[theirs]
            if alternative == mine:
                continue
            if key is None:
                raise CannotMerge(here)
            owner = self._owner.get(alternative) or pairs.setdefault((mine, alternative), key)
            pairs.setdefault((mine, alternative), owner)
            self._others.setdefault((a.name, i), {})[owner] = alternative
        if tuple(names[name] for name in b.mutates) != a.mutates:
            raise CannotMerge(here)
        names[b.name] = a.name
        if a.name in self._base.values:
            v, w = self._base.values[a.name], other.merged.recording.values[b.name]
            if not _alike(v, w):
                raise CannotMerge(here)
            other.storages.setdefault(w.storage, v.storage)

    # The merged recording.

    def finished(self) -> MergedBranches:
        """The recording with the ops of all ways, and choices between their results."""
        base = self._base
        self._settle()
        regions = {self._index[r.decision.op]: r for r in self._regions.values()}
        for i, op in enumerate(with_end(base)):
            chosen = self._chosen(op, i)
            if i == len(base.ops):
                output, loss = chosen.args
                break
            self._ops.append(chosen)
            if i in regions:
                for one in regions[i].ops:
                    self._ops.append(self._within(one, regions[i]))
        self._check_writes()
        order = [name for name, v in self._values.items() if v.producer is None]
        order += [op.name for op in self._ops]
        mine = {decision.key for decision in self._decisions}
        recording = replace(
            base,
            ops=tuple(numbered(self._ops)),
            values={name: self._values[name] for name in order},
            output=output,
            loss=loss.name if isinstance(loss, Ref) else None,
            decisions=tuple(d for d in base.decisions if d.key not in mine),
        )
        choices = {made: memo for memo, made in self._selects.items()}
        return MergedBranches(
            recording, {**choices, **self._inner}, self._when(), frozenset(self._met)
        )

    def _settle(self) -> None:
        """Finds, for every decision, the values that replace others in all later reads."""
        self._after: dict[Key, dict[str, str]] = {}
        for key, region in self._regions.items():
            found: dict[str, set[str | None]] = {}
            for op in with_end(self._base)[region.end :]:
                for i, name in enumerate(refs_of(op)):
                    other = self._others.get((op.name, i), {}).get(key)
                    found.setdefault(name, set()).add(other)
            self._after[key] = {
                name: other
                for name, others in found.items()
                for other in others
                if len(others) == 1 and other is not None
            }

    def _ordered(self, keys: Iterable[Key]) -> list[_Region]:
        regions = [self._regions[key] for key in keys]
        return sorted(regions, key=lambda region: (region.end, -region.start))

    def _chosen(self, op: Op, index: int) -> Op:
        """An op of the base that reads choices where its inputs depend on decisions."""
        wanted = []
        for i, name in enumerate(refs_of(op)):
            others = self._others.get((op.name, i), {})
            for region in self._ordered(others):
                key = region.decision.key
                if region.end > index:
                    raise CannotMerge([region.decision])
                name = self._select(name, self._at(others[key], region), region)
            wanted.append(name)
        return with_refs(op, wanted)

    def _within(self, op: Op, region: _Region) -> Op:
        return with_refs(op, [self._at(name, region) for name in refs_of(op)])

    def _at(self, name: str, region: _Region) -> str:
        """The value that a name of the base stands for where a decision is taken."""
        earlier = [
            key
            for key, other in self._regions.items()
            if other.end <= region.start and name in self._after[key]
        ]
        now = name
        for one in self._ordered(earlier):
            other = self._after[one.decision.key][name]
            now = self._select(now, self._at(other, one), one)
        return now

    def _select(self, name: str, other: str, region: _Region) -> str:
        if name == other:
            return name
        memo = (name, other, region.decision.key)
        if memo in self._selects:
            return self._selects[memo]
        one, two = self._values[name], self._values[other]
        if not one.is_tensor or not two.is_tensor or not _alike(one, two):
            raise CannotMerge([region.decision])
        made = self._names.new("chosen")
        decider = self._base.ops[region.start]
        self._values[made] = replace(one, name=made, producer=made)
        args = (Ref(name), Ref(other)), Ref(decider.name)
        self._ops.append(beside(decider, made, "function", "operator.getitem", args))
        self._selects[memo] = made
        return made

    def _check_writes(self) -> None:
        """Raises CannotMerge where an op writes into a value that a choice reads."""
        either = set()
        for name, other, _ in self._selects:
            either |= {self._values[name].storage, self._values[other].storage}
        for op in self._ops:
            if any(self._values[name].storage in either for name in op.mutates):
                raise CannotMerge(self._decisions)

    def _when(self) -> dict[str, Mapping[Key, bool]]:
        found: dict[str, dict[Key, bool]] = {}
        for key, region in self._regions.items():
            for op in self._base.ops[region.start + 1 : region.end]:
                found.setdefault(op.name, {})[key] = False
        for key, region in self._regions.items():
            outer = found.get(region.decision.op, {})
            for op in region.ops:
                found[op.name] = {**self._inner_when[op.name], **outer, key: True}
        return dict(found)


def _check_pure(ops: Sequence[Op], decisions: Sequence[Decision]) -> None:
    """Raises CannotMerge where an op writes, or might fail in the way that is not taken."""
    for op in ops:
        last = op.target.rpartition(".")[2]
        by_tensor = last in ("getitem", "setitem") and bool(walk(op.args[1:], Ref))
        if (
            op.mutates or op.buffers_written or op.opaque or by_tensor
            or any(word in op.target for word in _MAY_FAIL)
        ):  # fmt: skip
            raise CannotMerge(decisions)


def with_end(recording: Recording) -> list[Op]:
    """The ops, and one more that reads what the model returns."""
    return [*recording.ops, Op("", "function", "output", recording.returned)]


def refs_of(op: Op) -> list[str]:
    return [ref.name for ref in walk((op.args, op.kwargs), Ref)]


def with_refs(op: Op, names: Sequence[str]) -> Op:
    """The op with other values as its arguments, in order of appearance."""
    if list(names) == refs_of(op):
        return op
    following = iter(names)
    args, kwargs = rewritten(
        (op.args, op.kwargs), lambda part: Ref(next(following)) if type(part) is Ref else part
    )
    return replace(op, args=args, kwargs=kwargs)


def _common(
    left: Sequence[Op], right: Sequence[Op], keys: tuple[dict[str, Key], dict[str, Key]]
) -> int:
    """The number of equal ops that both end with."""
    count = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if keys[0].get(a.name) != keys[1].get(b.name) or form_of(a) != form_of(b):
            break
        count += 1
    return count


def _alike(one: Value, other: Value) -> bool:
    def of(value: Value) -> Any:
        return (value.shape, value.dtype, value.requires_grad, value.stride_order, value.varies)

    return bool(of(one) == of(other))
