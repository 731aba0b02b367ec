"""One stage on one rank walked with tokens: what may happen when, as far as it alone can tell.

Values, slots, weight versions, updates and order are local facts: an instruction list breaks
them or not, whatever the timing.  Who talks to whom is checked in `exchange`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy

from pdcompile.schedule import Action, Instruction, Kind
from pdcompile.schedule.instruction import POST_RECV, SEND, TRANSFERS, WAIT_RECV, WAIT_SEND
from pdcompile.schedule.registry import GRADIENT_SLOTS
from pdcompile.schedule.spec import FORWARD_ONLY_SLOTS, Hop, Hops, PipelineSpec, hops

_STATE = (
    "in_flight",
    "forwards",
    "backwards",
    "to_free",
    "slots",
    "to_send",
    "under_way",
    "steps",
    "weights",
    "posted",
    "waited",
    "num_forwards",
    "loss_after",
)

Label = tuple[int, int]  # minibatch from the beginning of training, microbatch or −1
Key = tuple[Kind, int]  # what is transferred, edge


class Violation(Exception):
    """What is wrong with one instruction, in words."""


class Tokens:
    """The token state of one stage on one rank, and the rules for every instruction.

    Every `do(instruction, base)` raises Violation or moves the state on; `base` is the number
    of calls of step before this one.
    """

    def __init__(self, spec: PipelineSpec, stage: int, rank: int, *, forward_only: bool = False):
        self.spec, self.stage, self.rank = spec, stage, rank
        self.forward_only = forward_only
        self.lag = 0 if forward_only else spec.kind.lag
        self.versions = spec.kind.versions
        self.hops = hops(spec, stage)
        replicated = len(spec.ranks[stage]) > 1
        self.collectives = (Kind.REDUCE,) * replicated + (Kind.NORMS,) * spec.clipping
        self.expected = {kind: _by_edge(self.hops, kind) for kind in TRANSFERS}
        self.pool = {
            Kind.VALUE: FORWARD_ONLY_SLOTS if forward_only else spec.pool(stage),
            Kind.GRADIENT: GRADIENT_SLOTS,
            Kind.TIED: GRADIENT_SLOTS,
            Kind.WEIGHT: 1,
        }
        self.depth = 1 if forward_only else spec.in_flight(stage)
        self.in_flight: dict[Label, None] = {}
        self.forwards: dict[int, list[int]] = {}  # microbatches per minibatch not yet updated
        self.backwards: dict[int, list[int]] = {}
        self.to_free: set[Label] = set()
        self.slots: dict[Key, dict[Label, bool]] = {}  # live slots; True once it has arrived
        self.to_send: dict[tuple[Key, int], set[Label]] = {}  # made, not yet sent to that stage
        self.under_way: dict[tuple[Key, int, int], list[Label]] = {}  # to that stage and rank
        self.steps = 0
        self.weights = {hop.edge: 0 for hop in self.hops.weights}
        self.posted = dict.fromkeys(self.collectives, 0)
        self.waited = dict.fromkeys(self.collectives, 0)
        self.num_forwards = 0  # of this call
        self.loss_after = 0  # the number of forwards before the loss was sent
        self.peak_in_flight = 0
        self.peak_slots: Counter[Key] = Counter()
        self.rules: dict[Action, Callable[[Instruction, Label], None]] = {
            Action.FORWARD: self.forward,
            Action.BACKWARD: self.backward,
            Action.STEP: self.step,
            Action.FREE: self.free,
            Action.LOSS: self.loss,
        }
        for kind in TRANSFERS:
            self._bind(kind)
        for action in (Action.POST_REDUCE, Action.POST_NORMS):
            self.rules[action] = self.post
        for action in (Action.WAIT_REDUCE, Action.WAIT_NORMS):
            self.rules[action] = self.wait

    def restore(self, other: Tokens) -> None:
        """Take over the state of the same stage and rank in another walk."""
        for name in _STATE:
            setattr(self, name, deepcopy(getattr(other, name)))

    def do(self, one: Instruction, base: int) -> None:
        self.rules[one.action](one, (base + one.minibatch, one.microbatch))

    # -- compute ---------------------------------------------------------------------------

    def forward(self, one: Instruction, label: Label) -> None:
        minibatch, microbatch = label
        self._compute(one, label)
        done = self.forwards.setdefault(minibatch, [])
        if one.minibatch != 0:
            raise Violation("a forward belongs to the call of its minibatch")
        if done and microbatch <= done[-1]:
            raise Violation(f"forward after that of microbatch {done[-1]}: not ascending")
        self._arrived(self.hops.before_forward, label)
        done.append(microbatch)
        self.num_forwards += 1
        self.in_flight[label] = None
        self.peak_in_flight = max(self.peak_in_flight, len(self.in_flight))
        if len(self.in_flight) > self.depth:
            raise Violation(f"{len(self.in_flight)} microbatches in flight, planned {self.depth}")
        self._made(self.hops.after_forward, label)
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
        done = self.backwards.setdefault(minibatch, [])
        if done and microbatch <= done[-1]:
            raise Violation(f"backward after that of microbatch {done[-1]}: not ascending")
        if self.collectives and self.posted[self.collectives[0]] > minibatch:
            raise Violation("a backward after the gradients were given to the collective")
        self._arrived(self.hops.before_backward, label)
        self._all_sent(self.hops.after_forward, label)
        done.append(microbatch)
        del self.in_flight[label]
        self.to_free.add(label)
        self._made(self.hops.after_backward, label)

    def _compute(self, one: Instruction, label: Label) -> None:
        """Microbatch, update and weight version of a forward or backward."""
        minibatch, microbatch = label
        if microbatch < 0 or one.edge >= 0 or one.peer >= 0:
            raise Violation("names no microbatch, or an edge or peer")
        if one.lag != self.lag:
            raise Violation(f"weights of lag {one.lag}, the schedule's is {self.lag}")
        if self.forward_only:
            return
        if minibatch < self.steps:
            raise Violation(f"the update of minibatch {minibatch} has already run")
        version = max(minibatch - self.lag, 0)
        if not self.steps - self.versions < version <= self.steps:
            oldest = max(0, self.steps + 1 - self.versions)
            raise Violation(
                f"needs weights W_{version}; versions W_{oldest} to W_{self.steps} exist"
            )
        for edge, received in self.weights.items():
            if received < version:
                raise Violation(
                    f"names W_{version}, of tied parameter {edge} W_{received} has arrived"
                )

    def _arrived(self, needed: Iterable[Hop], label: Label) -> None:
        for hop in needed:
            if not self.slots.get((hop.kind, hop.edge), {}).get(label):
                raise Violation(
                    f"{'tied parameter' if hop.kind is Kind.TIED else 'edge'} {hop.edge} "
                    f"from stage {hop.stage} was not waited for"
                )

    def _made(self, sent: Iterable[Hop], label: Label) -> None:
        for hop in sent:
            self.to_send.setdefault(((hop.kind, hop.edge), hop.stage), set()).add(label)

    def _all_sent(self, made: Iterable[Hop], label: Label) -> None:
        for hop in made:
            if label in self.to_send[(hop.kind, hop.edge), hop.stage]:
                raise Violation(f"what goes to stage {hop.stage} was not sent before")

    def free(self, one: Instruction, label: Label) -> None:
        if label not in self.to_free:
            raise Violation("frees what is not done (or was freed before)")
        hops_of = self.hops.after_forward if self.forward_only else self.hops.after_backward
        self._all_sent(hops_of, label)
        self.to_free.remove(label)
        for (kind, _), live in self.slots.items():
            if kind is not Kind.WEIGHT:
                live.pop(label, None)

    # -- update ----------------------------------------------------------------------------

    def step(self, one: Instruction, label: Label) -> None:
        minibatch, oldest = label[0], self.steps + 2 - self.versions
        if self.forward_only or one.microbatch >= 0 or minibatch != self.steps:
            raise Violation(f"the next update is that of minibatch {self.steps}")
        if self.backwards.get(minibatch, []) != self.forwards.get(minibatch, []):
            raise Violation("an update before the minibatch's last backward")
        for kind in self.collectives:
            if self.waited[kind] <= minibatch:
                raise Violation(f"an update before WAIT_{kind.name} of its minibatch")
        for t, i in self.in_flight:
            if max(t - self.lag, 0) < oldest:
                raise Violation(f"overwrites weights that microbatch {i} of minibatch {t} names")
        for key, labels in self.under_way.items():
            if key[0][0] is Kind.WEIGHT and any(t + 1 < oldest for t, _ in labels):
                raise Violation("overwrites weights that are still being sent")
        self._sent_weights()
        if any(received < self.steps for received in self.weights.values()):
            raise Violation("an update before the tied weights of the one before arrived")
        self.steps += 1
        self.forwards.pop(minibatch, None)
        self.backwards.pop(minibatch, None)
        self._made(self.hops.after_step, (minibatch, -1))

    def _sent_weights(self) -> None:
        for (key, stage), labels in self.to_send.items():
            if labels and key[0] is Kind.WEIGHT:
                raise Violation(f"tied parameter {key[1]} was not sent to stage {stage}")

    def _collective(self, one: Instruction) -> Kind:
        if one.action.kind not in self.collectives:
            raise Violation("this rank takes part in no such collective")
        return one.action.kind

    def post(self, one: Instruction, label: Label) -> None:
        kind = self._collective(one)
        if label != (self.posted[kind], -1):
            raise Violation(f"the next to be posted is minibatch {self.posted[kind]}")
        if self.backwards.get(label[0], []) != self.forwards.get(label[0], []):
            raise Violation("posted before the minibatch's last backward")
        before = self.collectives[: self.collectives.index(kind)]
        if any(self.waited[other] <= label[0] for other in before):
            raise Violation("posted before the replicas' gradients were reduced")
        self.posted[kind] += 1

    def wait(self, one: Instruction, label: Label) -> None:
        kind = self._collective(one)
        if label != (self.waited[kind], -1) or self.waited[kind] >= self.posted[kind]:
            raise Violation("waits for what was not posted")
        self.waited[kind] += 1

    def loss(self, one: Instruction, label: Label) -> None:
        if one.minibatch or one.microbatch >= 0:
            raise Violation("the loss is that of the call's whole minibatch")
        if one.peer < 0:
            last = len(self.spec.ranks) - 1
            if self.stage != last or self.loss_after:
                raise Violation("only the last stage sends its loss, and once")
            self.loss_after = self.num_forwards

    # -- transfers -------------------------------------------------------------------------

    def _bind(self, kind: Kind) -> None:
        incoming, outgoing = self.expected[kind]
        pool, carries_weights = self.pool[kind], kind is Kind.WEIGHT

        def source(one: Instruction, label: Label) -> dict[Label, bool]:
            hop = incoming.get(one.edge)
            if hop is None or one.peer not in self.spec.ranks[hop.stage] or one.target >= 0:
                raise Violation("no such transfer arrives here")
            if (label[1] < 0) != carries_weights:
                raise Violation("names a microbatch where it should not, or none")
            return self.slots.setdefault((kind, one.edge), {})

        def receiver(one: Instruction) -> Hop | None:
            for hop in outgoing.get(one.edge, ()):
                target = hop.stage if hop.ambiguous else -1
                if one.target == target and one.peer in self.spec.ranks[hop.stage]:
                    return hop
            return None

        def post(one: Instruction, label: Label) -> None:
            live = source(one, label)
            if incoming[one.edge].local:
                raise Violation("what comes from the same rank needs no receive")
            if label in live:
                raise Violation("posted twice")
            if len(live) >= pool:
                raise Violation(f"posted into a live slot: all {pool} slots are in use")
            if carries_weights and label[0] + 1 != self.steps:
                raise Violation("posted before this stage's own update, or too late")
            if self._is_over(kind, label):
                raise Violation("posted for a microbatch that is already done")
            live[label] = False
            key = (kind, one.edge)
            self.peak_slots[key] = max(self.peak_slots[key], len(live))

        def wait(one: Instruction, label: Label) -> None:
            live = source(one, label)
            if live.get(label, not incoming[one.edge].local) is not False:
                raise Violation("waits for what was not posted")
            if carries_weights:
                self.weights[one.edge] = label[0] + 1
                live.pop(label, None)
            else:
                live[label] = True

        def send(one: Instruction, label: Label) -> None:
            hop = receiver(one)
            made = self.to_send.get(((kind, one.edge), hop.stage), set()) if hop else ()
            if hop is None or label not in made:
                raise Violation("sends what was not made, was sent before or goes elsewhere")
            if carries_weights and label[0] + 1 != self.steps:
                raise Violation("sends weights that are no longer the newest")
            self.to_send[(kind, one.edge), hop.stage].remove(label)
            if hop.local:
                return
            under_way = self.under_way.setdefault(((kind, one.edge), hop.stage, one.peer), [])
            under_way.append(label)
            if len(under_way) > hop.window:
                raise Violation(f"{len(under_way)} sends under way, the buffers hold {hop.window}")

        def wait_send(one: Instruction, label: Label) -> None:
            hop = receiver(one)
            stage = hop.stage if hop else -1
            under_way = self.under_way.get(((kind, one.edge), stage, one.peer), [])
            if label not in under_way:
                raise Violation("waits for what was not sent")
            under_way.remove(label)

        for actions, rule in (
            (POST_RECV, post), (WAIT_RECV, wait), (SEND, send), (WAIT_SEND, wait_send),
        ):  # fmt: skip
            self.rules[actions[kind]] = rule

    def _is_over(self, kind: Kind, label: Label) -> bool:
        if kind is Kind.VALUE:
            return label[0] < self.steps or label[1] in self.forwards.get(label[0], ())
        if kind is Kind.WEIGHT:
            return False
        return label not in self.in_flight

    # -- boundaries ------------------------------------------------------------------------

    def end_call(self, *, drained: bool) -> None:
        """At the end of a program: nothing forgotten; `drained`: nothing left either."""
        sends_loss = self.stage == len(self.spec.ranks) - 1
        due = sends_loss and (self.loss_after > 0 or not self.forward_only)
        if due and self.loss_after != self.num_forwards:
            raise Violation("the loss was not sent after the last forward")
        self.num_forwards = self.loss_after = 0
        for (key, stage), labels in self.to_send.items():
            if labels:
                raise Violation(f"{SEND[key[0]]} {key[1]} to stage {stage} was forgotten")
        if self.to_free:
            raise Violation(f"FREE of microbatch {min(self.to_free)[1]} was forgotten")
        if drained:
            if self.in_flight:
                raise Violation(f"{len(self.in_flight)} microbatches without a backward")
            if self.forwards and not self.forward_only:
                raise Violation(f"no update of minibatch {min(self.forwards)}")
            if any(self.under_way.values()) or any(self.slots.values()):
                raise Violation("transfers are still under way")
            if self.posted != self.waited or any(
                received != self.steps for received in self.weights.values()
            ):
                raise Violation("a collective or tied weight was not waited for")

    def state(self, base: int) -> tuple[object, ...]:
        """What the future depends on, relative to the next call."""

        def relative(labels: Iterable[Label]) -> tuple[Label, ...]:
            return tuple((t - base, i) for t, i in labels)

        return (
            relative(self.in_flight),
            tuple((t - base, tuple(one)) for t, one in sorted(self.forwards.items())),
            tuple((t - base, tuple(one)) for t, one in sorted(self.backwards.items())),
            tuple(sorted((k, relative(v), tuple(v.values())) for k, v in self.slots.items() if v)),
            tuple(sorted((k, relative(v)) for k, v in self.under_way.items() if v)),
            self.steps - base,
            tuple(received - base for received in self.weights.values()),
            tuple(n - base for n in (*self.posted.values(), *self.waited.values())),
        )


def _by_edge(all_hops: Hops, kind: Kind) -> tuple[dict[int, Hop], dict[int, list[Hop]]]:
    """What arrives and what leaves, by edge."""
    before_forward, after_forward, before_backward, after_backward, after_step, weights = all_hops
    incoming = {
        hop.edge: hop for hop in (*before_forward, *before_backward, *weights) if hop.kind is kind
    }
    outgoing: dict[int, list[Hop]] = {}
    for hop in (*after_forward, *after_backward, *after_step):
        if hop.kind is kind:
            outgoing.setdefault(hop.edge, []).append(hop)
    return incoming, outgoing
