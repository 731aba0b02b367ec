"""Finds the tensors of the model that each stage holds, and their names there.

A tensor may have several names (tied weights).  A stage has those names whose modules it has,
so that the union of all stages' state_dict keys is the model's, aliases included.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from pdcompile.errors import PlanError
from pdcompile.ir.graph import Capture, Op, OpGraph, TensorInfo, written_buffers
from pdcompile.passes.form.module_tree import leaf_of
from pdcompile.plan import Plan


def all_tensors(capture: Capture) -> dict[str, TensorInfo]:
    """Parameters, buffers and constants of both modes."""
    return {**capture.eval.tensors, **capture.train.tensors}


def held_tensors(
    capture: Capture,
    plan: Plan,
    train_stage_of: Mapping[str, int],
    eval_stage_of: Mapping[str, int],
) -> tuple[tuple[str, ...], ...]:
    """Canonical FQNs that each stage holds, in the order of the model.

    A stage holds what its ops use in either mode.  A tensor that no op uses goes where the plan
    says, else to the first stage of the module that it lies in.  Raises PlanError when a mode
    reads, on one stage, what training changes on another only: the two would drift apart; and
    when calls of an opaque module are on several stages.
    """
    for graph, stage_of in ((capture.train, train_stage_of), (capture.eval, eval_stage_of)):
        _check_opaque(graph, stage_of)
    tensors = all_tensors(capture)
    train = users(capture.train, train_stage_of)
    evaluation = users(capture.eval, eval_stage_of)
    written = written_buffers(capture.train.ops)
    on_stage: list[set[str]] = [set() for _ in plan.stages]
    for fqn, info in tensors.items():
        changes = info.requires_grad or fqn in written
        strays = evaluation.get(fqn, set()) - train.get(fqn, set())
        if changes and fqn in train and strays:
            raise PlanError(
                f"evaluation reads {fqn!r} on stage {min(strays)}, and training changes it on "
                f"stage {min(train[fqn])} only",
                where="plan: stages",
                remedy=f"keep the ops that read {fqn!r} on one stage",
            )
        for k in train.get(fqn, set()) | evaluation.get(fqn, set()):
            on_stage[k].add(fqn)
    for stage in plan.stages:
        on_stage[stage.index].update(fqn for fqn in stage.parameters if fqn in tensors)
    placed = set().union(*on_stage)
    for fqn in tensors:
        if fqn not in placed:
            on_stage[_home(fqn, capture.train, train_stage_of)].add(fqn)
    return tuple(tuple(fqn for fqn in tensors if fqn in fqns) for fqns in on_stage)


def stage_names(
    capture: Capture,
    held: tuple[tuple[str, ...], ...],
    train_stage_of: Mapping[str, int],
    eval_stage_of: Mapping[str, int],
) -> tuple[dict[str, str], ...]:
    """Every name under which each stage has a tensor, mapped to the canonical FQN.

    A name that lies in a leaf module (one that an op calls whole) exists where that leaf is.
    """
    tensors = all_tensors(capture)
    leaves: list[set[str]] = [set() for _ in held]
    direct: list[set[str]] = [set() for _ in held]
    for graph, stage_of in ((capture.train, train_stage_of), (capture.eval, eval_stage_of)):
        for op in graph.ops:
            direct[stage_of[op.name]].update(op.attributes)
            if op.kind in ("module", "opaque"):
                leaves[stage_of[op.name]].add(op.module_path)
    everywhere = set().union(*leaves) if leaves else set()
    named: list[dict[str, str]] = [{} for _ in held]
    for k, fqns in enumerate(held):
        for fqn in fqns:
            every = (fqn, *tensors[fqn].aliases)
            here = [name for name in every if leaf_of(name, leaves[k]) is not None]
            free = [name for name in every if leaf_of(name, everywhere) is None]
            if fqn in direct[k]:
                here = [*here, *free] or [fqn]
            for name in here or free or [fqn]:
                named[k][name] = fqn
    present = {name for names in named for name in names}
    for fqn, info in tensors.items():
        first = next(k for k, fqns in enumerate(held) if fqn in fqns)
        for name in (fqn, *info.aliases):
            if name not in present:
                named[first][name] = fqn
    return tuple(named)


def _check_opaque(graph: OpGraph, stage_of: Mapping[str, int]) -> None:
    home: dict[str, int] = {}
    for op in graph.ops:
        if op.opaque and home.setdefault(op.module_path, stage_of[op.name]) != stage_of[op.name]:
            raise PlanError(
                f"{op.module_path!r} is opaque, and its calls are on stages "
                f"{home[op.module_path]} and {stage_of[op.name]}",
                where="plan: stages",
                remedy="keep all calls of one module on one stage",
            )


def users(graph: OpGraph, stage_of: Mapping[str, int]) -> dict[str, set[int]]:
    """The stages whose ops use each tensor of the model, by FQN."""
    found: dict[str, set[int]] = {}
    for op in graph.ops:
        for fqn in op.used_tensors:
            found.setdefault(fqn, set()).add(stage_of[op.name])
    return found


def _home(fqn: str, graph: OpGraph, stage_of: Mapping[str, int]) -> int:
    """The stage of the ops that share the longest part of the name; the first one of them."""
    path = fqn.split(".")[:-1]

    def shared(op: Op) -> int:
        pairs = zip(path, op.module_path.split("."), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    best = max(graph.ops, key=lambda op: (shared(op), -stage_of[op.name]), default=None)
    return stage_of[best.name] if best else 0
