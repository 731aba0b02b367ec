"""The best plan over cut, depth, replicas, microbatches, warm-up, schedule and recomputation.

Branch and bound.  A *branch* is a setting (schedule, microbatches, warm-up) on some of the
cluster's ranks with some replica counts; the branch of the least bound goes first.  Its bound is
all work on all devices, then that of the dynamic program over ideals and replicas, then that of
the candidate which comes next.  A branch of one rank a stage first has the sharper bounds and the
candidate of `passes.partition.search`; where only the cut is open, this is the only branch, and
that search goes on until its proof.  Where memory has limits a candidate is made into the plan
that would be returned, and dropped where a ledger of that plan exceeds them.  That takes long:
those that do not fit by the graph-free estimate come last, and only if they are faster than what
was found.  The search ends when no branch is left whose bound is below the best, or with what
there is when its budget is spent.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError, InfeasibleError, PlanError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs import Resident, rough_forecast
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.search import EQUAL, partition, solve
from pdcompile.passes.partition.space.candidates import violations
from pdcompile.passes.partition.space.pipelines import (
    PreparedProblem,
    exceeds,
    limited,
    neighbours,
    timed,
)
from pdcompile.passes.partition.space.search_branches import Branch, Found, branches
from pdcompile.passes.partition.space.seats import Seats, arrangements
from pdcompile.passes.partition.space.shortage import no_plan
from pdcompile.passes.planning.candidate_plan import candidate_plan
from pdcompile.passes.planning.memory_limits import within_ledgers
from pdcompile.passes.planning.solved_problem import with_problem
from pdcompile.plan import Certificate, MemoryLedger, Plan, Training
from pdcompile.problem import Partition, PartitionProblem
from pdcompile.problem.space import Candidate, SearchSpace
from pdcompile.schedule.registry import kind_of, name_of

Progress = Callable[[str], None]

DEFAULT_SECONDS = 20.0
PROBES = 3  # candidates of a branch that are tried as soon as it is opened
MAX_TRIED = 400  # candidates that are simulated, in all, once some plan is found
CHEAP = 0.05  # what one that is dropped before counts
SEARCHING = 0.8  # of the time; then what was put off is settled
SETTLING = 0.9  # of the time; the rest is for moving groups of the best
MAX_MOVES = 200  # of single groups, in the end
QUICK = 0.1  # of the time that is left, for the bounds of a branch of one rank a stage
EXACT = 1e-9  # relative: bounds this close to the best are met
PROVER = "branch and bound, dynamic program over ideals x replicas"
RELAXATION = "relaxation: all work on all devices, and one chain of ops"
LEDGERS = "memory by formula and by the ledger of the schedule"
RULES = f"contiguous ranks; {LEDGERS}"


@dataclass
class PlanSearch:
    """One search: the best candidate so far and what is left."""

    graph_at: Callable[[int], OpGraph]
    problem_at: Callable[[int], PartitionProblem]
    cluster: Cluster
    space: SearchSpace
    training: Training
    time_limit: float | None
    seed: int
    progress: Progress
    budget: Budget
    proved: Plan | None = None  # where only the cut is open
    found: list[tuple[float, Candidate]] = field(default_factory=list)  # each better, step seconds
    floor: float = math.inf  # bound of what was left unfinished
    unproved: list[str] = field(default_factory=list)  # why something was
    doubtful: list[tuple[float, Candidate]] = field(default_factory=list)  # step seconds
    tried: float = 0.0  # candidates that were simulated
    seen: set[Candidate] = field(default_factory=set)
    prepared: dict[int, PreparedProblem] = field(default_factory=dict)

    def run(self) -> None:
        """Search until nothing is left or the budget is spent."""
        self._branch_and_bound()
        self._settle()

    def _branch_and_bound(self) -> None:
        ticket = count()
        every = branches(self.cluster, self.space, self.training, self._prepared)
        heap = [(branch.bound, next(ticket), branch) for branch in every]
        heapq.heapify(heap)
        while heap and heap[0][0] < self._below():
            many = self.tried >= MAX_TRIED and self.found  # without a plan, time alone ends it
            begun = self.seen or self.budget.stopped
            over = begun and (many or self._spent(SEARCHING))  # one is tried at least
            # The search for a cut alone ends by itself, with a plan.
            if over and not self.space.cut_alone:
                why = f"{MAX_TRIED} plans were tried" if many else "time was over"
                self._unfinished(heap[0][0], why)
                return
            bound, _, branch = heapq.heappop(heap)
            go_on = self._open if branch.candidates is None else self._next
            go_on(branch)
            if branch.bound < math.inf:
                heapq.heappush(heap, (max(bound, branch.bound), next(ticket), branch))

    def _settle(self) -> None:
        """Judge the candidates that were put off, the fastest first."""
        doubtful = deque(sorted(self.doubtful, key=lambda one: one[0]))
        while doubtful and doubtful[0][0] < self._below():
            if self._spent(SETTLING):
                self._unfinished(doubtful[0][0], "time was over")
                return
            self._judge(*doubtful.popleft())

    def _spent(self, share: float) -> bool:
        """Whether that share of the time is over."""
        whole = max(self.budget.spent + self.budget.left, 1e-9)
        return self.budget.late or self.budget.spent > share * whole

    def improve(self) -> None:
        """Move single groups of the best candidate over a boundary as long as that helps."""
        left, moved = MAX_MOVES, True
        while self.found and moved and self.floor < self._below() * (1 - EQUAL):
            moved, best = False, self.found[-1][1]
            prepared = self._prepared(best.setting.num_microbatches)
            ranks = tuple(rank for ranks in best.ranks for rank in ranks)
            branch = Branch(best.setting, Seats(self.cluster, ranks), (), None, prepared)
            decide = self.space.decides_recomputation
            for one in neighbours(prepared, self.cluster, best, decide=decide):
                left -= 1
                if left < 0 or self.budget.late:
                    return
                self._try(branch, one)
                if self.found[-1][1] is not best:
                    moved = True
                    break

    def _unfinished(self, bound: float, why: str) -> None:
        """What was not tried may cost as little as its bound."""
        self.floor = min(self.floor, bound)
        if why not in self.unproved:
            self.unproved.append(why)

    def _below(self) -> float:
        return self.found[-1][0] * (1 - EXACT) if self.found else math.inf

    # -- problems ----------------------------------------------------------------------------

    def _prepared(self, m: int) -> PreparedProblem:
        if m not in self.prepared:
            most, wanted = len(self.cluster.devices), self.space.stages
            problem = self.problem_at(m)
            _refuse_numbers(self.space, problem)
            tables = most * len(self.space.menu(most)) * (wanted or 1)
            self.prepared[m] = PreparedProblem(problem, tables, wanted, self.seed)
        return self.prepared[m]

    # -- candidates --------------------------------------------------------------------------

    def _open(self, branch: Branch) -> None:
        """Solve the branch, and try its most promising candidates."""
        problem = branch.straight_problem(self.space)
        if problem is not None and self._settled(branch, problem):
            branch.bound = math.inf
            return
        pipelines = branch.pipelines(self.space)
        bound = pipelines.bound() * branch.scale
        if not (left_out := branch.left_out(self.space)):
            branch.bound = max(branch.bound, bound)
        elif branch.bound < self._below():
            self._unfinished(branch.bound, left_out)
        branch.candidates = pipelines.candidates(lambda: self._below() / branch.scale)
        if bound == math.inf:
            branch.bound = math.inf
            return
        if bound < self._below():
            self._probe(branch, branch.pipelines(self.space, likely=True))

    def _settled(self, branch: Branch, problem: PartitionProblem) -> bool:
        """Whether the search of one rank a stage leaves nothing of the branch; bounds it too."""
        if self.space.cut_alone:
            self.proved = self._within_ledgers(branch, problem)
            return True
        budget = Budget(self.budget.left * QUICK, within=self.budget)
        try:
            search = solve(problem, budget, self.seed, thorough=False)
        except InfeasibleError:
            return True
        if search.best is None:
            return search.impossible
        bound = search.bound * (1 - 1e-12) * branch.scale
        branch.bound = max(branch.bound, bound)
        fits = self._try(branch, branch.straight(search.best.stage_of))
        if search.proved and fits:
            self.floor = min(self.floor, bound)
        return search.proved and fits

    def _within_ledgers(self, branch: Branch, problem: PartitionProblem) -> Plan:
        """The best plan where only the cut is open.  Raises InfeasibleError, with the reason."""

        def planned(limited: PartitionProblem) -> tuple[Plan, Partition]:
            found, certificate = partition(
                limited, time_limit=self.time_limit, seed=self.seed, progress=self.progress
            )
            plan = self._plan(problem, branch.straight(found.stage_of))
            return replace(plan, certificate=certificate), found

        return replace(within_ledgers(problem, planned), problem=problem)

    def _probe(self, branch: Branch, likely: Found) -> None:
        for _ in range(PROBES):
            if branch.bound < math.inf:
                self._next(branch)
        if likely.bound() < math.inf:
            listed = likely.candidates(lambda: math.inf)
            for _, (_, candidate) in zip(range(PROBES), listed, strict=False):
                self._try(branch, candidate)

    def _next(self, branch: Branch) -> None:
        assert branch.candidates is not None
        bound, candidate = next(branch.candidates, (math.inf, None))
        if not branch.left_out(self.space) or bound == math.inf:
            branch.bound = max(branch.bound, bound * branch.scale)
        self._try(branch, candidate)

    def _try(self, branch: Branch, candidate: Candidate | None) -> bool:
        """Make it the best if it is; False where a better one lacks memory, or may lack it."""
        self.tried += CHEAP
        if candidate is None or candidate in self.seen:
            return candidate is not None
        self.seen.add(candidate)
        problem = branch.prepared.problem
        limit = self._below() / branch.scale
        seconds, fits = timed(problem, self.cluster, candidate, limit, self._residents)
        if seconds >= limit:
            return True
        self.tried += 1
        if fits:
            return self._judge(seconds * branch.scale, candidate)
        self.doubtful.append((seconds * branch.scale, candidate))
        return False

    def _judge(self, seconds: float, candidate: Candidate) -> bool:
        """Make it the best if it is; False where its plan exceeds a limit on memory."""
        if seconds >= self._below():
            return True
        if limited(self.cluster) and exceeds(self._ledgers(candidate), self.cluster):
            return False
        self.found.append((seconds, candidate))
        self.progress(f"a plan of {seconds:.6g} s a step: {describe(candidate)}")
        return True

    # -- plans -------------------------------------------------------------------------------

    def _ledgers(self, candidate: Candidate) -> Sequence[MemoryLedger]:
        """The ledgers of every rank, of the plan that would be returned."""
        problem = self._prepared(candidate.setting.num_microbatches).problem
        forecast = self._plan(problem, candidate).forecast
        assert forecast is not None
        return forecast.ledgers

    def _residents(self, candidate: Candidate) -> Sequence[Resident]:
        """An estimate of what each stage holds, summed over its ops, which is quick."""
        m = candidate.setting.num_microbatches
        graph, items = self.graph_at(m), self._prepared(m).problem.items
        pairs = zip(items, candidate.stage_of, strict=True)
        stage_of = {name: s for item, s in pairs for name in item.ops}
        b = next((op.cost.microbatch_size for op in graph.ops if op.cost), graph.batch_size)
        placed = [stage_of[op.name] for op in graph.ops]
        return rough_forecast(graph, placed, len(candidate.options), b)

    def _plan(self, problem: PartitionProblem, candidate: Candidate) -> Plan:
        graph = self.graph_at(candidate.setting.num_microbatches)
        return candidate_plan(graph, problem, candidate, self.training, self.cluster)

    def result(self) -> Plan:
        """The best plan with its certificate.  Raises InfeasibleError when there is none."""
        if self.proved is not None:
            return self.proved
        if not self.found:
            if self.budget.stopped:
                raise KeyboardInterrupt
            raise no_plan(
                self.prepared, self.cluster, self.space, self.training,
                unproved=[*self.unproved, *left_out(self.space, self.cluster)],
            )  # fmt: skip
        seconds, candidate = self.found[-1]
        setting = candidate.setting
        problem = self.prepared[setting.num_microbatches].problem
        plan = self._plan(problem, candidate)
        broken = violations(problem, self.cluster, candidate)
        assert plan.forecast is not None
        if broken or exceeds(plan.forecast.ledgers, self.cluster):
            what = broken[0] if broken else "a ledger exceeds its device"
            raise PlanError(f"internal error: the search's answer breaks its rules: {what}")
        every = setting.num_microbatches if kind_of(setting.schedule).stream else 1
        certificate = Certificate(
            objective_seconds=seconds / every,
            bound_seconds=min(self.floor, seconds) / every,
            status="feasible",
            prover=RELAXATION if self.space.placement else PROVER,
            seconds=self.budget.spent,
            scope=f"{problem.scope}; {scope_of(self.space, self.cluster)}",
        )
        if certificate.gap == 0:
            certificate = replace(certificate, status="optimal")
        notes = (*plan.notes, *idle_ranks(self.cluster, candidate, certificate))
        plan = replace(plan, certificate=certificate, notes=notes)
        return with_problem(plan, problem, self.cluster)


def _refuse_numbers(space: SearchSpace, problem: PartitionProblem) -> None:
    last = len(problem.stages) - 1
    if space.stages is None and (problem.forbidden or any(s != last for _, s in problem.pins)):
        raise ConfigError(
            "constraints name stages by number, and the number of stages is open",
            remedy="say how many stages there are to be: stages=4",
        )


def scope_of(space: SearchSpace, cluster: Cluster) -> str:
    """The scope of the certificate, besides coarsening."""
    orders, every_order = arrangements(cluster)
    parts = [str(space), LEDGERS if space.placement else RULES]
    if len(orders) > 1 and every_order and not space.in_order:
        parts.append(f"all orders of unlike devices ({len(orders)})")
    return "; ".join([*parts, *left_out(space, cluster)])


def left_out(space: SearchSpace, cluster: Cluster) -> Iterator[str]:
    """The parts of a large cluster's space that are never tried."""
    orders, every_order = arrangements(cluster)
    if not every_order and not space.in_order:
        yield f"some orders of unlike devices ({len(orders)})"
    ranks = len(cluster.devices)
    counts = space.counts(ranks)
    if space.replicas == "any" and len(counts) < ranks:
        yield f"of replica counts {counts[0]} to {counts[-1]} only {len(counts)}"


def idle_ranks(cluster: Cluster, candidate: Candidate, certificate: Certificate) -> Iterator[str]:
    """A note on devices that the plan leaves out."""
    used = {rank for ranks in candidate.ranks for rank in ranks}
    idle = sorted(set(range(len(cluster.devices))) - used)
    if idle:
        proved = certificate.status == "optimal"
        why = "no plan with them is" if proved else "no plan with them was found that is"
        yield f"ranks {', '.join(map(str, idle))} stay idle: {why} faster"


def best_plan(
    graph_at: Callable[[int], OpGraph],
    problem_at: Callable[[int], PartitionProblem],
    cluster: Cluster,
    space: SearchSpace,
    training: Training,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """The best plan of the space; its certificate says what was exhausted.

    Args:
        graph_at: the graph with costs of one microbatch, for a number of microbatches.
        problem_at: its coarse form, of `space.stages` stages, or of as many as there are devices,
            which offer everything.
        training: what every plan of the space has in common; schedule, microbatches and warm-up
            are chosen.
        time_limit: seconds; None: 20.  Ctrl-C ends the search with the best plan so far.
        seed: equal seeds give equal plans as long as the time limit is not reached.

    Raises:
        InfeasibleError: no plan fits; names what lacks.
        NotFoundError: none was found that does, and the space is not exhausted; says why.
        ConfigError: constraints that need a number of stages.
    """
    import torch  # noqa: F401  (ledgers are rehearsed with it; the search's time is not for this)

    with Budget(DEFAULT_SECONDS if time_limit is None else time_limit) as budget:
        search = PlanSearch(
            graph_at, problem_at, cluster, space, training, time_limit, seed,
            progress or (lambda _: None), budget,
        )  # fmt: skip
        search.run()
        search.improve()
        return search.result()


def describe(candidate: Candidate) -> str:
    """``2bw, 16 microbatches, stages of 4-2-2 ranks``."""
    widths = "-".join(str(option.replicas) for option in candidate.options)
    again = sum(option.recompute for option in candidate.options)
    setting = candidate.setting
    text = f"{name_of(setting.schedule)}, {setting.num_microbatches} microbatches, "
    where = f"{len(candidate.ranks)} stages on {len(set(candidate.ranks))} ranks"
    where += f" x {candidate.options[0].replicas}" * (not candidate.straight)
    where = where if candidate.shared else f"stages of {widths} ranks"
    return text + where + (f", {again} recompute" if again else "")
