"""What a plan costs, straight from the problem: shares no code with the solvers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdcompile.errors import PlanError
from pdcompile.passes.published.piper_file import MenuProblem, Variant
from pdcompile.problem.answer import StageAnswer

SLACK = 1e-9  # of the memory limit, where the file has fractions of bytes


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Per stage, in pipeline order; `objective` is the largest of `seconds`."""

    objective: float
    seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    in_flight: tuple[int, ...]


def evaluate(problem: MenuProblem, stages: Sequence[StageAnswer]) -> Evaluation:
    """The exact objective of Piper's model (see `piper_file`) for stages in pipeline order.

    Every stage has its data-parallel degree in `replicas`, and ``"tensor_parallel"`` and
    ``"variants"`` (variant id by node id, as text) in its details.

    Raises:
        PlanError: a node is missing, there twice or unknown, an edge points backwards, a degree
            or variant is not on the menu, or devices or memory do not suffice.
    """
    index = {node.id: i for i, node in enumerate(problem.nodes)}
    stage_of: dict[int, int] = {}
    for s, stage in enumerate(stages):
        for name in stage.members:
            if name not in index or index[name] in stage_of:
                raise PlanError(f"node {name!r} is unknown or in two stages", where=f"stages[{s}]")
            stage_of[index[name]] = s
        if not stage.members:
            raise PlanError("the stage is empty", where=f"stages[{s}]")
    if len(stage_of) < len(problem.nodes):
        raise PlanError(f"{len(problem.nodes) - len(stage_of)} nodes are in no stage")
    if any(stage_of[edge.source] > stage_of[edge.target] for edge in problem.edges):
        raise PlanError("an edge points to an earlier stage")
    devices = sum(stage.replicas * _degree(stage) for stage in stages)
    if devices > problem.devices:
        raise PlanError(f"the plan takes {devices} devices, there are {problem.devices}")

    seconds, memory, in_flight = [], [], []
    later = 0
    for s in reversed(range(len(stages))):
        d, t = stages[s].replicas, _degree(stages[s])
        if d < 1 or problem.batch % d:
            raise PlanError(f"{d} replicas do not divide the batch of {problem.batch}")
        chosen = {
            v: _variant(problem, v, t, stages[s].details["variants"])
            for v, at in stage_of.items()
            if at == s
        }
        later += d
        y = -(-later // d)
        held = math.fsum(c.moving_bytes * y + c.fixed_bytes for c in chosen.values())
        if held > allowed(problem):
            raise PlanError(
                f"{held:.0f} bytes exceed the limit of {problem.memory_bytes:.0f}",
                where=f"stages[{s}]",
            )
        cut = [
            2 * (edge.bytes + chosen[edge.target].sync_forward.get(edge.source, 0.0))
            for edge in problem.edges
            if edge.target in chosen and edge.source not in chosen
        ] + [
            2 * (edge.bytes + chosen[edge.source].sync_backward.get(edge.target, 0.0))
            for edge in problem.edges
            if edge.source in chosen and edge.target not in chosen
        ]
        weights = math.fsum(c.parameter_bytes for c in chosen.values())
        moved = math.fsum(cut) / d + 4 * (d - 1) / d * weights / problem.batch
        busy = math.fsum(c.seconds for c in chosen.values()) / d
        seconds.append(moved / problem.bytes_per_second + busy)
        memory.append(held)
        in_flight.append(y)
    return Evaluation(
        max(seconds), tuple(seconds[::-1]), tuple(memory[::-1]), tuple(in_flight[::-1])
    )


def allowed(problem: MenuProblem) -> float:
    """The limit on one device's bytes, with room for rounding where there are fractions."""
    whole = all(
        variant.moving_bytes.is_integer() and variant.fixed_bytes.is_integer()
        for node in problem.nodes
        for variants in node.variants.values()
        for variant in variants
    )
    return problem.memory_bytes if whole else problem.memory_bytes * (1 + SLACK)


def _degree(stage: StageAnswer) -> int:
    return int(stage.details["tensor_parallel"])


def _variant(problem: MenuProblem, v: int, degree: int, names: Mapping[str, object]) -> Variant:
    node = problem.nodes[v]
    for variant in node.variants.get(degree, ()):
        if variant.id == names.get(str(node.id)):
            return variant
    raise PlanError(
        f"node {node.id!r} has no variant {names.get(str(node.id))!r} on {degree} devices"
    )
