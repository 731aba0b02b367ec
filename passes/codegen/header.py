"""The top of a generated file: what it is, what goes in and out, how to run it."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pdcompile.graph import Capture
from pdcompile.passes.codegen.imports import Imports
from pdcompile.passes.codegen.layout import Layout
from pdcompile.passes.codegen.skeleton import Node
from pdcompile.passes.codegen.text import Line, Locations, clean, shape_text
from pdcompile.stage import Port, StageInterface

NOTE = (
    "Comments give dtype[shape]; b is the microbatch size, other letters are sizes that differ "
    "between instances of a class. Modules and parameters have the "
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
    return clean(full.rpartition(".")[2], 48) or "the model"


def docstring(
    capture: Capture,
    interface: StageInterface,
    route: Route,
    layout: Layout,
    imports: Imports,
    locations: Locations,
) -> str:
    """The module docstring of a stage, and its ``# needs:`` lines."""
    source = capture.train.classes.get("", ("", ""))[1]
    where = f" ({locations.short(source)})" if source else ""
    title = f"{model_name(capture)}{where}, stage {interface.index} of {route.num_stages}."
    holds = f"Holds {', '.join(contents(layout)) or 'no modules'}."
    text = [f'"""{title}', "", *_wrap(holds), "", *_table(_ports(interface, route)), ""]
    text += _wrap(NOTE)
    files = sorted(set(locations.files.values()))
    if files:
        text += ["", *_wrap(f"Source locations are in {', '.join(files)}.")]
    lines = [*text, '"""']
    if imports.needs:
        lines += ["", *(f"# needs: {clean(name, 90)}" for name in imports.needs)]
    return "\n".join(lines) + "\n"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 96, break_on_hyphens=False)


def docstring_lines(names: Sequence[str]) -> list[Line]:
    """The docstring of a class that holds these modules."""
    text = f"{', '.join(names)}."
    if len(text) <= 90:
        return [Line(f'"""{text}"""', depth=1, is_text=True)]
    wrapped = textwrap.wrap(text, 90, break_on_hyphens=False)
    return [
        Line(f'"""{wrapped[0]}', depth=1, is_text=True),
        *(Line(line, depth=1, is_text=True) for line in wrapped[1:]),
        Line('"""', depth=1),
    ]


def gathered(paths: Sequence[str]) -> list[str]:
    """Paths, those that only differ in one number as ``h.0-3.attn``."""
    runs: dict[tuple[str, ...], list[int]] = {}
    for path in paths:
        parts = path.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if place is None:
            runs.setdefault((path,), [])
        else:
            around = (".".join(parts[:place]), ".".join(parts[place + 1 :]))
            runs.setdefault(around, []).append(int(parts[place]))
    found = []
    for pattern, numbers in runs.items():
        parts = [clean(part, 40) for part in pattern]
        if numbers:
            parts.insert(1, _numbers(numbers))
        found.append(".".join(part for part in parts if part))
    return found


def _numbers(numbers: Sequence[int]) -> str:
    """``0-3`` for consecutive numbers, ``0,2,5`` for others."""
    ordered = sorted(set(numbers))
    if len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


_MOST = 9


def contents(layout: Layout) -> list[str]:
    """Modules and tensors of the model on this stage, as deep as few names can tell them."""
    nodes = [layout.root]
    while True:
        inner = [part for node in nodes for part in _inside(node, layout.partial)]
        if inner == nodes or (len(_ranges(inner)) > _MOST and nodes != [layout.root]):
            break
        nodes = inner
    part = {node.path for node in nodes} & layout.partial
    return _ranges([node for node in nodes if node.path], part) + [
        clean(name) for name in layout.root.tensors
    ]


def _inside(node: Node, partial: Collection[str]) -> list[Node]:
    """The children of a module that only holds others; itself where it is more than that."""
    is_layer = node.path in partial and node.path.rpartition(".")[2].isdecimal()
    if not node.children or node.leaf is not None or is_layer:
        return [node]
    plain = node.block is None and not node.tensors
    return list(node.children.values()) if plain or not node.path else [node]


def _ranges(nodes: Sequence[Node], part: Collection[str] = ()) -> list[str]:
    """Paths, those that only differ in a last number as ``h.0-3``."""
    found: list[str] = []
    position = 0
    while position < len(nodes):
        path = nodes[position].path
        container, _, name = path.rpartition(".")
        count = 1
        while name.isdecimal() and path not in part and position + count < len(nodes):
            following = nodes[position + count].path
            if following != f"{container}.{int(name) + count}" or following in part:
                break
            count += 1
        shown = clean(path) if count == 1 else f"{clean(path)}-{int(name) + count - 1}"
        found.append(f"a part of {shown}" if path in part else shown)
        position += count
    return found


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
