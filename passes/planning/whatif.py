"""Whatif: the problem inside a plan under other limits, solved again.

Costs are those of the plan: nothing is measured, and no plan comes out, since stages need the
graph.  With the number of samples in a microbatch unchanged, the problem solved here is the one
that planning anew with the same costs would solve.  Memory limits are kept as there by the
ledger of the schedule, which of another cut is estimated (see `graph_free`), so where one is met
closely planning anew may decide otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdcompile.cluster import Cluster, stage_limits
from pdcompile.errors import ConfigError, InfeasibleError, PlanError, did_you_mean
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.alternatives import StageUse, bottleneck, broken, stage_uses
from pdcompile.passes.planning.explain import with_ledgers
from pdcompile.passes.planning.graph_free import straight_plan_of
from pdcompile.passes.planning.memory_limits import excess, within_ledgers
from pdcompile.passes.planning.solved_problem import scaled, setting_of
from pdcompile.passes.schedules import rule_of, warmup
from pdcompile.plan import Certificate, Plan, Training
from pdcompile.plan.embedded import assignment, on_stages, problem_of
from pdcompile.plan.evaluate import Evaluation
from pdcompile.plan.schema import ranks_of
from pdcompile.problem import Partition, PartitionProblem
from pdcompile.problem.scenario import Scenario, changed_cluster
from pdcompile.schedule.registry import KINDS, kind_of
from pdcompile.units import format_bytes

CLOSE = 0.1  # of a memory limit: ledgers without a graph were up to 7 % off at stages of real plans
MOST_EXTRA = 4
OPTIMAL = 1e-5  # gap that counts as none, as in `Certificate`


@dataclass(frozen=True, slots=True)
class SolvedScenario:
    """One side: a problem, an answer to it, and what that means for a step.

    `objective_seconds` are those of a step with a flush, else of a microbatch; `step_seconds`
    are always those of a step (of a stream: in steady state).
    """

    training: Training
    cluster: Cluster
    problem: PartitionProblem
    stage_of: tuple[int, ...]
    objective_seconds: float
    bound_seconds: float
    status: str
    prover: str
    uses: tuple[StageUse, ...]
    bottleneck: int

    @property
    def flush(self) -> bool:
        return self.problem.objective == "flush"

    @property
    def step_seconds(self) -> float:
        return self.objective_seconds * (1 if self.flush else self.problem.num_microbatches)

    @property
    def samples_per_second(self) -> float:
        seconds = self.step_seconds
        return self.training.batch_size / seconds if seconds > 0 else math.inf

    @property
    def gap(self) -> float:
        if self.objective_seconds <= 0:
            return 0.0
        return max(0.0, 1 - self.bound_seconds / self.objective_seconds)


@dataclass(frozen=True, slots=True)
class Whatif:
    """Before and after, and the present cut under the changed limits.

    `kept_seconds`: the objective of the present cut, None where the number of stages differs or
    it breaks a limit; `kept_broken` names what it would break.
    """

    before: SolvedScenario
    after: SolvedScenario
    kept_seconds: float | None
    kept_broken: tuple[str, ...]
    notes: tuple[str, ...]


def whatif(
    plan: Plan,
    change: Scenario,
    *,
    time_limit: float | None = None,
    progress: Callable[[str], None] | None = None,
    where: str = "plan.json",
) -> Whatif:
    """Solve the plan's problem again under other limits, with the plan's seed.

    Raises:
        PlanError: the plan holds no problem, its stages tear an item apart, or are not one rank
            each that keeps its activations.
        ConfigError: the change names what is not there.
        InfeasibleError: no assignment satisfies the changed limits; says which conflict.
    """
    _refuse_more_than_a_cut(plan, where)
    problem = problem_of(plan, where)
    stage_of = assignment(plan, where)
    now = Cluster.from_toml(plan.cluster, where=f"{where}: cluster")
    changed, training, cluster, notes = changed_problem(plan, change, now)

    def planned(stages: tuple[int, ...], certificate: Certificate) -> Plan:
        return straight_plan_of(changed, stages, certificate, training, cluster, plan)

    def solve(limited: PartitionProblem) -> tuple[Plan, Partition]:
        best, certificate = partition(
            limited, time_limit=time_limit, seed=training.seed, progress=progress
        )
        return planned(best.stage_of, certificate), best

    own, wrong = _own_cut(changed, stage_of, planned, plan.certificate)
    kept = None if own is None else own.certificate.objective_seconds
    try:
        after = within_ledgers(changed, solve)
    except InfeasibleError:
        if own is None:
            raise
        after = own
    if own is not None and own.certificate.objective_seconds < after.certificate.objective_seconds:
        bound = min(after.certificate.bound_seconds, own.certificate.objective_seconds)
        after = replace(own, certificate=replace(own.certificate, bound_seconds=bound))
    source = [f"times come from {plan.costs}, as those of the plan"] if plan.costs else []
    return Whatif(
        before=_state(
            straight_plan_of(problem, stage_of, plan.certificate, plan.training, now, plan)
        ),
        after=_state(after),
        kept_seconds=kept,
        kept_broken=wrong,
        notes=(*source, *notes, *_close(after)),
    )


def _own_cut(
    changed: PartitionProblem,
    stage_of: tuple[int, ...],
    planned: Callable[[tuple[int, ...], Certificate], Plan],
    certificate: Certificate,
) -> tuple[Plan | None, tuple[str, ...]]:
    """The plan's own cut under the changed limits, or what it would break."""
    if len(changed.stages) <= max(stage_of):
        return None, (f"there would be {len(changed.stages)} stages",)
    own = Evaluation(changed, stage_of)
    if wrong := broken(own):
        return None, tuple(wrong)
    objective = own.seconds
    unknown = replace(
        certificate, objective_seconds=objective, bound_seconds=0.0, fastest_seconds=None
    )
    found = planned(stage_of, unknown)
    over = excess(changed, found) if found.forecast is not None else {}
    if over:
        return None, tuple(
            f"stage {s} would need {format_bytes(n)} more memory, by the ledger of its schedule"
            for s, n in over.items()
        )
    return found, ()


def _close(plan: Plan) -> tuple[str, ...]:
    """A stage so full that the estimate of its memory may be wrong about it."""
    problem = problem_of(plan)
    if plan.forecast is None:
        return ("the schedule is too long to walk: memory is the planner's formula, which is low",)
    for s, limits in enumerate(problem.stages):
        limit, held = limits.memory_bytes, plan.forecast.ledgers[s].total_bytes
        if limit is not None and held > limit * (1 - CLOSE):
            return (
                f"stage {s} would be {100 * held / max(limit, 1):.0f} % full: planning anew counts "
                "its memory exactly, and may cut elsewhere or find no plan that fits",
            )
    return ()


def changed_problem(
    plan: Plan, change: Scenario, cluster: Cluster
) -> tuple[PartitionProblem, Training, Cluster, tuple[str, ...]]:
    """The problem under the change, what is then trained on what, and what was assumed."""
    assert plan.problem is not None
    problem, before = plan.problem, plan.training
    after, notes = changed_cluster(cluster, change)
    training = _training(before, change)
    num_stages = len(problem.stages) if change.devices is None else len(after.devices)
    if change.of_machines:
        _refuse_odd_ranks(plan)
        problem = on_stages(problem, num_stages)
        problem = replace(problem, stages=stage_limits(after, num_stages))
    m = training.num_microbatches
    name = training.schedule
    resized = num_stages != len(plan.problem.stages)
    if resized or (name, m) != (before.schedule, before.num_microbatches):
        depths = warmup(name, num_stages, m, extra=extra_warmup(before, len(plan.stages)))
        problem = replace(
            problem,
            memory=rule_of(setting_of(training), depths),
            num_microbatches=m,
            objective=kind_of(name).objective,
        )
        training = replace(training, warmup=depths)
    sizes = [-(-one.batch_size // one.num_microbatches) for one in (before, training)]
    if sizes[0] != sizes[1]:
        problem = scaled(problem, sizes[1] / sizes[0])
        notes += (
            f"microbatches of {sizes[1]} samples, and the costs are of {sizes[0]}: times, "
            "activations and traffic are scaled in proportion, which planning anew would measure",
        )
    return problem, training, after, notes


def _refuse_more_than_a_cut(plan: Plan, where: str) -> None:
    """Refuse replicas, recomputation and several stages on a rank: `partition` knows none."""
    ranks = ranks_of(plan.stages)
    for s, stage in enumerate(plan.stages):
        shown = {
            "is replicated": stage.replicas > 1,
            "recomputes": stage.recompute,
            f"shares rank {ranks[s][0]} with another one": ranks.count(ranks[s]) > 1,
        }
        for what in (what for what, is_so in shown.items() if is_so):
            raise PlanError(
                f"stage {s} {what}, and whatif finds cuts for stages of one rank each that keep "
                "their activations",
                where=f"{where}: stages[{s}]",
                remedy="pdcompile explain says of such a plan what binds it, what neighbouring "
                "cuts cost, and which commands plan again without a limit; for faster links, more "
                "memory, other machines, schedules or minibatches plan again and compare: "
                "pdcompile diff a.json b.json",
            )


def _refuse_odd_ranks(plan: Plan) -> None:
    """Refuses plans whose stage s is not on rank s: limits of position s are those of device s."""
    for s, stage in enumerate(plan.stages):
        if stage.ranks not in ((), (s,)):
            raise PlanError(
                f"stage {s} runs on rank {stage.ranks[0]}, and other machines can be asked for "
                "only where stage s runs on rank s",
                where=f"plan: stages[{s}].ranks",
                remedy="plan again with the machines that you have in mind",
            )


def extra_warmup(training: Training, num_stages: int) -> int:
    """How much deeper than the least the plan's warm-up is (`extra` of `warmup`); 0 when odd."""
    for extra in range(MOST_EXTRA + 1):
        depths = warmup(training.schedule, num_stages, training.num_microbatches, extra=extra)
        if depths == training.warmup:
            return extra
    return 0


def _training(training: Training, change: Scenario) -> Training:
    name = change.schedule or training.schedule
    if name not in KINDS:
        raise ConfigError(
            f"--schedule {name!r} is not available",
            where="--schedule",
            remedy=did_you_mean(name, KINDS) + f"one of {', '.join(KINDS)}",
        )
    batch, m = change.batch_size, change.microbatches
    batch = training.batch_size if batch is None else batch
    if m is None:
        m = 1 if KINDS[name].updates_each else training.num_microbatches
    for option, number in (("--batch-size", batch), ("--microbatches", m)):
        if number < 1:
            raise ConfigError(f"{option} {number} is below 1", where=option, remedy="1 or more")
    if m > batch:
        raise ConfigError(
            f"{m} microbatches of a minibatch of {batch} samples",
            where="--microbatches",
            remedy=f"--microbatches {batch} or fewer, or a larger --batch-size",
        )
    return replace(training, schedule=name, num_microbatches=m, batch_size=batch)


def _state(plan: Plan) -> SolvedScenario:
    problem, certificate = problem_of(plan), plan.certificate
    stage_of = assignment(plan)
    found = Evaluation(problem, stage_of)
    uses, objective = with_ledgers(plan, stage_uses(found)), found.seconds
    bound = min(certificate.bound_seconds, objective)
    optimal = objective - bound <= OPTIMAL * objective  # an edited plan has another status
    return SolvedScenario(
        training=plan.training,
        cluster=Cluster.from_toml(plan.cluster, where="cluster"),
        problem=problem,
        stage_of=stage_of,
        objective_seconds=objective,
        bound_seconds=bound,
        status="optimal" if optimal else "feasible",
        prover=certificate.prover,
        uses=uses,
        bottleneck=bottleneck(uses),
    )
