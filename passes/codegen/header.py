"""The top of a generated file: what it is, what goes in and out, how to run it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdcompile.graph import Capture
from pdcompile.passes.codegen.blocks import Layout
from pdcompile.passes.codegen.imports import Imports
from pdcompile.passes.codegen.text import Line, clean, location, shape_text
from pdcompile.stage import Port, StageInterface

NOTE = (
    "Comments give dtype[shape]; b is the microbatch size. Modules and parameters have the "
    "model's own names, so state_dict() has its keys. Written by pdcompile: edit it, and load the "
    "folder again with compile(..., sources=folder). `python pipeline.py` runs all stages."
)


@dataclass(frozen=True, slots=True)
class Route:
    """Where values come from and go to, for the reader."""

    num_stages: int
    maker: Mapping[str, int]  # value -> stage
    readers: Mapping[str, tuple[int, ...]]  # value -> later stages


def model_name(capture: Capture) -> str:
    """The class name of the model, or ``the model``."""
    full = capture.train.classes.get("", ("", ""))[0]
    return clean(full.rpartition(".")[2], 24) or "the model"


def docstring(
    capture: Capture, interface: StageInterface, route: Route, layout: Layout, imports: Imports
) -> str:
    """The module docstring of a stage, and its ``# needs:`` lines."""
    source = capture.train.classes.get("", ("", ""))[1]
    where = f" ({location(source)})" if source else ""
    title = f"{model_name(capture)}{where}, stage {interface.index} of {route.num_stages}."
    holds = f"Holds {', '.join(contents(layout)) or 'no modules'}."
    text = [f'"""{title}', "", *textwrap.wrap(holds, 96), "", *_table(_ports(interface, route)), ""]
    text += textwrap.wrap(NOTE, 96)
    lines = [*text, '"""']
    if imports.needs:
        lines += ["", *(f"# needs: {clean(name, 90)}" for name in imports.needs)]
    return "\n".join(lines) + "\n"


def docstring_lines(names: Sequence[str]) -> list[Line]:
    """The docstring of a class that holds these modules."""
    text = f"{', '.join(names)}."
    if len(text) <= 88:
        return [Line(f'"""{text}"""', depth=1, is_text=True)]
    wrapped = textwrap.wrap(text, 92)
    return [
        Line(f'"""{wrapped[0]}', depth=1, is_text=True),
        *(Line(line, depth=1, is_text=True) for line in wrapped[1:]),
        Line('"""', depth=1),
    ]


def contents(layout: Layout) -> list[str]:
    """Child modules and tensors of the model on this stage; numbered ones as a range."""
    found = []
    for name, node in layout.root.children.items():
        if node.is_indexed and len(node.children) > 1:
            first, *_, last = node.children
            found.append(f"{clean(name)}.{first} to {clean(name)}.{last}")
        elif node.is_indexed:
            found.append(f"{clean(name)}.{next(iter(node.children))}")
        else:
            found.append(clean(name))
    return found + [clean(name) for name in layout.root.tensors]


def _ports(interface: StageInterface, route: Route) -> list[tuple[str, Port, str]]:
    train = interface.train
    last = interface.index == route.num_stages - 1
    rows = []
    for port in train.inputs:
        came = f"from stage {route.maker[port.value]}" if port.path is None else _from_call(port)
        rows.append(("in", port, came))
    for port in train.outputs:
        goes = ", ".join(f"stage {k}" for k in route.readers.get(port.value, ()))
        rows.append(("out", port, "the model's output" if last else f"to {goes}"))
    made = {port.value for port in train.outputs}
    for port in train.loss_inputs:
        if port.value not in made:
            rows.append(("loss", port, _from_call(port)))
    return rows


def _from_call(port: Port) -> str:
    path = clean(port.path or "")
    return "from the call" if path == port.name else f"from the call: {path}"


def _table(rows: Sequence[tuple[str, Port, str]]) -> list[str]:
    names = max((len(port.name) for _, port, _ in rows), default=0)
    types = [shape_text(port.shape, port.dtype) for _, port, _ in rows]
    width = max(map(len, types), default=0)
    return [
        f"    {kind:<4} {port.name:<{names}}  {text:<{width}}  {note}"[:99].rstrip()
        for (kind, port, note), text in zip(rows, types, strict=True)
    ]
