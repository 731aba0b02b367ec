"""``pipeline.py``: all stages in one process, forward and backward, on made-up inputs."""

from __future__ import annotations

from collections.abc import Collection

from pdcompile.eager.autocast import NO_CASTS, on_gpu
from pdcompile.ir.graph import Capture, GraphInput, OpGraph
from pdcompile.ir.stage_interface import Port, StageInterface
from pdcompile.passes.codegen.header import model_name
from pdcompile.passes.codegen.source_text import Line, fold, render, shape_text
from pdcompile.passes.form.expressions import quote
from pdcompile.passes.form.index_ranges import upper_bound
from pdcompile.passes.form.module_tree import reach
from pdcompile.passes.stages.naming import unique
from pdcompile.plan import Plan

_HELPERS = '''\
def load(stage, path):
    """Fill buffers and constants from the file that was written with the source, if there."""
    if not path.exists():
        return
    saved = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, buffer in stage.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])


def show(k, results):
    print(f"stage {k}:", *(f"{r.dtype}{tuple(r.shape)}".removeprefix("torch.") for r in results))
'''


_FILL = '''\
def fill(stages, model):
    """Put the model's own modules where the sources only name them."""
    for stage in stages:
        for path, module in list(stage.named_modules()):
            if type(module).__name__ == "OpaqueModule":
                if model is None:
                    what = f"{path} ({module.name}) is the model's own and not in these files"
                    raise SystemExit(f"{what}: call main(model) of pipeline.py with the model")
                stage.set_submodule(path, model.get_submodule(path))
'''


_ON_GPU = [
    Line("if torch.cuda.is_available():", depth=1),
    Line('torch.set_default_device("cuda")', depth=2),
    Line("else:", depth=1),
    Line(f'print("{NO_CASTS}")', depth=2),
]


_OWN = (
    "stages", "inputs", "results", "model", "fill", "parameters", "filled", "k", "stage", "load",
    "show", "loss", "main", "make_inputs", "Path", "enumerate", "sum", "print", "len", "B",
)  # fmt: skip


def pipeline_file(capture: Capture, plan: Plan, interfaces: tuple[StageInterface, ...]) -> str:
    """The text of ``pipeline.py``."""
    graph = capture.train
    count = len(interfaces)
    stages = "the stage" if count == 1 else f"the {count} stages"
    top = [
        f'"""Runs {stages} of {model_name(capture)} in this process, forward and backward.',
        "",
        "    python pipeline.py",
        "",
        "One microbatch of made-up inputs: right shapes and dtypes, integers in the range that the",
        "model accepts.  Weights are fresh.  It needs torch and the files beside it"
        + (", and main(model) the model." if _has_opaque(interfaces) else "."),
        '"""',
        "",
        "from pathlib import Path",
        "",
        "import torch",
        *sorted(f"from stage_{k} import Stage{k}" for k in range(count)),
        "",
        f"B = {graph.batch_size}  # microbatch size",
    ]
    parts = [
        "\n".join(top),
        _inputs(graph, interfaces),
        _HELPERS,
        *([_FILL] if _has_opaque(interfaces) else []),
        render(_main(plan, interfaces)),
        'if __name__ == "__main__":\n    main()',
    ]
    return "\n\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _inputs(graph: OpGraph, interfaces: tuple[StageInterface, ...]) -> str:
    used = {
        port.value
        for interface in interfaces
        for port in (*interface.train.inputs, *interface.train.loss_inputs)
    }
    lines = [
        Line("def make_inputs():"),
        Line('"""Leaves of the call and of the target, by path."""', depth=1, is_text=True),
        Line("return {", depth=1, is_text=True),
    ]
    for item in graph.inputs:
        if item.name in used:
            value = graph.values[item.name]
            comment = shape_text(value.shape, value.dtype)
            made = f"{quote(item.path)}: {_made_up(graph, item)},"
            *first, last = fold(made, 2)
            lines += [Line(text, is_text=True) for text in first]
            lines.append(Line(last, comment, is_text=True))
    lines.append(Line("}", depth=1, is_text=True))
    return render(lines)


def _made_up(graph: OpGraph, item: GraphInput) -> str:
    """An expression for a random tensor like the given input; for the example's integers where
    the model would not run on all others."""
    value = graph.values[item.name]
    sizes = [
        str(size) if isinstance(size, int) else str(size).replace("b", "B") for size in value.shape
    ]
    shape = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
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


def _main(plan: Plan, interfaces: tuple[StageInterface, ...]) -> list[Line]:
    count = len(interfaces)
    made = ", ".join(f"Stage{k}()" for k in range(count))
    kept, gpu = _has_opaque(interfaces), on_gpu(plan.training.autocast)
    lines = [
        Line("def main(model=None):" if kept else "def main():"),
        *_inside("torch.manual_seed(0)"),
        *(_ON_GPU if gpu else []),
        *_inside(f"stages = [{made}]"),
        *(_inside("fill(stages, model)") if kept else []),
        *_inside("for k, stage in enumerate(stages):"),
        *([Line("stage.to(torch.get_default_device())", depth=2)] if kept and gpu else []),
        Line('load(stage, Path(__file__).with_name(f"stage_{k}.pt"))', depth=2),
        *_ties(plan, interfaces),
        Line(),
        *_inside("inputs = make_inputs()"),
    ]
    variables: dict[str, str] = {}
    for interface in interfaces:
        lines += _run(interface, variables, _used_after(interfaces, interface.index))
    return lines + _loss(interfaces[-1], variables)


def _inside(*statements: str) -> list[Line]:
    return [Line(code, depth=1) for code in statements]


def _ties(plan: Plan, interfaces: tuple[StageInterface, ...]) -> list[Line]:
    def place(k: int, fqn: str, *, assigned: bool = False) -> str:
        """The expression of a tensor by a name that it has on the stage."""
        aliases = interfaces[k].aliases.items()
        name = next((name for name, canonical in aliases if canonical == fqn), fqn)
        path, _, attribute = name.rpartition(".")
        owner = f"stages[{k}].get_submodule({quote(path)})" if path else f"stages[{k}]"
        return reach(owner, attribute, "_parameters", assigned=assigned)

    return [
        Line(f"{place(k, one.fqn, assigned=True)} = {place(one.stages[0], one.fqn)}", "tied", 1)
        for one in plan.tied
        for k in one.stages[1:]
    ]


def _has_opaque(interfaces: tuple[StageInterface, ...]) -> bool:
    """True if modules of the model are run as they are."""
    return any(one.train.opaque_calls or one.eval.opaque_calls for one in interfaces)


def _used_after(interfaces: tuple[StageInterface, ...], k: int) -> set[str]:
    """Values that later stages or the loss read."""
    last = interfaces[-1].train
    ports = [port for later in interfaces[k + 1 :] for port in later.train.inputs]
    found = {port.value for port in (*ports, *last.loss_inputs)}
    return found if last.loss_inputs or last.loss is None else {*found, last.loss}


def _run(interface: StageInterface, variables: dict[str, str], used: Collection[str]) -> list[Line]:
    k, signature = interface.index, interface.train
    arguments = ", ".join(_argument(port, variables) for port in signature.inputs)
    lines = _inside(f"results = stages[{k}]({arguments})", f"show({k}, results)")
    made = [p for p in signature.outputs if p.value not in variables and p.value in used]
    for port in made:
        variables[port.value] = unique(port.name, [*variables.values(), *_OWN])
    if made:
        names = [variables[p.value] if p in made else "_" for p in signature.outputs]
        left = ", ".join(names) if len(names) > 1 else f"({names[0]},)"
        left = f"({left})" if len(left) > 84 else left
        lines += _inside(f"{left} = results")
    return lines


def _argument(port: Port, variables: dict[str, str]) -> str:
    if port.value in variables:
        return variables[port.value]
    return f"inputs[{quote(port.path or '')}]"


def _loss(interface: StageInterface, variables: dict[str, str]) -> list[Line]:
    signature = interface.train
    if signature.loss_inputs:
        arguments = ", ".join(_argument(port, variables) for port in signature.loss_inputs)
        made = f"stages[{interface.index}].loss({arguments})"
    elif signature.loss is not None:
        made = variables[signature.loss]
    elif any(port.requires_grad for port in signature.outputs):
        made = "sum(r.abs().mean() for r in results if r.requires_grad)"
    else:
        return []
    return [
        Line(),
        *_inside(
            f"loss = {made}",
            "loss.backward()",
            "parameters = [p for stage in stages for p in stage.parameters()]",
            "filled = sum(p.grad is not None for p in parameters)",
            'print(f"loss {loss.item():.4f}, gradients of {filled} of {len(parameters)} tensors")',
        ),
    ]
