"""The best plan over cut, depth, replicas, microbatches, warm-up, schedule and recomputation.

First likely plans and a bound of every setting (schedule, microbatches, warm-up), along lines.
Then branch and bound.  A *branch* is a setting on some of the cluster's ranks with some replica
counts; the branch of the least bound goes first.  Its bound is all work on all devices, that of its
setting, then that of the dynamic program over ideals and replicas, then that of the candidate which
comes next.  Where only the cut is open, one branch is all, and `passes.partition.search` goes on
until its proof.  Models with too many ideals for that keep the bounds of their settings, and the
boundaries of their best plan are moved as long as that helps.  Branches of ranks that hold several
stages come after all others: their bound says less, and their candidates are likely cuts.  The
search ends when no branch is left whose bound is below the best, or with what there is when its
budget is spent.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count

from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError, InfeasibleError, PlanError
from pdcompile.ir.graph import OpGraph
from pdcompile.pass_runner import Listener
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.answer import DEFAULT_SECONDS, PATIENCE, claimed
from pdcompile.passes.partition.budget import Budget, OutOfTimeError
from pdcompile.passes.partition.search import ALONG, EQUAL
from pdcompile.passes.partition.space.candidates import describe, evaluation, violations
from pdcompile.passes.partition.space.no_plan import (
    RECOMPUTATION,
    no_plan,
    too_large,
)
from pdcompile.passes.partition.space.pipelines import PreparedProblem, limited
from pdcompile.passes.partition.space.search_branches import (
    Branch,
    branches,
    settings,
)
from pdcompile.passes.partition.space.seats import arrangements
from pdcompile.passes.planning.border_cuts import preferred
from pdcompile.passes.planning.memory_limits import SCOPE, within_ledgers
from pdcompile.passes.planning.search.first_plans import FirstPlans
from pdcompile.passes.planning.search.move_groups import move_groups
from pdcompile.passes.planning.search.trials import EXACT, Sketched, Trials
from pdcompile.passes.planning.solved_problem import with_problem
from pdcompile.passes.stages.assemble import making_seconds
from pdcompile.plan import NOT_CERTIFIED, Certificate, Plan, Training
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import Partition, PartitionProblem
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import kind_of
from pdcompile.units import format_seconds

PROBES = 3  # candidates of a branch that are tried as soon as it is opened
MAX_TRIED = 400  # candidates that branches simulate, in all, once some plan is found
SEARCHING = 0.75  # of the time; then what was put off is settled
ALONE = 0.6  # of the time for one stage a rank, where ranks may hold several
SETTLING = 0.9  # of the time; the rest is for moving groups of the best
GAIN = 1e-3  # relative, of a move whose plan takes long to make
LITTLE = 1.0  # seconds, in which a plan may always be made
BRIEF = 1.0  # seconds of a search for what would help
PREFERRING, LONGEST = 0.15, 4.0  # of the time, at most so many seconds, for `border_cuts`
PROVER = "branch and bound, dynamic program over ideals x replicas"
RELAXATION = "linear program over critical paths"
LEAVES = "some of the longest path on each stage, where ranks hold several"
RULES = f"each stage on ranks in a row; {SCOPE}"


@dataclass
class PlanSearch:
    """One search: what was tried, and what is left."""

    graph_at: Callable[[int], OpGraph]
    problem_at: Callable[[int], PartitionProblem]
    cluster: Cluster
    space: SearchSpace
    training: Training
    seed: int
    listener: Listener
    budget: Budget
    whole: Budget  # with the time in which one of the fastest plans is chosen
    patience: float  # of the search for a cut alone, see `partition`
    tolerance: float  # see `best_plan`
    elsewhere: float = math.inf  # as there
    sketch: bool = False
    start: Candidate | None = None
    trials: Trials = field(init=False)
    proved: Plan | None = None  # where only the cut is open
    floor: float = math.inf  # bound of what was left unfinished
    relaxed: bool = False  # it is that of ranks which hold several stages
    unproved: list[str] = field(default_factory=list)  # why something was
    bounds: dict[Setting, float] = field(default_factory=dict)  # seconds of a step
    prepared: dict[int, PreparedProblem] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trials = Trials(
            self.graph_at, self._prepared, self.cluster, self.training, self.budget,
            self.listener.told, len(self.space.homes) > 1, self.elsewhere, self.sketch,
        )  # fmt: skip

    def run(self) -> None:
        """Search until nothing is left or the budget is spent.

        Raises InfeasibleError where all devices together are too small.
        """
        first = self._prepared(self.space.microbatches[0])
        if self.start is not None:
            self.trials.offer(self.start)
        several = bool(self.space.sharing or self.space.placement)
        # Of few cuts with a rank a stage what lacks is said in more detail once none is found.
        rough = several or not (self.space.cut_alone or first.complete)
        if rough and (error := too_large(first.problem, self.cluster, self.training)):
            raise error
        sharing = [branch for space in self.space.sharing for branch in self._branches(space)]
        if not (self.space.cut_alone or self.space.placement):
            every = list(settings(self.space, self.training, len(self.cluster.devices)))
            lines = FirstPlans(self.trials, self.space, every, sharing)
            lines.run()
            self.bounds = lines.bounds
        self._branch_and_bound(self._branches(self.space), ALONE if sharing else SEARCHING)
        self._branch_and_bound(sharing, SEARCHING)
        left = self.trials.settle(SETTLING)
        if left < math.inf:
            self._unfinished(left, None, "time was over")

    def _branches(self, space: SearchSpace) -> Iterator[Branch]:
        return branches(self.cluster, space, self.training, self._prepared)

    def _branch_and_bound(self, given: Iterable[Branch], until: float) -> None:
        """Search these branches until that share of the time is over."""
        ticket, trials = count(), self.trials
        heap, tried = [], trials.tried
        for branch in given:
            branch.bound = max(branch.bound, self.bounds.get(branch.setting, 0.0))
            heap.append((branch.bound, next(ticket), branch))
        heapq.heapify(heap)
        while heap and heap[0][0] < trials.below:
            bound, _, branch = heap[0]
            if trials.some and not branch.sharp and bound < self.floor and not trials.over(1.0):
                branch.sharpen()
                heapq.heapreplace(heap, (branch.bound, next(ticket), branch))
                continue
            if why := self._enough(branch, tried, until):
                self._unfinished(bound, branch, why)
                return
            heapq.heappop(heap)
            go_on = self._open if branch.candidates is None else self._next
            go_on(branch)
            if branch.bound < math.inf:
                heapq.heappush(heap, (max(bound, branch.bound), next(ticket), branch))

    def _enough(self, branch: Branch, tried: float, until: float) -> str:
        """Reason to end though this branch may hold a better plan; empty: the search goes on."""
        trials = self.trials
        if self.space.cut_alone:  # ends by itself, with a plan
            return ""
        if trials.some and not branch.space.placement and not branch.prepared.complete:
            return branch.left_out
        if trials.some and trials.tried - tried >= MAX_TRIED:  # without a plan, time alone ends it
            return f"{MAX_TRIED} plans were tried"
        begun = trials.seen or trials.budget.stopped or self.sketch  # one is tried at least
        return "time was over" if begun and trials.over(until) else ""

    def improve(self) -> None:
        """Move groups of the best candidate over a boundary as long as that helps."""
        trials, complete = self.trials, self._prepared(self.space.microbatches[0]).complete
        if not trials.found or (self.sketch and not complete):
            return

        def ends() -> bool:
            return trials.over(1.0) or self.floor >= trials.below * (1 - EQUAL)

        gain = EXACT if trials.quick(trials.best) else GAIN
        move_groups(trials, ends, gain, decide=self.space.decides_recomputation)

    def _unfinished(self, bound: float, branch: Branch | None, why: str) -> None:
        """Note that what was not tried may cost as little as its bound."""
        if bound < self.floor:
            self.floor, self.relaxed = bound, branch is not None and bool(branch.space.placement)
        if why not in self.unproved:
            self.unproved.append(why)

    # -- problems ----------------------------------------------------------------------------

    def _prepared(self, m: int) -> PreparedProblem:
        if m not in self.prepared:
            most, wanted = len(self.cluster.devices), self.space.stages
            problem = self.problem_at(m)
            if wanted is None and _numbered(problem):
                raise ConfigError(
                    "constraints name stages by number, and the number of stages is open",
                    remedy="say how many stages there are to be: stages=4",
                )
            tables = most * len(self.space.menu(self.space.counts(most))) * (wanted or 1)
            self.prepared[m] = PreparedProblem(problem, tables, wanted)
        return self.prepared[m]

    # -- candidates --------------------------------------------------------------------------

    def _open(self, branch: Branch) -> None:
        """Solve the branch, and try its most promising candidates."""
        if self.space.cut_alone:
            self.proved, branch.bound = _best_cut(self, branch, branch.straight_problem), math.inf
            return
        branch.sharpen()
        pipelines = branch.pipelines(self.budget if self.sketch else None)
        try:
            bound = pipelines.bound() * branch.setting.scale
        except OutOfTimeError:  # the bound of a plan that there is may take longer
            return
        if not (left_out := branch.left_out):
            branch.bound = max(branch.bound, bound)
        elif branch.bound < self.trials.below:
            self._unfinished(branch.bound, branch, left_out)
        branch.candidates = pipelines.candidates(partial(self._below, branch))
        if bound == math.inf:
            branch.bound = math.inf
            return
        if bound >= self.trials.below:  # what its choices cost is told all the same
            self.trials.offer(next(pipelines.candidates(lambda: math.inf), (0.0, None))[1])
            return
        for _ in range(PROBES):
            if branch.bound < math.inf:
                self._next(branch)

    def _next(self, branch: Branch) -> None:
        assert branch.candidates is not None
        bound, candidate = next(branch.candidates, (math.inf, None))
        if bound == math.inf and not self._below(branch):
            return  # time was over, and something may be left
        if not branch.left_out or bound == math.inf:
            branch.bound = max(branch.bound, bound * branch.setting.scale)
        self.trials.offer(candidate)

    def _below(self, branch: Branch) -> float:
        """The objective that candidates of a branch have to be below; 0 where time is over."""
        late = (self.trials.seen or self.sketch) and self.trials.over(1.0)
        return 0.0 if late else self.trials.below / branch.setting.scale

    def result(self) -> Plan:
        """The best plan with its certificate.

        Raises InfeasibleError when there is none, Sketched where none is to be made.
        """
        if self.sketch and (self.proved or self.trials.found):
            raise self._sketched()
        if self.proved is not None:
            return self.proved
        if (dropped := self.trials.confirm()) < math.inf:
            self._unfinished(dropped, None, "a plan took more memory than was estimated")
        if not self.trials.found:
            if self.budget.stopped:
                raise KeyboardInterrupt
            if self.elsewhere < math.inf or (self.sketch and self.unproved):
                least = min(self.trials.least.values(), default=math.inf)
                raise Sketched(min(self.floor, self.elsewhere), least)
            raise no_plan(
                self.prepared, self.cluster, self.space, self.training,
                unproved=[*self.unproved, *left_out(self.space, self.cluster)],
            )  # fmt: skip
        (seconds, candidate), (fastest, other) = self.trials.chosen, self.trials.found[-1]
        setting = candidate.setting
        problem = self.prepared[setting.num_microbatches].problem
        certificate = claimed(
            replace(
                NOT_CERTIFIED,
                prover=self._prover(setting),
                seconds=self.budget.spent,
                scope=f"{problem.scope}; {scope_of(self.space, self.cluster)}",
            ),
            seconds / setting.scale,
            min(self.floor, fastest) / setting.scale,
            fastest / setting.scale if fastest < seconds else None,
        )
        notes = [*idle_ranks(self.cluster, candidate, certificate)]
        if fastest < seconds:
            notes.append(passed_over(self.trials, (seconds, candidate), (fastest, other)))
        tried = tuple(self.trials.alternatives(candidate))
        candidate, certificate, saved = _preferred(self, candidate, certificate)
        plan = self.trials.plan(candidate)
        broken = violations(problem, self.cluster, candidate)
        if broken or self.trials.filled(candidate) > 1:
            what = broken[0] if broken else "a ledger exceeds its device"
            raise PlanError(f"internal error: the search's answer breaks its rules: {what}")
        notes = [*plan.notes, *notes, *saved]
        plan = replace(plan, certificate=certificate, notes=tuple(notes), alternatives=tried)
        return with_problem(plan, problem, self.cluster)

    def _sketched(self) -> Sketched:
        """Seconds of the best plan, and of the bound."""
        if (plan := self.proved) is not None:
            certificate, scale = plan.certificate, plan.training.scale
            seconds = certificate.objective_seconds * scale
            if plan.forecast is not None:
                seconds = plan.forecast.step_seconds
            return Sketched(certificate.bound_seconds * scale, seconds)
        (seconds, candidate), (fastest, _) = self.trials.chosen, self.trials.found[-1]
        seconds += self.trials.updates(candidate)
        return Sketched(min(self.floor, fastest), seconds, candidate)

    def _prover(self, setting: Setting) -> str:
        if self.space.placement or self.relaxed:
            return RELAXATION
        complete = self.prepared[setting.num_microbatches].complete
        return PROVER if complete else ALONG


def _preferred(
    search: PlanSearch, candidate: Candidate, certificate: Certificate
) -> tuple[Candidate, Certificate, tuple[str, ...]]:
    """The candidate with the cut that a person would choose, where there is time to make its plan,
    its certificate and notes."""
    trials, problem = search.trials, search.prepared[candidate.setting.num_microbatches].problem
    found, making = evaluation(problem, search.cluster, candidate), trials.making(candidate)

    def fits(stage_of: tuple[int, ...]) -> bool:
        one = replace(candidate, stage_of=stage_of)
        return trials.may_fit(one, search.whole.left) and trials.filled(one) <= 1

    setting, left = candidate.setting, max(0.0, search.whole.left - making)
    update = partial(search.training.update_seconds, versions=kind_of(setting.schedule).stream)
    stage_of, judged, notes = preferred(
        found, certificate, search.graph_at(setting.num_microbatches), search.tolerance,
        update=update, fits=fits, seconds=left,
    )  # fmt: skip
    chosen = replace(candidate, stage_of=stage_of)
    if not making and trials.making(chosen) > max(search.whole.left, LITTLE):
        return candidate, certificate, ()
    return chosen, judged, notes


def _best_cut(search: PlanSearch, branch: Branch, problem: PartitionProblem) -> Plan:
    """The best plan where only the cut is open.  Raises InfeasibleError, with the reason."""
    making = making_seconds(search.graph_at(problem.num_microbatches), even_cut(problem))

    def planned(limited: PartitionProblem) -> tuple[Plan, Partition]:
        found, certificate = partition(
            limited, time_limit=max(0.0, search.budget.left - making), patience=search.patience,
            seed=search.seed, progress=search.listener.found,
        )  # fmt: skip
        candidate = replace(branch.straight, stage_of=found.stage_of)
        candidate, certificate, notes = _preferred(search, candidate, certificate)
        plan = search.trials.plan(candidate)
        plan = replace(plan, certificate=certificate, notes=(*plan.notes, *notes))
        return plan, Evaluation(limited, candidate.stage_of).partition()

    alone = not search.sketch and search.elsewhere == math.inf  # else nobody reads a remedy
    try:
        return replace(within_ledgers(problem, planned, advises=alone), problem=problem)
    except InfeasibleError as error:
        if not (alone and search.training.kind.trains and limited(search.cluster)):
            raise  # else a cut alone keeps activations
        own = search.cluster, replace(search.space, recompute=(False, True)), search.training
        try:
            best_plan(search.graph_at, search.problem_at, *own, time_limit=BRIEF)
        except InfeasibleError:
            raise error from error.__cause__
        remedy = f"{error.remedy}; or allow {RECOMPUTATION}"
        raise type(error)(error.message, where=error.where, remedy=remedy) from error.__cause__


def even_cut(problem: PartitionProblem) -> list[int]:
    """The stage of each item where all stages take as long, to the item."""
    seconds = [item.forward_seconds + item.backward_seconds for item in problem.items]
    count, whole = len(problem.stages), sum(seconds) or 1.0
    return [min(int(count * before / whole), count - 1) for before in accumulate(seconds)]


def _numbered(problem: PartitionProblem) -> bool:
    """Do constraints name stages by number?"""
    last = len(problem.stages) - 1
    return any(s != last for _, s in problem.pins)


def scope_of(space: SearchSpace, cluster: Cluster) -> str:
    """The scope of the certificate, besides coarsening."""
    orders, every_order = arrangements(cluster)
    parts = [str(space), SCOPE if space.placement else RULES]
    if space.placement or space.sharing:
        parts.append(LEAVES)
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
        yield f"{len(counts)} of the replica counts {counts[0]} to {counts[-1]}"


def passed_over(
    trials: Trials, chosen: tuple[float, Candidate], fastest: tuple[float, Candidate]
) -> str:
    """A note on why a plan was chosen though another one that was found is faster."""
    kind = kind_of(fastest[1].setting.schedule)
    why = "no time was left to make its plan; a larger time_limit (--time-limit) would"
    updates = [trials.updates(one) for _, one in (chosen, fastest)]
    if chosen[0] + updates[0] <= fastest[0] + updates[1]:
        first, second = map(format_seconds, updates)
        why = f"an update takes {first} here and {second} there"
    elif trials.price(*chosen) <= trials.price(*fastest):
        what = "splitting backwards" if kind.splits_backward else "training on old weights"
        why = f"{what} has to save {100 * kind.gain:.0f} %, as no forecast counts what it costs"
    slower = 100 * (chosen[0] / fastest[0] - 1)
    return f"{slower:.2g} % slower than the fastest found ({describe(fastest[1])}): {why}"


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
    tolerance: float = 0.0,
    seed: int = 0,
    listener: Listener | None = None,
    elsewhere: float = math.inf,
    sketch: bool = False,
    start: Candidate | None = None,
) -> Plan:
    """The best plan of the space; its certificate says what was exhausted.

    Args:
        graph_at: the graph with costs of one microbatch, for a number of microbatches.
        problem_at: its coarse form, of `space.stages` stages, or of as many as there are devices,
            which offer everything.
        training: what every plan of the space has in common; schedule, microbatches and warm-up
            are chosen.
        time_limit: seconds; None: 20, and fewer where only the cut is open and a search has no
            news (see `partition`).  Ctrl-C ends the search with the best plan so far.
        tolerance: of the fastest plan's objective, within which other cuts may be preferred (see
            `border_cuts`); 0: the fastest plan.
        seed: equal seeds give equal plans as long as the time limit is not reached.
        elsewhere: seconds of a step, with its updates, of a plan that there is in another space;
            only better ones are sought, unless only the cut is open.
        sketch: make no plan, which takes seconds of a large model; all time is for the search.
        start: a candidate that is tried first, as the best one of a sketch.

    Raises:
        Sketched: no better one than that was found, or only a sketch is wanted.
        InfeasibleError: no plan fits; names what lacks.
        NotFoundError: none was found that does, and the space is not exhausted; says why.
        ConfigError: constraints that need a number of stages.
    """
    import torch  # noqa: F401  (ledgers are rehearsed with it; the search's time is not for this)

    if space.sharing and _numbered(problem_at(space.microbatches[0])):
        space = replace(space, sharing=())  # there a stage of that number is another one
    seconds = DEFAULT_SECONDS if time_limit is None else time_limit
    kept = min(LONGEST, PREFERRING * seconds) if tolerance > 0 and not sketch else 0.0
    with Budget(seconds) as whole:
        search = PlanSearch(
            graph_at, problem_at, cluster, space, training, seed,
            listener or Listener(), Budget(seconds - kept, within=whole), whole,
            PATIENCE if time_limit is None else math.inf, tolerance, elsewhere, sketch, start,
        )  # fmt: skip
        search.run()
        search.improve()
        return search.result()
