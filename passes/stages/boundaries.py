"""Derives the values that cross between stages, and what every stage takes, returns and holds.

A plan says which op runs where; everything else about a boundary follows from the data flow
and is computed here, once, for the planner (edges, tied parameters), the code generator and
the runtime (interfaces).  Reaching a graph input costs nothing: the caller hands it to every
stage that uses it.  Everything else that an op on a later stage reads is an edge, sent directly
from the stage that makes it, however many stages lie between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pdcompile.errors import PlanError
from pdcompile.ir.graph import DTYPE_BYTES, Capture, Op, OpGraph, Ref, Value, walk
from pdcompile.ir.stage_interface import StageInterface
from pdcompile.passes.stages.held_tensors import all_tensors, held_tensors, stage_names, users
from pdcompile.passes.stages.kept_outputs import given_by, planned
from pdcompile.passes.stages.signatures import Mode, signature
from pdcompile.plan import Edge, Plan, TiedParameter, TiedUses
from pdcompile.releases.torch_internals import CONSTRUCTORS


def stage_of_ops(graph: OpGraph, plan: Plan) -> dict[str, int]:
    """The stage of every op of a graph that the plan is of, or another form of it: ops of the loss
    belong to the last stage, and those that only outputs need; one that the plan does not know to
    that of its first reader."""
    last, found = len(plan.stages) - 1, dict[str, int]()
    for op in reversed(graph.ops):
        readers = [found[name] for name in graph.values[op.name].consumers if name in found]
        known = plan.stage_of.get(op.name, min(readers, default=last))
        found[op.name] = last if op.region == "loss" or op.aside else known
    return {op.name: found[op.name] for op in graph.ops}


def making_of_nothing(graph: OpGraph, stage_of: Mapping[str, int]) -> set[int]:
    """Stages with ops that may make tensors of nothing (`torch.arange(n)`).

    Where they are made depends on what torch was told, in a way that it asks for at every call of
    every function.
    """
    return {stage_of[op.name] for op in graph.ops if _may_make(op)}


def _may_make(op: Op) -> bool:
    """Code of the user may; a constructor does even where a tensor says how much (`torch.full`),
    unless the call says on which device."""
    if op.opaque or op.target.endswith(".apply"):
        return True
    if op.target.startswith("torch.ops.") and not op.target.startswith("torch.ops.aten."):
        return True
    name = op.target.rpartition(".")[2]
    if dict(op.kwargs).get("device") is not None:
        return False
    return op.kind == "function" and (name in CONSTRUCTORS or not (op.inputs or op.attributes))


def place_eval(capture: Capture, train_stage_of: Mapping[str, int]) -> dict[str, int]:
    """The stage of every op of the eval graph, given that of the train graph's ops.

    Ops are matched by module, target, line of source, tensors of the model, and how many like
    it came before.  One that only eval has goes where its nearest predecessor in the same module
    is, as far as its producers and consumers allow, and where training has the tensors that it
    reads; to the last stage if only outputs need it and its value cannot be sent.  Finally no op
    stays on an earlier stage than something it reads, and what in-place writes join is together.
    """
    graph = capture.eval
    last = max(train_stage_of.values(), default=0)
    twins = dict(zip(_keys(capture.train), capture.train.ops, strict=True))
    fixed = {
        op.name: train_stage_of[twins[key].name]
        for op, key in zip(graph.ops, _keys(graph), strict=True)
        if key in twins
    }
    holders = users(capture.train, train_stage_of)  # of what training may change
    latest: dict[str, int] = {}  # no later than its matched consumers, through unmatched ones
    for op in reversed(graph.ops):
        limit = min(fixed.get(op.name, last), latest.get(op.name, last))
        for name in op.inputs:
            latest[name] = min(latest.get(name, last), limit)

    held_last = _unsendable_outputs(graph, fixed)
    placed: dict[str, int] = {}
    nearest: dict[str, int] = {}  # module path -> stage of its latest op
    previous = 0
    for op in graph.ops:
        earliest = max((placed[name] for name in op.inputs if name in placed), default=0)
        stage = fixed.get(op.name)
        if stage is None:
            near = last if op.name in held_last else nearest.get(op.module_path, previous)
            stage = min(near, latest.get(op.name, last))
            having = [holders[fqn] for fqn in op.used_tensors if fqn in holders]
            shared = set.intersection(*having) if having else {stage}
            if stage not in shared:
                stage = min((k for k in shared if k >= earliest), default=stage)
        stage = last if op.region == "loss" else max(stage, earliest)
        if any(not graph.values[name].is_tensor for name in op.inputs):
            stage = earliest  # a container is taken apart where it is made
        placed[op.name] = nearest[op.module_path] = previous = stage
    return _together(graph, placed)


def _unsendable_outputs(graph: OpGraph, fixed: Mapping[str, int]) -> set[str]:
    """Ops that only outputs need, not among those with a stage, whose values cannot be sent."""
    aside: set[str] = set()
    for op in reversed(graph.ops):
        if op.name not in fixed and aside.issuperset(graph.values[op.name].consumers):
            aside.add(op.name)
    values = map(graph.values.__getitem__, aside)
    return {value.name for value in values if value.varies or value.dtype not in DTYPE_BYTES}


def _together(graph: OpGraph, placed: dict[str, int]) -> dict[str, int]:
    """Moves ops of evaluation that have to share a stage to the last of their stages.

    Ops that read from them follow.  The planner keeps such ops of training together; in-place
    writes, and numbers that are read off tensors, may be in evaluation alone.
    """
    spans = [
        (value.producer, *value.consumers)
        for value in graph.values.values()
        if value.producer is not None and value.consumers and not value.is_tensor
    ]
    writes = list(_writes(graph))
    while spans or writes:
        before = dict(placed)
        for span in (*spans, *_stale(writes, placed)):
            placed.update(dict.fromkeys(span, max(placed[name] for name in span)))
        for op in graph.ops:
            placed[op.name] = max(placed[name] for name in (op.name, *op.inputs) if name in placed)
        if placed == before:
            break
    return placed


_Write = tuple[str | None, str, list[str], list[str], bool]


def _writes(graph: OpGraph) -> Iterator[_Write]:
    """Yields each value and each op that writes into its memory later: the value's producer, the
    op, readers before and after it, and whether the model returns the value."""
    returned = {ref.name for ref in walk(graph.output, Ref)}
    position = {op.name: i for i, op in enumerate(graph.ops)}
    writers: dict[int, list[str]] = {}  # storage -> ops, in order
    for op in graph.ops:
        for storage in {graph.values[name].storage for name in op.mutates}:
            writers.setdefault(storage, []).append(op.name)
    for value in graph.values.values():
        made = -1 if value.producer is None else position[value.producer]
        for writer in writers.get(value.storage, ()):
            at = position[writer]
            if at > made:
                readers = [name for name in value.consumers if name != writer]
                earlier = [name for name in readers if position[name] < at]
                later = [name for name in readers if position[name] > at]
                yield value.producer, writer, earlier, later, value.name in returned


def _stale(writes: list[_Write], placed: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yields groups of ops that have to share a stage because one of them writes in place.

    A stage sends a value as it is at its end.  So readers after a write may be anywhere if the
    stage that makes the value writes it, and readers before it may not.  Inputs of the model each
    stage takes from the caller.
    """
    for producer, writer, earlier, later, returned in writes:
        if producer is None:
            yield (writer, *earlier, *later)
        elif later or returned:
            yield (producer, writer)
        if producer is not None and placed[producer] == placed[writer]:
            yield (producer, writer, *(r for r in earlier if placed[r] > placed[writer]))


def edges(graph: OpGraph, stage_of: Mapping[str, int], num_stages: int, b: int) -> tuple[Edge, ...]:
    """Every value that a later stage needs, in the order in which values are produced.

    The model's output leaves are needed on the last stage.  `b` is the microbatch size that
    `Edge.bytes` is for.  A gradient flows back along an edge when the loss depends on the value
    *through one of the receiving stages*.  Raises PlanError for an op that is on an earlier
    stage than something it reads, and for a container that would have to be sent.
    """
    last = num_stages - 1
    ops = {op.name: op for op in graph.ops}
    wanted: dict[str, set[int]] = {op.name: set() for op in graph.ops}
    for op in graph.ops:
        for name in op.inputs:
            if name in wanted:
                _check_order(ops[name], op, stage_of)
                wanted[name].add(stage_of[op.name])
    for ref in walk(graph.output, Ref):
        if ref.name in wanted:
            wanted[ref.name].add(last)
    found = []
    for op in graph.ops:
        source = stage_of[op.name]
        targets = tuple(sorted(wanted[op.name] - {source}))
        if not targets:
            continue
        value = graph.values[op.name]
        if not value.is_tensor:
            raise PlanError(
                f"{op.name!r} ({op.target} at {op.source}) makes a container that stage "
                f"{targets[0]} reads, and only tensors can be sent",
                where=f"plan: stages[{source}].ops",
                remedy=f"put {op.name!r} and the ops that take it apart on one stage",
            )
        found.append(
            Edge(
                value=op.name,
                source=source,
                targets=targets,
                bytes=value.bytes(b),
                gradient=value.needs_gradient and _gradient_returns(graph, value, ops, stage_of),
                shape=tuple(str(size) for size in value.shape),
                dtype=value.dtype,
            )
        )
    return tuple(found)


def eval_edges(capture: Capture, plan: Plan, b: int) -> tuple[Edge, ...]:
    """The edges of evaluation, for the stages that a plan gives the train graph."""
    placed = place_eval(capture, stage_of_ops(capture.train, plan))
    return edges(capture.eval, placed, len(plan.stages), b)


def as_planned(capture: Capture, plan: Plan) -> Capture:
    """The capture whose training returns what the plan's steps give, and leaves out the rest."""
    graph = planned(capture.train, plan.training)
    given = given_by(plan.training, graph, stage_of_ops(graph, plan), len(plan.stages))
    return capture if given is capture.train else replace(capture, train=given)


def tied(graph: OpGraph, stage_of: Mapping[str, int]) -> tuple[TiedParameter, ...]:
    """Trainable parameters that ops on several stages read, in the order of the model."""
    uses: dict[str, dict[tuple[str, int], list[int]]] = {}
    for op in graph.ops:
        for fqn in dict.fromkeys((*op.parameters, *op.attributes)):
            calls = uses.setdefault(fqn, {})
            calls.setdefault((op.module_path, op.module_call), []).append(stage_of[op.name])
    found = []
    for fqn, info in graph.tensors.items():
        calls = uses.get(fqn, {}) if info.kind == "parameter" and info.requires_grad else {}
        stages = tuple(sorted({stage for each in calls.values() for stage in each}))
        if len(stages) > 1:
            listed = tuple(TiedUses(*call, tuple(each)) for call, each in calls.items())
            found.append(TiedParameter(fqn, stages, info.bytes, listed))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Staged:
    """A capture on the stages of a plan.

    `names`: for each stage every name under which it has a tensor, mapped to the canonical FQN.
    """

    capture: Capture
    train: Mode
    eval: Mode
    names: tuple[dict[str, str], ...]
    interfaces: tuple[StageInterface, ...]


def staged(capture: Capture, plan: Plan) -> Staged:
    """Arguments, results and tensors of every stage, for training and for evaluation.

    Arguments are first the values of earlier stages in the order of production, then the leaves
    of the call in its order; results are in the order of production, on the last stage in that
    of the model's output.  Raises PlanError when evaluation would read, on one stage, a tensor
    that training changes on another only.
    """
    capture = as_planned(capture, plan)
    count = len(plan.stages)
    train_of = stage_of_ops(capture.train, plan)
    eval_of = place_eval(capture, train_of)
    train, evaluation = (
        Mode(graph, of, count - 1, edges(graph, of, count, graph.batch_size))
        for graph, of in ((capture.train, train_of), (capture.eval, eval_of))
    )
    held = held_tensors(capture, plan, train_of, eval_of)
    names = stage_names(capture, held, train_of, eval_of)
    infos = all_tensors(capture)

    def interface(k: int) -> StageInterface:
        def of(kind: str) -> tuple[str, ...]:
            return tuple(fqn for fqn in held[k] if infos[fqn].kind == kind)

        return StageInterface(
            index=k,
            train=signature(train, k),
            eval=signature(evaluation, k),
            parameters=of("parameter"),
            buffers=of("buffer"),
            constants=of("constant"),
            aliases={name: fqn for name, fqn in names[k].items() if name != fqn},
        )

    return Staged(capture, train, evaluation, names, tuple(map(interface, range(count))))


def _keys(graph: OpGraph) -> list[tuple[Hashable, int]]:
    """A key of each op that is the same in both modes.

    It counts ops that are alike: an index among all ops of a module would differ where one mode
    has more of them.
    """
    seen: Counter[Hashable] = Counter()
    found: list[tuple[Hashable, int]] = []
    for op in graph.ops:
        key = (op.module_path, op.target, op.source, op.used_tensors, op.region)
        found.append((key, seen[key]))
        seen[key] += 1
    return found


def _check_order(producer: Op, consumer: Op, stage_of: Mapping[str, int]) -> None:
    first, second = stage_of[producer.name], stage_of[consumer.name]
    if second < first:
        raise PlanError(
            f"op {consumer.name!r} on stage {second} reads {producer.name!r} of stage {first}",
            where=f"plan: stages[{second}].ops",
            remedy=f"move {consumer.name!r} to stage {first} or later",
        )


def _gradient_returns(
    graph: OpGraph, value: Value, ops: Mapping[str, Op], stage_of: Mapping[str, int]
) -> bool:
    """True if the loss depends on the value through an op on another stage than its own."""
    if value.name == graph.loss:
        return True  # made on an earlier stage: backward starts from it on the last one
    readers = [name for name in value.consumers if stage_of[name] != stage_of[value.name]]
    return any(has_gradient(graph, (name, *ops[name].mutates)) for name in readers)


def has_gradient(graph: OpGraph, names: Iterable[str]) -> bool:
    """True if a gradient comes back to one of these values, or to what is taken out of one."""
    values = [graph.values[name] for name in names if name in graph.values]
    return any(
        one.needs_gradient if one.is_tensor else has_gradient(graph, one.consumers)
        for one in values
    )
