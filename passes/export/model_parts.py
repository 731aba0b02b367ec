"""Parts of a model: the modules that other pipelines place whole, and the stages they are on.

A part is a numbered entry of a container (``transformer.h.3``), or a module beside those
(``transformer.wte``, ``lm_head``).  Modules around the containers (``transformer``) are no parts:
what runs in their own forward lies between parts.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdcompile.errors import ConfigError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs.costed_op import costed_ops
from pdcompile.passes.form.module_tree import ancestors
from pdcompile.plan import Plan


def part_paths(graph: OpGraph) -> tuple[str, ...]:
    """The parts that run, in the order of their first op."""
    return tuple(dict.fromkeys(path for path in parts_of_ops(graph).values() if path))


def parts_of_ops(graph: OpGraph) -> dict[str, str]:
    """The part that each op runs in, "" between parts and in the loss function."""
    # A loss function has a path too, which a module of the model may have as well.
    around = _around(op.module_path for op in graph.ops if op.region == "forward")
    return {
        op.name: part_at(op.module_path, around) if op.region == "forward" else ""
        for op in graph.ops
    }


def part_at(module_path: str, around: frozenset[str]) -> str:
    """The part that holds a module, "" where that is one of those around parts."""
    for path in ancestors(module_path):
        if is_numbered(path) or path not in around:
            return path
    return ""


def _around(paths: Iterable[str]) -> frozenset[str]:
    """Modules that hold the outermost numbered ones."""
    found: set[str] = set()
    for path in paths:
        chain = ancestors(path)
        first = next((i for i, one in enumerate(chain) if is_numbered(one)), 0)
        found.update(chain[:first])
    return frozenset(found)


def is_numbered(path: str) -> bool:
    """True if it is an entry of a container."""
    return path.rpartition(".")[2].isdecimal()


def views(graph: OpGraph) -> frozenset[str]:
    """Ops that compute nothing: an item keeps them beside the op that makes or reads the bytes."""
    return frozenset(call.op.name for call in costed_ops(graph, graph.batch_size) if call.is_view)


def stages_of_parts(graph: OpGraph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """The stage of each part, in order of running; one that computes nothing is where the part
    before it is.  A part without tensors (an activation) may have several: each can have a copy.

    Raises:
        ConfigError: a part with tensors runs on several stages.
    """
    stage_of, part_of, idle = plan.stage_of, parts_of_ops(graph), views(graph)
    held = {part_of[op.name] for op in graph.ops if op.parameters or op.buffers_read}
    on: dict[str, set[int]] = {path: set() for path in part_paths(graph)}
    for op in graph.ops:
        if part_of[op.name] and op.name in stage_of and op.name not in idle:
            on[part_of[op.name]].add(stage_of[op.name])
    found: dict[str, tuple[int, ...]] = {}
    last: tuple[int, ...] = (0,)
    for path, stages in on.items():
        around = f"{path.rpartition('.')[0]}.*"
        wish = f"CutAt({around!r}) (--cut-at '{around}')"
        if not is_numbered(path):
            wish = f"Together({path!r}) (--together {path})"
        found[path] = tuple(sorted(stages)) or last
        if len(stages) > 1 and path in held:
            raise ConfigError(
                f"module {path!r} runs on stages {', '.join(map(str, found[path]))}, and other "
                "runtimes place each module once",
                where="plan: stages",
                remedy=f"plan with {wish}",
            )
        last = found[path] if len(found[path]) == 1 else last
    return found


def whole_parts(graph: OpGraph, plan: Plan) -> dict[str, int]:
    """The stage of each part that has one alone.  Raises ConfigError as `stages_of_parts`."""
    return {path: on[0] for path, on in stages_of_parts(graph, plan).items() if len(on) == 1}


def runs_of_parts(graph: OpGraph) -> dict[str, int]:
    """Runs of each part: those of the module inside of it that runs least often."""
    part_of, inside = parts_of_ops(graph), dict[str, dict[str, int]]()
    for op in graph.ops:
        if part := part_of[op.name]:
            runs = inside.setdefault(part, {})
            runs[op.module_path] = max(runs.get(op.module_path, 0), op.module_call + 1)
    return {part: min(runs.values()) for part, runs in inside.items()}
