"""Makes a plan of ops on stages.

Nothing is decided here: everything about stages is added up from the graph, and what crosses
between them comes from `boundaries`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

import torch

import pdcompile
from pdcompile import jsonio
from pdcompile.cluster import Cluster, Level, ring_seconds
from pdcompile.ir.graph import Op, OpCost, OpGraph, Ref, walk, written_buffers
from pdcompile.ir.graph import fingerprint as graph_fingerprint
from pdcompile.passes.costs import Resident
from pdcompile.passes.costs.forecast import (
    Progress,
    Rehearsal,
    rehearsals,
    rehearsals_of,
    residents,
)
from pdcompile.passes.costs.workspaces import Kernels
from pdcompile.passes.stages import boundaries
from pdcompile.passes.stages.kept_outputs import given_by, note_on_left_out
from pdcompile.plan import NOT_CERTIFIED, Plan, StagePlan, TiedParameter, Training
from pdcompile.problem.deployment import balanced_homes
from pdcompile.units import format_bytes

FINGERPRINT_DIGITS = 16  # hexadecimal, of each part
OTHERS = 2e-4  # seconds an op of the graph, of a plan that is made, for all but rehearsals


def making_seconds(graph: OpGraph, stage_of: Sequence[int], others: float = 0.0) -> float:
    """Seconds that making a plan takes, with its forecast, by what rehearsing has taken in this
    process: stages of one size mostly are equal, and are rehearsed once.

    Args:
        stage_of: of every item.
        others: seconds that all but rehearsing has taken before.
    """
    unlike = sum(set(Counter(stage_of).values())) / max(len(stage_of), 1)
    rehearsing = rehearsals.each * unlike * len(graph.ops)
    return max(others, OTHERS * len(graph.ops)) + rehearsing


def plan_of_cut(
    graph: OpGraph,
    stage_of: Mapping[str, int],
    ranks: Sequence[tuple[int, ...]],
    training: Training,
    cluster: Cluster,
    *,
    rehearsed: bool = True,
    known: Plan | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan of ops on stages, without a forecast (the simulator adds it) and a certificate.

    Stage s runs on `ranks[s]`, as fast as the slowest of them.  `parameter_bytes` of a stage
    includes buffers and constants, which never train.

    Args:
        rehearsed: False leaves out what only rehearsals tell, bytes of a microbatch on a stage, of
            which there are none then.
        known: a plan that has these bytes, if this version found them for the same stages.

    Raises:
        PlanError: an op is on an earlier stage than something it reads.
    """
    last = len(ranks) - 1
    b = next((op.cost.microbatch_size for op in graph.ops if op.cost), graph.batch_size)
    edges = boundaries.edges(graph, stage_of, len(ranks), b)
    tied = boundaries.tied(graph, stage_of)
    given = given_by(training, graph, stage_of, len(ranks))
    kernels = Kernels.of_all(one.kind for one in cluster.devices)
    held: list[Rehearsal] = []
    resident: Sequence[Resident | StagePlan] = [Resident(0, 0)] * len(ranks)
    if rehearsed:
        placed = [stage_of.get(op.name, last) for op in given.ops]  # of what was not planned, last
        held = rehearsals_of(
            given, placed, len(ranks), b, keeps_outputs=training.keeps_outputs,
            backwards=training.kind.backwards, kernels=kernels,
        )  # fmt: skip
        if known is not None and known.rehearsed == _digest(held, known.stages):
            resident = known.stages
        else:
            resident = residents(given, b, held, progress)
    ops: list[list[Op]] = [[] for _ in ranks]
    for op in graph.ops:
        ops[stage_of[op.name]].append(op)
    trained = _trained(given, ops, tied)
    updated = _updated(trained, ranks, training)
    stages = tuple(
        _at_speed(
            _stage(given, s, ops[s], own, resident[s], updated[s], training, b if s == last else 0),
            min(cluster.devices[rank].speed for rank in own),
            sum_seconds(given, trained[s], cluster.parts),
        )
        for s, own in enumerate(ranks)
    )
    return Plan(
        fingerprint=fingerprint(graph, cluster),
        stages=stages,
        edges=edges,
        tied=tied,
        training=training,
        cluster=cluster.to_toml(),
        certificate=NOT_CERTIFIED,
        notes=(
            *graph.notes,
            *_notes_on_written_inputs(graph),
            *note_on_left_out(training, given),
            *(_notes_on_whole_backwards(ops) if training.kind.splits_backward else ()),
            *filter(None, (kernels.note(),)),
        ),
        model=graph.model,
        rehearsed=_digest(held, stages) if rehearsed else "",
    )


#: bytes of one microbatch on a stage that only its rehearsal tells, by their names in plans
_HELD = tuple(one.name for one in fields(StagePlan) if hasattr(Resident, one.name))


def _digest(held: Sequence[Rehearsal], stages: Sequence[StagePlan]) -> str:
    """Digest of these bytes and of all that decides them: only a plan of this model, torch and
    version, whose bytes nobody has edited, has the same."""
    parts = [pdcompile.__version__, torch.__version__, *(one.key for one in held)]
    parts += [str([getattr(stage, name) for name in _HELD]) for stage in stages]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:FINGERPRINT_DIGITS]


def _notes_on_whole_backwards(ops: Sequence[Sequence[Op]]) -> Iterator[str]:
    """Notes on stages that run their backward in one part, though the schedule splits it."""
    for stage, held in enumerate(ops):
        opaque = next((op for op in held if op.kind == "opaque"), None)
        if opaque is not None:
            yield (
                f"stage {stage} does not split its backward, and is later than forecast: nobody "
                f"knows what the opaque module {opaque.module_path!r} hangs onto autograd's graph"
            )


def notes_on_own_buffers(plan: Plan, graph: OpGraph) -> Iterator[str]:
    """Notes on replicas that train with buffers of their own: gradients that depend on these are
    then not those of accumulation."""
    ops = {op.name: op for op in graph.ops}
    for stage in plan.stages:
        written = sorted(written_buffers(ops[name] for name in stage.ops))
        if stage.replicas > 1 and written:
            shown = ", ".join(map(repr, written[:3])) + (", …" if written[3:] else "")
            yield (
                f"the {stage.replicas} replicas of stage {stage.index} each write buffers of their "
                f"own in training ({shown}), from the microbatches that they take: training that "
                "reads them is not that of accumulation; states and evaluation have their mean, "
                "or the first replica's where they are no floating numbers"
            )


def _notes_on_written_inputs(graph: OpGraph) -> list[str]:
    """A note for each input that forward writes: the caller's tensors stay as they are."""
    return [
        f"forward writes its input {path!r} in place ({op.source}); stages write copies, so that "
        "the caller's tensor keeps its values, unlike in eager"
        for path, op in graph.written_inputs().items()
    ]


def fingerprint(graph: OpGraph, cluster: Cluster) -> str:
    """Digests of the graph, costs and cluster that a plan was made for, joined by dots.

    The parts are apart because a plan stays valid for a model whose costs were measured again.
    """
    costs = jsonio.canonical([op.cost for op in graph.ops])
    parts = (
        graph_fingerprint(graph),
        hashlib.sha256(costs).hexdigest(),
        hashlib.sha256(cluster.to_toml().encode()).hexdigest(),
    )
    return ".".join(part[:FINGERPRINT_DIGITS] for part in parts)


def _stage(
    graph: OpGraph,
    index: int,
    ops: list[Op],
    ranks: tuple[int, ...],
    resident: Resident | StagePlan,
    updated: Sequence[Sequence[int]],
    training: Training,
    b: int,
) -> StagePlan:
    """One stage, on ranks of speed 1.

    Args:
        updated: bytes of the parameters that each home updates; of one, where each replica does.
        b: the size of a microbatch on the last stage, which has the outputs; 0 on others.
    """
    costs = [op.cost or OpCost() for op in ops]
    tensors = [graph.tensors[fqn] for fqn in sorted({fqn for op in ops for fqn in op.used_tensors})]
    parameters = {info.fqn: info for info in tensors if info.kind == "parameter"}
    trainable = {fqn: info for fqn, info in parameters.items() if info.requires_grad}
    input_bytes, output_bytes = _caller_bytes(graph, ops, training, b)
    home_bytes = tuple(map(sum, updated))
    versions = training.kind.stream
    found = StagePlan(
        index=index,
        ops=tuple(op.name for op in ops),
        parameters=tuple(parameters),
        ranks=ranks,
        forward_seconds=sum(cost.forward_seconds for cost in costs),
        backward_seconds=sum(cost.backward_seconds for cost in costs),
        parameter_bytes=sum(info.bytes for info in tensors),
        trainable_bytes=sum(info.bytes for info in trainable.values()),
        largest_gradient_bytes=max((one.bytes for one in tensors if one.requires_grad), default=0),
        step_bytes=max(map(training.step_bytes, updated)),
        update_seconds=training.update_seconds(max(home_bytes), versions=versions),
        replicas=len(ranks),
        home_bytes=home_bytes if len(home_bytes) > 1 else (),
        input_bytes=input_bytes,
        output_bytes=output_bytes,
    )
    return replace(found, **{name: getattr(resident, name) for name in _HELD})


def _trained(
    graph: OpGraph, ops: Sequence[Sequence[Op]], tied: Sequence[TiedParameter]
) -> list[dict[str, int]]:
    """Bytes of the parameters that each stage updates, in the optimizer's order."""
    sizes = []
    for s, held in enumerate(ops):
        used = {fqn for op in held for fqn in op.used_tensors}
        used -= {one.fqn for one in tied if s in one.stages[1:]}  # which an earlier stage updates
        infos = [one for fqn, one in graph.tensors.items() if fqn in used]
        trained = [one for one in infos if one.kind == "parameter" and one.requires_grad]
        sizes.append({one.fqn: one.bytes for one in trained})
    return sizes


def _updated(
    sizes: Sequence[Mapping[str, int]], ranks: Sequence[Sequence[int]], training: Training
) -> list[list[list[int]]]:
    """Bytes of the parameters that are updated, by stage and home, in the optimizer's order."""
    found = []
    updating = ranks if training.updates == "home" else [own[:1] for own in ranks]
    homes = balanced_homes(updating, sizes)
    for own, of in zip(updating, sizes, strict=True):
        each: list[list[int]] = [[] for _ in own]
        for fqn, size in of.items():
            each[homes[fqn]].append(size)
        found.append(each)
    return found


def sum_seconds(graph: OpGraph, fqns: Iterable[str], link: Level | None) -> float:
    """Seconds of an update in which parts sum gradients: those of the parameters, of these, that
    each has whole, one after the other."""
    sizes = [graph.tensors[fqn].bytes for fqn in graph.summed.intersection(fqns)]
    return sum(ring_seconds(link, size, link.size) for size in sizes) if link else 0.0


def _at_speed(stage: StagePlan, speed: float, summing: float) -> StagePlan:
    """A stage of speed 1 on ranks of another one, whose parts sum gradients for so long."""
    return replace(
        stage,
        forward_seconds=stage.forward_seconds / speed,
        backward_seconds=stage.backward_seconds / speed,
        update_seconds=stage.update_seconds / speed + summing,
    )


def _caller_bytes(graph: OpGraph, ops: Sequence[Op], training: Training, b: int) -> tuple[int, int]:
    """Bytes that a stage reads of the caller's minibatch, and returns to it of a microbatch."""
    beside = [op for op in graph.ops if op.aside] if b else []
    read = {name for op in (*ops, *beside) for name in op.inputs}
    given = [one for name, one in graph.values.items() if name in read and one.producer is None]
    outputs = {ref.name for ref in walk(graph.output, Ref)} if training.keeps_outputs else set()
    values = [graph.values[name] for name in outputs] if b else []
    return (
        sum(one.bytes(training.batch_size) for one in given if one.is_tensor),
        sum(one.bytes(b) for one in values if one.producer is not None),
    )


_OWN_BYTES = ("saved_bytes", "workspace_bytes", "input_bytes", "output_bytes", "split_bytes",
              "split_workspace_bytes", "split_freed_bytes", "largest_gradient_bytes")  # fmt: skip


def with_own_bytes(plan: Plan, graph: OpGraph, progress: Progress | None = None) -> Plan:
    """The plan with the bytes that its stages keep, read and return, whatever it says of them.

    Stages are rehearsed for that, unless the plan has what this version found when it made it.  A
    note tells where it said less.  Sums over parameters are compared by `check_plan` instead.
    """
    stage_of = {op.name: plan.stage_of.get(op.name, len(plan.stages) - 1) for op in graph.ops}
    made = plan_of_cut(
        graph, stage_of, plan.ranks, plan.training, plan.machines, known=plan,
        progress=progress,
    )  # fmt: skip
    notes = list(plan.notes)
    for stage, own in zip(plan.stages, made.stages, strict=True):
        for name in _OWN_BYTES:
            said, found = getattr(stage, name), getattr(own, name)
            if said < found:
                notes.append(
                    f"stages[{stage.index}].{name} of the given plan is {format_bytes(said)}, its "
                    f"ops make it {format_bytes(found)}: that is what memory is forecast with"
                )
    stages = (
        replace(stage, **{name: getattr(own, name) for name in {*_HELD, *_OWN_BYTES}})
        for stage, own in zip(plan.stages, made.stages, strict=True)
    )
    return replace(plan, stages=tuple(stages), notes=tuple(notes))
