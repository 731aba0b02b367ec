"""The driver's way to a plan: costs, the search of what is open, and stages timed once.

Timing all stages takes a second, or four runs of each where those take longer.  By itself that is
done where op costs were measured here and it costs little beside what it saves: sums of op times
are some 10 % below what stages take, and not by the same share everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from pdcompile.eager.meta import refuse_mostly_estimated
from pdcompile.errors import ConfigError, InfeasibleError
from pdcompile.hardware import devices
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.options import Options
from pdcompile.options.chosen_schedule import microbatches_of
from pdcompile.options.configuration import Configuration, search_space
from pdcompile.passes import codegen
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.coarsen.constraints import Constraints
from pdcompile.passes.costs.machines import KERNEL, STEP, relative
from pdcompile.passes.partition.space.candidates import describe
from pdcompile.passes.parts.prices import note_on_exchange, priced
from pdcompile.passes.planning.border_cuts import TOLERANCE
from pdcompile.passes.planning.branch_and_bound import BRIEF, best_plan
from pdcompile.passes.planning.by_speed import with_turns
from pdcompile.passes.planning.memory_limits import advised_of_devices
from pdcompile.passes.planning.optimizer_state import optimizer_costs
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.passes.planning.refine import refine
from pdcompile.passes.planning.search.trials import Sketched
from pdcompile.passes.planning.solved_problem import space_of_cut
from pdcompile.passes.profile import Sizes, machine_for, source_of
from pdcompile.passes.profile.stage_times import LEAST_RUNS, StageTimes, measure_stages
from pdcompile.passes.stages.boundaries import as_planned
from pdcompile.passes.stages.kept_outputs import planned
from pdcompile.plan import Plan
from pdcompile.problem import BY_RULE, PartitionProblem, StageLimits
from pdcompile.problem.space import Candidate
from pdcompile.schedule.registry import DEFAULT, KINDS, kind_of
from pdcompile.units import format_seconds

if TYPE_CHECKING:
    from torch import nn

    from pdcompile.batch import FlatCall
    from pdcompile.pass_runner import Listener

ESTIMATED = "costs are estimated, not measured on this machine"
GLANCE = 1.0  # seconds, for replicas and schedules that nobody asked about
WORTH_A_NOTE = 0.2  # of a step
SMALL = 1e-4  # seconds of an op: larger microbatches are much faster only where launches count
LITTLE_SECONDS = 5.0  # for timing the stages, and for solving again


class Planner:
    """Plans one captured model: costs, problem, the search, and the stages timed once.

    `problem`, `plan` and `refined` need `costs` first.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Capture,
        options: Options,
        chosen: Configuration,
        listener: Listener,
    ) -> None:
        """Raises ConfigError: the options ask for what the model or minibatch does not allow."""
        Constraints.resolve(captured.train, options.constraints)  # before anything is timed
        if options.costs == "estimated":
            cluster = relative(chosen.cluster, captured.train, chosen.microbatch_size)
            chosen = replace(chosen, cluster=cluster)
        machine = machine_for(options.costs, chosen.cluster.devices[0].kind)
        on_gpu = not chosen.cluster.devices[0].on_host
        takes, assumed = optimizer_costs(options.optimizer, on_gpu=on_gpu)
        self.model, self.captured, self.options = model, captured, options
        self.cluster, self.listener = chosen.cluster, listener
        counted = options.costs == "measured" and not on_gpu  # the host works while a GPU does
        self._call_seconds = machine.call_seconds if counted else 0.0
        updated = takes.calls * sum(one.requires_grad for one in model.parameters())
        devices_used = min(len(chosen.cluster.devices), chosen.num_stages)
        calls = STEP * devices_used + KERNEL * updated  # of all stages
        self.training = replace(
            chosen.training,
            optimizer_factor=takes.factor,
            step=takes.step,
            step_moved=takes.moved,
            moving_seconds=1 / machine.bytes_per_second,
            host_seconds=self._call_seconds * calls / chosen.num_stages,
        )
        self._chosen = chosen
        self.space = search_space(options, chosen, captured.train.sizes)
        # The number of microbatches is neither the user's nor the search's choice.
        self._by_rule = (
            microbatches_of(options) == "auto"
            and len(self.space.microbatches) == 1
            and self.training.num_microbatches > 1
        )
        self._notes = [assumed] if assumed else []
        self._sizes = Sizes(
            captured.train,
            model,
            [self._size(m) for m in self.space.microbatches],
            costs=options.costs,
            device_kind=self.cluster.devices[0].kind,
            progress=listener.part,
            say=self._notes.append,
        )
        self._graphs: dict[int, OpGraph] = {}  # the part that is planned, with costs
        self._problem_at = cache(partial(self._problem, self._graphs))

    def costs(self) -> OpGraph:
        """The graph with costs, for every number of microbatches in the space; the first one."""
        counts = sorted(self.space.microbatches)
        for m in dict.fromkeys((counts[0], counts[-1], *counts)):  # the others lie between these
            self._graphs[m] = self._costed(m)
        first = self._graphs[self.space.microbatches[0]]
        if self.options.costs == "measured" and (
            self.options.refine is True or not self.options.searches
        ):
            refuse_mostly_estimated(first, self.model)
        return first

    def _costed(self, m: int) -> OpGraph:
        sized = priced(self._sizes.at(self._size(m)), self.cluster.parts)
        return planned(sized, self.training)

    def least_step_seconds(self) -> float:
        """Seconds that no step can take less than: all work, on all devices at once."""
        return self.work_seconds / sum(device.speed for device in self.cluster.devices)

    @property
    def work_seconds(self) -> float:
        """Seconds of a step's work on one device of speed 1, at the best microbatch size."""
        return _work(self._graphs)

    def problem(self) -> PartitionProblem:
        """The problem of the first number of microbatches."""
        return self._problem_at(self.space.microbatches[0])

    def plan(
        self, elsewhere: float = inf, *, sketch: bool = False, start: Candidate | None = None
    ) -> Plan:
        """The best plan of the space, with a note where its stages could be timed and are not.

        Args:
            elsewhere: seconds of a step that it has to be faster than.
            sketch: it is not to be made.
            start: a candidate that is tried first.

        Raises:
            Sketched: it is not faster, or not to be made.
            InfeasibleError: no plan fits (NotFoundError: none was found).
        """
        plan = self._best(self._graphs, self._problem_at, elsewhere, sketch=sketch, start=start)
        plan = replace(plan, notes=(*plan.notes, *self._note_on_wider(plan)))
        reason = why_not_timed(plan, self.options, self.model)
        if not reason:
            return plan
        note = f"stages not timed: {reason}; refine=True (--refine on) does it"
        return replace(plan, notes=(*plan.notes, note))

    def refined(self, plan: Plan, microbatch: Callable[[int], FlatCall]) -> Plan:
        """The plan after its stages were timed, with a note that says how far it was off.

        `microbatch`: one of the example's, by its size.
        """
        if self.options.searches:
            self.space = space_of_cut(plan)
            self.training = replace(plan.training, warmup=())
        m = plan.training.num_microbatches
        graph, leaves = self._graphs[m], microbatch(self._size(m)).leaves
        size = next(op.cost.microbatch_size for op in graph.ops if op.cost is not None)
        device = devices.of_kind(self.cluster.devices[0].kind)

        def measure(plan: Plan) -> tuple[StageTimes, ...]:
            captured = as_planned(self.captured, plan)
            sources = codegen.generate(captured, plan)
            return measure_stages(
                captured.train, plan, sources, self.model, leaves,
                microbatch_size=size, progress=self.listener.part,
                call_seconds=self._call_seconds,
            )  # fmt: skip

        def solve(mended: OpGraph) -> Plan:
            graphs = {m: mended}
            return self._best(graphs, cache(partial(self._problem, graphs)))

        try:
            found = refine(plan, graph, measure, solve)
        except torch.OutOfMemoryError as error:  # the whole model is more than one rank may have
            note = f"stages not timed: {str(error).partition('. ')[0]}"
            return replace(plan, notes=(*plan.notes, note))
        finally:
            devices.hand_back(device)
        return replace(found.plan, notes=(*found.plan.notes, str(found)))

    def _note_on_wider(self, plan: Plan) -> Iterator[str]:
        """A note where replicas and schedules that nobody asked about are known to be faster; with
        other numbers of microbatches, where nobody chose one and their costs take no measuring."""
        options, kind = self.options, KINDS.get(plan.training.schedule)  # None: a drawn one
        asked = options.stages or options.replicas != 1 or options.constraints
        if asked or not self.space.cut_alone or kind is None or not kind.takes_replicas:
            return
        if plan.forecast is None or len(self.cluster.devices) == 1:
            return
        seconds = plan.forecast.step_seconds
        opened: dict[str, Any] = {"replicas": "any"}
        opened |= {"schedule": "auto"} if options.schedule == DEFAULT else {}
        wider = replace(options, **opened)
        space = search_space(wider, self._chosen, self.captured.train.sizes)
        num_ops = len(self.captured.train.ops)
        small = self.work_seconds < SMALL * plan.training.num_microbatches * num_ops
        if not (self._by_rule and options.costs == "estimated" and small):
            counts = self.space.microbatches  # which have costs
            shared = tuple(replace(one, microbatches=counts) for one in space.sharing)
            space = replace(space, microbatches=counts, sharing=shared)
        graphs = {m: self._graphs.get(m) or self._costed(m) for m in space.microbatches}
        try:
            best_plan(
                graphs.__getitem__, cache(partial(self._problem, graphs)), self.cluster, space,
                self.training, time_limit=GLANCE, elsewhere=seconds * (1 - WORTH_A_NOTE),
                sketch=True,
            )  # fmt: skip
        except Sketched as sketch:
            if sketch.best is not None and sketch.seconds <= seconds * (1 - WORTH_A_NOTE):
                given = ", ".join(f"{name}={value!r}" for name, value in opened.items())
                flags = " ".join(f"--{name} {value}" for name, value in opened.items())
                yield (
                    f"with {' and '.join(opened)} left open a step takes "
                    f"{format_seconds(sketch.seconds)} or less, instead of "
                    f"{format_seconds(seconds)}: {describe(sketch.best)}; {given} ({flags})"
                )
        except InfeasibleError:
            return

    def _best(
        self,
        graphs: Mapping[int, OpGraph],
        problem_at: Callable[[int], PartitionProblem],
        elsewhere: float = inf,
        *,
        sketch: bool = False,
        start: Candidate | None = None,
    ) -> Plan:
        options, tolerance = self.options, self.options.cut_tolerance
        search = partial(
            best_plan, graphs.__getitem__, problem_at, space=self.space, training=self.training,
            seed=self.training.seed,
        )  # fmt: skip
        try:
            plan = search(
                self.cluster, time_limit=options.time_limit, listener=self.listener,
                tolerance=TOLERANCE if tolerance is None else tolerance, elsewhere=elsewhere,
                sketch=sketch, start=start,
            )  # fmt: skip
        except InfeasibleError as error:
            if sketch or elsewhere < inf or self.space.cut_alone:
                raise
            self.listener.told("looking for the memory that is enough")
            brief = partial(search, time_limit=BRIEF)
            raise advised_of_devices(error, self.cluster, brief) from error.__cause__
        least = _work(graphs) / sum(device.speed for device in self.cluster.devices)
        plan = with_turns(plan, least / plan.training.scale)
        if self._by_rule:
            m = plan.training.num_microbatches
            near = sorted({max(1, m // 4), max(1, m // 2), m, min(2 * m, plan.training.batch_size)})
            rule = f"{m} {BY_RULE} (--microbatches {','.join(map(str, near))} compares)"
            certificate = replace(plan.certificate, scope=f"{plan.certificate.scope}; {rule}")
            plan = replace(plan, certificate=certificate)
        check_plan(plan, graphs[plan.training.num_microbatches], self.cluster)
        exchanged = note_on_exchange(graphs[plan.training.num_microbatches], self.cluster.parts)
        notes = (*plan.notes, *self.cluster.notes, *self._notes, *exchanged)
        source = source_of(self.options.costs, self.cluster.devices[0].kind)
        return replace(plan, notes=notes, costs=source)

    def _problem(self, graphs: Mapping[int, OpGraph], m: int) -> PartitionProblem:
        free = (StageLimits(),) * (self.space.stages or len(self.cluster.devices))
        # Where weights of stages differ in age, no two may hold one parameter.
        own_ages = not any(kind_of(name).one_age for name in self.space.schedules)
        return coarsen(
            graphs[m], free, num_microbatches=m, constraints=self.options.constraints,
            own_ages=own_ages,
        )  # fmt: skip

    def _size(self, m: int) -> int:
        return -(-self.training.batch_size // m)


def _work(graphs: Mapping[int, OpGraph]) -> float:
    """Seconds of a step's work on one device of speed 1, at the best number of microbatches."""
    costs = {m: [op.cost for op in graph.ops if op.cost is not None]
             for m, graph in graphs.items()}  # fmt: skip
    work = (m * sum(one.forward_seconds + one.backward_seconds for one in each)
            for m, each in costs.items())  # fmt: skip
    return min(work)


def check_refine(options: Options, model: nn.Module) -> None:
    """Refuse refine=True where no stages would be timed, before anything is captured.

    Raises:
        ConfigError: costs are estimated, a plan is given, the model has no memory, or the planner
            also decides replicas or microbatches.
    """
    if options.refine is True and (reason := _never_timed(options, model)):
        raise ConfigError(
            "refine=True (--refine on) times the planned stages on this machine, and corrects the "
            f"costs of one cut, but {reason}",
            where="refine",
            remedy="leave refine out; then plan with measured costs what was chosen, and refine "
            "that",
        )


def why_not_timed(plan: Plan, options: Options, model: nn.Module) -> str | None:
    """Reason why the stages of a plan are not timed; "" where nobody asks, None where they are."""
    if options.refine is True:
        return None
    unasked = options.refine is False or options.searches or options.costs != "measured"
    if unasked or len(plan.stages) == 1 or _never_timed(options, model):
        return ""
    runs = LEAST_RUNS * sum(s.forward_seconds + s.backward_seconds for s in plan.stages)
    for seconds, what in ((runs, "timing them"), (plan.certificate.seconds, "planning again")):
        if seconds > LITTLE_SECONDS:
            return f"{what} takes about {seconds:.0f} s"
    return None


def after_wider(plan: Plan, wider: Plan) -> Plan:
    """A plan for the setting that a search over more of them chose, with what that search found."""
    found, each = wider.certificate, "step" if plan.training.kind.drains else "microbatch"
    note = (
        "the certificate is of this setting alone, for which the model was captured again (single "
        "samples); over all that was open, on costs of larger microbatches, the bound is "
        f"{format_seconds(found.bound_seconds)} a {each}, and the plan took "
        f"{format_seconds(found.objective_seconds)}: a gap of {100 * found.gap:.2g} %"
    )
    return replace(plan, notes=(*plan.notes, note), alternatives=wider.alternatives)


def times_compiled(options: Options, model: nn.Module) -> bool:
    """True if stages are timed once more, as they are compiled; the cut stays."""
    asked = options.stage_compiler is not None and options.refine is not False
    return asked and not _never_timed(replace(options, replicas=1), model)


def _never_timed(options: Options, model: nn.Module) -> str:
    """Reason why no stages are timed, whatever the plan is; "" for none."""
    reasons = {
        "a plan is given": options.plan is not None or options.sources is not None,
        ESTIMATED: options.costs == "estimated",
        "the model's parameters have no memory (meta device)": any(
            parameter.is_meta for parameter in model.parameters()
        ),
        "parts of stages are not timed together": options.parts != 1,
        "the planner also decides replicas, schedule or microbatches": options.replicas != 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
