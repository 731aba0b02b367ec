"""Table ``papers_2bw``: PipeDream-2BW against GPipe and the flush schedule on BERT-32.

The chain of Piper's profile is cut into equal stages by our planner; seconds and bytes are those of
the simulator and its ledgers.  A stage that does not fit runs its forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.published import piper_model
from benchmarks.published.piper_model import MenuProblem
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.planning.graph_free import plan_of
from pdcompile.passes.schedules import warmup
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Certificate, Plan, Training
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import Item, PartitionProblem, StageLimits, Traffic
from pdcompile.problem.space import Setting
from planning.published import REFERENCE
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only papers"
STAGES, PER_STAGE = (4, 8, 16), (1, 2, 4)
DEVICE_BYTES = 16 * 2**30
SCHEDULES = ("gpipe", "1f1b", "2bw")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One schedule: seconds of a minibatch, and the most that a device holds."""

    seconds: float
    peak_bytes: int

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= DEVICE_BYTES


def chain(menus: MenuProblem) -> tuple[list[Item], list[Traffic]]:
    """The layers one after the other, on one device each; a sample is a microbatch.

    What a second run of the forward costs is the difference of the two variants.  Edges of inputs
    of the model (masks) are left out: every stage is fed by the caller.
    """
    layers = [n for n, node in enumerate(menus.nodes) if node.name != "tensor"]
    items = []
    for n in layers:
        kept, again = menus.nodes[n].variants[1]
        forward = again.seconds - kept.seconds
        size = round(kept.parameter_bytes)
        items.append(
            Item(
                str(n), (str(n),), forward, kept.seconds - forward, size, size,
                round(kept.moving_bytes), trained_sizes=(size,),
            )
        )  # fmt: skip
    entering = {n: [e.bytes for e in menus.edges if e.target == n] for n in layers}
    sizes = [round(max(entering[n])) for _, n in pairwise(layers)]
    return items, [Traffic(str(s), s, (s + 1,), size, size) for s, size in enumerate(sizes)]


@dataclass(frozen=True, slots=True)
class Cut:
    """The layers in equal stages: the slowest is as fast as can be."""

    problem: PartitionProblem
    stage_of: tuple[int, ...]
    certificate: Certificate


def cut(menus: MenuProblem, num_stages: int) -> Cut:
    """Our planner's cut into so many stages, the same for every schedule."""
    items, traffic = chain(menus)
    limits = StageLimits(bytes_per_second=menus.bytes_per_second)
    problem = PartitionProblem(tuple(items), tuple(traffic), (limits,) * num_stages)
    found, certificate = partition(problem)
    return Cut(problem, found.stage_of, certificate)


def planned(schedule: str, stages: Cut, num_microbatches: int) -> Plan:
    """The cut under a schedule, on devices of 16 GiB and the profile's links."""
    count = len(stages.problem.stages)
    depths = warmup(schedule, count, num_microbatches)
    training = Training(schedule, num_microbatches, num_microbatches, depths)
    level = Level("link", count, stages.problem.stages[0].bytes_per_second)
    cluster = Cluster((Device("v100", DEVICE_BYTES),) * count, (level,))
    problem = scheduled(stages.problem, cluster, Setting(schedule, num_microbatches), depths)
    plan = plan_of(Evaluation(problem, stages.stage_of), training)
    return replace(plan, certificate=stages.certificate, cluster=cluster.to_toml(), problem=problem)


def simulated(plan: Plan, *, recompute: bool) -> Outcome:
    stages = tuple(replace(stage, recompute=recompute) for stage in plan.stages)
    forecast = simulate(replace(plan, stages=stages), timeline=False).forecast
    peak = max(ledger.total_bytes for ledger in forecast.ledgers)
    return Outcome(forecast.step_seconds, peak)


def outcomes(plan: Plan) -> tuple[Outcome, Outcome]:
    """Outcomes without recomputing, and with it on every stage."""
    return simulated(plan, recompute=False), simulated(plan, recompute=True)


def chosen(schedule: str, both: Sequence[Outcome]) -> Outcome:
    """The paper's GPipe recomputes; the others where they would not fit."""
    return both[schedule == "gpipe" or not both[0].fits]


def table() -> Table:
    found = Table(
        "papers_2bw",
        "PipeDream-2BW on BERT-32, 16 GiB a device; published: up to 3.2 over GPipe, 1.6 over 1F1B",
        COMMAND,
        ("stages", "microbatches", "GPipe GB", "1F1B GB", "2BW GB", "fits 16 GiB", "GPipe s",
         "1F1B s", "2BW s", "2BW/GPipe", "2BW/1F1B", "cost of recomputing", "2BW keeps all/GPipe"),
        (6, 12, 15, 15, 15, 16, 8, 8, 8, 9, 8, 19, 19),
    ).begin()  # fmt: skip
    menus = piper_model.read(REFERENCE / "piper" / "bert32a100.json")
    best = {"gpipe": 0.0, "flush": 0.0, "kept": 0.0}
    for num_stages in STAGES:
        stages = cut(menus, num_stages)
        for m in (num_stages * count for count in PER_STAGE):
            both = {name: outcomes(planned(name, stages, m)) for name in SCHEDULES}
            gpipe, flush, stream = (chosen(name, both[name]) for name in SCHEDULES)
            kept, again = both["2bw"]
            ratios = {
                "gpipe": gpipe.seconds / stream.seconds,
                "flush": flush.seconds / stream.seconds,
                "kept": gpipe.seconds / kept.seconds,
            }
            best = {name: max(most, ratios[name]) for name, most in best.items()}
            found.add(
                num_stages, m, *(_sizes(both[name]) for name in SCHEDULES),
                ", ".join(_fits(both[name]) for name in SCHEDULES),
                *(f"{one.seconds:.3f}" for one in (gpipe, flush, stream)),
                f"{ratios['gpipe']:.2f}", f"{ratios['flush']:.2f}",
                percent(again.seconds / kept.seconds - 1), f"{ratios['kept']:.2f}",
            )  # fmt: skip
    found.note(**{f"over_{name}": most for name, most in best.items()})
    return found


def _sizes(both: Sequence[Outcome]) -> str:
    return " / ".join(f"{one.peak_bytes / 1e9:.1f}" for one in both)


def _fits(both: Sequence[Outcome]) -> str:
    return "yes" if both[0].fits else "again" if both[1].fits else "no"
