"""Groups: a union-find over the ops of a graph that remembers why ops were joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Groups:
    """Disjoint sets over 0 … size−1; the root of a set is its smallest member."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))
        self.reasons: Counter[str] = Counter()

    def find(self, i: int) -> int:
        parent = self.parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, members: Iterable[int], reason: str) -> None:
        """Put members into one group; `reason` counts how many joins it was the cause of."""
        first: int | None = None
        for member in members:
            root = self.find(member)
            if first is None:
                first = root
            elif root != first:
                low, high = min(first, root), max(first, root)
                self.parent[high] = low
                first = low
                self.reasons[reason] += 1

    def members(self) -> dict[int, list[int]]:
        """Root to members, both ascending."""
        found: dict[int, list[int]] = {}
        for i in range(len(self.parent)):
            found.setdefault(self.find(i), []).append(i)
        return found
