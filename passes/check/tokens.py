"""One stage on one rank walked with tokens: what may happen when, as far as it alone can tell.

Values, slots, weight versions, updates and order are local facts: an instruction list breaks
them or not, whatever the timing.  Who talks to whom is checked in `exchange`.
"""

from __future__ import annotations

from pdcompile.passes.check.transfers import Updates, Violation
from pdcompile.passes.schedules.program_walk import Label
from pdcompile.schedule import Action, Instruction, Kind
from pdcompile.schedule.instruction import TO_INPUTS, TO_WEIGHTS
from pdcompile.schedule.spec import PipelineSpec


class Tokens(Updates):
    """The token state of one stage on one rank, and the rules for every instruction.

    Every `do(instruction, base)` raises Violation or moves the state on; `base` is the number
    of calls of step before this one.
    """

    def __init__(
        self, spec: PipelineSpec, stage: int, replica: int, *, forward_only: bool, puts_off: bool
    ):
        """`puts_off`: what was made may be sent later, also in a later call."""
        super().__init__(spec, stage, replica, forward_only=forward_only)
        self.puts_off = puts_off
        self.rank = spec.ranks[stage][replica]
        self.lag = 0 if forward_only else spec.lag(stage)
        self.depth = 1 if forward_only else spec.in_flight(stage)
        self.backward_actions = spec.kind.backwards
        self.to_free: set[Label] = set()
        self.loss_after = 0  # the number of forwards before the loss was summed
        self.peak_in_flight = 0
        self.rules |= {
            Action.FORWARD: self.forward,
            **dict.fromkeys(self.backward_actions, self.backward),
            Action.FREE: self.free,
            Action.LOSS: self.loss,
            Action.TELL_LOSS: self.tell,
            Action.HEAR_LOSS: self.hear,
        }

    def begin(self, minibatches: int) -> None:
        """Begin where so many minibatches are over and nothing is in flight: where an update is of
        several, those that wait for the rest of their group have all been backward."""
        self.steps = minibatches // self.group
        for counts in self.counters:
            counts.update(dict.fromkeys(counts, self.steps))
        for minibatch in range(self.steps * self.group, minibatches):
            if self.spec.rank(self.stage, 0, minibatch) == self.rank:
                for done in (self.forwards, self.begun, self.backwards):
                    done[minibatch] = [0]

    def do(self, one: Instruction, base: int) -> None:
        rule = self.rules.get(one.action)
        if rule is None:
            raise Violation("not an instruction of a program that computes")
        rule(one, (base + one.minibatch, one.microbatch))

    # -- compute ---------------------------------------------------------------------------

    def forward(self, one: Instruction, label: Label) -> None:
        minibatch, microbatch = label
        self._compute(one, label)
        done = self.forwards.setdefault(minibatch, [])
        if one.minibatch != 0:
            raise Violation("a forward belongs to the call of its minibatch")
        if done and microbatch <= done[-1]:
            raise Violation(f"forward after that of microbatch {done[-1]}: not ascending")
        if (
            self.spec.kind.updates_each
            and self.spec.rank(self.stage, microbatch, minibatch) != self.rank
        ):
            raise Violation("a forward of what another replica takes: they take turns")
        self.arrived(self.values_in, label)
        done.append(microbatch)
        self.done.append(microbatch)
        self.in_flight[label] = None
        self.peak_in_flight = max(self.peak_in_flight, len(self.in_flight))
        if len(self.in_flight) > self.depth:
            raise Violation(f"{len(self.in_flight)} microbatches in flight, planned {self.depth}")
        self.made(self.values_out, label)
        if self.forward_only:
            del self.in_flight[label]
            self.to_free.add(label)

    def backward(self, one: Instruction, label: Label) -> None:
        minibatch, microbatch = label
        if self.forward_only:
            raise Violation("a backward in a forward-only program")
        self._compute(one, label)
        if label not in self.in_flight:
            raise Violation("a backward without its forward before it")
        if self.collectives and self.posted[self.collectives[0]] > minibatch // self.group:
            raise Violation("a backward after the gradients were given to the collective")
        if one.action in TO_INPUTS:
            if any(count > minibatch for count in self.passed.values()):
                raise Violation("a backward after the sum of its tied gradients was passed on")
            self.arrived(self.gradients_in, label)
            self.all_sent(self.values_out, label)
            self._ascending(self.begun, label)
            self.made(self.gradients_out, label)
        elif microbatch not in self.begun.get(minibatch, ()):
            raise Violation("gradients of weights before those of the inputs")
        if one.action is Action.BACKWARD_INPUT:
            self.used(self.gradients_in, label)
        if one.action in TO_WEIGHTS:
            self._ascending(self.backwards, label)
            del self.in_flight[label]
            self.to_free.add(label)

    def _ascending(self, order: dict[int, list[int]], label: Label) -> None:
        minibatch, microbatch = label
        done = order.setdefault(minibatch, [])
        turn = self.spec.kind.turn
        if done and turn(microbatch) <= turn(done[-1]):
            raise Violation(f"backward after that of microbatch {done[-1]}: not ascending")
        done.append(microbatch)

    def _compute(self, one: Instruction, label: Label) -> None:
        """Microbatch, update and weight version of a forward or backward."""
        minibatch, microbatch = label
        if microbatch < 0 or one.edge >= 0 or one.peer >= 0:
            raise Violation("expected a microbatch, and no edge or peer")
        if one.lag != self.lag:
            raise Violation(f"weights of lag {one.lag}, the schedule's is {self.lag}")
        if self.forward_only:
            return
        if self.updated(minibatch):
            raise Violation(f"the update of minibatch {minibatch} has already run")
        version = self.spec.version(self.stage, minibatch)
        if not self.steps - self.versions < version <= self.steps:
            oldest = max(0, self.steps + 1 - self.versions)
            raise Violation(
                f"needs weights W_{version}; versions W_{oldest} to W_{self.steps} exist"
            )
        self.gathered(version)
        for edge, received in self.received.items():
            if received < version:
                raise Violation(
                    f"names W_{version}, of tied parameter {edge} W_{received} has arrived"
                )

    def free(self, one: Instruction, label: Label) -> None:
        if label not in self.to_free:
            raise Violation("frees what is not done (or was freed before)")
        if self.forward_only or not self.puts_off:
            self.all_sent(self.values_out if self.forward_only else self.gradients_out, label)
        self.to_free.remove(label)
        self.release(label)

    # -- loss -----------------------------------------------------------------------------

    def loss(self, one: Instruction, label: Label) -> None:
        self.hear(one, label)
        if one.peer >= 0 or self.stage != len(self.spec.ranks) - 1 or self.loss_after:
            raise Violation("only the last stage sums its loss, and once")
        self.loss_after = len(self.done)

    def tell(self, one: Instruction, label: Label) -> None:
        self.hear(one, label)
        if not self.loss_after:
            raise Violation("tells a loss that was not summed")

    def hear(self, one: Instruction, label: Label) -> None:
        if one.minibatch or one.microbatch >= 0:
            raise Violation("the loss is that of the call's whole minibatch")

    # -- boundaries ------------------------------------------------------------------------

    def end_call(self, base: int, *, drained: bool, updates: bool) -> None:
        """Check the end of a program, `base` minibatches from the beginning: nothing forgotten;
        `drained`: nothing left either, but for what waits for the rest of its group."""
        sends_loss = self.stage == len(self.spec.ranks) - 1
        due = sends_loss and (self.loss_after > 0 or not self.forward_only)
        if due and self.loss_after != len(self.done):
            raise Violation("the loss was not summed after the last forward")
        self.done, self.loss_after = [], 0
        if drained or not self.puts_off:
            self.nothing_forgotten()
        if self.to_free:
            raise Violation(f"FREE of microbatch {min(self.to_free)[1]} was forgotten")
        if not drained:
            return
        if self.in_flight:
            raise Violation(f"{len(self.in_flight)} microbatches without a backward")
        left = [t for t in self.forwards if self.spec.closing(self.stage, t) < base]
        if left and updates:
            raise Violation(f"no update of minibatch {min(left)}")
        if self.steps != base // self.group:
            raise Violation("an update too many, or too few")
        if self.backwards and self.group == 1 and self.waited.get(Kind.REDUCE, 1) < 1:
            raise Violation("the replicas' gradients were not reduced")
        if self.backwards and (not self._has_sums(0) or 0 in self.passed.values()):
            raise Violation("the gradients of tied parameters were not summed")
        if self.outstanding:
            raise Violation("transfers are still in flight")
        late = any(received != self.steps for received in self.received.values())
        late |= self.gathers and self.posted[Kind.GATHER] < self.steps
        if late or self.posted != self.waited:
            raise Violation("a collective or tied weight was not waited for")

    def state(self, base: int) -> tuple[object, ...]:
        """All that the future depends on, relative to the next call."""
        return (
            tuple((t - base, i) for t, i in self.in_flight),
            tuple((t - base, tuple(one)) for t, one in sorted(self.forwards.items())),
            tuple((t - base, tuple(one)) for t, one in sorted(self.begun.items())),
            tuple((t - base, tuple(one)) for t, one in sorted(self.backwards.items())),
            self.links(base),
            self.steps * self.group - base,
            tuple(n * self.group - base for counts in self.counters for n in counts.values()),
        )
