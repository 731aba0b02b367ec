"""Plans made by hand for schedule tests, and a reader of programs that knows no `check`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from pdcompile.cluster import Cluster
from pdcompile.passes.schedules import warmup
from pdcompile.plan import Certificate, Edge, Plan, StagePlan, TiedParameter, Training
from pdcompile.problem import ANY_CUT
from pdcompile.schedule import Action, Instruction, Kind, Schedule
from pdcompile.schedule.registry import KINDS, kind_of

CERTIFICATE = Certificate(1.0, 1.0, "optimal", "brute force", 0.0, ANY_CUT)


def chain(num_stages: int, num_bytes: int = 1) -> tuple[Edge, ...]:
    return tuple(Edge(f"x{s}", s, (s + 1,), num_bytes, True) for s in range(num_stages - 1))


def make_plan(
    name: str = "1f1b",
    num_stages: int = 3,
    num_microbatches: int = 4,
    *,
    edges: tuple[Edge, ...] | None = None,
    tied: tuple[TiedParameter, ...] = (),
    clip: float | None = None,
    replicas: tuple[int, ...] = (),
    extra: int = 0,
    depths: tuple[int, ...] | None = None,
    per_rank: int = 1,
    seconds: Sequence[tuple[float, float]] | None = None,
    homes: bool = False,
    **stage: Any,
) -> Plan:
    """A chain of stages with F = 1 and B = 2 unless told otherwise; where each rank has several,
    those that the schedule puts together."""
    counts = replicas or (1,) * num_stages
    placed = kind_of(name).placement(num_stages, num_stages // per_rank) if per_rank > 1 else ()
    times = seconds or [(1.0, 2.0)] * num_stages
    stages = tuple(
        StagePlan(
            s,
            (),
            (),
            replicas=counts[s],
            ranks=group(placed[s], counts[s]) if placed else (),
            forward_seconds=times[s][0],
            backward_seconds=times[s][1],
            **stage,
        )
        for s in range(num_stages)
    )
    if depths is None:
        depths = warmup(name, num_stages, num_microbatches, replicas, extra, placed)
    training = Training(
        name, num_microbatches, num_microbatches, depths, max_grad_norm=clip,
        updates="home" if homes else "every",
    )  # fmt: skip
    found = chain(num_stages) if edges is None else edges
    return Plan("hand-made", stages, found, tied, training, "", CERTIFICATE)


def group(place: int, replicas: int) -> tuple[int, ...]:
    """The ranks of the stages at a place, where all have so many replicas."""
    return tuple(range(place * replicas, (place + 1) * replicas))


@st.composite
def plans(
    draw: st.DrawFn,
    max_stages: int = 5,
    max_microbatches: int = 8,
    replicated: bool = True,
    stream: bool | None = None,
    several: bool = False,
) -> Plan:
    """Any depth, microbatches, warm-up, edges (skips, several targets), replicas or tied sets, as
    far as the schedule has them; `several`: ranks may hold several stages."""
    trained = [kind for kind in KINDS.values() if kind.trains]
    kind = draw(st.sampled_from([k for k in trained if stream in (None, k.stream)]))
    n = draw(st.integers(1, max_stages))
    m = 1 if kind.updates_each else draw(st.integers(1, max_microbatches))
    replicas: tuple[int, ...] = ()
    if replicated and kind.takes_replicas and draw(st.booleans()):
        replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)))
    counts = [k for k in range(1, n + 1) if n % k == 0 and kind.holds(k)]
    shared = several and not replicas and kind.several
    per_rank = draw(st.sampled_from(counts)) if shared else 1
    edges, tied = [], []
    for index in range(draw(st.integers(0, 4)) if n > 1 else 0):
        source = draw(st.integers(0, n - 2))
        targets = tuple(sorted(draw(st.sets(st.integers(source + 1, n - 1), min_size=1))))
        edges.append(Edge(f"v{index}", source, targets, 1, draw(st.booleans())))
    late = kind.stream and kind.drains  # ties are of stages on the same ranks
    ties = n > 1 and kind.one_age and not late
    for index in range(draw(st.integers(0, 2)) if ties else 0):
        holders = tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=2))))
        tied.append(TiedParameter(f"w{index}", holders, 1))
    return make_plan(
        kind.name,
        n,
        m,
        edges=tuple(edges),
        tied=tuple(tied),
        clip=draw(st.sampled_from([None, 1.0])) if kind.one_age else None,
        replicas=replicas,
        extra=draw(st.integers(0, 2)),
        per_rank=per_rank,
        homes=bool(replicas) and not kind.updates_each and draw(st.booleans()),
    )


def same_clock(found: float, plan: Plan, expected: float) -> bool:
    """Whether the fast clock agrees with the simulator: exactly, but for weights on several stages.

    It has their sums leave with a stage's last work, over links of their own: it may be off by
    what they and the new weights take, and by the second parts of split backwards.
    """
    slack = 1e-9 * expected
    if plan.tied:
        levels = Cluster.from_toml(plan.cluster).levels
        slowest = max(one.latency_seconds + 8 / one.bytes_per_second for one in levels)
        messages = 2 * sum(len(one.stages) for one in plan.tied)
        slack += messages * slowest * max(stage.replicas for stage in plan.stages)
    if plan.tied and kind_of(plan.training.schedule).splits_backward:
        slack += plan.training.num_microbatches * sum(one.backward_seconds for one in plan.stages)
    return abs(found - expected) <= slack


def rich(name: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Options of `make_plan` as a schedule can have them: None where it cannot."""
    kind = KINDS[name]
    if (
        ("replicas" in options and not kind.takes_replicas)
        or ("tied" in options and not kind.one_age)
        or ("homes" in options and kind.updates_each)
    ):
        return None
    return {**options, "clip": options.get("clip") if kind.one_age else None}


def microbatches(name: str, most: int) -> int:
    """Microbatches, as many as a schedule can have."""
    return 1 if KINDS[name].updates_each else most


def mutated(program: Schedule, rank: int, column: Sequence[Instruction]) -> Schedule:
    columns = list(program.columns)
    columns[rank] = tuple(column)
    return replace(program, columns=tuple(columns))


class Broken(Exception):
    """The program computes nothing sensible: a value is missing, a slot is taken, a hang."""


@dataclass
class _Rank:
    weights: dict[int, Any] = field(default_factory=lambda: {0: "W0"})  # slot -> content
    steps: int = 0
    gradients: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)
    contributions: dict[Any, Any] = field(default_factory=dict)
    posts: dict[Any, deque[Any]] = field(default_factory=dict)
    forwards: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    begun: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # of tied copies too
    sums: dict[tuple[int, int], list[Any]] = field(default_factory=dict)  # by update and tied


class Meaning:
    """Runs programs on symbols: what every update and loss is made of, as nested tuples.

    Sends are rendezvous with the posted receive; a receive slot is a key that must be free.
    Two sequences of programs with the same `result` train the same model.
    """

    def __init__(self, plan: Plan, versions: Sequence[int]):
        """`versions`: of each stage, how many it holds."""
        self.plan, self.versions = plan, versions
        self.ranks = [_Rank() for _ in range(plan.num_ranks)]
        self.replicas: list[list[int]] = []
        for stage in plan.stages:
            begin = sum(map(len, self.replicas))
            self.replicas.append(list(range(begin, begin + stage.replicas)))
        self.sent: dict[Any, list[Any]] = {}
        self.received: dict[Any, int] = {}
        self.posted: dict[Any, int] = {}
        self.acknowledged: dict[Any, int] = {}
        self.collective: dict[Any, dict[int, Any]] = {}
        self.losses: list[Any] = []
        self.updates: list[Any] = []
        self.base = 0

    def run(self, program: Schedule) -> None:
        position = [0] * len(program.columns)
        going = True
        while going:
            going = False
            for rank, column in enumerate(program.columns):
                while position[rank] < len(column) and self._do(rank, column[position[rank]]):
                    position[rank] += 1
                    going = True
        for rank, column in enumerate(program.columns):
            if position[rank] < len(column):
                raise Broken(f"rank {rank} hangs at {column[position[rank]]}")
        self.base += "+" not in program.name

    def result(self) -> Any:
        """Every update of every rank with all that went into it, and every loss."""
        weights = [sorted(rank.weights.items(), key=str) for rank in self.ranks]
        return sorted(map(str, self.updates)), sorted(map(str, self.losses)), weights

    def _do(self, rank: int, one: Instruction) -> bool:
        me, minibatch = self.ranks[rank], self.base + one.minibatch
        label = (minibatch, one.microbatch)
        update = minibatch // self._group(one)
        kind, _, family = one.action.partition("_RECV")
        if one.action is Action.FORWARD:
            arrived = self._inputs(me, rank, label, forward=True)
            weights = self._weights(me, minibatch, one)
            value = hash(("F", one.stage, label, weights, arrived))
            me.values["own", label] = value
            me.forwards[minibatch] = (*me.forwards.get(minibatch, ()), value)
        elif one.action is Action.BACKWARD_WEIGHT:
            value = me.values.pop(("half", label), None)
            if value is None:
                raise Broken("gradients of weights without those of the inputs")
            weights = self._weights(me, minibatch, one)
            me.gradients[update] = (*me.gradients.get(update, ()), hash((value, weights)))
        elif one.action in (Action.BACKWARD, Action.BACKWARD_INPUT):
            arrived = self._inputs(me, rank, label, forward=False)
            weights = self._weights(me, minibatch, one)
            forward = me.values.pop(("own", label), None)
            if forward is None:
                raise Broken("no forward")
            value = hash(("B", one.stage, label, weights, forward, arrived))
            me.values["gradient", label] = value
            me.begun[update] = (*me.begun.get(update, ()), value)
            if one.action is Action.BACKWARD_INPUT:
                me.values["half", label] = value
            else:
                me.gradients[update] = (*me.gradients.get(update, ()), value)
        elif one.action is Action.STEP:
            new = hash(
                (
                    me.weights[me.steps % self.versions[one.stage]],
                    minibatch,
                    me.gradients.pop(update, ()),
                    me.contributions.pop(("REDUCE", minibatch), None),
                    me.contributions.pop(("NORMS", minibatch), None),
                    str(sorted((key, me.sums.pop(key)) for key in [*me.sums] if key[0] == update)),
                )
            )
            me.begun.pop(update, None)
            me.steps += 1
            me.weights[me.steps % self.versions[one.stage]] = new
            self.updates.append((rank, minibatch, new))
        elif one.action is Action.FREE:
            me.values = {
                key: value
                for key, value in me.values.items()
                if not (key[0] == "slot" and key[3] == label)
            }
        elif one.action is Action.LOSS:
            self.losses.append((minibatch, rank, me.forwards.pop(minibatch, ())))
        elif one.action.kind is Kind.LOSS:
            pass  # told to other ranks, which compute nothing from it
        elif one.action in (Action.POST_GATHER, Action.WAIT_GATHER):
            return self._gather(rank, one, minibatch)
        elif "REDUCE" in one.action or "NORMS" in one.action:
            return self._collective(rank, one, minibatch)
        elif kind == "POST":
            self._post(me, rank, one, family, label)
        elif kind == "WAIT" and family is not None and "_RECV" in one.action:
            return self._wait(me, rank, one, family, label)
        else:
            return self._send(me, rank, one, label)
        return True

    def _group(self, one: Instruction) -> int:
        """Minibatches that an update takes: one of every replica, or of a part of each one."""
        each = kind_of(self.plan.training.schedule).updates_each
        return len(self.replicas[one.stage]) if each and one.stage >= 0 else 1

    def _weights(self, me: _Rank, minibatch: int, one: Instruction) -> Any:
        tied = tuple(sorted((k, v) for k, v in me.values.items() if k[0] == "tied"))
        update = minibatch // self._group(one)
        version = max(update - one.lag, 0) % self.versions[one.stage]
        return me.weights.get(version), str(tied)

    def _inputs(self, me: _Rank, rank: int, label: Any, *, forward: bool) -> Any:
        """Inputs that must have arrived, read from the plan: a missing value is None in the
        result."""
        stage = next(s for s, ranks in enumerate(self.replicas) if rank in ranks)
        needed = []
        for index, edge in enumerate(self.plan.edges):
            later = (edge.source, *edge.targets)
            if forward and stage in edge.targets:
                needed.append(("", index))
            elif not forward and edge.gradient and stage in later[:-1]:
                needed.append(("_GRADIENT", index))
        found = [me.values.get(("slot", family, index, label)) for family, index in needed]
        if None in found:
            raise Broken("an input is missing")
        return tuple(found)

    def _post(self, me: _Rank, rank: int, one: Instruction, family: str, label: Any) -> None:
        slot = ("slot", family, one.edge, (*label, one.peer) if family == "_TIED" else label)
        if slot in me.values:
            raise Broken("the slot is taken")
        me.values[slot] = None
        channel = (family, one.edge, one.peer, rank)
        me.posts.setdefault(channel, deque()).append(slot)
        self.posted[channel] = self.posted.get(channel, 0) + 1

    def _wait(self, me: _Rank, rank: int, one: Instruction, family: str, label: Any) -> bool:
        channel = (family, one.edge, one.peer, rank)
        sent, count = self.sent.get(channel, []), self.received.get(channel, 0)
        posts = me.posts.get(channel)
        if not posts:
            raise Broken("nothing was posted")
        if len(sent) <= count:
            return False
        self.received[channel] = count + 1
        slot, value = posts.popleft(), sent[count]
        if family == "_WEIGHT":
            me.values.pop(slot, None)
            me.values["tied", one.edge, label[0] % self.versions[one.stage]] = value
        elif family == "_TIED":
            me.values.pop(slot, None)
            key = (label[0], one.edge)  # they are added in the order of replicas
            me.sums[key] = sorted((*me.sums.get(key, ()), (one.peer, value)))
        elif slot in me.values:  # else freed before it arrived
            me.values[slot] = value
        return True

    def _send(self, me: _Rank, rank: int, one: Instruction, label: Any) -> bool:
        waits, family = one.action.startswith("WAIT"), one.action.partition("SEND")[2]
        channel = (family, one.edge, rank, one.peer)
        if waits:
            count = self.acknowledged.get(channel, 0)
            if count >= len(self.sent.get(channel, [])):
                raise Broken("nothing was sent")
            if self.posted.get(channel, 0) <= count:
                return False
            self.acknowledged[channel] = count + 1
            return True
        if family == "_WEIGHT":
            value = me.weights[me.steps % self.versions[one.stage]]
        elif family == "_TIED":
            value = hash(
                (label, me.begun.get(label[0]), str(me.sums.pop((label[0], one.edge), "")))
            )
        else:
            value = me.values.get(("gradient" if family else "own", label))
        if value is None:
            raise Broken("nothing to send")
        self.sent.setdefault(channel, []).append((family, one.edge, label, value))
        return True

    def _gather(self, rank: int, one: Instruction, minibatch: int) -> bool:
        """Makes the weights of an update whole, once the shares of all replicas have come."""
        given = self.collective.setdefault(("GATHER", one.stage, minibatch), {})
        me = self.ranks[rank]
        slot = me.steps % self.versions[one.stage]
        if one.action is Action.POST_GATHER:
            given[rank] = me.weights[slot]
        elif len(given) < len(self.replicas[one.stage]):
            return False
        else:
            me.weights[slot] = hash(("whole", minibatch, str(sorted(given.items()))))
        return True

    def _collective(self, rank: int, one: Instruction, minibatch: int) -> bool:
        name = one.action.partition("_")[2]
        members = (
            self.replicas[one.stage]
            if name == "REDUCE"
            else [rank for ranks in self.replicas for rank in ranks]
        )
        given = self.collective.setdefault((name, one.stage * (name == "REDUCE"), minibatch), {})
        me = self.ranks[rank]
        if one.action.startswith("POST"):
            own = me.gradients.get(minibatch // self._group(one))
            given[rank] = (own, me.contributions.get(("REDUCE", minibatch)))
            return True
        if len(given) < len(members):
            return False
        me.contributions[name, minibatch] = str(sorted(given.items()))
        return True
