"""The cases that a bound along a path tells apart: on how many and which stages the path is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.path.beside import Array, Beside
from pdcompile.passes.partition.path.branches import Parallel, parallels
from pdcompile.passes.partition.path.crossings import (
    Crossing,
    Hop,
    branches_of,
    hop_around,
    hop_over,
)
from pdcompile.passes.partition.path.interval_bytes import IntervalBytes
from pdcompile.passes.partition.path.path_case import Case, Mask
from pdcompile.plan.makespan import warmup_of
from pdcompile.problem import StageLimits
from pdcompile.schedule.registry import kind_of

SHARES = tuple(i / 40 for i in range(41))  # of a backward in forward and backward: one is chosen
WORTH = 0.2  # of the average stage's work: for so much work it has to say most


def cases_of(beside: Beside) -> Iterator[list[Case]]:
    """All stages hold groups of the path; or some do not, and it begins on one of these.

    Each with more or fewer groups told apart (`branches.NARROW`): what is impossible in one of the
    list is impossible.
    """
    model = beside.model
    alone, hop = model.num_stages == 1, _hops(beside)
    if alone or in_order(model):
        yield [_case(beside, hop, _Limits.of(beside, every=True), None, (0, 0))]
    if not alone:
        choices = parallels(beside, *_seconds(model), filled=in_order(model))
        limits = _Limits.of(beside, every=False)
        for first in _firsts(beside):
            yield [_case(beside, hop, limits, parallel, first) for parallel in choices]


def _firsts(beside: Beside) -> Iterator[tuple[int, int]]:
    """Where the path may begin: on the first stage or later, stages in a row, told apart where a
    shared parameter may have to go over another kind of link."""
    model, stages = beside.model, beside.model.problem.stages
    if not in_order(model):
        yield 0, len(stages) - 1
        return
    yield 0, 0
    most, start = min(int(np.count_nonzero(beside.low == 0)), len(stages) - 1), 1
    if any(flow.tied for flow in model.flows):
        links = [(stage.bytes_per_second, stage.latency_seconds) for stage in stages]
        for s in range(2, most + 1):
            if links[s - 1] != links[s - 2]:
                yield start, s - 1
                start = s
    if start <= most:
        yield start, most


def in_order(model: Model) -> bool:
    """Whether every stage holds something."""
    return model.most_used == model.num_stages and not model.problem.allow_empty


def _seconds(model: Model) -> tuple[Array, Array]:
    """Of each group at the highest speed: forward, and backward until gradients of its inputs are
    there."""
    part = kind_of(model.problem.memory.schedule).halves(1.0)[0]  # of a backward
    fastest = max(stage.speed for stage in model.problem.stages)
    return np.array(model.forward) / fastest, part * np.array(model.backward) / fastest


class _Limits(NamedTuple):
    """By stage and interval of the path: whether the stage may hold it, by its memory and by where
    groups may be, and the most work of a microbatch that it can have then."""

    allowed: list[Mask]
    most: list[Array]

    @staticmethod
    def of(beside: Beside, *, every: bool) -> _Limits:
        model, needed = beside.model, IntervalBytes(beside, every)
        ends, work = np.arange(beside.length + 1), np.add(*_seconds(model))
        there = float(work.sum()) - beside.before(work)[:, None] - beside.behind(work)[None, :]
        allowed, most = [], []
        for s, stage in enumerate(model.problem.stages):
            barred = [not a <= s <= b for a, b in zip(model.lowest, model.highest, strict=True)]
            mask = beside.inside(np.array(barred, dtype=np.float64), every=every) < 0.5
            mask &= ends[:, None] < ends[None, :]
            if stage.memory_bytes is not None:
                least = needed.least(s) + needed.of_branches(s)
                mask &= least <= stage.memory_bytes * (1 + 1e-12) + 0.5
            allowed.append(mask)
            most.append(np.minimum(np.maximum(there, 0.0), needed.most(s, work)))
        return _Limits(allowed, most)


def _case(
    beside: Beside,
    hop: Callable[[int, int], Hop],
    limits: _Limits,
    parallel: Parallel | None,
    first: tuple[int, int],
) -> Case:
    """`parallel`: where some stages hold nothing of the path."""
    model, size, every = beside.model, beside.length, parallel is None
    stages, m = model.problem.stages, model.problem.num_microbatches
    part = kind_of(model.problem.memory.schedule).halves(1.0)[0]  # of a backward
    fastest, work = max(stage.speed for stage in stages), np.add(*_seconds(model))
    f, w = (
        beside.inside(one, every=every)
        for one in (np.array(model.forward), part * np.array(model.backward))
    )
    before, rest, total = beside.before(work), beside.behind(work), float(work.sum())
    outside = np.where((beside.low == 0) & (first[1] > 0) & (not every), work, 0.0)
    own = [(f / stage.speed, w / stage.speed) for stage in stages]
    whole, missing = total - float(outside.sum()), 0.0
    if parallel is not None:
        missing = float(work[parallel.wide].sum())
    lasts = int(np.count_nonzero(beside.high == size + 1)) if in_order(model) else len(stages)
    links = [stages[min(first[1], s) : s] for s in range(len(stages))]
    return Case(
        own=own,
        speeds=[stage.speed / fastest for stage in stages],
        warmup=warmup_of(model.problem.memory.in_flight, len(stages), m),
        allowed=limits.allowed,
        hop=hop,
        before=before - beside.before(outside),
        rest=rest - beside.behind(outside),
        backward_share=_backward_share(beside),
        most=limits.most,
        surely=(beside.before(work), beside.beyond(work)),
        loose=beside.across(work),
        whole=whole,
        total=total,
        final=_final(beside, first, 0 if every else lasts, parallel),
        shared=[
            _shared(beside, between, f + w, missing, every=every)
            for between, (f, w) in zip(links, own, strict=True)
        ],
        microbatches=m,
        parallel=parallel,
        left_out=not every and in_order(model) and first == (0, 0),
        first=first,
        last=0 if every else lasts,
    )


def _backward_share(beside: Beside) -> tuple[float, float]:
    """(r, z): any groups that are not surely on a stage and take x seconds of a microbatch take at
    least r·x − z of it backward."""
    forward, backward = _seconds(beside.model)
    loose = beside.low < beside.high
    work = (forward + backward)[loose]
    aim = WORTH * float((forward + backward).sum()) / beside.model.num_stages

    def lacking(share: float) -> float:
        return float(np.maximum(share * work - backward[loose], 0.0).sum())

    best = max(SHARES, key=lambda share: share * aim - lacking(share))
    return best, lacking(best)


def _hops(beside: Beside) -> Callable[[int, int], Hop]:
    """From a stage to another: over the slowest link between them, or, where stages may hold
    nothing, over any."""
    stages = beside.model.problem.stages
    if not in_order(beside.model):
        any_link, ways = hop_over(beside, stages), Crossing.over(beside, stages)
        any_link = replace(any_link, around=hop_around(any_link.least, [ways]))
        return lambda s, t: any_link
    short = branches_of(beside, np.add(*_seconds(beside.model)), len(stages))
    unlike = {(stage.bytes_per_second, stage.latency_seconds): stage for stage in stages}
    over = {
        link: (hop_over(beside, [stage], short), Crossing.over(beside, [stage]))
        for link, stage in unlike.items()
    }
    by_stage = [over[stage.bytes_per_second, stage.latency_seconds] for stage in stages]

    @cache
    def hop(s: int, t: int) -> Hop:
        if t == s + 1:
            return by_stage[s][0]
        least = np.max([one.least for one, _ in by_stage[s:t]], axis=0)
        around = hop_around(least, [ways for _, ways in by_stage[s:t]])
        return replace(by_stage[s][0], least=least, around=around, branches=False)

    return hop


def _shared(
    beside: Beside, links: Sequence[StageLimits], own: Array, missing: float, *, every: bool
) -> Array:
    """[j, k]: seconds until the sum of the gradients of a parameter that a group of the stage
    shares with the first one of the path has arrived there over these links, after the least way
    down."""
    model, found = beside.model, np.zeros_like(own)
    m, fastest = model.problem.num_microbatches, max(one.speed for one in model.problem.stages)
    down = np.maximum(beside.before(np.array(model.forward)) / fastest - missing, 0.0)
    for once, held in _tied(beside, links, every=every):
        found = np.maximum(found, np.where(held, down[:, None] + own + m * once, 0.0))
    return found


def _tied(
    beside: Beside, links: Sequence[StageLimits], *, every: bool
) -> Iterator[tuple[float, Mask]]:
    """Shared parameters whose first holder is the first of the path: seconds of an m-th part of
    the sum over the slowest link that surely is between the first holder and the last one (from
    holder to holder, one of which sends over it), and where that one is."""
    model = beside.model
    for flow in model.flows:
        last = flow.sinks[-1]
        if not flow.tied or not _begins(beside, min(*flow.sources, *flow.sinks)):
            continue
        if links:
            has = np.zeros(model.num_groups)
            has[last] = 1.0
            once = max(flow.backward_seconds(link) for link in links)
            yield once, beside.inside(has, every=every) > 0


def _begins(beside: Beside, v: int) -> bool:
    """Whether the path begins with this group."""
    return bool(beside.low[v] == beside.high[v] == 1)


def _final(beside: Beside, first: tuple[int, int], last: int, parallel: Parallel | None) -> Array:
    """By the end of the path's first stage: seconds of new weights that are sent after its last
    backward.

    Of a parameter that the path's first group shares with one that surely is on a later stage, over
    the slowest link that surely is between.  The first holder, which sends them, is where the path
    begins, or has waited for the gradient from there.
    """
    model, stages, size = beside.model, beside.model.problem.stages, beside.length
    found = np.zeros(size + 1)
    for flow in model.flows:
        if not flow.tied or not any(_begins(beside, v) for v in flow.sources):
            continue
        for low in map(int, beside.low[list(flow.sinks)]):
            behind = size - low + last
            if parallel is not None:
                behind += min(parallel.most[low:size].sum(), len(stages))
            links = stages[first[1] : max(len(stages) - 1 - int(behind), 0)]
            seconds = [flow.forward_seconds(link) for link in links]
            least = min(map(flow.forward_seconds, stages[first[0] : first[1] + 1]))
            once = model.problem.num_microbatches * max(seconds, default=least)
            found[:low] = np.maximum(found[:low], once)
    return found
