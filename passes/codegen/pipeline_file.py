"""``pipeline.py``: all stages in one process, forward and backward, on made-up inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pdcompile.eager.autocast import NO_CASTS, on_gpu
from pdcompile.ir.graph import Capture, GraphInput, OpGraph, Size
from pdcompile.ir.graph_text import format_shape
from pdcompile.ir.records import PARTS, TURNS
from pdcompile.ir.stage_interface import Port, StageInterface
from pdcompile.passes.codegen.header import model_name
from pdcompile.passes.codegen.source_text import Line, filled, fold, render
from pdcompile.passes.form.expressions import quote
from pdcompile.passes.form.index_ranges import upper_bound
from pdcompile.passes.form.module_tree import reach
from pdcompile.passes.stages.naming import unique
from pdcompile.plan import Plan

TEMPLATE = Path(__file__).with_name("pipeline.py.txt")
_OWN = (
    "stages", "inputs", "results", "model", "fill", "parameters", "filled", "k", "stage", "load",
    "show", "loss", "main", "make_inputs", "Path", "enumerate", "sum", "print", "len", "B",
)  # fmt: skip


def pipeline_file(
    capture: Capture, plan: Plan, interfaces: tuple[StageInterface, ...], parts: int = 1
) -> str:
    """The text of ``pipeline.py``."""
    graph, count = capture.train, len(interfaces)
    opaque = any(one.train.opaque_calls or one.eval.opaque_calls for one in interfaces)
    gpu = on_gpu(plan.training.autocast)
    variables: dict[str, str] = {}
    runs = [
        line
        for one in interfaces
        for line in _run(one, variables, used_after(interfaces, one.index))
    ]
    loss = _loss(interfaces[-1], variables)
    made = ", ".join(f"Stage{k}()" for k in range(count))
    words = {
        "stages": "the stage" if count == 1 else f"the {count} stages",
        "model": model_name(capture),
        "parts": parts,
        "in_parts": f" in {parts} parts" if parts > 1 else "",
        "needs": ", and main(model) the model" if opaque else "",
        "imports": "\n".join(sorted(f"from stage_{k} import Stage{k}" for k in range(count))),
        "conversions": PARTS,
        "turns": TURNS,
        "batch": graph.batch_size,
        "inputs": "".join(_inputs(graph, interfaces)),
        "given": "model=None" if opaque else "",
        "no_casts": NO_CASTS,
        "made": "\n".join(fold(f"stages = [{made}]", 1)),
        "ties": "".join(render([line]) for line in _ties(plan, interfaces)),
        "runs": "\n".join(line for code in runs for line in fold(code, 1)),
        "loss": "\n".join(fold(f"loss = {loss}", 1)),
    }
    kept = {"opaque": opaque, "gpu": gpu, "opaque_on_gpu": opaque and gpu, "loss": bool(loss)}
    kept["parts"], kept["one"] = parts > 1, parts == 1
    return filled(TEMPLATE, kept, words)


def _inputs(graph: OpGraph, interfaces: tuple[StageInterface, ...]) -> Iterator[str]:
    """Lines of the dict of inputs that stages or the loss read."""
    ports = (p for one in interfaces for p in (*one.train.inputs, *one.train.loss_inputs))
    used = {port.value for port in ports}
    for item in graph.inputs:
        if item.name in used:
            value = graph.values[item.name]
            text = f"{quote(item.path)}: {_made_up(graph, item)},"
            yield render([Line(text, format_shape(value.shape, value.dtype), depth=2)])


def _made_up(graph: OpGraph, item: GraphInput) -> str:
    """An expression for a random tensor like the given input; for the example's integers where
    the model would not run on all others."""
    value = graph.values[item.name]
    shape = sizes(value.shape)
    integers = graph.origin.integers if graph.origin is not None else {}
    if item.path in integers:
        return f"torch.tensor({integers[item.path]}, dtype=torch.{value.dtype})"
    if value.dtype == "bool":
        return f"torch.rand({shape}) < 0.5"
    if value.dtype.startswith(("float", "bfloat", "complex")):
        made = f"torch.randn({shape})"
        return made if value.dtype == "float32" else f"{made}.to(torch.{value.dtype})"
    dtype = "" if value.dtype == "int64" else f", dtype=torch.{value.dtype}"
    return f"torch.randint({upper_bound(graph, item.name)}, {shape}{dtype})"


def sizes(shape: Sequence[Size]) -> str:
    """A shape as source, in which B is the number of samples."""
    text = ", ".join(str(size).replace("b", "B") for size in shape)
    return f"({text}{',' * (len(shape) == 1)})"


def _ties(plan: Plan, interfaces: tuple[StageInterface, ...]) -> list[Line]:
    def place(k: int, fqn: str, *, assigned: bool = False) -> str:
        path, _, attribute = name_on(interfaces[k], fqn).rpartition(".")
        owner = f"stages[{k}].get_submodule({quote(path)})" if path else f"stages[{k}]"
        return reach(owner, attribute, "_parameters", assigned=assigned)

    return [
        Line(f"{place(k, one.fqn, assigned=True)} = {place(one.stages[0], one.fqn)}", "tied", 1)
        for one in plan.tied
        for k in one.stages[1:]
    ]


def name_on(stage: StageInterface, fqn: str) -> str:
    """A name that a tensor has on a stage."""
    aliases = stage.aliases.items()
    return next((name for name, canonical in aliases if canonical == fqn), fqn)


def used_after(interfaces: Sequence[StageInterface], k: int) -> set[str]:
    """Values that later stages or the loss read."""
    last = interfaces[-1].train
    ports = [port for later in interfaces[k + 1 :] for port in later.train.inputs]
    found = {port.value for port in (*ports, *last.loss_inputs)}
    return found if last.loss_inputs or last.loss is None else {*found, last.loss}


def _run(
    interface: StageInterface, variables: dict[str, str], used: Collection[str]
) -> Iterator[str]:
    """Statements that run a stage, whose results get names where something reads them later."""
    k, signature = interface.index, interface.train
    arguments = ", ".join(_argument(port, variables) for port in signature.inputs)
    yield f"results = stages[{k}]({arguments})"
    yield f"show({k}, results)"
    made = [p for p in signature.outputs if p.value not in variables and p.value in used]
    for port in made:
        variables[port.value] = unique(port.name, [*variables.values(), *_OWN])
    if made:
        names = [variables[p.value] if p in made else "_" for p in signature.outputs]
        left = ", ".join(names) if len(names) > 1 else f"({names[0]},)"
        yield f"{left} = results"


def _argument(port: Port, variables: dict[str, str]) -> str:
    if port.value in variables:
        return variables[port.value]
    return f"inputs[{quote(port.path or '')}]"


def _loss(interface: StageInterface, variables: dict[str, str]) -> str:
    """The expression of the loss; "" where nothing takes a gradient."""
    signature = interface.train
    if signature.loss_inputs:
        arguments = ", ".join(_argument(port, variables) for port in signature.loss_inputs)
        return f"stages[{interface.index}].loss({arguments})"
    if signature.loss is not None:
        return variables[signature.loss]
    if any(port.requires_grad for port in signature.outputs):
        return "sum(r.abs().mean() for r in results if r.requires_grad)"
    return ""
