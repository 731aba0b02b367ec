"""Random clusters whose memory just fits some plan or just does not, and brute force over plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError, NotFoundError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.planning.branch_and_bound import best_plan
from pdcompile.passes.planning.candidate_plan import candidate_plan
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.plan import MemoryLedger, Plan, Training
from pdcompile.problem import PartitionProblem, StageLimits
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from tests.helpers.graphs import B, GraphBuilder, chain, residual
from tests.helpers.spaces import every_candidate, seconds_of

BATCH = 8
GraphAt = Callable[[int], OpGraph]


def at(graph: OpGraph) -> GraphAt:
    """The graph with costs that grow with the microbatch, and a part that does not."""

    @cache
    def found(m: int) -> OpGraph:
        size = BATCH // m
        ops = []
        for n, op in enumerate(graph.ops):
            assert op.cost is not None
            seconds = (0.2 + size / 4) * (1 + n % 3)
            cost = replace(
                op.cost,
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
                microbatch_size=size,
            )
            ops.append(replace(op, cost=cost))
        return replace(graph, ops=tuple(ops))

    return found


class WholeSpace:
    """Every plan that the search may return, with equal devices in the order of their ranks."""

    def __init__(self, graph_at: GraphAt, cluster: Cluster, space: SearchSpace) -> None:
        self.graph_at, self.cluster, self.space = graph_at, cluster, space
        self.training = Training(batch_size=BATCH)

    def problem(self, m: int) -> PartitionProblem:
        limits = (StageLimits(),) * len(self.cluster.devices)
        return coarsen(self.graph_at(m), limits, num_microbatches=m)

    def plan(self, candidate: Candidate) -> Plan:
        m = candidate.setting.num_microbatches
        graph, problem = self.graph_at(m), self.problem(m)
        return candidate_plan(graph, problem, candidate, self.training, self.cluster)

    def candidates(self) -> Iterator[tuple[PartitionProblem, Candidate]]:
        space, ranks = self.space, range(len(self.cluster.devices))
        choices = itertools.product(
            space.microbatches, space.schedules, space.extra_warmup, space.homes
        )
        for m, schedule, extra, homes in choices:
            problem = self.problem(m)
            setting = Setting(schedule, m, extra, self.training.optimizer_factor, homes=homes)
            for used in range(1, len(ranks) + 1):
                for order in itertools.permutations(ranks, used):
                    for one in every_candidate(problem, space, setting, order, space.counts(used)):
                        yield problem, one

    def best(self) -> tuple[float, Candidate] | None:
        """The least seconds of a step of all plans that fit; None where none does."""
        found: tuple[float, Candidate] | None = None
        for problem, one in self.candidates():
            if violations(problem, self.cluster, one):
                continue
            setting = one.setting
            scale = setting.num_microbatches if setting.schedule == "2bw" else 1
            least = found[0] if found else float("inf")
            if evaluation(problem, self.cluster, one).seconds * scale < least:
                seconds = seconds_of(problem, self.cluster, one, self.ledgers) * scale
                if seconds < least:
                    found = seconds, one
        return found

    def ledgers(self, candidate: Candidate) -> Sequence[MemoryLedger]:
        """Ledgers of the ranks of the candidate's plan."""
        told = self.plan(candidate).forecast
        assert told is not None
        return told.ledgers


def woven(r: random.Random) -> OpGraph:
    """A few layers that hold what they read, some of it again later; some tied, some frozen."""
    g = GraphBuilder()
    values = [g.input("x", (B, 8))]
    tied = g.parameter("tied.weight", (8, 8))
    for i in range(r.randint(2, 4)):
        own = g.parameter(f"layers.{i}.weight", (8, r.choice((1, 8))), trainable=r.random() < 0.8)
        read = [values[-1]]
        if len(values) > 1 and r.random() < 0.4:
            read.append(r.choice(values[:-1]))
        name = "operator.add" if len(read) > 1 else "torch.nn.functional.linear"
        one = g.op(
            f"layer_{i}", name, tuple(read), module=f"layers.{i}",
            parameters=(tied if r.random() < 0.25 else own,), shape=(B, 8),
            seconds=(1.0, 2.0), saved=r.choice((0, 32, 128, 256)),
        )  # fmt: skip
        values.append(one)
    loss = g.op("loss", "torch.mean", (values[-1],), shape=(), seconds=(0.1, 0.1))
    return g.build(loss, loss=loss)


def random_space(seed: int) -> WholeSpace:
    """A short graph on two or three devices; limits are what ranks of random plans hold."""
    r = random.Random(seed)
    kind = r.random()
    graph_at = at(residual(1) if kind < 0.1 else woven(r) if kind < 0.5 else chain(r.randint(2, 4)))
    count = r.randint(2, 3)
    level = Level("link", count, r.choice((1e2, 1e3, 1e5)), r.choice((0.0, 0.1)), r.random() < 0.7)
    speeds = r.choice(((1.0,), (1.0, 2.0)))
    devices = tuple(Device("cpu", None, r.choice(speeds)) for _ in range(count))
    space = SearchSpace(
        r.choice(("1", "any", "any")),
        r.choice(((False, True), (False, True), (True,), (False,))),
        r.choice((("1f1b",), ("gpipe",), ("2bw",), ("1f1b", "2bw"))),
        r.choice(((2,), (4,), (4,), (2, 4))),
        r.choice(((0,), (0,), (1,), (0, 1))),
    )
    if seed % 16 == 0:
        space = replace(space, replicas="1", schedules=("vsync",), microbatches=(1,))
    elif seed % 8 == 0:
        space = replace(space, homes=(True, False))
    free = WholeSpace(graph_at, Cluster(devices, (level,)), space)
    every = [
        one for problem, one in free.candidates() if not violations(problem, free.cluster, one)
    ]
    held = [
        ledger.total_bytes
        for one in r.sample(every, min(4, len(every)))
        for ledger in free.ledgers(one)
        if ledger.total_bytes
    ]
    limited = tuple(
        replace(device, memory_bytes=None if r.random() < 0.2 else _near(r, held))
        for device in devices
    )
    return WholeSpace(graph_at, Cluster(limited, (level,)), space)


def _near(r: random.Random, held: list[int]) -> int:
    """Limits near what some plan holds, a little less or a little more."""
    return max(1, r.choice(held) + r.choice((0, 0, -1, 4, -4, 64)))


def explored(
    case: WholeSpace, time_limit: float | None = None, tolerance: float = 0.0,
    **more: Any,
) -> Plan:  # fmt: skip
    given = case.graph_at, case.problem, case.cluster, case.space, case.training
    return best_plan(*given, time_limit=time_limit, tolerance=tolerance, **more)


def verdict(case: WholeSpace) -> str:
    """Verdict of the search on a case; fails where it is not true."""
    exists = case.best()
    try:
        plan = explored(case, time_limit=300.0)  # to the end, on a busy machine too
    except NotFoundError:
        return "unknown"
    except InfeasibleError:
        if exists is not None:
            raise
        return "infeasible"
    assert exists is not None
    least = exists[0]
    check_plan(plan, case.graph_at(plan.training.num_microbatches), case.cluster)
    every = plan.training.num_microbatches if plan.training.schedule == "2bw" else 1
    certificate = plan.certificate
    assert certificate.objective_seconds * every >= least * (1 - 1e-9)
    assert certificate.bound_seconds * every <= least * (1 + 1e-9), exists
    assert plan.forecast is not None
    for ledger, device in zip(plan.forecast.ledgers, case.cluster.devices, strict=False):
        assert device.memory_bytes is None or ledger.total_bytes <= device.memory_bytes
    return certificate.status
