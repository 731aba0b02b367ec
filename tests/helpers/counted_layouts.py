"""Random problems whose layouts of parts, cuts, replicas and updates can be counted out.

Up to ten groups on two hosts of two devices, 100 GB/s inside and 12.5 GB/s between them.  Whole
stages and stages in two parts by each family have numbers of their own: a part's share of each op,
what it does not divide, and conversions on the link between the parts.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import inf, isclose
from operator import itemgetter
from typing import Any

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError
from pdcompile.ir.graph import OpGraph
from pdcompile.layout_search import LayoutSearch, Planned
from pdcompile.options import Options
from pdcompile.options.layouts import SPLITS, named
from pdcompile.pass_runner import Listener
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.schedules import warmup
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from tests.helpers.graphs import B, GraphBuilder
from tests.helpers.spaces import seconds_of
from tests.helpers.whole_space import WholeSpace, explored

INSIDE, BETWEEN = Level("inside", 2, 100e9, 5e-6), Level("between", 2, 12.5e9, 2e-5)
CLUSTER = Cluster((Device("cpu"),) * 4, (INSIDE, BETWEEN))


def drawn(seed: int) -> dict[str, tuple[Options, WholeSpace]]:
    """The problem of each layout."""
    r = random.Random(seed)
    groups, m = r.randint(2, 9), r.choice((1, 2, 4))
    limit = r.choice((None, None, r.randint(400, 1_600) * groups))
    work = [r.choice((1, 4)) * r.uniform(1e-5, 1e-3) for _ in range(groups)]
    weights, sent = [r.randint(1, 12) for _ in work], r.choice((1e4, 1e6, 1e8))
    space = SearchSpace(
        "any", r.choice(((False,), (False, True))), ("1f1b",), (m,),
        homes=r.choice(((False,), (True, False))),
    )  # fmt: skip
    found = {}
    for parts, split in [(1, "auto"), *((2, split) for split in r.sample(SPLITS, 2))]:
        given = {"cluster": CLUSTER, "replicas": "any", "parts": parts, "split": split}
        options, cluster = Options.given(given), CLUSTER.grouped(parts)
        devices = tuple(replace(one, memory_bytes=limit) for one in cluster.devices)
        graph = _graph(r, work, weights, parts, r.choice((0.0, sent)), r.choice((0.0, 0.2)))
        case = WholeSpace(cache(lambda m, g=graph: g), replace(cluster, devices=devices), space)
        found[named(options)] = options, case
    return found


def _graph(
    r: random.Random, work: list[float], weights: list[int], parts: int, sent: float, whole: float
) -> OpGraph:
    """One op a group: `sent` bytes of conversions for each, and a share that is not divided."""
    g = GraphBuilder()
    value, share = g.input("x", (B, 8)), 1 / parts if parts == 1 else whole + (1 - whole) / parts
    converted = sent / INSIDE.bytes_per_second + INSIDE.latency_seconds if parts > 1 else 0.0
    for i, (seconds, width) in enumerate(zip(work, weights, strict=True)):
        rows = -(-width // parts) if r.random() < 0.8 else width
        own = g.parameter(f"layers.{i}.weight", (8, rows))
        value = g.op(
            f"layer_{i}", "torch.nn.functional.linear", (value,), module=f"layers.{i}",
            parameters=(own,), shape=(B, 8), saved=r.choice((32, 128)) // parts,
            seconds=(seconds * share + converted, 2 * seconds * share + converted),
        )  # fmt: skip
    loss = g.op("loss", "torch.mean", (value,), shape=(), seconds=(1e-6, 1e-6))
    return g.build(loss, loss=loss)


def counted_out(case: WholeSpace, least: float = inf) -> float:
    """The least seconds of all cuts, replicas, recomputation and updates on ranks in a row, and of
    `least`: a candidate is not asked where a stage, and those before it once, work for longer."""
    problem = case.problem(case.space.microbatches[0])
    forward, backward = (
        list(itertools.accumulate((getattr(i, f"{one}_seconds") for i in problem.items), initial=0))
        for one in ("forward", "backward")
    )

    def at_least(one: Candidate) -> float:
        found, begin = 0.0, 0
        for stage, option in enumerate(one.options):
            end = bisect(one.stage_of, stage)
            own = (forward[end] - forward[begin]) * (1 + option.recompute)
            own += backward[end] - backward[begin]
            turns = -(-one.setting.num_microbatches // option.replicas)
            found = max(found, forward[begin] + backward[begin] + turns * own)
            begin = end
        return found

    for bound, one in sorted(
        ((at_least(one), one) for one in candidates(case, len(problem.items))),
        key=itemgetter(0),
    ):
        if bound >= least:
            break
        if violations(problem, case.cluster, one):
            continue
        if evaluation(problem, case.cluster, one).seconds < least:
            least = min(least, seconds_of(problem, case.cluster, one, case.ledgers))
    return least


def candidates(case: WholeSpace, items: int) -> Iterator[Candidate]:
    """Every cut of a chain, with every number of ranks in a row for each stage."""
    space, most = case.space, len(case.cluster.devices)
    (m,), factor = space.microbatches, case.training.optimizer_factor
    for replicas in itertools.chain(
        *(itertools.product(range(1, most + 1), repeat=n) for n in range(1, most + 1))
    ):
        n, ends = len(replicas), list(itertools.accumulate(replicas))
        if ends[-1] > most:
            continue
        ranks = tuple(tuple(range(end - r, end)) for end, r in zip(ends, replicas, strict=True))
        for homes, again, cut in itertools.product(
            space.homes,
            itertools.product(space.recompute, repeat=n),
            itertools.combinations(range(1, items), n - 1),
        ):
            stage_of = tuple(sum(i >= at for at in cut) for i in range(items))
            options = tuple(StageDeployment(r, a) for r, a in zip(replicas, again, strict=True))
            setting = Setting("1f1b", m, 0, factor, homes=homes)
            yield Candidate(setting, stage_of, options, ranks, warmup("1f1b", n, m, replicas))


def difference(seed: int) -> tuple[bool, str]:
    """Search one problem: whether a plan fits, and how what was found is not the proved best of all
    that can be counted, or nothing."""
    found = drawn(seed)
    search = LayoutSearch(True, Listener())
    for options in search.turns([options for options, _ in found.values()]):
        case = found[named(options)][1]
        with search.trying(options):
            graph = case.graph_at(case.space.microbatches[0])
            costs = [op.cost for op in graph.ops if op.cost is not None]
            work = sum(one.forward_seconds + one.backward_seconds for one in costs)
            least = work * case.space.microbatches[0] / len(case.cluster.devices)
            search.check(least * (1 - 1e-9))
            none: Any = None
            plan = explored(
                case, 300.0, elsewhere=search.elsewhere, sketch=search.sketches, start=search.start
            )
            search.add(Planned(options, none, none, none, none, plan))
    best = inf
    for _, case in found.values():
        best = counted_out(case, best)
    try:
        certificate = search.fastest().plan.certificate
    except InfeasibleError:
        return best < inf, "" if best == inf else f"nothing found, {best} s counted out"
    if not isclose(certificate.objective_seconds, best, rel_tol=1e-9):
        return True, f"found {certificate.objective_seconds} s, counted out {best} s"
    if certificate.status != "optimal" or certificate.bound_seconds > best * (1 + 1e-9):
        return True, f"{certificate.status}, bound {certificate.bound_seconds} s of {best} s"
    return True, ""
