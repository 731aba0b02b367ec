"""Size of rooms, files, classes and functions; no import circles."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.test_imports import modules, parsed, runtime_imports

#: folders of a room (with what lies below them, unless it is in another room) and its lines.
#: A budget only shrinks: who needs more lines somewhere finds them in the same room.
ROOMS: dict[str, tuple[tuple[str, ...], int]] = {
    "front door and options": (
        ("pdcompile", "passes/__init__.py", "pdcompile/options", "pdcompile/clusters"),
        5_549,
    ),
    "graph and batches": (("pdcompile/ir", "pdcompile/batch"), 4_009),
    "eager and releases": (("pdcompile/eager", "pdcompile/releases"), 2_664),
    "trace": (("passes/trace",), 6_479),
    "costs": (("passes/costs", "passes/profile"), 3_555),
    "planner": (
        ("passes/coarsen", "passes/partition", "passes/planning", "pdcompile/problem"),
        9_145,
    ),
    "plan": (("pdcompile/plan", "passes/planning/plan_check.py"), 2_680),
    "schedules": (
        ("pdcompile/schedule", "passes/schedules", "passes/check", "passes/simulate"),
        5_685,
    ),
    "stages": (("passes/stages", "passes/form", "passes/codegen"), 5_420),
    "verify": (("passes/verify",), 1_515),
    "parts": (("passes/parts", "pdcompile/parts"), 3_954),
    "runtime": (("runtime",), 9_723),
    "checkpoints and state": (
        ("pdcompile/checkpoint", "pdcompile/weights", "runtime/state"),
        3_539,
    ),
    "hardware": (("pdcompile/hardware", "passes/probe"), 1_045),
    "reference and integrations": (("pdcompile/reference", "pdcompile/integrations"), 1_193),
    "terminal and pages": (("pdcompile/cli", "pdcompile/report"), 3_473),
    "export": (("passes/export",), 341),
}
LINES_OF_A_FILE = 500
LINES_OF_A_CLASS = 250
LINES_OF_A_FUNCTION = 60  # of its body, without the docstring
STILL_TOO_LONG: set[str] = set()
FILES_STILL_TOO_LONG: set[str] = set()


def room_of(path: str) -> str:
    """Room whose folder is the longest that a file's path begins with.

    Raises:
        KeyError: no room has it.
    """
    folders = {folder: room for room, (folders, _) in ROOMS.items() for folder in folders}
    found = [folder for folder in folders if f"{path}/".startswith(f"{folder}/")]
    return folders[max(found, key=len, default=path)]


def too_large(lines: Mapping[str, int]) -> dict[str, int]:
    """Lines of the rooms above their budget, from the lines of each file by path."""
    counts: Counter[str] = Counter()
    for path, count in lines.items():
        counts[room_of(path)] += count
    return {room: count for room, count in counts.items() if count > ROOMS[room][1]}


def too_long(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    """Names and lines of the classes and function bodies among nodes that are too long."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LINES_OF_A_CLASS:
                yield node.name, lines
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > LINES_OF_A_FUNCTION:
                yield node.name, lines


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of a graph, [] where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def internals(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Private names of torch's modules that a file imports or reads, but for those of operators."""
    of_torch = {"torch"}
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [(alias.asname or "torch", alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            names = [(alias.asname or alias.name, f"{home}.{alias.name}") for alias in node.names]
        else:
            continue
        for name, full in names:
            if full.partition(".")[0] == "torch":
                of_torch.add(name)
                if _is_private(full):
                    yield full
    for node in nodes:
        if isinstance(node, ast.Attribute):
            full = dotted(node)
            if full.partition(".")[0] in of_torch and _is_private(full):
                yield full


def dotted(node: ast.expr) -> str:
    """A name with its attributes, "" where the attributes are those of another expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join((node.id, *reversed(parts))) if isinstance(node, ast.Name) else ""


def _is_private(name: str) -> bool:
    parts = name.split(".")
    private = any(part[:1] == "_" and part[:2] != "__" for part in parts)
    return private and "ops" not in parts[:2] and all(part.isidentifier() for part in parts)


def dependencies() -> dict[str, set[str]]:
    """Modules that each module imports anywhere, inside functions too, but not for types alone."""
    known = modules()
    return {n: (runtime_imports(path) & known.keys()) - {n} for n, path in known.items()}


def nodes_of(text: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(text))]


@cache
def found_in_files() -> dict[str, tuple[list[str], list[str]]]:
    """Parts of each module that are too long, and internals of torch that it names."""
    found = {}
    for module, path in modules().items():
        nodes = [*ast.walk(parsed(path))]
        found[module] = [name for name, _ in too_long(nodes)], [*internals(nodes)]
    return found


def lines_of_files() -> dict[str, int]:
    root = Path(__file__).resolve().parents[1]
    return {
        str(path.resolve().relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for path in modules().values()
    }


def test_rooms_keep_their_budgets() -> None:
    assert too_large(lines_of_files()) == {}


def test_files_are_short() -> None:
    found = {path for path, count in lines_of_files().items() if count > LINES_OF_A_FILE}
    assert found <= FILES_STILL_TOO_LONG


def test_classes_and_functions_are_short() -> None:
    """Except for those that wait to be divided: the list may only become shorter."""
    found = {f"{module}.{name}" for module, (long, _) in found_in_files().items() for name in long}
    assert found == STILL_TOO_LONG


def test_no_imports_go_in_a_circle() -> None:
    assert circle(dependencies()) == []


def test_internals_of_torch_are_named_in_one_file() -> None:
    """That file knows what releases of torch changed."""
    found = {module for module, (_, names) in found_in_files().items() if names}
    assert found == {"pdcompile.releases.torch_internals"}


def test_the_measures_notice() -> None:
    lines = "    x = 1\n" * 61
    assert list(too_long(nodes_of(f'def f():\n    """Says so."""\n{lines}'))) == [("f", 61)]
    assert list(too_long(nodes_of("class A:\n" + lines * 5))) == [("A", 306)]
    assert too_large({"passes/verify/a.py": 400, "passes/verify/b/c.py": 50_000}) == {
        "verify": 50_400
    }
    assert room_of("pdcompile/cli/x.py") != room_of("pdcompile/x.py")
    with pytest.raises(KeyError):
        room_of("elsewhere/x.py")
    uses = "from torch import nn\nfrom torch.utils._pytree import x\nnn.init._no_grad\n"
    uses += "torch._C._nn.gelu\ntorch.ops.aten._to_copy\nself._x\ntorch.__version__\n"
    assert set(internals(nodes_of(uses))) == {
        "torch.utils._pytree.x", "nn.init._no_grad",
        "torch._C", "torch._C._nn", "torch._C._nn.gelu",
    }  # fmt: skip
    assert set(circle({"a": {"b"}, "b": {"a"}})) == {"a", "b"}
