"""Candidates next to a candidate: one group over one boundary, or who recomputes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdcompile.cluster import Cluster
from pdcompile.passes.partition.space.evaluate import violations
from pdcompile.passes.partition.space.search import Ground, recomputing
from pdcompile.problem.space import Candidate, StageOption


def neighbours(
    ground: Ground, cluster: Cluster, candidate: Candidate, *, decide: bool
) -> Iterator[Candidate]:
    """All that break nothing, the candidate itself not among them.

    `decide`: where memory is lacking a stage recomputes; each cut also comes with recomputation
    nowhere else.
    """
    seen = {candidate}
    for one in _cuts(ground, candidate):
        for variant in _variants(ground, cluster, one) if decide else (one,):
            if variant not in seen and not violations(ground.problem, cluster, variant):
                seen.add(variant)
                yield variant


def _variants(ground: Ground, cluster: Cluster, candidate: Candidate) -> Iterator[Candidate]:
    bare = tuple(StageOption(option.replicas) for option in candidate.options)
    for options in (bare, candidate.options):
        yield recomputing(ground.problem, cluster, replace(candidate, options=options))


def _cuts(ground: Ground, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate, and its cut with one group over one boundary."""
    model = ground.model
    yield candidate
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
            if 0 <= t <= last and free and stage.count(s) > 1:
                yield replace(candidate, stage_of=model.items_of((*stage[:v], t, *stage[v + 1 :])))
