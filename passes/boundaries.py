"""What crosses the boundaries between stages, and what every stage takes, returns and holds.

A plan says which op runs where; everything else about a boundary follows from the data flow
and is computed here, once, for the planner (edges, tied parameters), the code generator and
the runtime (interfaces).  Reaching a graph input costs nothing: the caller hands it to every
stage that uses it.  Everything else that an op on a later stage reads is an edge, sent directly
from the stage that makes it, however many stages lie between.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdcompile.errors import PlanError
from pdcompile.graph import Affine, Capture, Op, OpGraph, Ref, Value, walk
from pdcompile.passes.held import held_tensors, stage_names
from pdcompile.plan import Edge, Plan, TiedParameter
from pdcompile.stage import Port, Signature, StageInterface


def stage_of_ops(graph: OpGraph, plan: Plan) -> dict[str, int]:
    """The stage of every op of the train graph; ops of the loss belong to the last stage.

    Raises PlanError when an op of the model has no stage or two.
    """
    last = len(plan.stages) - 1
    placed: dict[str, int] = {}
    for stage in plan.stages:
        for name in stage.ops:
            if placed.setdefault(name, stage.index) != stage.index:
                raise PlanError(
                    f"op {name!r} is on stage {placed[name]} and on stage {stage.index}",
                    where=f"plan: stages[{stage.index}].ops",
                    remedy="leave it in one of the two",
                )
    for op in graph.ops:
        if op.region == "loss":
            placed[op.name] = last
        elif op.name not in placed:
            raise PlanError(
                f"op {op.name!r} ({op.source}) is on no stage",
                where="plan: stages",
                remedy="add it to the ops of one stage, or plan again for this model",
            )
    return {op.name: placed[op.name] for op in graph.ops}


def place_eval(capture: Capture, train_stage_of: Mapping[str, int]) -> dict[str, int]:
    """The stage of every op of the eval graph, given that of the train graph's ops.

    Ops are matched by (module path, call index, target).  One that only eval has goes where its
    nearest predecessor in the same module is, as far as its producers and consumers allow.
    Finally no op stays on an earlier stage than something it reads.
    """
    graph = capture.eval
    last = max(train_stage_of.values(), default=0)
    matched = {_key(op): train_stage_of[op.name] for op in capture.train.ops}
    fixed = {op.name: matched[_key(op)] for op in graph.ops if _key(op) in matched}
    latest: dict[str, int] = {}  # no later than its matched consumers, through unmatched ones
    for op in reversed(graph.ops):
        limit = min(fixed.get(op.name, last), latest.get(op.name, last))
        for name in op.inputs:
            latest[name] = min(latest.get(name, last), limit)

    placed: dict[str, int] = {}
    nearest: dict[str, int] = {}  # module path -> stage of its latest op
    previous = 0
    for op in graph.ops:
        earliest = max((placed[name] for name in op.inputs if name in placed), default=0)
        stage = fixed.get(op.name)
        if stage is None:
            stage = min(nearest.get(op.module_path, previous), latest.get(op.name, last))
        stage = last if op.region == "loss" else max(stage, earliest)
        if any(not graph.values[name].is_tensor for name in op.inputs):
            stage = earliest  # a container is taken apart where it is made
        placed[op.name] = nearest[op.module_path] = previous = stage
    return placed


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


def tied(graph: OpGraph, stage_of: Mapping[str, int]) -> tuple[TiedParameter, ...]:
    """Trainable parameters that ops on several stages read, in the order of the model."""
    readers: dict[str, set[int]] = {}
    for op in graph.ops:
        for fqn in (*op.parameters, *op.attributes):
            readers.setdefault(fqn, set()).add(stage_of[op.name])
    return tuple(
        TiedParameter(fqn, tuple(sorted(readers[fqn])), info.bytes)
        for fqn, info in graph.tensors.items()
        if info.kind == "parameter" and info.requires_grad and len(readers.get(fqn, ())) > 1
    )


def interfaces(capture: Capture, plan: Plan) -> tuple[StageInterface, ...]:
    """Arguments, results and tensors of every stage, for training and for evaluation.

    Arguments are first the values of earlier stages in the order of production, then the leaves
    of the call in its order; results are in the order of production, on the last stage in that
    of the model's output.  Raises PlanError when evaluation would read, on one stage, a tensor
    that training changes on another only.
    """
    num_stages = len(plan.stages)
    train_stage_of = stage_of_ops(capture.train, plan)
    eval_stage_of = place_eval(capture, train_stage_of)
    modes = ((capture.train, train_stage_of), (capture.eval, eval_stage_of))
    held = held_tensors(capture, plan, train_stage_of, eval_stage_of)
    names = stage_names(capture, held, train_stage_of, eval_stage_of)
    found = []
    for k in range(num_stages):
        train, evaluation = (_signature(graph, of, k, num_stages) for graph, of in modes)
        tensors = {
            fqn: capture.train.tensors.get(fqn) or capture.eval.tensors[fqn] for fqn in held[k]
        }
        by_kind = {
            kind: tuple(fqn for fqn, info in tensors.items() if info.kind == kind)
            for kind in ("parameter", "buffer", "constant")
        }
        found.append(
            StageInterface(
                index=k,
                train=train,
                eval=evaluation,
                parameters=by_kind["parameter"],
                buffers=by_kind["buffer"],
                constants=by_kind["constant"],
                aliases={name: fqn for name, fqn in names[k].items() if name != fqn},
            )
        )
    return tuple(found)


def identifier(text: str, fallback: str = "value") -> str:
    """A Python identifier that looks like `text`; never a keyword, never dunder."""
    word = re.sub(r"[^0-9a-zA-Z_]+", "_", text).strip("_")[:40].strip("_")
    if not word or word[0].isdigit():
        word = f"{fallback}_{word}" if word else fallback
    return f"{word}_" if keyword.iskeyword(word) or keyword.issoftkeyword(word) else word


# What generated source refers to by these names; no variable may hide them.
RESERVED = frozenset(
    ("self", "torch", "nn", "F", "math", "operator", "draw", "super")
    + ("range", "float", "int", "getattr", "setattr", "print")
)


def unique(wish: str, taken: Iterable[str]) -> str:
    """`wish`, or the first of wish_1, wish_2, … that is neither taken nor reserved."""
    used = {*taken, *RESERVED}
    name, count = wish, 0
    while name in used:
        count += 1
        name = f"{wish}_{count}"
    return name


def value_name(graph: OpGraph, name: str) -> str:
    """The variable that a reader of the model would expect for a value."""
    for item in graph.inputs:
        if item.name == name:
            return identifier(item.path, "input")
    op = next(op for op in graph.ops if op.name == name)
    return identifier(op.variable or op.name)


def _key(op: Op) -> tuple[str, int, str, str]:
    return op.module_path, op.call_index, op.target, op.region


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
    """Whether the loss depends on the value through an op on another stage than its own."""
    if value.name == graph.loss:
        return True  # made on an earlier stage: backward starts from it on the last one
    source = stage_of[value.name]
    for op in graph.ops:
        if stage_of[op.name] != source and value.name in op.inputs:
            written = (*op.outputs, *op.mutates)
            if any(graph.values[name].needs_gradient for name in written if name in graph.values):
                return True
    return False


@dataclass(slots=True)
class _Names:
    """Names of one stage's ports; a result may take the name of an argument that is dead."""

    graph: OpGraph
    ops: list[Op]

    def inputs(self, values: list[str]) -> dict[str, str]:
        named: dict[str, str] = {}
        for value in values:
            named[value] = unique(value_name(self.graph, value), named.values())
        return named

    def outputs(self, values: list[str], inputs: Mapping[str, str]) -> dict[str, str]:
        position = {op.name: i for i, op in enumerate(self.ops)}
        last_use = {name: i for i, op in enumerate(self.ops) for name in op.inputs}
        named: dict[str, str] = {value: inputs[value] for value in values if value in inputs}
        for value in values:
            if value in named:
                continue
            alive = [
                name for other, name in inputs.items() if last_use.get(other, -1) > position[value]
            ]
            named[value] = unique(value_name(self.graph, value), [*named.values(), *alive])
        return named


def _signature(graph: OpGraph, stage_of: Mapping[str, int], k: int, num_stages: int) -> Signature:
    last = k == num_stages - 1
    everything = [op for op in graph.ops if stage_of[op.name] == k]
    ops = [op for op in everything if op.region == "forward"]
    results = (
        list(dict.fromkeys(ref.name for ref in walk(graph.output, Ref)))
        if last
        else [edge.value for edge in edges(graph, stage_of, num_stages, 1) if edge.source == k]
    )
    made = {op.name for op in ops}
    used = dict.fromkeys(name for op in ops for name in op.inputs)
    needed = {name for name in (*used, *results) if name not in made}
    received = [op.name for op in graph.ops if op.name in needed]
    received += [item.name for item in graph.inputs if item.name in needed]
    received += _size_carrier(graph, ops, received)
    names = _Names(graph, ops)
    inputs = names.inputs(received)
    outputs = names.outputs(results, inputs)
    loss_ops = [op for op in everything if op.region == "loss"]
    loss_made = {op.name for op in loss_ops}
    loss_used = {name for op in loss_ops for name in op.inputs if name not in loss_made}
    loss_values = [name for name in results if name in loss_used]
    loss_values += [i.name for i in graph.inputs if i.name in loss_used and i.name not in results]
    strange = loss_used - set(loss_values)
    if strange:
        raise PlanError(
            f"the loss reads {sorted(strange)}, which the model does not return",
            where=loss_ops[0].source,
            remedy="return from forward what loss_fn needs",
        )
    draws: dict[str, tuple[int, ...]] = {}
    for op in ops:
        if op.draw is not None and op.kind in ("module", "opaque"):
            draws[op.module_path] = (*draws.get(op.module_path, ()), op.draw)
    mutated = {graph.values[name].storage for op in ops for name in op.mutates} - {-1}
    mutated_names = {name for op in ops for name in op.mutates}

    def port(value: str, name: str, *, entering: bool) -> Port:
        info = graph.values[value]
        source = next((item for item in graph.inputs if item.name == value), None)
        affine = (i for i, size in enumerate(info.shape) if isinstance(size, Affine))
        return Port(
            name=name,
            value=value,
            path=source.path if source else None,
            shape=info.shape,
            dtype=info.dtype,
            requires_grad=info.requires_grad,
            needs_gradient=info.needs_gradient,
            batch_dim=source.batch_dim if source else next(affine, None),
            mutated=entering and (info.storage in mutated or value in mutated_names),
            stride_order=info.stride_order,
        )

    loss_names = names.inputs(loss_values)
    return Signature(
        inputs=tuple(port(value, inputs[value], entering=True) for value in received),
        outputs=tuple(port(value, outputs[value], entering=False) for value in results),
        loss_inputs=tuple(port(v, loss_names[v], entering=False) for v in loss_values),
        loss=graph.loss if last else None,
        draws=draws,
    )


def _size_carrier(graph: OpGraph, ops: list[Op], received: list[str]) -> list[str]:
    """One input to learn the microbatch size from, when ops need it and nothing else tells."""
    if not any(walk((op.args, op.kwargs), Affine) for op in ops):
        return []
    known = (*received, *(op.name for op in ops))
    if any(isinstance(size, Affine) for name in known for size in graph.values[name].shape):
        return []
    for item in graph.inputs:
        if any(isinstance(size, Affine) for size in graph.values[item.name].shape):
            return [item.name]
    return []
