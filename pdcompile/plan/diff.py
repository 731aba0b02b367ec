"""Diff: what differs between two plans, as data."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import groupby
from typing import Any

from pdcompile.plan.schema import Plan

PARTS = ("model", "costs", "cluster")  # of a fingerprint, in order
CLOSE = 1e-6  # relative, of seconds


@dataclass(frozen=True, slots=True)
class Changed:
    """One fact that differs; `what` is the field's name in the plan."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Moved:
    """Ops that go together from one stage to another; a None stage: the op is not in that plan."""

    ops: tuple[str, ...]
    source: int | None
    target: int | None


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Differences from plan a to plan b, each list empty where there is none.

    `prints`: which parts of the fingerprint (model, costs, cluster) differ; "all" where they have
    another form.  `identical`: nothing but the planner's own running time differs.
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
        """True if the plans differ only in what no list shows (costs inside stages, say)."""
        lists = (getattr(self, field.name) for field in fields(self) if field.name != "identical")
        return not any(lists)


def diff(a: Plan, b: Plan) -> PlanDiff:
    """Compare two plans, whatever they are of."""
    prints = other_prints(a.fingerprint, b.fingerprint)
    unlike = prints[:1] in (("model",), ("all",)) and not _alike(a, b)
    facts = {name: _compared(of(a), of(b)) for name, of in FACTS.items()}
    both = tuple(one for one in facts["stages"] if None not in (one.a, one.b))
    return PlanDiff(
        identical=_without_time(a) == _without_time(b),
        unlike=unlike,
        prints=prints,
        moved=() if unlike else _moved(a, b),
        notes=_notes(a, b),
        **facts | {"stages": both},
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


def _alike(a: Plan, b: Plan) -> bool:
    """True if half of the smaller model's ops are in the other one, by name."""
    ours, theirs = a.stage_of.keys(), b.stage_of.keys()
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


def _compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Changed, ...]:
    """Facts that differ; None where one plan has none of the name."""
    names = (name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name))
    return tuple(Changed(name, a.get(name), b.get(name)) for name in names)


def _fields(record: Any, *without: str) -> dict[str, Any]:
    names = (field.name for field in fields(record))
    return {name: getattr(record, name) for name in names if name not in without}


def _cluster(plan: Plan) -> dict[str, Any]:
    """Devices, what runs of equal ones are, and the links of each level."""
    cluster = plan.machines
    found: dict[str, Any] = {"devices": tuple(level.size for level in reversed(cluster.levels))}
    for name in ("kind", "memory_bytes", "speed"):
        runs = groupby(getattr(device, name) for device in cluster.devices)
        found[name] = tuple(value for value, _ in runs)
    for level in cluster.levels:
        links = _fields(level, "name", "size")
        found |= {f"{level.name}.{name}": value for name, value in links.items()}
    return found | {"in_process": cluster.in_process}


def _stages(plan: Plan) -> dict[str, Any]:
    shown = ("replicas", "ranks", "turns", "recompute", "forward_seconds", "backward_seconds")
    return {"stages": len(plan.stages)} | {
        f"stages[{stage.index}].{name}": getattr(stage, name)
        for stage in plan.stages
        for name in shown
    }


def _forecast(plan: Plan) -> dict[str, Any]:
    found = plan.forecast
    if found is None:
        return {}
    return _fields(found, "ledgers") | {"sent_bytes": sum(found.sent_bytes)}


def _memory(plan: Plan) -> dict[str, Any]:
    """Peak bytes of each rank by its ledger."""
    return {f"rank {rank}": one.total_bytes for rank, one in enumerate(plan.ledgers)}


def _moved(a: Plan, b: Plan) -> tuple[Moved, ...]:
    """Ops on another stage, in the order of the plans; those only one plan has come last."""
    ours, theirs = a.stage_of, b.stage_of
    groups: dict[tuple[int | None, int | None], list[str]] = defaultdict(list)
    for op in dict.fromkeys((*ours, *theirs)):
        source, target = ours.get(op), theirs.get(op)
        if source != target:
            groups[source, target].append(op)
    pairs = sorted(groups, key=lambda pair: [(s is None, s or 0) for s in pair])
    return tuple(Moved(tuple(groups[pair]), *pair) for pair in pairs)


def _traffic(plan: Plan) -> dict[str, int]:
    """Per microbatch, values once to each receiver and gradients once over each hop."""
    hops = sum(len(edge.targets) for edge in plan.edges)
    size = sum(edge.bytes * len(edge.targets) * (2 if edge.gradient else 1) for edge in plan.edges)
    return {"values": hops, "bytes": size, "tied parameters": len(plan.tied)}


def _notes(a: Plan, b: Plan) -> tuple[Changed, ...]:
    gone = [Changed("note", note, None) for note in a.notes if note not in b.notes]
    new = [Changed("note", None, note) for note in b.notes if note not in a.notes]
    return (*gone, *new)


#: what is compared of two plans, section by section
FACTS: Mapping[str, Callable[[Plan], dict[str, Any]]] = {
    "training": lambda plan: _fields(plan.training),
    "cluster": _cluster,
    "stages": _stages,
    "edges": _traffic,
    "forecast": _forecast,
    "memory": _memory,
    # how long the planner took says nothing of the plan
    "certificate": lambda plan: _fields(plan.certificate, "seconds"),
}
