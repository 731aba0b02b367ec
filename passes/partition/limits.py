"""The limits of a problem, one by one: what may be in conflict and what may be given up.

Precedence along the flow of data and a parameter's price on every holder are no limits: they
are what the model is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TypeVar

from pdcompile.problem import PartitionProblem, Wish
from pdcompile.units import format_bytes

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Limit:
    """The memory of a stage, what a person asked for, or that no stage may be empty."""

    text: str
    stage: int | None = None
    wish: Wish | None = None

    @property
    def empty(self) -> bool:
        return self.stage is None and self.wish is None


def limits_of(problem: PartitionProblem) -> tuple[Limit, ...]:
    """Everything that can be given up; wishes first, because the first are blamed first."""
    found = [Limit(wish.text, wish=wish) for wish in _wishes(problem)]
    if not problem.allow_empty:
        found.append(Limit(f"something on each of {len(problem.stages)} stages"))
    found += [
        Limit(f"the {format_bytes(stage.memory_bytes)} of memory of stage {s}", stage=s)
        for s, stage in enumerate(problem.stages)
        if stage.memory_bytes is not None
    ]
    return tuple(found)


def keeping(problem: PartitionProblem, limits: Collection[Limit]) -> PartitionProblem:
    """The problem under these of its limits alone."""
    stages = {limit.stage for limit in limits}
    wishes = tuple(limit.wish for limit in limits if limit.wish is not None)
    counts = [wish.max_stages for wish in wishes if wish.max_stages is not None]
    return replace(
        problem,
        stages=tuple(
            stage if s in stages else replace(stage, memory_bytes=None)
            for s, stage in enumerate(problem.stages)
        ),
        allow_empty=not any(limit.empty for limit in limits),
        pins=_entries(wish.pins for wish in wishes),
        together=_entries(wish.together for wish in wishes),
        apart=_entries(wish.apart for wish in wishes),
        forbidden=_entries(wish.forbidden for wish in wishes),
        max_stages=min(counts, default=None),
        wishes=wishes,
    )


def listed(limits: Iterable[Limit]) -> str:
    """In words: neighbouring stages with the same memory together."""
    given = sorted(limits, key=lambda limit: -1 if limit.stage is None else limit.stage)
    texts = [limit.text for limit in given if limit.stage is None]
    stages = [limit for limit in given if limit.stage is not None]
    runs: list[list[Limit]] = []
    for before, limit in pairwise([None, *stages]):
        assert limit is not None
        if before is not None and (before.stage, _size(before)) == (_below(limit), _size(limit)):
            runs[-1].append(limit)
        else:
            runs.append([limit])
    for run in runs:
        if len(run) == 1:
            texts.append(run[0].text)
        else:
            texts.append(f"{_size(run[0])} of memory of each of stages {run[0].stage}–"
                         f"{run[-1].stage}")  # fmt: skip
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + f" and {texts[-1]}"


def _below(limit: Limit) -> int:
    return (limit.stage or 0) - 1


def _size(limit: Limit) -> str:
    return limit.text.rpartition(" of stage ")[0].removesuffix(" of memory")


def _wishes(problem: PartitionProblem) -> list[Wish]:
    """What a person asked for, and every entry that no wish lists, as one of its own."""
    names = [repr(item.name) for item in problem.items]
    found = list(problem.wishes)
    known = {
        field: {entry for wish in found for entry in getattr(wish, field)}
        for field in ("pins", "together", "apart", "forbidden")
    }
    for i, s in problem.pins:
        if (i, s) not in known["pins"]:
            found.append(Wish(f"{names[i]} pinned to stage {s}", pins=((i, s),)))
    for group in problem.together:
        if group not in known["together"]:
            words = " with ".join(names[i] for i in group)
            found.append(Wish(f"{words} on one stage", together=(group,)))
    for a, b in problem.apart:
        if (a, b) not in known["apart"]:
            found.append(Wish(f"{names[a]} apart from {names[b]}", apart=((a, b),)))
    for i, s in problem.forbidden:
        if (i, s) not in known["forbidden"]:
            found.append(Wish(f"{names[i]} kept off stage {s}", forbidden=((i, s),)))
    if problem.max_stages is not None and all(wish.max_stages is None for wish in found):
        text = f"at most {problem.max_stages} stages"
        found.append(Wish(text, max_stages=problem.max_stages))
    return found


def _entries(parts: Iterable[tuple[Entry, ...]]) -> tuple[Entry, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(parts)))
