"""Diff: what differs between two plans, as data."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from pdcompile.cluster import Cluster
from pdcompile.plan.schema import Plan

PARTS = ("model", "costs", "cluster")  # of a fingerprint, in order
CLOSE = 1e-6  # relative, of seconds
_OF_THE_RUN = ("seconds",)  # how long the planner took says nothing of the plan


@dataclass(frozen=True, slots=True)
class Changed:
    """One fact that differs; `what` is the field's name in the plan."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Moved:
    """Ops that go together from one stage to another; a None stage: the op is not in that plan.

    `modules`: the paths of the ops' modules, where a plan holds its problem and they have one.
    """

    ops: tuple[str, ...]
    source: int | None
    target: int | None
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Differences from plan a to plan b, each list empty where there is none.

    `prints`: which parts of the fingerprint (model, costs, cluster) differ; "graph" in place of
    "model" where it is one model, captured for microbatches of which a graph of their own is
    made; "all" where they have another form.  `identical`: nothing but the planner's own running
    time differs.
    `unlike`: the models differ so much that `moved` is left empty.
    """

    identical: bool
    unlike: bool
    prints: tuple[str, ...]
    training: tuple[Changed, ...]
    cluster: tuple[Changed, ...]
    stages: tuple[Changed, ...]
    moved: tuple[Moved, ...]
    edges: tuple[Changed, ...]
    forecast: tuple[Changed, ...]
    memory: tuple[Changed, ...]
    certificate: tuple[Changed, ...]
    notes: tuple[Changed, ...]

    @property
    def says_nothing(self) -> bool:
        """Whether the plans differ only in what no list shows (costs inside stages, say)."""
        lists = (getattr(self, field.name) for field in fields(self) if field.name != "identical")
        return not any(lists)


def diff(a: Plan, b: Plan) -> PlanDiff:
    """Compare two plans, whatever they are of."""
    prints = other_prints(a.fingerprint, b.fingerprint)
    if prints[:1] == ("model",) and _one_model(a, b):
        prints = ("graph", *prints[1:])
    unlike = prints[:1] in (("model",), ("all",)) and not _alike(a, b)
    return PlanDiff(
        identical=_without_time(a) == _without_time(b),
        unlike=unlike,
        prints=prints,
        training=_fields(a.training, b.training),
        cluster=_clusters(a, b),
        stages=_stages(a, b),
        moved=() if unlike else _moved(a, b),
        edges=_edges(a, b),
        forecast=_forecasts(a, b),
        memory=_memory(a, b),
        certificate=tuple(
            one for one in _fields(a.certificate, b.certificate) if one.what not in _OF_THE_RUN
        ),
        notes=_notes(a, b),
    )


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Place and both values of all that differs in two records, None where one has nothing there.

    Lists of records with a name are compared name by name, and seconds up to rounding.
    """
    if is_dataclass(a) and type(a) is type(b):
        for field in fields(a):
            below = f"{path}.{field.name}" if path else field.name
            yield from differences(getattr(a, field.name), getattr(b, field.name), below)
    elif isinstance(a, tuple) and any(map(is_dataclass, (*a, *b))):
        others = {named(one, i): one for i, one in enumerate(b)}
        for i, one in enumerate(a):
            other = others.pop(named(one, i), None)
            yield from differences(one, other, f"{path}[{i}]")
        yield from ((path, None, other) for other in others.values())
    elif a != b and not (isinstance(a, float) and math.isclose(a, b, rel_tol=CLOSE)):
        yield path, a, b


def named(record: Any, otherwise: Any) -> Any:
    """The name of a record in a list, where it has one."""
    names = (getattr(record, field, None) for field in ("value", "fqn", "name"))
    return next((name for name in names if name is not None), otherwise)


def _one_model(a: Plan, b: Plan) -> bool:
    """Whether the graphs may differ by the size of microbatches alone: a single sample has one of
    its own, in which some ops are others; all weights and most ops are the same."""
    ours, theirs = (
        (plan.model, {fqn for s in plan.stages for fqn in s.parameters}, _owned(plan))
        for plan in (a, b)
    )
    sizes = {-(-one.batch_size // one.num_microbatches) for one in (a.training, b.training)}
    return ours == theirs and len(sizes) > 1 and _alike(a, b)


def _owned(plan: Plan) -> int:
    """Bytes of trainable weights, each once."""
    copies = sum(one.bytes * (len(one.stages) - 1) for one in plan.tied)
    return sum(stage.trainable_bytes for stage in plan.stages) - copies


def _alike(a: Plan, b: Plan) -> bool:
    """Whether half of the smaller model's ops are in the other one, by name."""
    ours, theirs = ({op for stage in plan.stages for op in stage.ops} for plan in (a, b))
    return 2 * len(ours & theirs) >= min(len(ours), len(theirs))


def _without_time(plan: Plan) -> Plan:
    return replace(plan, certificate=replace(plan.certificate, seconds=0.0))


def other_prints(a: str, b: str) -> tuple[str, ...]:
    """Parts that differ in two fingerprints; "all" where they have another form."""
    if a == b:
        return ()
    ours, theirs = a.split("."), b.split(".")
    if not len(ours) == len(theirs) == len(PARTS):
        return ("all",)
    return tuple(part for part, x, y in zip(PARTS, ours, theirs, strict=True) if x != y)


def _fields(a: Any, b: Any) -> tuple[Changed, ...]:
    pairs = ((field.name, getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return tuple(Changed(name, x, y) for name, x, y in pairs if x != y)


def _clusters(a: Plan, b: Plan) -> tuple[Changed, ...]:
    """Number of devices, and devices and levels one by one."""
    ours = Cluster.from_toml(a.cluster, where="a: cluster")
    theirs = Cluster.from_toml(b.cluster, where="b: cluster")
    found = []
    sizes = [tuple(level.size for level in reversed(one.levels)) for one in (ours, theirs)]
    if sizes[0] != sizes[1]:
        found.append(Changed("devices", sizes[0], sizes[1]))
    for name in ("kind", "memory_bytes", "speed"):
        values = [
            tuple(dict.fromkeys(getattr(device, name) for device in one.devices))
            for one in (ours, theirs)
        ]
        if values[0] != values[1]:
            found.append(Changed(name, values[0], values[1]))
    levels = [{level.name: level for level in one.levels} for one in (ours, theirs)]
    for name in dict.fromkeys((*levels[0], *levels[1])):
        x, y = levels[0].get(name), levels[1].get(name)
        if x is None or y is None:
            there = ["absent" if one is None else "present" for one in (x, y)]
            found.append(Changed(name, *there))
            continue
        for one in _fields(x, y):
            if one.what != "size":
                found.append(Changed(f"{name}.{one.what}", one.a, one.b))
    if ours.in_process != theirs.in_process:
        found.append(Changed("in_process", ours.in_process, theirs.in_process))
    if ours.devices != theirs.devices and not found:
        found.append(Changed("order of devices", "as in a", "as in b"))
    return tuple(found)


def _stages(a: Plan, b: Plan) -> tuple[Changed, ...]:
    """Number of stages, replicas, ranks, recomputation; seconds where both have the stage."""
    found = []
    if len(a.stages) != len(b.stages):
        found.append(Changed("stages", len(a.stages), len(b.stages)))
    shown = ("replicas", "ranks", "recompute", "forward_seconds", "backward_seconds")
    for x, y in zip(a.stages, b.stages, strict=False):
        for name in shown:
            ours, theirs = getattr(x, name), getattr(y, name)
            if ours != theirs:
                found.append(Changed(f"stages[{x.index}].{name}", ours, theirs))
    return tuple(found)


def _moved(a: Plan, b: Plan) -> tuple[Moved, ...]:
    """Ops on another stage, in the order of the plans; those only one plan has come last."""
    ours = {op: stage.index for stage in a.stages for op in stage.ops}
    theirs = {op: stage.index for stage in b.stages for op in stage.ops}
    groups: dict[tuple[int | None, int | None], list[str]] = defaultdict(list)
    for op in dict.fromkeys((*ours, *theirs)):
        source, target = ours.get(op), theirs.get(op)
        if source != target:
            groups[source, target].append(op)
    module = _modules(a) | _modules(b)
    found = []
    for pair in sorted(groups, key=lambda pair: [(s is None, s or 0) for s in pair]):
        ops = groups[pair]
        paths = dict.fromkeys(module[op] for op in ops if op in module)
        found.append(Moved(tuple(ops), *pair, modules=tuple(paths)))
    return tuple(found)


def _modules(plan: Plan) -> dict[str, str]:
    """The module path of each op's item; an item without one is named as its op."""
    items = () if plan.problem is None else plan.problem.items
    paths = ((item, item.name.partition(":")[0]) for item in items)
    return {op: path for item, path in paths if "." in path for op in item.ops}


def _edges(a: Plan, b: Plan) -> tuple[Changed, ...]:
    """Values over the boundaries: how many, and bytes a microbatch; tied parameters."""
    found = []
    ours, theirs = _traffic(a), _traffic(b)
    for name in ours:
        if ours[name] != theirs[name]:
            found.append(Changed(name, ours[name], theirs[name]))
    return tuple(found)


def _traffic(plan: Plan) -> dict[str, int]:
    """Per microbatch, values once to each receiver and gradients once over each hop."""
    hops = sum(len(edge.targets) for edge in plan.edges)
    size = sum(edge.bytes * len(edge.targets) * (2 if edge.gradient else 1) for edge in plan.edges)
    return {"values": hops, "bytes": size, "tied parameters": len(plan.tied)}


def _forecasts(a: Plan, b: Plan) -> tuple[Changed, ...]:
    names = ("step_seconds", "samples_per_second", "bubble")
    found = []
    for name in names:
        ours, theirs = (None if p.forecast is None else getattr(p.forecast, name) for p in (a, b))
        if ours != theirs:
            found.append(Changed(name, ours, theirs))
    sent = [None if p.forecast is None else sum(p.forecast.sent_bytes) for p in (a, b)]
    if sent[0] != sent[1]:
        found.append(Changed("sent_bytes", sent[0], sent[1]))
    return tuple(found)


def _memory(a: Plan, b: Plan) -> tuple[Changed, ...]:
    """Peak bytes of each rank by the ledgers."""
    totals = [
        () if p.forecast is None else tuple(one.total_bytes for one in p.forecast.ledgers)
        for p in (a, b)
    ]
    most = max(map(len, totals))
    padded = [(*one, *[None] * (most - len(one))) for one in totals]
    return tuple(
        Changed(f"rank {rank}", x, y)
        for rank, (x, y) in enumerate(zip(*padded, strict=True))
        if x != y
    )


def _notes(a: Plan, b: Plan) -> tuple[Changed, ...]:
    gone = [Changed("note", note, None) for note in a.notes if note not in b.notes]
    new = [Changed("note", None, note) for note in b.notes if note not in a.notes]
    return (*gone, *new)
