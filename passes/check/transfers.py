"""Transfers, sums and updates of one stage on one rank, walked with tokens: slots, order,
buffers, collectives, versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pdcompile.passes.schedules.program_walk import Label
from pdcompile.schedule import Action, Instruction, Kind
from pdcompile.schedule.instruction import POST_RECV, SEND, TRANSFERS, WAIT_RECV, WAIT_SEND
from pdcompile.schedule.registry import GRADIENT_SLOTS
from pdcompile.schedule.spec import FORWARD_ONLY_SLOTS, Hop, PipelineSpec, hops


class Violation(Exception):
    """Fault of one instruction, in words: of the one that is walked, or of this one of a rank.

    Position −1 is the last one of the rank.
    """

    def __init__(self, message: str, rank: int = -1, position: int = -1) -> None:
        super().__init__(message)
        self.rank, self.position = rank, position


@dataclass(slots=True)
class Inlet:
    """Entry for the transfers of one edge."""

    hop: Hop
    pool: int
    live: dict[Label, bool] = field(default_factory=dict)  # slots; True once it has arrived


@dataclass(slots=True)
class Outlet:
    """Exit for the transfers of one edge to one other stage."""

    hop: Hop
    made: set[Label] = field(default_factory=set)  # not yet sent
    outstanding: dict[int, list[Label]] = field(default_factory=dict)  # by rank


class Transfers:
    """The transfers of a stage's replica, and what was computed as far as they depend on it."""

    def __init__(self, spec: PipelineSpec, stage: int, replica: int, *, forward_only: bool):
        self.spec, self.stage, self.forward_only = spec, stage, forward_only
        self.group = spec.group(stage)
        self.steps = 0  # updates so far
        self.in_flight: dict[Label, None] = {}
        self.forwards: dict[int, list[int]] = {}  # microbatches per minibatch not yet updated
        self.begun: dict[int, list[int]] = {}  # of them, with the gradients of their inputs
        pools = dict.fromkeys(TRANSFERS, GRADIENT_SLOTS) | {
            Kind.VALUE: FORWARD_ONLY_SLOTS if forward_only else spec.pool(stage),
            Kind.TIED: spec.gradient_buffers(stage),
            Kind.WEIGHT: 1,
        }
        self.inlets: dict[tuple[Kind, int, int], Inlet] = {}  # by peer
        self.outlets: dict[tuple[Kind, int, int, int], Outlet] = {}  # by peer and target

        def peers(hop: Hop) -> tuple[int, ...]:
            return (hop.peer,) if hop.peer >= 0 else spec.ranks[hop.stage]

        def arriving(found: Iterable[Hop]) -> list[Inlet]:
            made = [Inlet(hop, pools[hop.kind]) for hop in found]
            for one in made:
                hop = one.hop
                self.inlets |= {(hop.kind, hop.edge, peer): one for peer in peers(hop)}
            return made

        def leaving(found: Iterable[Hop]) -> list[Outlet]:
            made = [Outlet(hop) for hop in found]
            for one in made:
                hop = one.hop
                for peer in peers(hop):
                    target = hop.stage if hop.ambiguous else -1
                    self.outlets[hop.kind, hop.edge, peer, target] = one
                    one.outstanding[peer] = []
            return made

        all_hops = hops(spec, stage, replica)
        self.values_in = arriving(all_hops.before_forward)
        self.values_out = leaving(all_hops.after_forward)
        self.gradients_in = arriving(all_hops.before_backward)
        self.gradients_out = leaving(all_hops.after_backward)
        self.sums_in = arriving(all_hops.sums_in)
        self.sums_out = leaving(all_hops.sums_out)
        self.weights_out = leaving(all_hops.after_step)
        self.weights_in = arriving(all_hops.weights)
        came = self.values_in, self.gradients_in, self.sums_in, self.weights_in
        self.all_in = [inlet for inlets in came for inlet in inlets]
        sent = self.values_out, self.gradients_out, self.sums_out, self.weights_out
        self.all_out = [outlet for outlets in sent for outlet in outlets]
        self.received = {one.hop.edge: 0 for one in self.weights_in}  # version of tied copies
        # Minibatches whose sum has come from a later holder, and has been passed on.
        self.summed = {(one.hop.edge, one.hop.peer): 0 for one in self.sums_in}
        self.passed = {one.hop.edge: 0 for one in self.sums_out}
        #: minibatches or versions of which something has happened, see `begin`
        self.counters: list[dict[Any, int]] = [self.received, self.summed, self.passed]
        self.rules: dict[Action, Callable[[Instruction, Label], None]] = {}
        for kind in TRANSFERS:
            self.rules[POST_RECV[kind]], self.rules[SEND[kind]] = self.post_receive, self.send
            self.rules[WAIT_RECV[kind]] = self.wait_receive
            self.rules[WAIT_SEND[kind]] = self.wait_send

    def updated(self, minibatch: int) -> bool:
        """True if the update has run that takes a minibatch."""
        return minibatch // self.group < self.steps

    def _inlet(self, one: Instruction, label: Label) -> Inlet:
        kind = one.action.kind
        inlet = self.inlets.get((kind, one.edge, one.peer))
        if inlet is None or one.target >= 0:
            raise Violation("no such transfer arrives here")
        if (label[1] < 0) != (kind in (Kind.TIED, Kind.WEIGHT)):
            raise Violation("expected a microbatch for values and gradients alone")
        return inlet

    def post_receive(self, one: Instruction, label: Label) -> None:
        inlet = self._inlet(one, label)
        live = inlet.live
        if inlet.hop.local:
            raise Violation("what comes from the same rank needs no receive")
        if label in live:
            raise Violation("posted twice")
        if len(live) >= inlet.pool:
            raise Violation(f"posted into a live slot: all {inlet.pool} slots are in use")
        if one.action is Action.POST_RECV:
            done = self.forwards.get(label[0])
            if self.updated(label[0]) or (done and label[1] <= done[-1]):
                raise Violation("posted for a microbatch that is already done")
        elif one.action is Action.POST_RECV_WEIGHT:
            passed = self.passed[one.edge] if self.spec.kind.stream else 0
            if label[0] + 1 != self.steps and not self.steps <= label[0] < passed:
                raise Violation("posted while a backward may need what it overwrites, or too late")
        elif one.action is Action.POST_RECV_TIED:
            if label[0] < self.summed[one.edge, one.peer] or self.updated(label[0]):
                raise Violation("posted for a minibatch whose sum has come")
        elif label not in self.in_flight or label[1] in self.begun.get(label[0], ()):
            raise Violation("posted for a microbatch that is already done")
        live[label] = False

    def wait_receive(self, one: Instruction, label: Label) -> None:
        inlet = self._inlet(one, label)
        if inlet.live.get(label, not inlet.hop.local) is not False:
            raise Violation("waits for what was not posted")
        if one.action is Action.WAIT_RECV_WEIGHT:
            self.received[one.edge] = label[0] + 1
            inlet.live.pop(label, None)
        elif one.action is Action.WAIT_RECV_TIED:
            if label[0] != self.summed[one.edge, one.peer]:
                raise Violation("sums of tied gradients come in the order of minibatches")
            self.summed[one.edge, one.peer] += 1
            inlet.live.pop(label, None)
        else:
            inlet.live[label] = True

    def send(self, one: Instruction, label: Label) -> None:
        outlet = self.outlets.get((one.action.kind, one.edge, one.peer, one.target))
        if outlet is None or label not in outlet.made:
            raise Violation("sends what was not made, was sent before or goes elsewhere")
        if one.action is Action.SEND_WEIGHT and label[0] + 1 != self.steps:
            raise Violation("sends weights that are no longer the newest")
        outlet.made.remove(label)
        if outlet.hop.local:
            return
        outstanding = outlet.outstanding[one.peer]
        outstanding.append(label)
        if len(outstanding) > outlet.hop.window:
            window = outlet.hop.window
            raise Violation(f"{len(outstanding)} sends in flight, the buffers hold {window}")

    def wait_send(self, one: Instruction, label: Label) -> None:
        outlet = self.outlets.get((one.action.kind, one.edge, one.peer, one.target))
        if outlet is None or label not in outlet.outstanding[one.peer]:
            raise Violation("waits for what was not sent")
        outlet.outstanding[one.peer].remove(label)

    # -- what compute asks of them -------------------------------------------------------------

    @staticmethod
    def arrived(needed: Iterable[Inlet], label: Label) -> None:
        for one in needed:
            if not one.live.get(label):
                raise Violation(
                    f"edge {one.hop.edge} from stage {one.hop.stage} was not waited for"
                )

    @staticmethod
    def made(outlets: Iterable[Outlet], label: Label) -> None:
        for one in outlets:
            one.made.add(label)
            held = len(one.made) + sum(map(len, one.outstanding.values()))
            most = 1 + one.hop.window * len(one.outstanding)
            if held > most:
                raise Violation(f"{held} results are not sent or on their way, planned {most}")

    @staticmethod
    def all_sent(outlets: Iterable[Outlet], label: Label) -> None:
        for one in outlets:
            if label in one.made:
                raise Violation(f"what goes to stage {one.hop.stage} was not sent before")

    def release(self, label: Label) -> None:
        """The slots of a microbatch are free."""
        self.used((*self.values_in, *self.gradients_in), label)

    @staticmethod
    def used(inlets: Iterable[Inlet], label: Label) -> None:
        for one in inlets:
            one.live.pop(label, None)

    def nothing_forgotten(self) -> None:
        """Raise Violation where something was made and not sent."""
        for one in self.all_out:
            if one.made:
                hop = one.hop
                raise Violation(f"{SEND[hop.kind]} {hop.edge} to stage {hop.stage} was forgotten")

    @property
    def outstanding(self) -> bool:
        """True if anything is sent and not waited for, or any slot taken."""
        sent = (labels for one in self.all_out for labels in one.outstanding.values())
        return any(sent) or any(one.live for one in self.all_in)

    def links(self, base: int) -> tuple[object, ...]:
        """All that the future depends on, relative to the next call."""

        def relative(labels: Iterable[Label]) -> tuple[Label, ...]:
            return tuple((t - base, i) for t, i in labels)

        return (
            tuple((relative(one.live), *one.live.values()) for one in self.all_in),
            tuple(
                (
                    relative(sorted(one.made)),
                    *((peer, relative(labels)) for peer, labels in one.outstanding.items()),
                )
                for one in self.all_out
            ),
        )


class Updates(Transfers):
    """The updates of a stage's replica, with the collectives that each waits for."""

    def __init__(self, spec: PipelineSpec, stage: int, replica: int, *, forward_only: bool):
        super().__init__(spec, stage, replica, forward_only=forward_only)
        self.versions = spec.versions(stage)
        replicated = len(spec.ranks[stage]) > 1
        self.collectives = (Kind.REDUCE,) * replicated + (Kind.NORMS,) * spec.clipping
        self.backwards: dict[int, list[int]] = {}
        self.gathers = spec.gathers(stage)
        kinds = (*self.collectives, *(Kind.GATHER,) * self.gathers)
        self.posted, self.waited = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
        self.counters += [self.posted, self.waited]
        self.done: list[int] = []  # microbatches that went forward in this call
        self.rules |= {
            Action.STEP: self.step,
            Action.POST_REDUCE: self.post,
            Action.POST_NORMS: self.post,
            Action.WAIT_REDUCE: self.wait,
            Action.WAIT_NORMS: self.wait,
            Action.POST_GATHER: self.gather,
            Action.WAIT_GATHER: self.wait,
            Action.SEND_WEIGHT: self.send_weight,
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
        self.gathered(self.steps)
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
        if one.action.kind not in self.posted:
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
        replaced = self.posted[kind] + 1 - self.versions  # which replicas compare with the sum
        if kind is Kind.REDUCE and self.steps < replaced:
            raise Violation(f"posted before there are weights W_{replaced}, which it replaces")
        self.gathered(replaced)
        self.posted[kind] += 1

    def gather(self, one: Instruction, label: Label) -> None:
        """The homes give what the newest update has made."""
        kind = self._collective(one)
        if label != (self._group_of(self.posted[kind])[-1], -1) or self.posted[kind] >= self.steps:
            raise Violation("gives weights before their update, or again")
        self.posted[kind] += 1

    def gathered(self, version: int) -> None:
        """Raise Violation unless weights of this version have come from their homes."""
        if self.gathers and self.waited[Kind.GATHER] < version:
            raise Violation(f"needs weights W_{version} before they have come from their homes")

    def send_weight(self, one: Instruction, label: Label) -> None:
        """The owner of a tied parameter sends its new weights on, which its home has given it."""
        self.gathered(label[0] + 1)
        self.send(one, label)

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
