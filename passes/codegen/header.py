"""The top of a generated file: what it is, what goes in and out, how to run it."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pdcompile.ir.graph import Capture
from pdcompile.ir.graph_text import format_shape
from pdcompile.ir.records import PARTS
from pdcompile.ir.stage_interface import Port, StageInterface
from pdcompile.passes.codegen.block_classes import Block, CodeLayout
from pdcompile.passes.codegen.safety import Imports
from pdcompile.passes.codegen.source_text import WIDTH, Line, Locations, clean
from pdcompile.passes.form.module_tree import Node
from pdcompile.passes.stages.boundaries import Staged
from pdcompile.passes.stages.signatures import Mode

NOTE = (
    "Comments give dtype[shape]: b is the microbatch size{letters}. Names are the model's, also in "
    "state_dict(). Written by pdcompile: edit it, and run it by compile(..., sources=folder, "
    "allow_edited=True). `python pipeline.py` runs all stages."
)
LETTERS = ", other letters differ between instances of a class"


@dataclass(slots=True)
class FileContext:
    """The layout, names and imports that all parts of one file share."""

    layout: CodeLayout
    names: Mapping[str, str]  # tensor name on the stage -> canonical FQN
    class_names: list[str] = field(default_factory=list)
    imports: Imports = field(default_factory=Imports)
    locations: Locations = field(default_factory=Locations)


def model_name(capture: Capture) -> str:
    """The class name of the model, or ``the model``."""
    full = capture.train.classes.get("", ("", ""))[0]
    return clean(full.rpartition(".")[2], 32) or "the model"


def docstring(
    on_stages: Staged, interface: StageInterface, context: FileContext, parts: int = 1
) -> str:
    """The module docstring of a stage, and its ``# needs:`` lines."""
    layout, locations = context.layout, context.locations
    capture = on_stages.capture
    source = capture.train.classes.get("", ("", ""))[1]
    where = f" ({locations.short(source)})" if source else ""
    title = f"{model_name(capture)}{where}, stage {interface.index} of {len(on_stages.interfaces)}."
    holds = f"Holds {', '.join(contents(layout)) or 'no modules'}."
    if parts > 1:
        holds += f" Sizes are those of one of {parts} parts, which exchange values by the"
        holds += f" functions of {PARTS}.py."
    text = [
        f'"""{title}'[:WIDTH].rstrip(),
        "",
        *_wrap(holds),
        "",
        *_table(_ports(interface, on_stages.train)),
        "",
    ]
    files = sorted(set(locations.files.values()))
    differ = any(block.arguments or _letters(block) for block in layout.blocks)
    note = NOTE.format(letters=LETTERS if differ else "")
    text += _wrap(f"{note} Source lines are those of {', '.join(files)}." if files else note)
    lines = [*text, '"""']
    if needs := context.imports.needs:
        lines += ["", *(f"# needs: {clean(name, 90)}" for name in needs)]
    return "\n".join(lines) + "\n"


def _letters(block: Block) -> bool:
    """True if comments of the block have letters for sizes."""
    shapes = (shape for mode in block.shapes for shape in mode.values())
    return any(isinstance(size, str) for shape in shapes for size in shape)


def _wrap(text: str, width: int = 96) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def class_lines(name: str, source: str, members: Sequence[str]) -> list[Line]:
    """The head of a class, with where it comes from and the modules that are instances of it.

    In one line where that holds all, else in comments below it.
    """
    text = ", ".join(members)
    head, about = f"class {name}(nn.Module):", f"{source}: {text}" if source else text
    if len(head) + len(about) + 4 <= WIDTH:
        return [Line(head, about)]
    return [Line(head, source), *(Line("", part, 1) for part in _wrap(text, 90))]


def gathered(paths: Sequence[str]) -> list[str]:
    """Paths, those that only differ in one number as ``h.0-3.attn``; ``h.0.{attn, mlp}``."""
    runs: dict[tuple[str, ...], list[int]] = {}
    for path in paths:
        parts = path.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if place is None:
            runs.setdefault((path,), [])
        else:
            around = (".".join(parts[:place]), ".".join(parts[place + 1 :]))
            runs.setdefault(around, []).append(int(parts[place]))
    found: dict[str, list[str]] = {}  # up to and with the number -> what follows
    for pattern, numbers in runs.items():
        parts = [clean(part, 40) for part in pattern]
        if numbers:
            parts.insert(1, _numbers(numbers))
        found.setdefault(".".join(filter(None, parts[:2])), []).append(".".join(parts[2:]))
    return [
        f"{head}.{{{', '.join(tails)}}}" if len(tails) > 1 and all(tails) else
        ", ".join(".".join(filter(None, (head, tail))) for tail in tails)
        for head, tails in found.items()
    ]  # fmt: skip


def _numbers(numbers: Sequence[int]) -> str:
    """``0-3`` for consecutive numbers, ``0,2,5`` for others."""
    ordered = sorted(set(numbers))
    if len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


_MOST = 9


def contents(layout: CodeLayout) -> list[str]:
    """Modules and tensors of the model on this stage, as deep as few names can tell them."""
    nodes = [layout.root]
    while True:
        inner = [part for node in nodes for part in _inside(node, layout.partial)]
        if inner == nodes or (len(_shown(inner, ())) > _MOST and nodes != [layout.root]):
            break
        nodes = inner
    return _shown(nodes, layout.partial) + [clean(name) for name in layout.root.tensors]


def _shown(nodes: Sequence[Node], partial: Collection[str]) -> list[str]:
    """Paths of modules, with a mark on those that are here in part."""
    paths = [node.path for node in nodes if node.path]
    return gathered([f"a part of {path}" if path in partial else path for path in paths])


def _inside(node: Node, partial: Collection[str]) -> list[Node]:
    """The children of a module that only holds others; itself where it is more than that."""
    is_layer = node.path in partial and node.path.rpartition(".")[2].isdecimal()
    if not node.children or node.leaf is not None or is_layer:
        return [node]
    plain = node.block is None and not node.tensors
    return list(node.children.values()) if plain or not node.path else [node]


def _ports(interface: StageInterface, mode: Mode) -> list[tuple[str, Port, str]]:
    train = interface.train
    readers = {edge.value: edge.targets for edge in mode.edges}
    rows = []
    for port in train.inputs:
        came = f"from stage {mode.stage_of[port.value]}" if port.path is None else _from_call(port)
        rows.append(("in", port, came))
    for port in train.outputs:
        goes = ", ".join(f"stage {k}" for k in readers.get(port.value, ()))
        rows.append(
            ("out", port, "the model's output" if interface.index == mode.last else f"to {goes}")
        )
    made = {port.value for port in train.outputs}
    for port in train.loss_inputs:
        if port.value not in made:
            rows.append(("loss", port, _from_call(port)))
    return rows


_MANY = 2  # values that are alike, before the rest is left to the arguments of forward


def _from_call(port: Port) -> str:
    path = clean(port.path or "")
    return "from the call" if path == port.name else f"from the call: {path}"


def _table(rows: Sequence[tuple[str, Port, str]]) -> list[str]:
    """A line for each port; one for all in a row that are alike but for their names."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for kind, port, note in rows:
        groups.setdefault((kind, format_shape(port.shape, port.dtype), note), []).append(port.name)
    table = [(kind, _listed(n), text, note) for (kind, text, note), n in groups.items()]
    names = max((len(name) for _, name, _, _ in table), default=0)
    width = max((len(text) for _, _, text, _ in table), default=0)
    return [
        f"    {kind:<4} {name:<{names}}  {text:<{width}}  {note}"[:99].rstrip()
        for kind, name, text, note in table
    ]


def _listed(names: Sequence[str]) -> str:
    """Names of values that are alike; of many the first and the last."""
    if len(names) <= _MANY or len(", ".join(names)) <= 36:
        return ", ".join(names)
    return f"{', '.join(names[:_MANY])}, ... {names[-1]} ({len(names)})"
