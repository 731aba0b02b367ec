"""Which minibatches an update of a stage takes, and which weights a minibatch runs on."""

from __future__ import annotations


class Numbering:
    """Updates and versions of a stage by number, where one update takes `group` minibatches.

    `begun`: the first minibatch whose gradients are known.
    """

    def __init__(self, group: int) -> None:
        self.group = group
        self.begun = 0

    def update(self, minibatch: int) -> int:
        """The update that takes a minibatch: it replaces the version of this number."""
        return minibatch // self.group

    def version(self, minibatch: int, lag: int) -> int:
        """The version that a minibatch runs on, where it is so many updates old."""
        return max(minibatch // self.group - lag, 0)

    def taken(self, minibatch: int) -> int:
        """Of how many minibatches the update is that takes this one: less than the group where
        the history began within it."""
        end = (minibatch // self.group + 1) * self.group
        return min(self.group, end - self.begun)

    def waiting(self, minibatches: int) -> int:
        """Of how many minibatches gradients then wait for the others of their group."""
        return min(minibatches % self.group, minibatches - self.begun)
