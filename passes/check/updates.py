"""What one stage on one rank sums and updates, walked with tokens: collectives, versions, order."""

from __future__ import annotations

from pdcompile.passes.check.transfers import Transfers, Violation
from pdcompile.passes.schedules.program_walk import Label
from pdcompile.schedule import Action, Instruction, Kind
from pdcompile.schedule.spec import PipelineSpec


class Updates(Transfers):
    """The updates of a stage's replica, with the collectives that each waits for."""

    def __init__(self, spec: PipelineSpec, stage: int, replica: int, *, forward_only: bool):
        super().__init__(spec, stage, replica, forward_only=forward_only)
        self.versions = spec.versions(stage)
        replicated = len(spec.ranks[stage]) > 1
        self.collectives = (Kind.REDUCE,) * replicated + (Kind.NORMS,) * spec.clipping
        self.backwards: dict[int, list[int]] = {}
        self.posted = dict.fromkeys(self.collectives, 0)
        self.waited = dict.fromkeys(self.collectives, 0)
        self.counters += [self.posted, self.waited]
        self.done: list[int] = []  # microbatches that went forward in this call
        self.rules |= {
            Action.STEP: self.step,
            Action.POST_REDUCE: self.post,
            Action.POST_NORMS: self.post,
            Action.WAIT_REDUCE: self.wait,
            Action.WAIT_NORMS: self.wait,
            Action.SEND_TIED: self.pass_sum,
            Action.POST_BUFFERS: self.between_calls,
            Action.WAIT_BUFFERS: self.between_calls,
        }

    def step(self, one: Instruction, label: Label) -> None:
        oldest, group = self.steps + 2 - self.versions, self._group_of(self.steps)
        if self.forward_only or label != (group[-1], -1):
            raise Violation(f"the next update is that of minibatch {group[-1]}")
        if not self._complete(group):
            raise Violation("an update before the minibatch's last backward")
        for kind in self.collectives:
            if self.waited[kind] <= self.steps:
                raise Violation(f"an update before WAIT_{kind.name} of its minibatch")
        if not self._has_sums(self.steps):
            raise Violation("an update before the sums of its tied gradients have come")
        if any(count <= self.steps for count in self.passed.values()):
            raise Violation("an update before SEND_TIED of its minibatch")
        for t, i in self.in_flight:
            if self.spec.version(self.stage, t) < oldest:
                raise Violation(f"overwrites weights that microbatch {i} of minibatch {t} names")
        for outlet in self.weights_out:
            if any(t + 1 < oldest for labels in outlet.outstanding.values() for t, _ in labels):
                raise Violation("overwrites weights that are still being sent")
            if outlet.made:
                hop = outlet.hop
                raise Violation(f"tied parameter {hop.edge} was not sent to stage {hop.stage}")
        if any(received < self.steps for received in self.received.values()):
            raise Violation("an update before the tied weights of the one before arrived")
        self.steps += 1
        for minibatch in group:
            for done in (self.forwards, self.begun, self.backwards):
                done.pop(minibatch, None)
        self.made(self.weights_out, label)

    def _group_of(self, update: int) -> range:
        """The minibatches that an update takes, whose last one names it."""
        return range(update * self.group, (update + 1) * self.group)

    def _complete(self, minibatches: range) -> bool:
        """True if those that this replica takes have gone backward; where an update is of several
        minibatches it takes one, which must have come."""
        came = self.group == 1 or any(t in self.forwards for t in minibatches)
        return came and all(
            sorted(self.backwards.get(t, ())) == self.forwards.get(t, []) for t in minibatches
        )

    def pass_sum(self, one: Instruction, label: Label) -> None:
        """A holder of a tied parameter adds its own gradient to what has come, and passes it on."""
        minibatch = self.passed.get(one.edge)
        if minibatch is None or label != (minibatch, -1):
            raise Violation("passes on a sum that is not the next one, or that it owns")
        if sorted(self.begun.get(minibatch, ())) != self.forwards.get(minibatch, []):
            raise Violation("passes on a sum before the minibatch's last backward")
        if not self._has_sums(minibatch, one.edge):
            raise Violation("passes on a sum before that of a later stage has come")
        self.made((o for o in self.sums_out if o.hop.edge == one.edge), label)
        self.send(one, label)
        self.passed[one.edge] += 1

    def _has_sums(self, minibatch: int, edge: int | None = None) -> bool:
        """True if the sums of later holders have come, of one tied parameter or of all."""
        counts = (n for (tied, _), n in self.summed.items() if edge in (None, tied))
        return all(count > minibatch for count in counts)

    def _collective(self, one: Instruction) -> Kind:
        if one.action.kind not in self.collectives:
            raise Violation("this rank takes part in no such collective")
        return one.action.kind

    def post(self, one: Instruction, label: Label) -> None:
        kind = self._collective(one)
        group = self._group_of(self.posted[kind])
        if label != (group[-1], -1):
            raise Violation(f"the next to be posted is minibatch {group[-1]}")
        if not self._complete(group):
            raise Violation("posted before the minibatch's last backward")
        before = self.collectives[: self.collectives.index(kind)]
        if any(self.waited[other] <= self.posted[kind] for other in before):
            raise Violation("posted before the replicas' gradients were reduced")
        owned = (edge for edge, _ in self.summed if edge not in self.passed)
        if not all(self._has_sums(group[-1], edge) for edge in owned):
            raise Violation("posted before the sums of tied gradients have come")
        self.posted[kind] += 1

    def wait(self, one: Instruction, label: Label) -> None:
        kind = self._collective(one)
        named = (self._group_of(self.waited[kind])[-1], -1)
        if label != named or self.waited[kind] >= self.posted[kind]:
            raise Violation("waits for what was not posted")
        self.waited[kind] += 1

    def between_calls(self, one: Instruction, _: Label) -> None:
        """Buffers of replicas are brought together while nothing is in flight."""
        if Kind.REDUCE not in self.collectives:
            raise Violation("a stage of one rank has nothing to bring together")
        if self.in_flight or self.done or one.minibatch or one.microbatch >= 0:
            raise Violation("buffers are brought together between calls, not in one")
