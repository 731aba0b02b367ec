"""Candidates next to a candidate: one group over one boundary, the rest as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdcompile.passes.partition.space.evaluate import violations
from pdcompile.passes.partition.space.search import Ground, recomputing
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.space import Candidate


def neighbours(
    ground: Ground, seats: Seats, candidate: Candidate, *, decide: bool
) -> Iterator[Candidate]:
    """All that break nothing; `decide`: who recomputes is decided anew."""
    model = ground.model
    stage = [candidate.stage_of[members[0]] for members in model.members]
    before: list[list[int]] = [[] for _ in stage]
    after: list[list[int]] = [[] for _ in stage]
    for a, b in model.arcs:
        before[b].append(a)
        after[a].append(b)
    last = len(candidate.options) - 1
    for v, s in enumerate(stage):
        for t, bound in ((s + 1, after), (s - 1, before)):
            free = all((stage[u] - s) * (t - s) > 0 for u in bound[v])
            if not 0 <= t <= last or not free or stage.count(s) == 1:
                continue
            moved = model.items_of((*stage[:v], t, *stage[v + 1 :]))
            one = replace(candidate, stage_of=moved)
            if decide:
                one = recomputing(ground.problem, seats, one)
            if not violations(ground.problem, seats.cluster, one):
                yield one
