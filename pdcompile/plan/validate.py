"""Refuses plans that are nonsense by themselves, without a graph: numbers, indices, order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from pdcompile.errors import ClusterError, PlanError, ScheduleError
from pdcompile.ir.graph import DTYPE_BYTES
from pdcompile.plan.embedded import Finding, unusable_numbers
from pdcompile.schedule.registry import KINDS, allowed, kind_of, one_age_streams, several_a_rank
from pdcompile.schedule_limits import JOINT, elsewhere, unfit

if TYPE_CHECKING:
    from pdcompile.plan.schema import Plan

_SIZE = re.compile(r"[0-9]+|(-?[0-9]+\*)?b(/[0-9]+)?([+-][0-9]+)?")

MOST_REPLICAS = 1_000_000  # ranks are counted out: more have no memory here


def validate(plan: Plan, where: str = "plan.json") -> None:
    """Refuse nonsense.

    Raises:
        PlanError: the first thing wrong, with its place and what to do.
    """
    parts = (_schedule, _stages, pipeline, _edges, _tied, _training, _cluster, _certificate)
    found = chain(unusable_numbers(plan, ""), *(part(plan) for part in parts))
    for path, message, remedy in found:
        raise PlanError(message, where=f"{where}: {path}", remedy=remedy)


def _schedule(plan: Plan) -> Iterator[Finding]:
    """Findings of a schedule that there is not: all that follows reads its row."""
    try:
        kind_of(plan.training.schedule, "training.schedule")
    except ScheduleError as error:
        yield error.where or "", error.message, error.remedy or "make the plan again"


def _stages(plan: Plan) -> Iterator[Finding]:
    if not plan.stages:
        yield "stages", "the plan has no stages", "make the plan again"
    first: dict[str, str] = {}
    for s, stage in enumerate(plan.stages):
        path = f"stages[{s}]"
        if stage.index != s:
            remedy = "number the stages from 0 without gaps"
            yield f"{path}.index", f"index {stage.index} in position {s}", remedy
        for i, op in enumerate(stage.ops):
            here = f"{path}.ops[{i}]"
            if not op.isidentifier():
                yield here, f"{op!r} is not an op name", "use the names of the graph"
            if op in first:
                message = f"op {op!r} is assigned twice, first in {first[op]}"
                yield here, message, "keep it on one stage"
            first[op] = here
        if list(stage.parameters) != sorted(set(stage.parameters)):
            message = "parameters are not sorted, or one appears twice"
            yield f"{path}.parameters", message, "sort them and remove repetitions"
        if stage.trainable_bytes > stage.parameter_bytes:
            message = f"{stage.trainable_bytes} trainable of {stage.parameter_bytes} bytes"
            yield f"{path}.trainable_bytes", message, "trainable bytes are part of parameter_bytes"
        if stage.largest_gradient_bytes > stage.trainable_bytes:
            message = f"{stage.largest_gradient_bytes} of {stage.trainable_bytes} trainable bytes"
            yield f"{path}.largest_gradient_bytes", message, "it is one of the trainable parameters"


def pipeline(plan: Plan) -> Iterator[Finding]:
    """Findings of what no schedule could run, whatever the stages compute."""
    yield from _fitting(plan)
    yield from _ranks(plan)
    for i, edge in enumerate(plan.edges):
        path = f"edges[{i}].targets"
        if edge.source >= len(plan.stages):
            remedy = "name an existing stage"
            yield f"edges[{i}].source", f"there is no stage {edge.source}", remedy
        if not edge.targets:
            yield path, "an edge without targets", "remove the edge"
        yield from _ascending(edge.targets, len(plan.stages), path)
        if edge.targets and min(edge.targets) <= edge.source:
            message = f"goes from stage {edge.source} to stage {min(edge.targets)}"
            yield path, message, "values only go to later stages"
    late = plan.training.kind.stream and plan.training.kind.drains
    for i, tied in enumerate(plan.tied):
        path = f"tied[{i}].stages"
        holders = [stage for stage in plan.stages if stage.index in tied.stages]
        if late and len({tuple(sorted(stage.ranks)) for stage in holders}) > 1:
            message = f"{tied.fqn!r} is on stages {list(tied.stages)}, which have unlike ranks"
            remedy = "a number of stages that has no common divisor with that of ranks"
            yield path, f"{message} under {plan.training.schedule!r}", remedy
        if len(tied.stages) < 2:
            message = f"{tied.fqn!r} is tied to fewer than two stages"
            yield path, message, "list only parameters held by several stages"
        yield from _ascending(tied.stages, len(plan.stages), path)


def _ranks(plan: Plan) -> Iterator[Finding]:
    held: dict[int, list[int]] = {}
    most = plan.training.kind.stages_per_rank
    for s, stage in enumerate(plan.stages):
        path = f"stages[{s}].ranks"
        if not 1 <= stage.replicas <= MOST_REPLICAS:
            remedy = f"write 1 or more, {MOST_REPLICAS:,} at most"
            yield f"stages[{s}].replicas", f"a stage with {stage.replicas:,} replicas", remedy
        if stage.ranks and len(stage.ranks) != stage.replicas:
            message = f"{len(stage.ranks)} ranks for {stage.replicas} replicas"
            yield path, message, "give one rank to each replica"
        if len(set(stage.ranks)) < len(stage.ranks) or min(stage.ranks, default=0) < 0:
            yield path, f"{list(stage.ranks)} are not ranks", "give each replica a rank of its own"
        for rank in stage.ranks:
            stages = held.setdefault(rank, [])
            stages.append(s)
            if most is not None and len(stages) > most:
                message = f"rank {rank} holds stages {stages}; schedule "
                message += f"{plan.training.schedule!r} runs {most} on a rank"
                others = several_a_rank(len(stages))
                yield path, message, f"give every rank to one stage, or use schedule {others}"
    yield from _turns(plan, held)
    shared = {rank: stages for rank, stages in held.items() if len(stages) > 1}
    if shared:
        yield from _equal_replicas(plan, shared)
        yield from _dispatch(plan)
        yield from _placement(plan, held)


def _turns(plan: Plan, held: dict[int, list[int]]) -> Iterator[Finding]:
    """Findings of turns that replicas cannot take."""
    kind = plan.training.kind
    for s, stage in enumerate(plan.stages):
        path, strange = f"stages[{s}].turns", {*stage.turns} - {*range(stage.replicas)}
        if strange:
            message = f"turns of replica {min(strange)}, and the stage has {stage.replicas}"
            yield path, message, "number them from 0"
        if stage.paces and (len(stage.paces) != stage.replicas or not 0 < min(stage.paces) <= 1):
            message = f"paces {list(stage.paces)} of {stage.replicas} replicas"
            yield f"stages[{s}].paces", message, "write a number above 0, up to 1, for each"
        if stage.turns and kind.updates_each and not kind.alone:
            message = f"turns under {kind.name!r}, where an update is of one microbatch of each"
            yield path, message, "leave turns out, or use another schedule"
        firsts = [plan.stages[held[rank][0]] for rank in stage.ranks]
        for one in [one for one in firsts if one.turns != stage.turns]:
            message = f"stages {one.index} and {s} share ranks, and have unlike turns"
            yield path, message, "write the same turns for all stages of a rank"


def _equal_replicas(plan: Plan, shared: dict[int, list[int]]) -> Iterator[Finding]:
    """Findings of stages of a rank whose replicas take unlike microbatches."""
    counts = [stage.replicas for stage in plan.stages]
    rank, stages = next(iter(shared.items()))
    if len(set(counts)) > 1:
        message = f"rank {rank} holds stages {stages}, and stages have {counts} replicas"
        yield "stages", message, "as many replicas of every stage, or one rank for each stage"
    dispatched = plan.training.kind.dispatched  # the ranks of stages begin elsewhere
    own = [tuple(sorted(one)) if dispatched else one for one in plan.ranks]
    for rank, stages in shared.items():
        unlike = [s for s in stages if own[s] != own[stages[0]]]
        for s in unlike:
            message = f"rank {rank} holds stages {stages}, which are on other ranks besides: "
            message += f"{list(plan.stages[stages[0]].ranks)} and {list(plan.stages[s].ranks)}"
            remedy = "stages that share a rank share all of them, in one order"
            yield f"stages[{s}].ranks", message, remedy


def _dispatch(plan: Plan) -> Iterator[Finding]:
    """Findings of microbatches that are not on the rank whose turn it is."""
    kind, count = plan.training.kind, len(plan.stages)
    for s, stage in enumerate(plan.stages if kind.dispatched else ()):
        placement = kind.placement(count, max(plan.num_ranks // stage.replicas, 1))
        due = kind.ranks(placement, stage.replicas)[s]
        if stage.ranks != due or stage.turns:
            message = f"{list(stage.ranks)}, and the turns under {kind.name!r} are {list(due)}"
            yield f"stages[{s}].ranks", message, f"write {list(due)}"


def _placement(plan: Plan, held: dict[int, list[int]]) -> Iterator[Finding]:
    """Findings of ranks that hold other stages than those that the schedule's order is for."""
    kind, ranks, count = plan.training.kind, len(held), len(plan.stages)
    if kind.placed is None or kind.written is not None:
        return
    places = ranks // plan.stages[0].replicas
    placed = kind.placed.places(count, places)
    together = [[s for s in range(count) if placed[s] == place] for place in range(places)]
    for rank, stages in held.items():
        if stages not in together or count % places:
            message = f"rank {rank} holds stages {stages} of {count} on {ranks} ranks"
            kinds = [KINDS[name] for name in allowed("any")]
            anywhere = [one.name for one in kinds if one.several and not one.placed]
            remedy = "give every rank as many stages"
            if count % places == 0:
                remedy = f"under {kind.name!r} stages {kind.placed.name} share a rank: "
                remedy += " and ".join(map(str, together))
            remedy += f"; or use schedule {' or '.join(anywhere)}"
            yield f"stages[{stages[0]}].ranks", message, remedy


def _fitting(plan: Plan) -> Iterator[Finding]:
    """Findings of stages, microbatches, replicas or updates that the schedule does not have."""
    kind, training = plan.training.kind, plan.training
    counts = [stage.replicas for stage in plan.stages]
    asked: dict[str, Sequence[Any]] = {
        "stages": [len(counts)],
        "microbatches": [training.num_microbatches],
        "replicas": sorted({*counts} - {1}),
        "max_grad_norm": [1] * (training.max_grad_norm is not None),
        "grad_scaler": [1] * training.loss_scaling,
        "updates": ["home"] * (training.updates == "home" and max(counts) > 1),
    }
    places = {"microbatches": "num_microbatches", "grad_scaler": "loss_scaling"}
    for name, count, why, remedy in unfit(kind, f"under {kind.name!r}", asked):
        place = f"training.{places.get(name, name)}"
        if name in ("stages", "replicas"):
            place = "stages" + f"[{counts.index(count)}].replicas" * (name == "replicas")
        yield place, f"{name if name in JOINT else f'{count} {name}'}{why}", remedy
    for s, rank in enumerate(kind.written.placement[: len(counts)] if kind.written else ()):
        if (own := plan.stages[s].ranks or (s,)) != (rank,):
            message = f"rank {own[0]}, and the schedule {kind.name!r} has stage {s} on rank {rank}"
            yield f"stages[{s}].ranks", message, "make the plan again with this schedule"
    if kind.one_age:
        return
    for i, tied in enumerate(plan.tied):
        message = f"{tied.fqn!r} is on stages {list(tied.stages)}, whose weights differ in age "
        remedy = f"use schedule {one_age_streams()}, or keep its users on one stage "
        remedy += "(constraints=[Together(…)])"
        yield f"tied[{i}].stages", f"{message}under {kind.name!r}", remedy


def _edges(plan: Plan) -> Iterator[Finding]:
    seen: set[str] = set()
    for i, edge in enumerate(plan.edges):
        path = f"edges[{i}]"
        if edge.value in seen:
            yield path, f"value {edge.value!r} has two edges", "list all targets in one edge"
        seen.add(edge.value)
        made = plan.stage_of.get(edge.value, edge.source)
        if made != edge.source:
            message = f"{edge.value!r} is made on stage {made}, not {edge.source}"
            yield f"{path}.source", message, "send a value from the stage that makes it"
        if edge.dtype not in DTYPE_BYTES:
            yield f"{path}.dtype", f"unknown dtype {edge.dtype!r}", "use torch's names"
        for size in edge.shape:
            if not _SIZE.fullmatch(size):
                yield f"{path}.shape", f"{size!r} is not a size", 'write "4", "b" or "2*b+1"'


def _tied(plan: Plan) -> Iterator[Finding]:
    for i, tied in enumerate(plan.tied):
        for s in tied.stages:
            if s < len(plan.stages) and tied.fqn not in plan.stages[s].parameters:
                message = f"stage {s} does not hold {tied.fqn!r}"
                yield f"tied[{i}].stages", message, f"add it to stages[{s}].parameters"
    if len({tied.fqn for tied in plan.tied}) != len(plan.tied):
        yield "tied", "a parameter is listed twice", "keep one entry a parameter"


def _ascending(stages: tuple[int, ...], num_stages: int, path: str) -> Iterator[Finding]:
    if any(a >= b for a, b in pairwise(stages)):
        yield path, f"{list(stages)} is not ascending", "sort and remove repetitions"
    if stages and max(stages) >= num_stages:
        yield path, f"there is no stage {max(stages)}", "name existing stages"


def depths(plan: Plan) -> Iterator[Finding]:
    """Findings of a warm-up that is not one depth for each stage."""
    warmup, count = plan.training.warmup, len(plan.stages)
    if len(warmup) != count or min(warmup, default=0) < 0:
        message = f"{len(warmup)} warm-up depths for {count} stages: {list(warmup)}"
        yield "training.warmup", message, "give one depth, from 0, to each stage"


def _training(plan: Plan) -> Iterator[Finding]:
    training = plan.training
    for name in ("num_microbatches", "batch_size"):
        if getattr(training, name) < 1:
            yield f"training.{name}", f"{name} is 0", "write 1 or more"
    if training.max_grad_norm == 0:
        yield "training.max_grad_norm", "clips every gradient to 0", "write null or more than 0"
    warmup = training.warmup
    yield from depths(plan) if warmup else ()
    replicated = any(stage.replicas > 1 for stage in plan.stages)
    if not (replicated or training.kind.written) and any(a < b for a, b in pairwise(warmup)):
        remedy = "a stage needs at least the depth of the next one"
        yield "training.warmup", f"warm-up {list(warmup)} increases", remedy


def _certificate(plan: Plan) -> Iterator[Finding]:
    found = plan.certificate
    if found.bound_seconds > found.objective_seconds * (1 + 1e-9):
        message = f"bound {found.bound_seconds!r} is above objective {found.objective_seconds!r}"
        yield "certificate.bound_seconds", message, "make the plan again"
    fastest = found.fastest_seconds
    if fastest is not None and not found.bound_seconds <= fastest * (1 + 1e-9):
        message = f"the fastest plan's {fastest!r} is below the bound {found.bound_seconds!r}"
        yield "certificate.fastest_seconds", message, "make the plan again"
    if fastest is not None and fastest > found.objective_seconds:
        message = f"the fastest plan's {fastest!r} is above objective {found.objective_seconds!r}"
        yield "certificate.fastest_seconds", message, "write null: this plan is the fastest"
    if found.status == "optimal" and found.gap > 0:
        message = f'"optimal" with a gap of {found.gap:.2%}'
        yield "certificate.status", message, 'write "feasible", or make the plan again'
    forecast = plan.forecast
    if forecast is not None:
        for name in ("sent_bytes", "ledgers"):
            if len(getattr(forecast, name)) not in (0, plan.num_columns):
                message = f"{len(getattr(forecast, name))} entries for {plan.num_columns} ranks"
                yield f"forecast.{name}", message, "remove the forecast"


def _cluster(plan: Plan) -> Iterator[Finding]:
    try:
        cluster = plan.machines
    except ClusterError as error:
        yield "cluster", error.message, error.remedy or "paste the text of a cluster.toml"
        return
    for message, remedy in elsewhere(plan.training.kind, cluster.hosts):
        yield "cluster", message, remedy
    parts, joined = plan.training.parts, 1 if cluster.parts is None else cluster.parts.size
    if parts != joined or (plan.training.split == "") != (joined == 1):
        each = () if isinstance(parts, int) else parts
        alike = len(each) == len(plan.stages) and all(
            plan.parts_of_rank[rank] == each[s]
            for s, ranks in enumerate(plan.ranks)
            for rank in ranks
        )
        if {*each} != {1, joined} or not alike or not plan.training.split:
            said = f"{parts} parts by {plan.training.split!r}, and the cluster joins {joined} each"
            yield "training.parts", said, "undo the change, or plan again"
    if plan.num_ranks > len(cluster.devices):
        message = f"{plan.num_ranks} ranks on a cluster of {len(cluster.devices)} devices"
        yield "cluster", message, "use a larger cluster, or fewer stages"
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    if ranks and max(ranks) >= len(cluster.devices):
        yield "stages", f"the cluster has no device {max(ranks)}", "name existing ranks"
