"""Whatif: the problem inside a plan, solved again under other conditions.

Costs are those of the plan: nothing is measured, and what comes out is no plan that could run, as
its stages would need the graph.  With the number of samples in a microbatch unchanged, the problem
solved here is the one that planning anew with the same costs would solve.  Memory limits are kept
as there by the ledger of the schedule, which of another cut is estimated (see `graph_free`), so
where one is met closely planning anew may decide otherwise.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace

from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError, PlanError
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.answer import claimed
from pdcompile.passes.planning.graph_free import straight_plan_of
from pdcompile.passes.planning.memory_limits import within_ledgers
from pdcompile.passes.planning.solved_problem import extra_warmup, scaled, setting_of
from pdcompile.passes.schedules import memory_rule, warmup
from pdcompile.plan import Plan, Training
from pdcompile.plan.embedded import assignment, on_stages, problem_of
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import Partition, PartitionProblem, Wish
from pdcompile.problem.constraints import KINDS, Constraint, Forbid, Pin, Split, option, read
from pdcompile.problem.deployment import stage_limits
from pdcompile.problem.scenario import Scenario, changed_cluster
from pdcompile.schedule.registry import kind_of

DECIDED = ("stages", "warmup", "schedule", "max-staleness", "microbatches", "replicas", "recompute",
           "cut-tolerance")  # fmt: skip


def whatif(
    plan: Plan,
    change: Scenario,
    *,
    progress: Callable[[str], None] | None = None,
    where: str = "plan.json",
) -> tuple[Plan, Plan, tuple[str, ...]]:
    """The plan as its problem has it, the best one under other limits, and what was assumed.

    Neither has a graph, but the stages, objective and ledgers that follow from the problem.

    Raises:
        PlanError: the plan holds no problem, its stages tear an item apart, or are not one rank
            each that keeps its activations.
        ConfigError: the change names what is not there.
        InfeasibleError: no assignment satisfies the changed limits; says which conflict.
    """
    _refuse_more_than_a_cut(plan, change, where)
    problem, stage_of = problem_of(plan, where), assignment(plan, where)
    now = Cluster.from_toml(plan.cluster, where=f"{where}: cluster")
    changed, training, cluster, notes = changed_problem(plan, change, now)
    answer = _solved(plan, changed, training, cluster, change.time_limit, progress)
    seconds = Evaluation(problem, stage_of).seconds  # an edited plan claims another objective
    claim = claimed(plan.certificate, seconds, plan.certificate.bound_seconds)
    before = straight_plan_of(problem, stage_of, claim, plan.training, now, plan)
    source = [f"times come from {plan.costs}, as those of the plan"] if plan.costs else []
    return before, answer, (*source, *notes)


def _solved(
    plan: Plan,
    problem: PartitionProblem,
    training: Training,
    cluster: Cluster,
    time_limit: float | None,
    progress: Callable[[str], None] | None,
) -> Plan:
    """Solve another form of a plan's problem by the planner's own search, with the plan's seed.

    It begins with the plan's own cut, where there are as many stages.

    Raises:
        InfeasibleError: no assignment was found that satisfies the limits.
    """
    end = None if time_limit is None else time.monotonic() + time_limit
    own = assignment(plan) if len(problem.stages) == len(plan.stages) else ()

    def solve(limited: PartitionProblem) -> tuple[Plan, Partition]:
        left = None if end is None else max(0.0, end - time.monotonic())
        best, certificate = partition(
            limited, time_limit=left, seed=training.seed, progress=progress, start=own
        )
        stages = best.stage_of
        return straight_plan_of(problem, stages, certificate, training, cluster, plan), best

    return within_ledgers(problem, solve)


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
        problem = on_stages(problem, num_stages)
        problem = replace(problem, stages=stage_limits(after, range(num_stages)))
    m = training.num_microbatches
    name = training.schedule
    resized = num_stages != len(plan.problem.stages)
    if resized or (name, m) != (before.schedule, before.num_microbatches):
        depths = warmup(name, num_stages, m, extra=extra_warmup(plan))
        training = replace(training, warmup=depths)
        problem = replace(
            problem,
            memory=memory_rule(setting_of(training), depths),
            num_microbatches=m,
            objective=kind_of(name).objective,
        )
    sizes = [-(-one.batch_size // one.num_microbatches) for one in (before, training)]
    if sizes[0] != sizes[1]:
        problem = scaled(problem, sizes[1] / sizes[0])
        notes += (
            f"microbatches of {sizes[1]} samples, and the costs are of {sizes[0]}: times, "
            "activations and traffic are scaled in proportion, which planning anew would measure",
        )
    return problem, training, after, notes


def _refuse_more_than_a_cut(plan: Plan, change: Scenario, where: str) -> None:
    """Refuse replicas, recomputation and shared ranks, which `partition` does not know; and other
    machines for stages elsewhere than on the device of their number."""
    ranks = plan.ranks
    for s, stage in enumerate(plan.stages):
        shown = {
            "is replicated": stage.replicas > 1,
            "recomputes": stage.recompute,
            f"shares rank {ranks[s][0]} with another one": ranks.count(ranks[s]) > 1,
            f"runs on rank {ranks[s][0]}": change.of_machines and ranks[s][0] != s,
        }
        for what in (what for what, is_so in shown.items() if is_so):
            raise PlanError(
                f"stage {s} {what}, and whatif finds cuts for stages of one rank each that keep "
                "their activations, stage s on rank s",
                where=f"{where}: stages[{s}]",
                remedy="pdcompile explain says of such a plan what binds it, what neighbouring "
                "cuts cost, and which commands plan again without a limit; for faster links, more "
                "memory, other machines, schedules or minibatches plan again and compare: "
                "pdcompile diff a.json b.json",
            )


def _training(training: Training, change: Scenario) -> Training:
    kind = kind_of(change.schedule or training.schedule, "--schedule")
    if kind.trains != training.kind.trains:
        raise ConfigError(
            f"the plan's costs are those of {training.schedule!r}, with or without backwards, and "
            f"{kind.name!r} has others",
            where="--schedule",
            remedy=f"plan again: pdcompile plan TARGET --schedule {kind.name}",
        )
    batch, m = change.batch_size or training.batch_size, change.microbatches
    m = m or (1 if kind.updates_each else training.num_microbatches)
    if m > batch:
        raise ConfigError(
            f"{m} microbatches of a minibatch of {batch} samples",
            where="--microbatches",
            remedy=f"--microbatches {batch} or fewer, or a larger --batch-size",
        )
    name = change.schedule or training.schedule
    return replace(training, schedule=name, num_microbatches=m, batch_size=batch)


def command(plan: Plan, new: Plan, change: Scenario, output: str, machines: str) -> str:
    """The command that makes such a plan: that of the plan, with what has changed.

    Args:
        output: the file of the new plan.
        machines: the file of the changed machines.
    """
    target, *made = plan.command or ("TARGET",)
    after, stages = new.training, len(problem_of(new).stages)
    others = change.of_machines or not any(word.startswith("--cluster=") for word in made)
    gone = {*DECIDED, *(name.replace("_", "-") for name in KINDS if KINDS[name] is not Split)}
    gone |= {"cluster", "memory"} if others else set()
    words = [word for word in made if word.partition("=")[0].removeprefix("--") not in gone]
    words += [f"--schedule={after.schedule}", f"--microbatches={after.num_microbatches}"]
    words += [f"--cluster={machines}"] if others else []
    extra = extra_warmup(new)
    if extra or stages < len(Cluster.from_toml(new.cluster).devices):
        words += [f"--stages={stages}", f"--warmup={extra}"]
    words.append("--cut-tolerance=0")  # whatif knows no modules, and prefers no cut
    asked = [constraint for wish in problem_of(new).wishes if (constraint := _asked(wish))]
    words += ["=".join(option(constraint)) for constraint in asked]
    return shlex.join(["pdcompile", "plan", target, *words, "-o", output])


def _asked(wish: Wish) -> Constraint | None:
    """The constraint, with the stages that it is about in the changed problem."""
    found = read(wish.text)
    if isinstance(found, Pin):
        return Pin(found.patterns[0], wish.pins[0][1]) if wish.pins else None
    if isinstance(found, Forbid):
        stages = sorted({stage for _, stage in wish.forbidden})
        return Forbid(found.patterns[0], *stages) if stages else None
    return found
