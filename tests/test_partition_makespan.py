"""The fast makespan: pictures, the simulator, critical paths, and bounds below them."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.bounds import bounding_cost
from pdcompile.passes.partition.chains import solve
from pdcompile.passes.partition.known_paths import KnownPaths, along
from pdcompile.passes.partition.local_search import Neighbourhood
from pdcompile.passes.partition.model import after, all_ideals, build, moves
from pdcompile.passes.partition.segments import Segments
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.schedules import warmup
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Certificate, Edge, Plan, StagePlan, TiedParameter, Training
from pdcompile.plan.evaluate import Deployment, Evaluation
from pdcompile.plan.makespan import Path, order_of, warmup_of
from pdcompile.plan.times import Message, PipelineTimes
from pdcompile.problem import Item, PartitionProblem, SharedParameter, Traffic
from pdcompile.problem.deployment import stage_limits
from pdcompile.problem.space import Setting
from pdcompile.schedule.registry import DEFAULT, kind_of
from tests.helpers.problems import brute_force, evaluate, random_problem
from tests.helpers.timing import SECONDS, of_hops


def picture(warmup: int, m: int) -> str:
    turns = order_of(DEFAULT, ((0, warmup, m, 0, ()),), 1)
    return " ".join(f"{action.value}{k}" for _, action, k in turns if k >= 0)


def test_programs() -> None:
    assert picture(1, 3) == "F0 F1 B0 F2 B1 B2"
    assert picture(0, 2) == "F0 B0 F1 B1"
    assert picture(2, 3) == "F0 F1 F2 B0 B1 B2"


def row(num_stages: int, seconds: float = 0.0) -> PipelineTimes:
    """Stages of F = 1 and B = 2 in a row."""
    ahead = {(s, s + 1): seconds for s in range(num_stages - 1)}
    back = {(s + 1, s): seconds for s in range(num_stages - 1)}
    return of_hops((1.0,) * num_stages, (2.0,) * num_stages, ahead, back)


@pytest.mark.sample(4)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_balanced_stages_take_m_plus_n_minus_1(num_stages: int, m: int) -> None:
    """GPipe and 1F1B alike, when nothing is sent."""
    depth = warmup_of((), num_stages, m)
    assert row(num_stages).makespan(depth, m) == 3 * (m + num_stages - 1)
    assert row(num_stages).makespan((m - 1,) * num_stages, m) == 3 * (m + num_stages - 1)


def test_deeper_warmup_hides_transfers() -> None:
    """F=1, B=2, 0.75 a transfer, four stages: 4.13 per microbatch, and 3 with twice the depth."""
    slow = [row(4, 0.75).makespan((3, 2, 1, 0), m) for m in (100, 200)]
    fast = [row(4, 0.75).makespan((6, 4, 2, 0), m) for m in (100, 200)]
    assert (slow[1] - slow[0]) / 100 == pytest.approx(4.125, abs=0.02)
    assert (fast[1] - fast[0]) / 100 == pytest.approx(3.0, abs=0.02)


def test_half_duplex_shares_the_link() -> None:
    timing = of_hops((1.0, 1.0), (1.0, 1.0), {(0, 1): 5.0}, {(1, 0): 5.0})
    half = replace(timing, link=lambda _, __: replace(SECONDS, full_duplex=False))
    assert half.makespan((1, 0), 4) > timing.makespan((1, 0), 4)


def test_too_little_warmup_is_noticed() -> None:
    with pytest.raises(ValueError, match="never ends"):
        row(2).makespan((0, 1), 3)


def sum_of(path: Path, timing: PipelineTimes) -> float:
    work = sum(a * b for a, b in zip(path.forward, timing.forward, strict=True))
    work += sum(a * b for a, b in zip(path.backward, timing.backward, strict=True))
    return work + sum(timing.hops[kind][hop] * count for hop, kind, count in path.hops)


def test_a_path_of_one_timing_bounds_every_other() -> None:
    for seed in range(300):
        r = random.Random(seed)
        n, m = r.randint(1, 5), r.randint(1, 6)
        depth = warmup_of(tuple(2 * (n - s) - 1 for s in range(n)), n, m)

        def draw(r: random.Random = r, n: int = n) -> PipelineTimes:
            return of_hops(
                tuple(r.random() for _ in range(n)),
                tuple(r.random() for _ in range(n)),
                {(s, s + 1): r.random() for s in range(n - 1)},
                {(s + 1, s): r.random() for s in range(n - 1)},
            )

        one, other = draw(), draw()
        path = one.critical_path(depth, m)
        assert sum_of(path, one) == pytest.approx(one.makespan(depth, m))
        assert sum_of(path, other) <= other.makespan(depth, m) * (1 + 1e-9)


def random_timing(r: random.Random, num_stages: int) -> PipelineTimes:
    """Hops that skip stages, some of them missing, and new weights of tied parameters."""

    def seconds() -> float:
        return r.choice((0.0, 0.25, r.random(), 3 * r.random()))

    far = [(a, b) for b in range(num_stages) for a in range(b)]
    pairs = [(a, b) for a, b in far if b == a + 1 or r.random() < 0.3]
    return of_hops(
        tuple(seconds() for _ in range(num_stages)),
        tuple(seconds() for _ in range(num_stages)),
        {pair: seconds() for pair in pairs if r.random() < 0.9},
        {(b, a): seconds() for a, b in pairs if r.random() < 0.9},
        {pair: seconds() for pair in pairs if r.random() < 0.2},
    )


def least_solution(timing: PipelineTimes, depth: tuple[int, ...], m: int) -> float | None:
    """The makespan from "nothing starts before what it waits for", raised until it all holds.

    None where it never does.  Written apart from the walk: events are times by name.
    """
    begin: dict[tuple[object, ...], float] = {}
    waits = list(_waits(timing, depth, m))
    for _ in range(len(waits)):
        moved = False
        for before, then, seconds in waits:
            least = begin.get(before, 0.0) + seconds
            if least > begin.get(then, 0.0) * (1 + 1e-15):
                begin[then], moved = least, True
        if not moved:
            return begin.get(("end",), 0.0)
    return None


def _waits(
    timing: PipelineTimes, depth: tuple[int, ...], m: int
) -> Iterator[tuple[tuple[object, ...], tuple[object, ...], float]]:
    for s, k in itertools.product(range(len(depth)), range(m)):
        if k:
            yield ("F done", s, k - 1), ("F", s, k), 0.0
            yield ("B done", s, k - 1), ("B", s, k), 0.0
        if k > depth[s]:
            yield ("B done", s, k - 1 - depth[s]), ("F", s, k), 0.0
        yield ("F done", s, min(k + depth[s], m - 1)), ("B", s, k), 0.0
        tables = (("F", timing.hops["forward"], timing.forward),
                  ("B", timing.hops["backward"], timing.backward))  # fmt: skip
        for kind, table, work in tables:
            before: tuple[object, ...] = (kind, s, k)
            gap = work[s]
            for b in sorted((b for a, b in table if a == s), key=lambda b: abs(b - s)):
                seconds, handed, wire = table[s, b], (kind, "handed", s, b, k), (kind, s, b, k)
                yield before, handed, gap
                window = max(2, 1 + depth[min(s, b)] - depth[max(s, b)])
                if k >= window:
                    yield (kind, s, b, k - window), handed, seconds
                yield handed, wire, 0.0
                if k:
                    yield (kind, s, b, k - 1), wire, seconds
                yield wire, (kind, b, k), seconds
                pool = min(depth[b] + 2, m)
                if kind == "F" and k >= pool:
                    yield ("B done", b, k - pool), wire, 0.0
                if kind == "B":
                    yield ("F done", b, k), wire, 0.0
                    if k >= 2:
                        yield ("B done", b, k - 2), wire, 0.0
                before, gap = handed, 0.0
            yield before, (f"{kind} done", s, k), gap
        yield ("B done", s, m - 1), ("end",), 0.0
    for (a, b), seconds in timing.hops["final"].items():
        for end in (a, b):
            yield ("B done", end, m - 1), ("end",), seconds


def test_the_walk_is_the_least_solution_of_all_waits() -> None:
    compared = endless = 0
    for seed in range(250):
        r = random.Random(seed)
        n, m = r.randint(1, 5), r.randint(1, 6)
        timing = random_timing(r, n)
        depth = warmup_of(tuple(n - s + r.randint(-1, 2) for s in range(n)), n, m)
        try:
            found = timing.makespan(depth, m)
        except ValueError:
            endless += 1
            some = replace(timing, forward=(1.0,) * n, backward=(1.0,) * n)
            assert least_solution(some, depth, m) is None, seed
            continue
        compared += 1
        assert found == pytest.approx(least_solution(timing, depth, m), rel=1e-9), seed
        path = timing.critical_path(depth, m)
        assert sum_of(path, timing) == pytest.approx(found)
        hops = timing.hops.values()
        other = of_hops(
            tuple(r.random() for _ in range(n)),
            tuple(r.random() for _ in range(n)),
            *({hop: r.random() for hop in table} for table in hops),
        )
        assert sum_of(path, other) <= other.makespan(depth, m) * (1 + 1e-9)
    assert compared > 150
    assert endless > 3


def flush_problem(seed: int) -> PartitionProblem | None:
    problem = random_problem(seed)
    return problem if problem.objective == "flush" else None


def test_the_bounding_cost_is_below_the_optimum(fast: bool) -> None:
    compared, count = 0, 150 if fast else 600
    for seed in range(count):
        problem = flush_problem(seed)
        best = brute_force(problem) if problem else None
        if problem is None or best is None:
            continue
        model = build(problem)
        segments = Segments(model, all_ideals(model, 10_000) or [])
        found = solve(segments, bounding_cost(segments))
        assert found is not None
        assert found[0] <= best * (1 + 1e-9) + 1e-12, f"seed {seed}"
        compared += 1
    assert compared > count // 4


def simulated(
    seed: int, skips: float = 0.0, schedules: tuple[str, ...] = ("gpipe", "1f1b")
) -> tuple[PartitionProblem, Plan]:
    """One item a stage, as a problem and as a plan, with slow links and tied ends.

    `skips`: probability that a value also goes to a stage beyond the next.
    """
    r = random.Random(seed)
    n, m = r.randint(1, 6), r.randint(1, 14)
    rate, latency = r.choice((1.0, 2.0, 5.0, 50.0)), r.choice((0.0, 0.1))
    link = Level("link", n, rate, latency, r.random() < 0.8)
    cluster = Cluster((Device(),) * n, (link,))
    items = tuple(
        Item(
            f"i{s}", (f"i{s}",), r.choice((1.0, r.random())), r.choice((2.0, 3 * r.random())), 4, 4
        )
        for s in range(n)
    )
    traffic, edges = [], []
    for s in range(n - 1):
        size, back = r.randint(1, 4), r.random() < 0.9
        targets = (s + 1, *(t for t in range(s + 2, n) if r.random() < skips))
        traffic.append(Traffic(f"i{s}", s, targets, size, size if back else 0))
        edges.append(Edge(f"i{s}", s, targets, size, back))
    shared: tuple[SharedParameter, ...] = ()
    tied: tuple[TiedParameter, ...] = ()
    if n > 2 and r.random() < 0.3:
        shared = (SharedParameter("w", 3, True, (0, n - 1)),)
        tied = (TiedParameter("w", (0, n - 1), 3),)
    name = r.choice(schedules)
    depth = warmup(name, n, m, extra=r.choice((0, 1)))
    problem = PartitionProblem(
        items, tuple(traffic), stage_limits(cluster, range(n)), shared,
    )  # fmt: skip
    problem = scheduled(problem, cluster, Setting(name, m), depth)
    holders = {0, n - 1} if tied else set()
    stages = tuple(
        StagePlan(
            s, (f"i{s}",), ("w",) if s in holders else (), 1, (s,),
            items[s].forward_seconds, items[s].backward_seconds,
        )
        for s in range(n)
    )  # fmt: skip
    return problem, Plan(
        "", stages, tuple(edges), tied, Training(name, m, m, depth), cluster.to_toml(),
        Certificate(1.0, 1.0, "optimal", "", 0.0, ""),
    )  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(4))
def test_equal_to_the_simulator(block: int) -> None:
    for seed in range(60 * block, 60 * block + 60):
        problem, plan = simulated(seed)
        fast = evaluate(problem, tuple(range(len(problem.stages)))).objective
        assert fast == pytest.approx(simulate(plan).forecast.step_seconds, rel=1e-9), f"seed {seed}"


def test_close_to_the_simulator_where_values_skip_stages(fast: bool) -> None:
    """All values of a hop go together in the fast model: rarely a little different."""
    equal, count = 0, 60 if fast else 200
    for seed in range(count):
        problem, plan = simulated(seed, 0.3)
        fast = evaluate(problem, tuple(range(len(problem.stages)))).objective
        slow = simulate(plan).forecast.step_seconds
        assert fast == pytest.approx(slow, rel=0.1), f"seed {seed}"
        equal += fast == pytest.approx(slow, rel=1e-9)
    assert equal >= 0.95 * count


def critical(plan: Evaluation) -> Path:
    return plan.times.critical_path(plan.warmup, plan.m)


def spread(problem: PartitionProblem, name: str, r: random.Random) -> Deployment:
    """The problem's stages, each on a rank, on several, or two of them on one."""
    on, n, m = Deployment.straight(problem), len(problem.stages), problem.num_microbatches
    own = replace(on, flush=True, schedule=name)
    near, far = (Level("", 2, r.choice((0.5, 3.0)), 0.1 * r.random()) for _ in range(2))
    width = r.choice((1, 2, 3)) if kind_of(name).stages_per_rank == 1 else 1
    if width > 1:
        ranks = [tuple(range(width * s, width * (s + 1))) for s in range(n)]
        return replace(
            own, ranks=ranks, link=lambda a, b: near if a // width == b // width else far
        )
    if kind_of(name).stages_per_rank == 1 or n % 2 or m % (n // 2):
        return own if kind_of(name).stages_per_rank == 1 else replace(own, schedule="1f1b")
    place = kind_of(name).placement(n, n // 2)
    depths = warmup(name, n, m, (1,) * n, placement=place)
    ranks = [(one,) for one in place]
    return replace(own, ranks=ranks, link=lambda *_: far, in_flight=[one + 1 for one in depths])


def test_replicas_that_go_on_alike_are_one_chain() -> None:
    """One of them takes as long as all of them."""
    alike = 0
    for seed in range(600):
        r = random.Random(seed)
        problem = replace(random_problem(seed, 12), num_microbatches=r.randint(1, 12))
        on = spread(problem, r.choice(("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v")), r)
        on = replace(on, clips=r.random() < 0.3, homes=r.random() < 0.3)
        cut = sorted(r.choices(range(len(on.ranks)), k=len(problem.items)))
        times = Evaluation(problem, cut, on).times
        every = replace(times)
        vars(every)["chains"] = 1  # so all of them are followed
        warm, m = Evaluation(problem, cut, on).warmup, problem.num_microbatches
        assert times.makespan(warm, m) == pytest.approx(every.makespan(warm, m), rel=1e-12)
        alike += times.chains > 1 and m % times.chains == 0
    assert alike > 60


def test_flush_partitions_of_random_problems_are_never_below_their_paths(fast: bool) -> None:
    for seed in range(60 if fast else 200):
        problem = flush_problem(seed)
        if problem is None:
            continue
        try:
            found, _ = partition(problem, time_limit=0)
        except InfeasibleError:
            continue
        plan = Evaluation(problem, found.stage_of)
        assert sum_of(critical(plan), plan.times) <= found.objective * (1 + 1e-9) + 1e-12


def test_known_paths_tell_only_what_the_clock_says() -> None:
    """Assignments in any order: those below a limit take the clock's seconds, others that limit."""
    told = below = 0
    for seed in range(80):
        problem, r = random_problem(seed, 12), random.Random(seed)
        known, stages = KnownPaths(), range(len(problem.stages))
        again = [r.random() < 0.5 for _ in stages]
        names = "1f1b", "gpipe", "zb-h1", "interleaved"  # each has paths of its own
        deployments = [replace(spread(problem, name, r), recompute=again) for name in names]
        deployments += [replace(one, clips=True, homes=r.random() < 0.5) for one in deployments]
        limit = math.inf
        for _ in range(30):
            on = r.choice(deployments)
            plan = Evaluation(problem, sorted(r.choices(stages, k=len(problem.items))), on)
            clock, walks = Evaluation(problem, plan.stage_of, on).seconds, len(known.of(on))
            found = known.seconds(plan, limit)
            every = known.of(on) if plan.bounded else ()
            longest = max((along(path, plan.times) for path in every), default=0.0)
            assert longest <= clock * (1 + 1e-9), seed
            told += len(known.of(on)) == walks and found >= limit
            if clock < limit * (1 - 1e-9):
                assert found == clock, seed
                limit, below = clock * r.choice((1, 1.2)), below + 1
            else:
                assert found >= limit * (1 - 1e-9), seed
    assert told > 700
    assert below > 150


def test_weights_that_follow_clipped_updates_at_homes_wait_for_two_halves() -> None:
    """A path with all of one reduction, as where all replicas update, would tell too much of other
    cuts."""
    messages = [Message("forward", a, a + 1, 0) for a in (0, 1)]
    messages += [Message("backward", a, a - 1, 0) for a in (1, 2)]
    messages += [Message("final", 2, 0, 5), Message("final", 0, 2, 5)]
    times = PipelineTimes(
        (0.0, 50.0, 0.0), (0.0, 50.0, 0.0), [(0, 1), (2, 3), (4, 5)], messages, lambda *_: SECONDS,
        [False] * 3, [10, 12, 0], clips=True, homes=True,
    )  # fmt: skip
    path, other = times.critical_path((1, 1, 0), 2), replace(times, reduced=[0, 12, 0])
    assert ((0, 2), "final", 1) in path.hops
    for one in (times, other):
        assert 0 < along(path, one) <= one.makespan((1, 1, 0), 2)
    assert along(path, times) == times.makespan((1, 1, 0), 2)
    assert sorted(path.sums) == [(0, 0.5), (1, 0.5)]
    on = replace(Deployment.straight(random_problem(0)), clips=True)
    known = KnownPaths()
    known.of(on).append(replace(times, homes=False).critical_path((1, 1, 0), 2))
    assert known.of(on)
    assert not known.of(replace(on, homes=True))


def test_a_neighbourhood_tells_what_the_clock_says_after_each_move() -> None:
    """Known paths never take longer than the clock, and one that is critical then takes as long."""
    told = lost = tied = summed = 0
    for seed in range(300):
        r = random.Random(seed)
        problem = random_problem(seed, 12)
        third = r.randrange(len(problem.items))
        shared = [replace(one, items=(*one.items, third)) for one in problem.shared]
        problem = replace(
            problem, objective="flush", shared=tuple(shared), together=(), apart=(), pins=()
        )
        on = spread(problem, r.choice(("1f1b", "gpipe", "zb-h1", "interleaved")), r)
        if not kind_of(on.schedule).splits_backward:
            on = replace(on, recompute=[r.random() < 0.3 for _ in on.ranks])
        model, stages = build(problem), range(len(problem.stages))
        groups, *others = (tuple(sorted(r.choices(stages, k=model.num_groups))) for _ in range(4))
        cuts = (model.items_of(one) for one in (groups, *others))
        now, *elsewhere = (Evaluation(problem, cut, on) for cut in cuts)
        every = [*moves(model.arcs, groups, len(stages))]
        moved = (after(groups, *move) for move in every)
        plans = [Evaluation(problem, model.items_of(one), on) for one in moved]
        own, *paths = map(critical, (now, *elsewhere, *plans))
        near = Neighbourhood(model, groups, now, [own])
        assert near.lengths.max() == pytest.approx(along(own, now.times), rel=1e-9), seed
        near.know([own, *paths])
        known = now.times.hops
        for move, plan, path in zip(every, plans, paths[len(elsewhere) :], strict=True):
            least, exact = near.least(*move), along(path, plan.times)
            assert least <= plan.seconds * (1 + 1e-9) + 1e-12, (seed, move)
            reduced = sum(share * plan.times.reduction(s) for s, share in path.sums)
            summed += reduced > 0
            ties = reduced and any(one.trainable for one in problem.shared)  # they may stay
            if not ties and all(hop in known[kind] for hop, kind, _ in path.hops):
                assert least >= exact * (1 - 1e-9), (seed, move)
                told += exact > 0
            lost += any(known[kind].keys() - plan.times.hops[kind].keys() for kind in known)
            tied += any(kind == "final" for _, kind, _ in path.hops)
    assert told > 500
    assert lost > 100
    assert tied > 20
    assert summed > 200
