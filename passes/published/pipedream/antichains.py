"""The states that PipeDream's own optimizer visits, for searches that cannot take them all.

It walks from the first source: an antichain is augmented (see `Dag.boundary`), one node of it
moves on to one of its consumers, and what then lies below another node is taken out again
('PipeDream', SOSP 2019, its published program).  A plan over these states and more is never
worse than the one it finds.
"""

from __future__ import annotations

from pdcompile.passes.partition.lattice import members
from pdcompile.passes.published.pipedream.states import Dag


def walked(dag: Dag, limit: int) -> list[int] | None:
    """The down-closed sets of all antichains on the walk, or None when they exceed `limit`."""
    start = 1
    known = {start: None}
    queue = [start]
    for antichain in queue:  # grows while it is walked
        for following in _steps(dag, antichain):
            if following not in known:
                if len(known) >= limit:
                    return None
                known[following] = None
                queue.append(following)
    return list(dict.fromkeys(dag.close_down(antichain) for antichain in queue))


def _steps(dag: Dag, antichain: int) -> list[int]:
    augmented = antichain
    for v in members(antichain):
        augmented |= dag.exposed[v]
    below = 0
    for v in members(augmented):
        below |= dag.ancestors[v]
    found = []
    for old in members(augmented):
        for new in members(dag.after[old] & ~antichain & ~below):
            moved = augmented & ~(1 << old) | 1 << new
            history = 0
            for v in members(moved):
                history |= dag.ancestors[v]
            found.append(moved & ~history)
    return found
