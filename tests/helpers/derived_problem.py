"""Claims of a plan on itself, held against graph and cluster: fingerprint, bytes, its problem.

The embedded problem is what the certificate's bound is about: if it were not that of the graph
and the cluster, the bound would be of something else.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from pdcompile import jsonio
from pdcompile.cluster import Cluster
from pdcompile.eager.summation import summation_order
from pdcompile.errors import PlanError
from pdcompile.ir.graph import OpGraph, Ref, TensorInfo, fingerprint, walk
from pdcompile.plan.embedded import Finding, assignment
from pdcompile.plan.evaluate import Evaluation
from pdcompile.plan.schema import Plan
from pdcompile.problem import OUTPUT_WISH, Item, PartitionProblem, SharedParameter, Traffic, Wish
from pdcompile.problem.deployment import stage_limits
from pdcompile.schedule.registry import DEFAULT, kind_of

AGAIN = "make the plan again for this model and cluster"
CLOSE = 1e-9  # relative, of sums of seconds


def findings(plan: Plan, graph: OpGraph, cluster: Cluster) -> Iterator[Finding]:
    """Claims that graph and cluster do not bear out."""
    yield from _bytes(plan, graph)
    yield from _fingerprint(plan, graph, cluster)
    if plan.problem is not None:
        yield from _items(plan.problem, graph, sized=any(plan.training.step))
        yield from _values(plan.problem, graph)
        yield from _machines(plan, plan.problem, cluster)
        yield from _training(plan, plan.problem)
        yield from _scope(plan.certificate.scope, plan.problem)
        yield from _kept(plan, plan.problem)


def _bytes(plan: Plan, graph: OpGraph) -> Iterator[Finding]:
    ops = {op.name: op for op in graph.ops}
    for s, stage in enumerate(plan.stages):
        held = {fqn for name in stage.ops for fqn in ops[name].used_tensors}
        total = sum(graph.tensors[fqn].bytes for fqn in held)
        if stage.parameter_bytes != total:
            message = f"parameter_bytes is {stage.parameter_bytes}, its ops hold {total}"
            yield f"stages[{s}].parameter_bytes", message, AGAIN


def _fingerprint(plan: Plan, graph: OpGraph, cluster: Cluster) -> Iterator[Finding]:
    parts = plan.fingerprint.split(".")
    given = [("another model", fingerprint(graph))]
    if any(op.cost is not None for op in graph.ops):
        costs = jsonio.canonical([op.cost for op in graph.ops])
        given.append(("other costs", hashlib.sha256(costs).hexdigest()))
    else:
        given.append(("", parts[1] if len(parts) > 1 else ""))
    machines = hashlib.sha256(cluster.to_toml().encode()).hexdigest()
    given.append(("another cluster", machines))
    if len(parts) != len(given):
        yield "fingerprint", f"{plan.fingerprint!r} is not a fingerprint", AGAIN
        return
    for part, (what, digest) in zip(parts, given, strict=True):
        if not part or not digest.startswith(part):
            yield "fingerprint", f"the plan was made for {what}", AGAIN
    if Cluster.from_toml(plan.cluster, where="cluster").to_toml() != cluster.to_toml():
        yield "cluster", "the plan is for another cluster", AGAIN


def _items(problem: PartitionProblem, graph: OpGraph, *, sized: bool) -> Iterator[Finding]:
    """Seconds and bytes of every item are those of its ops.

    `sized`: sizes of single parameters matter, which plans of earlier versions do not know.
    """
    ops = {op.name: op for op in graph.ops}
    if not all(op.cost is not None for op in graph.ops):
        return
    held: dict[int, list[TensorInfo]] = defaultdict(list)
    owners = _owners(problem, graph)
    for fqn, info in graph.tensors.items():
        if len(items := owners.get(fqn, set())) == 1:
            held[min(items)].append(info)
    for i, item in enumerate(problem.items):
        costs = [cost for name in item.ops if (cost := ops[name].cost) is not None]
        own = held[i]
        trained = [one.bytes for one in own if one.kind == "parameter" and one.requires_grad]
        expected = Item(
            item.name,
            item.ops,
            math.fsum(cost.forward_seconds for cost in costs),
            math.fsum(cost.backward_seconds for cost in costs),
            sum(info.bytes for info in own),
            sum(trained),
            sum(cost.saved_bytes for cost in costs),
            max((cost.workspace_bytes for cost in costs), default=0),
        )
        if sized and item.trained_sizes != tuple(trained):
            message = f"{item.trained_sizes}, the ops of {item.name!r} train {tuple(trained)}"
            yield f"problem.items[{i}].trained_sizes", message, AGAIN
        for name in Item.__slots__[2:-1]:
            given, found = getattr(item, name), getattr(expected, name)
            if not math.isclose(given, found, rel_tol=CLOSE, abs_tol=1e-300):
                message = f"{name} is {given!r}, the ops of {item.name!r} make it {found!r}"
                yield f"problem.items[{i}].{name}", message, AGAIN


def _owners(problem: PartitionProblem, graph: OpGraph) -> dict[str, set[int]]:
    item_of = {name: i for i, item in enumerate(problem.items) for name in item.ops}
    owners: dict[str, set[int]] = defaultdict(set)
    for op in graph.ops:
        for fqn in op.used_tensors:
            owners[fqn].add(item_of[op.name])
    return owners


def _values(problem: PartitionProblem, graph: OpGraph) -> Iterator[Finding]:
    """Values that pass between items, and that several of them hold."""
    item_of = {name: i for i, item in enumerate(problem.items) for name in item.ops}
    b = next((op.cost.microbatch_size for op in graph.ops if op.cost), graph.batch_size)
    returned = {ref.name for ref in walk(graph.output, Ref)}
    # The model's output is consumed by the item that the coarsener pins to the last stage.
    last = len(problem.stages) - 1
    ends = [i for i, s in problem.pins if s == last]
    traffic = {}
    for op in graph.ops:
        value = graph.values[op.name]
        readers = {item_of[name] for name in value.consumers} - {item_of[op.name]}
        size = value.bytes(b)
        traffic[op.name] = (
            item_of[op.name],
            readers,
            size,
            size if value.needs_gradient else 0,
        )
    seen = set()
    for t, given in enumerate(problem.traffic):
        path = f"problem.traffic[{t}]"
        name = given.value
        if name not in traffic or name in seen:
            yield path, f"{name!r} is not a value of the graph, or twice", AGAIN
            continue
        seen.add(name)
        if not _same(given, traffic[name], ends if name in returned else []):
            yield path, f"{name!r} is not what the graph makes of it", AGAIN
    for name, (producer, readers, _, _) in traffic.items():
        if readers and name not in seen:
            message = f"{name!r} goes from item {producer} to {sorted(readers)} and is not listed"
            yield "problem.traffic", message, AGAIN
    pairs = {(item_of[a], item_of[b]) for a, b, _ in summation_order(graph)}
    if set(problem.order) != {(a, b) for a, b in pairs if a != b}:
        yield "problem.order", "this is not the order in which gradients are summed", AGAIN
    shared = {
        fqn: SharedParameter(
            fqn,
            graph.tensors[fqn].bytes,
            graph.tensors[fqn].kind == "parameter" and graph.tensors[fqn].requires_grad,
            tuple(sorted(items)),
        )
        for fqn, items in _owners(problem, graph).items()
        if len(items) > 1
    }
    if shared != {parameter.fqn: parameter for parameter in problem.shared} or len(shared) != len(
        problem.shared
    ):
        yield "problem.shared", "these are not the tensors that several items hold", AGAIN


def _same(value: Traffic, found: tuple[int, set[int], int, int], ends: list[int]) -> bool:
    producer, readers, forward, backward = found
    more = set(value.consumers) - readers
    return (
        value.producer == producer
        and readers <= set(value.consumers)
        and len(set(value.consumers)) == len(value.consumers)
        and len(more) <= 1
        and more <= set(ends)
        and (value.forward_bytes, value.backward_bytes) == (forward, backward)
    )


def _machines(plan: Plan, problem: PartitionProblem, cluster: Cluster) -> Iterator[Finding]:
    """Stages are positions on the cluster; memory limits may have been lowered."""
    if _replicated(plan) or len(problem.stages) != len(plan.stages):
        return
    if any(stage.ranks and stage.ranks != (s,) for s, stage in enumerate(plan.stages)):
        return  # other positions than the planner's: the objective is checked, the bound is not
    for s, (given, found) in enumerate(
        zip(problem.stages, stage_limits(cluster, range(len(plan.stages))), strict=True)
    ):
        path = f"problem.stages[{s}]"
        if replace(given, memory_bytes=None) != replace(found, memory_bytes=None):
            yield path, f"is not what position {s} of the cluster offers", AGAIN
        if found.memory_bytes is not None and not (
            given.memory_bytes is not None and given.memory_bytes <= found.memory_bytes
        ):
            message = f"{given.memory_bytes} of the device's {found.memory_bytes} bytes"
            yield f"{path}.memory_bytes", message, AGAIN


def _training(plan: Plan, problem: PartitionProblem) -> Iterator[Finding]:
    training = plan.training
    kind = kind_of(training.schedule)
    if problem.objective != kind.objective:
        message = f"{problem.objective!r} is not what {kind.name!r} minimises"
        yield "problem.objective", message, AGAIN
    if problem.num_microbatches != training.num_microbatches:
        message = f"{problem.num_microbatches}, and the plan has {training.num_microbatches}"
        yield "problem.num_microbatches", message, AGAIN
    for s in range(len(problem.stages)):
        factor = problem.holding(s).optimizer_factor
        if factor != training.optimizer_factor:
            message = f"{factor!r}, the plan has {training.optimizer_factor!r}"
            yield f"problem.holdings[{s}].optimizer_factor", message, AGAIN
    straight = not _replicated(plan) and len(problem.stages) == len(plan.stages)
    order = problem.schedule
    if order != training.schedule and (straight or order != DEFAULT):
        yield "problem.schedule", f"{order!r}, the plan has {training.schedule!r}", AGAIN
    if not straight:
        return
    last = len(plan.stages) - 1
    depths = training.warmup or [last - s for s in range(last + 1)]
    most = training.num_microbatches
    expected = tuple(kind.in_flight(depth, most) for depth in depths)
    if problem.in_flight != expected:
        message = f"{problem.in_flight}, and warm-up {tuple(depths)} means {expected}"
        yield "problem.in_flight", message, AGAIN


def _scope(scope: str, problem: PartitionProblem) -> Iterator[Finding]:
    """The scope says what was kept together and what was asked for."""
    path, ops = "certificate.scope", sum(len(item.ops) for item in problem.items)
    said = re.search(r"(\d+) groups of the (\d+) ops", scope)
    if said is None and any(len(item.ops) > 1 for item in problem.items):
        yield path, f"says nothing of the {len(problem.items)} groups of the {ops} ops", AGAIN
    if said is not None and said.groups() != (str(len(problem.items)), str(ops)):
        yield path, f"{said.group()}, and the problem has {len(problem.items)} of {ops}", AGAIN
    for wish in problem.wishes:
        own = wish == Wish(OUTPUT_WISH, pins=wish.pins[:1])
        if wish.text not in scope and not own:
            yield path, f"does not say that it holds under {wish.text}", AGAIN
    for name in ("pins", "together", "apart"):
        asked = {entry for wish in problem.wishes for entry in getattr(wish, name)}
        for entry in set(getattr(problem, name)) ^ asked:
            yield f"problem.{name}", f"{entry} is not what the wishes ask for", AGAIN


def _kept(plan: Plan, problem: PartitionProblem) -> Iterator[Finding]:
    """The plan keeps what its problem demands."""
    try:
        stage_of = assignment(plan)
    except PlanError as error:
        yield "stages", error.message, error.remedy or AGAIN
        return
    for message in Evaluation(problem.without_memory_limits(), stage_of).violations():
        yield "stages", message, "move it back, or plan again"


def _replicated(plan: Plan) -> bool:
    return any(stage.replicas > 1 or stage.recompute for stage in plan.stages)
